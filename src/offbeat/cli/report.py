"""What the demo found: the numbers, the table, and the sentences that follow from the numbers."""

from __future__ import annotations

import io
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from offbeat.cli.train import RankResult

__all__ = ["UNTIMED_STEPS", "ArmReport", "arm_report", "largest_difference", "sentences", "table"]

#: The first steps are left out of the medians: memory is allocated, and a kernel may be compiled.
UNTIMED_STEPS = 5


@dataclass(frozen=True)
class Timing:
    """Milliseconds over all ranks and all steps after the first few: the median and the middle half around it."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        """Summarize the times of single steps."""
        lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
        return cls(median, lower, upper)

    @property
    def spread(self) -> float:
        """Half the width of the middle half."""
        return (self.upper - self.lower) / 2

    def __str__(self) -> str:
        return f"{self.median:.3g} +- {self.spread:.2g}"


@dataclass(frozen=True)
class ArmReport:
    """One arm's numbers, ready to be written down."""

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

    def as_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self)


def arm_report(name: str, results: list[RankResult]) -> ArmReport:
    """Put together what the ranks of one arm found."""
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


def largest_difference(one: list[RankResult], other: list[RankResult]) -> float:
    """The largest absolute difference between any two parameters of the arms' final models."""
    a, b = (torch.load(io.BytesIO(results[0].weights or b""), weights_only=True) for results in (one, other))
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def table(arms: list[ArmReport], difference: float) -> Table:
    """All numbers side by side, a column an arm."""
    shown = Table(header_style="bold")
    shown.add_column("")
    for arm in arms:
        shown.add_column(arm.name, justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("training loss, before", [f"{arm.train_loss_before:.4f}" for arm in arms]),
        ("training loss, after", [f"{arm.train_loss_after:.4f}" for arm in arms]),
        ("held-out loss, before", [f"{arm.held_out_loss_before:.4f}" for arm in arms]),
        ("held-out loss, after", [f"{arm.held_out_loss_after:.4f}" for arm in arms]),
        ("optimizer step, ms", [str(arm.optimizer_ms) for arm in arms]),
        ("whole step, ms", [str(arm.step_ms) for arm in arms]),
        ("first optimizer step, ms", [f"{arm.first_optimizer_ms:.3g}" for arm in arms]),
        ("ranks bit-identical", ["yes" if arm.ranks_identical else "NO" for arm in arms]),
        ("largest gap to torch's", ["-", *(f"{difference:.2g}" for _ in arms[1:])]),
    ]
    for label, cells in rows:
        # A section ends where the subject changes: losses, times, parameters.
        shown.add_row(label, *cells, end_section=label in ("held-out loss, after", "first optimizer step, ms"))
    return shown


def sentences(torchs: ArmReport, ours: ArmReport, overlapped: ArmReport) -> list[str]:
    """What was gained or lost, from the measured numbers alone."""
    share = torchs.optimizer_ms.median / torchs.step_ms.median
    explained = torchs.optimizer_ms.median - ours.optimizer_ms.median
    return [
        f"The optimizer's step: {_compared(torchs.optimizer_ms, ours.optimizer_ms)}.",
        f"The whole step: {_compared(torchs.step_ms, ours.step_ms, explained)}. The optimizer was {share:.1%} of it "
        "with torch, so that is the most a faster one could save here.",
        _overlap(ours, overlapped),
        _learned(torchs, ours),
    ]


def _overlap(ours: ArmReport, overlapped: ArmReport) -> str:
    same = "bit for bit the same" if overlapped.parameter_digests == ours.parameter_digests else "NOT THE SAME"
    return (
        f"With overlap parameters were updated during backward: {overlapped.optimizer_ms.median:.3g} ms of the "
        f"optimizer's {ours.optimizer_ms.median:.3g} were left for step(), the whole step took "
        f"{overlapped.step_ms.median:.3g} ms against {ours.step_ms.median:.3g}, and the parameters are {same}."
    )


def _compared(torchs: Timing, ours: Timing, explained: float | None = None) -> str:
    """Both times and the verdict. ``explained``: how much of what was saved the optimizer can have saved."""
    saved = torchs.median - ours.median
    both = f"{ours.median:.3g} ms with offbeat, {torchs.median:.3g} ms with torch"
    spread = max(torchs.spread, ours.spread)
    if abs(saved) <= spread:
        return f"{both}; the difference is within the spread of single steps ({spread:.2g} ms)"
    if explained is not None and abs(saved - explained) > spread:
        return (
            f"{both}, {-saved:+.2g} ms, of which the optimizer explains {-explained:+.2g}; "
            "the rest comes from elsewhere, such as other load on this machine"
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
