"""What a round did: ``RoundReport``, and where reports can go."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from offbeat.replicas.fragment import Fragment
from offbeat.replicas.round import Outcome

__all__ = ["Reports", "RoundHook", "RoundReport", "log_rounds"]


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What one round did, as this rank saw it.

    Attributes:
        step: the step after which the round began.
        level: the level, counted from the lowest.
        fragment: the fragment of the level.
        version: how many landings have moved the anchors of the fragment so far.
        status: ``"landed"``; ``"skipped"`` if replicas agreed to change nothing; ``"failed"`` if nothing was used.
        reason: why it was skipped or failed, or what else is to be said; empty if nothing is.
        members: the ranks that took part; with :class:`offbeat.Elastic` their places.
        weights: their weights in the mean.
        seconds: ``"exposed"``, how long training waited; ``"comparing"``, until replicas had decided what to do;
            ``"exchanging"``, encoding and sending included; ``"applying"``. A round in the background compares and
            exchanges while training goes on.
        bytes_sent: by kind: ``"agreement"``, with which ranks compare and vote, and ``"parameters"``, buffers included.
        pseudo_gradient: the norm of the mean pseudo-gradient, if norms were asked for and there is an outer optimizer.
        outer_step: the norm of the outer step, likewise.
    """

    step: int
    level: int
    fragment: int
    version: int
    status: Literal["landed", "skipped", "failed"]
    reason: str
    members: tuple[int, ...]
    weights: tuple[float, ...]
    seconds: Mapping[str, float]
    bytes_sent: Mapping[str, int]
    pseudo_gradient: float | None = None
    outer_step: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dictionaries."""
        return dataclasses.asdict(self)


class RoundHook:
    """A registered function; see ``register_round_hook``."""

    def __init__(self, reports: Reports, function: Callable[[RoundReport], Any]) -> None:
        self._reports, self._function = weakref.ref(reports), function

    def remove(self) -> None:
        """Call the function no more."""
        reports = self._reports()
        if reports is not None and self._function in reports.functions:
            reports.functions.remove(self._function)


class Reports:
    """Makes reports of outcomes and hands them to functions.

    Attributes:
        functions: called with each report, on the training thread.
        last: the newest report.
        norms: whether norms are computed, which takes two passes over the parameters.
    """

    def __init__(self) -> None:
        self.functions: list[Callable[[RoundReport], Any]] = []
        self.last: RoundReport | None = None
        self.norms = False

    def anchors_before(self, fragment: Fragment) -> dict[str, Tensor] | None:
        """A copy of a fragment's anchors, if norms are asked for."""
        if not self.norms or fragment.outer is None:
            return None
        return {name: fragment.outer.anchors[name].clone() for name in fragment.names()}

    def add(
        self,
        fragment: Fragment,
        outcome: Outcome,
        seconds: Mapping[str, float],
        before: Mapping[str, Tensor] | None,
    ) -> None:
        """Make the report of a round that has ended.

        Args:
            fragment: what was exchanged.
            outcome: what came of it.
            seconds: how long training waited, and how long it took to apply the outcome.
            before: the anchors before it landed, if norms are asked for.
        """
        landed = outcome.status in ("averaged", "rest")
        reason = str(outcome.error or "") if outcome.status == "failed" else "; ".join(outcome.notes)
        if outcome.status == "rest" and not reason:
            reason = "no replica has trained since the last round"
        self.last = RoundReport(
            step=outcome.step,
            level=fragment.place,
            fragment=fragment.number,
            version=fragment.version,
            status="landed" if landed else "skipped" if outcome.status == "skipped" else "failed",
            reason=reason,
            members=outcome.members,
            weights=outcome.weights,
            seconds={**outcome.seconds, **seconds},
            bytes_sent=dict(outcome.bytes_sent),
            **_norms(fragment, outcome, before),
        )
        for function in list(self.functions):
            function(self.last)


def _norms(fragment: Fragment, outcome: Outcome, before: Mapping[str, Tensor] | None) -> dict[str, float]:
    if before is None or fragment.outer is None or outcome.status != "averaged":
        return {}
    anchors = fragment.outer.anchors
    norms = {"outer_step": _norm([anchors[name] - old for name, old in before.items()])}
    if outcome.gradients is not None:
        norms["pseudo_gradient"] = _norm(list(outcome.gradients.values()))
    elif outcome.values is not None:
        means = {name: outcome.values[name] for name in before if name in outcome.values}
        norms["pseudo_gradient"] = _norm([before[name] - mean.to(before[name]) for name, mean in means.items()])
    return norms


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


class Writer(Protocol):
    """What :func:`log_rounds` needs of TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Record a number."""


def log_rounds(optimizer: Any, path: str | Path | None = None, writer: Writer | None = None) -> RoundHook:
    """Write a line of JSON for each round of an optimizer, and numbers to TensorBoard.

    Args:
        optimizer: an :class:`offbeat.Replica`, such as :class:`offbeat.DiLoCo`.
        path: a file to which lines are added. If it cannot be written, training goes on and a warning says so, once.
        writer: a :class:`torch.utils.tensorboard.SummaryWriter`, or anything with its ``add_scalar``.

    Returns:
        A handle; its ``remove()`` ends the log.

    Example:
        >>> import json, tempfile, torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.DiLoCo(offbeat.AdamW(model.parameters()), model, every=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     handle = offbeat.log_rounds(optimizer, f"{folder}/rounds.jsonl")
        ...     for step in range(4):
        ...         model(torch.randn(8, 4)).square().mean().backward()
        ...         optimizer.step()
        ...     lines = open(f"{folder}/rounds.jsonl").readlines()
        >>> [json.loads(line)["step"] for line in lines]
        [1, 3]
        >>> dist.destroy_process_group()
    """
    if path is None and writer is None:
        raise ValueError("log_rounds() needs a path or a writer; without one there is nowhere to log to")
    if not hasattr(optimizer, "register_round_hook"):
        raise TypeError(
            f"log_rounds() needs an optimizer of replicas, such as offbeat.DiLoCo, but got {type(optimizer).__name__}"
        )
    return optimizer.register_round_hook(_Log(path, writer))  # type: ignore[no-any-return]


class _Log:
    """Writes reports."""

    def __init__(self, path: str | Path | None, writer: Writer | None) -> None:
        self._path, self._writer, self._has_warned = path, writer, False

    def __call__(self, report: RoundReport) -> None:
        if self._path is not None:
            try:
                with open(self._path, "a") as file:
                    file.write(json.dumps(report.as_json()) + "\n")
            except OSError as error:
                if not self._has_warned:
                    self._has_warned = True
                    warnings.warn(
                        f"rounds are not logged, because {self._path} cannot be written: {error}", stacklevel=9
                    )
        if self._writer is not None:
            self._write_scalars(report)

    def _write_scalars(self, report: RoundReport) -> None:
        assert self._writer is not None
        numbers = {f"seconds_{name}": value for name, value in report.seconds.items()}
        numbers["bytes_sent"] = float(sum(report.bytes_sent.values()))
        numbers["members"] = float(len(report.members))
        numbers["landed"] = float(report.status == "landed")
        for name in ("pseudo_gradient", "outer_step"):
            value = getattr(report, name)
            if value is not None:
                numbers[name] = value
        for name, value in numbers.items():
            self._writer.add_scalar(f"rounds/level{report.level}/{name}", value, report.step)
