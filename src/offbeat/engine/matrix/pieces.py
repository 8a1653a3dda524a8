"""Parameters that are cut over ranks, of which each rank transforms its own piece (FSDP2).

A transform that works on pieces is a generator. It yields the sums and norms that run over the cut dimension, and goes
on with the totals over all pieces. Many parameters are worked on at once, so that one all-reduce of a few numbers for
each serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.rules.rule import Total

__all__ = ["Piecewise", "Task", "run_pieces", "run_whole"]

#: What a transform that works on pieces returns when it is called.
Piecewise = Generator[list[Total], list[Tensor], tuple[Tensor, ...]]


class Task(NamedTuple):
    """Parameters of one shape that are cut alike.

    Attributes:
        begin: calls the transform.
        end: uses its result.
        dim: the dimension along which they are cut, counted from the last (-1).
    """

    begin: Callable[[], Piecewise]
    end: Callable[[tuple[Tensor, ...]], None]
    dim: int


def run_whole(transform: Piecewise) -> tuple[Tensor, ...]:
    """The result of a transform on parameters that are not cut."""
    return _Running(transform, None).result


def run_pieces(rounds: Sequence[Sequence[Task]], group: Any) -> None:
    """Run tasks on every rank of the group, which all have the same ones.

    A round is begun while the one before it is finished, so that the sums of both travel together.
    """
    waiting = list(rounds)
    underway: list[list[tuple[Task, _Running]]] = []
    while waiting or underway:
        if waiting:
            underway.append([(task, _Running(task.begin(), task.dim)) for task in waiting.pop(0)])
        _add_up([running for pairs in underway for _, running in pairs if running.asked], group)
        for pairs in underway:
            if all(running.is_done for _, running in pairs):
                for task, running in pairs:
                    task.end(running.result)
        underway = [pairs for pairs in underway if not all(running.is_done for _, running in pairs)]


class _Running:
    """A transform that has been called: it has a result, or requests totals.

    Args:
        dim: the dimension that is cut, counted from the last; None if none is.
    """

    result: tuple[Tensor, ...]

    def __init__(self, transform: Piecewise, dim: int | None) -> None:
        self._transform, self._dim = transform, dim
        self._parts: list[Total] = []
        self.asked: list[int] = []  # which of the parts have to be added up
        self.is_done = False
        self._go_on(None)

    def parts(self) -> list[Total]:
        """Return the parts to add up over the ranks."""
        return [self._parts[i] for i in self.asked]

    def answer(self, totals: Sequence[Tensor]) -> None:
        """Go on with these totals."""
        answers = [total.part for total in self._parts]
        for i, total in zip(self.asked, totals, strict=True):
            answers[i] = total
        self._go_on(answers)

    def _go_on(self, answers: Any) -> None:
        while True:
            try:
                self._parts = self._transform.send(answers)
            except StopIteration as end:
                self.result, self.asked, self.is_done = end.value, [], True
                return
            needed = [part.dim is None or part.dim == self._dim for part in self._parts]
            self.asked = [i for i, is_needed in enumerate(needed) if is_needed and self._dim is not None]
            if self.asked:
                return
            answers = [part.part for part in self._parts]


def _add_up(running: Sequence[_Running], group: Any) -> None:
    """Add up the requested parts over the ranks. In double precision: a sum of large squares must not overflow."""
    parts = [part for request in running for part in request.parts()]
    if not parts:
        return
    device = parts[0].part.device
    wide = torch.float32 if device.type in ("mps", "xla") else torch.float64
    lines = [request.part.to(wide).flatten() for request in parts]
    flat = torch.cat([line.square() if request.norm else line for request, line in zip(parts, lines, strict=True)])
    dist.all_reduce(flat, group=group)
    sums = []
    for request, line in zip(parts, torch.split(flat, [line.numel() for line in lines]), strict=True):
        sums.append((line.sqrt() if request.norm else line).view(request.part.shape).to(request.part.dtype))
    totals = iter(sums)
    for asking in running:
        asking.answer([next(totals) for _ in asking.asked])
