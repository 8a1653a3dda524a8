"""The results of the demo: numbers, a table, and sentences made from the numbers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from rich.table import Table
from torch import Tensor

from offbeat.cli.train import RankResult

__all__ = ["UNTIMED_STEPS", "ArmReport", "arm_report", "largest_difference", "sentences", "table"]

#: The first steps are not part of the medians, because memory is allocated and kernels may be compiled.
UNTIMED_STEPS = 5


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step over all ranks and all steps after the first few: median and quartiles."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        """The median and the quartiles of these times."""
        lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
        return cls(median, lower, upper)

    @property
    def spread(self) -> float:
        """Half the interquartile range."""
        return (self.upper - self.lower) / 2

    def __str__(self) -> str:
        return f"{self.median:.3g} +- {self.spread:.2g}"


@dataclass(frozen=True)
class ArmReport:
    """The results of one arm over all ranks."""

    name: str
    tier: str
    train_loss_before: float
    train_loss_after: float
    held_out_loss_before: float
    held_out_loss_after: float
    first_optimizer_ms: float
    optimizer_ms: Timing
    step_ms: Timing
    ranks_identical: bool
    start_digest: str
    parameter_digests: list[str]


def arm_report(name: str, results: list[RankResult]) -> ArmReport:
    """Combine the results of all ranks of one arm."""
    first = results[0]
    return ArmReport(
        name=name,
        tier=first.tier,
        train_loss_before=first.train_loss[0],
        train_loss_after=first.train_loss[1],
        held_out_loss_before=first.held_out_loss[0],
        held_out_loss_after=first.held_out_loss[1],
        first_optimizer_ms=max(result.optimizer_ms[0] for result in results),
        optimizer_ms=Timing.of([ms for result in results for ms in result.optimizer_ms[UNTIMED_STEPS:]]),
        step_ms=Timing.of([ms for result in results for ms in result.step_ms[UNTIMED_STEPS:]]),
        ranks_identical=len({digest for result in results for digest in result.digests}) == 1,
        start_digest=first.start_digest,
        parameter_digests=first.digests,
    )


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest absolute difference between the parameters of two models."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def table(arms: list[ArmReport], difference: float) -> Table:
    """All numbers side by side, one column per arm; fits into 80 characters."""
    shown = Table(header_style="bold")
    shown.add_column("", no_wrap=True)
    for arm in arms:
        shown.add_column(arm.name.replace("(", "\n(").replace(", ", ",\n"), justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("training loss, before", [f"{arm.train_loss_before:.4f}" for arm in arms]),
        ("training loss, after", [f"{arm.train_loss_after:.4f}" for arm in arms]),
        ("held-out loss, before", [f"{arm.held_out_loss_before:.4f}" for arm in arms]),
        ("held-out loss, after", [f"{arm.held_out_loss_after:.4f}" for arm in arms]),
        ("optimizer.step(), ms", [str(arm.optimizer_ms) for arm in arms]),
        ("whole step, ms", [str(arm.step_ms) for arm in arms]),
        ("first step(), ms", [f"{arm.first_optimizer_ms:.3g}" for arm in arms]),
        ("ranks bit-identical", ["yes" if arm.ranks_identical else "NO" for arm in arms]),
        ("largest gap to torch's", ["-", *(f"{difference:.2g}" for _ in arms[1:])]),
    ]
    for label, cells in rows:
        # Three sections: losses, times, parameters.
        shown.add_row(label, *cells, end_section=label in ("held-out loss, after", "first step(), ms"))
    return shown


def sentences(torchs: ArmReport, ours: ArmReport, overlapped: ArmReport) -> list[str]:
    """A summary of the measured numbers."""
    share = torchs.optimizer_ms.median / torchs.step_ms.median
    explained = torchs.optimizer_ms.median - ours.optimizer_ms.median
    return [
        f"optimizer.step(): {_compared(torchs.optimizer_ms, ours.optimizer_ms)}.",
        f"Whole training step: {_compared(torchs.step_ms, ours.step_ms, explained)}. With torch, the optimizer took "
        f"{share:.1%} of it, which is the most that a faster optimizer can save here.",
        _overlap(ours, overlapped),
        _learned(torchs, ours),
    ]


def _overlap(ours: ArmReport, overlapped: ArmReport) -> str:
    same = "bit for bit the same" if overlapped.parameter_digests == ours.parameter_digests else "NOT THE SAME"
    return (
        f"With overlap, parameters are updated during backward: optimizer.step() took "
        f"{overlapped.optimizer_ms.median:.3g} ms instead of {ours.optimizer_ms.median:.3g}, the whole training step "
        f"{overlapped.step_ms.median:.3g} ms instead of {ours.step_ms.median:.3g}, and the parameters are {same}."
    )


def _compared(torchs: Timing, ours: Timing, explained: float | None = None) -> str:
    """Compare two times. ``explained`` is the part of the difference that is due to the optimizer."""
    saved = torchs.median - ours.median
    both = f"{ours.median:.3g} ms with offbeat, {torchs.median:.3g} ms with torch"
    spread = max(torchs.spread, ours.spread)
    if abs(saved) <= spread:
        return f"{both}; the difference is within the spread of single steps ({spread:.2g} ms)"
    if explained is not None and abs(saved - explained) > spread:
        return (
            f"{both}. Of this difference of {-saved:+.2g} ms, {-explained:+.2g} ms is due to the optimizer and the "
            "rest to something else, such as other load on this machine"
        )
    if saved > 0:
        return f"{both}; offbeat was {torchs.median / ours.median:.2f} times as fast and saved {saved:.2g} ms"
    return f"{both}; offbeat took {ours.median / torchs.median:.2f} times as long and lost {-saved:.2g} ms"


def _learned(torchs: ArmReport, ours: ArmReport) -> str:
    failed = [arm.name for arm in (torchs, ours) if arm.held_out_loss_after >= arm.held_out_loss_before]
    if failed:
        return f"The held-out loss did not go down with {' and '.join(failed)}."
    gap = ours.held_out_loss_after - torchs.held_out_loss_after
    against = f"{abs(gap):.1g} {'more' if gap > 0 else 'less'} than with torch" if gap else "exactly as with torch"
    return f"Both learned: the held-out loss ended at {ours.held_out_loss_after:.4f} with offbeat, {against}."
