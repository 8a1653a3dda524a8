r"""The schedule: after which step which level and which fragment is exchanged.

Steps are counted from 0, once for gradients and parameters. During the first ``warmup`` steps gradients are averaged
over all ranks. Let :math:`n = s + 1 - \text{warmup}` be the number of local steps after step :math:`s`. Fragment
:math:`f` of :math:`F` at a level is exchanged after step :math:`s` if

.. math:: n \ge o_f, \qquad (n - o_f) \bmod \text{every} = 0, \qquad
   o_f = \text{phase} - \text{every} + \lfloor \text{every} (f + 1) / F \rfloor,

so that fragments take turns within a period, and a single one is exchanged for the first time after ``phase`` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Entry", "Schedule", "check_period"]


def check_period(period: Any, what: str) -> None:
    """Raise unless this is a positive number of steps or a function."""
    if callable(period):
        return
    if isinstance(period, bool) or not isinstance(period, int):
        raise TypeError(f"{what} must be a number of steps or a function of the step, but got {period!r}")
    if period < 1:
        raise ValueError(f"{what} must be at least 1 step, but got {period}")


@dataclass(frozen=True)
class Entry:
    """One level, as far as the schedule is concerned.

    Attributes:
        every: the period, or a function of the step that returns it. With a function, the level is due when at least
            that many steps have passed since its last round.
        phase: the number of local steps until the first round; None is ``every``.
        parts: the number of fragments.
        covers: whether a round at this level makes one at a lower level after the same step needless.
        can_be_covered: whether a round at this level is nothing but a mean.
    """

    every: Any
    phase: int | None = 1
    parts: int = 1
    covers: bool = True
    can_be_covered: bool = True


class Schedule:
    """Counts steps, and tells whether warm-up is over and what is due.

    Args:
        entries: the levels, lowest first.
        warmup: the number of steps of warm-up, or a function of the step that returns whether warm-up continues; it is
            called until it returns False.
    """

    def __init__(self, entries: Sequence[Entry], warmup: int | Callable[[int], bool]) -> None:
        for entry in entries:
            check_period(entry.every, "every")
        if not callable(warmup):
            if isinstance(warmup, bool) or not isinstance(warmup, int):
                raise TypeError(f"warmup must be a number of steps or a function of the step, but got {warmup!r}")
            if warmup < 0:
                raise ValueError(f"warmup must be at least 0 steps, but got {warmup}")
        self.entries = list(entries)
        self.warmup = warmup
        self.step = 0
        self._since: int | None = None  # the first step after warm-up, if warmup is a function
        self._asked = -1
        self._last: list[int | None] = [None] * len(self.entries)

    @property
    def is_local(self) -> bool:
        """Whether the current step is after warm-up. Unlike :meth:`settle` this changes nothing."""
        if not callable(self.warmup):
            return self.step >= self.warmup
        if self._since is None and self._asked != self.step:
            return not self.warmup(self.step)
        return self._since is not None

    @property
    def local_steps(self) -> int:
        """The number of steps made after warm-up."""
        since = self._since if callable(self.warmup) else self.warmup
        return 0 if since is None else max(0, self.step - since)

    def settle(self) -> bool:
        """Decide, once per step, whether the current step is after warm-up."""
        if callable(self.warmup) and self._since is None and self._asked != self.step:
            local = self.is_local
            self._asked = self.step
            self._since = self.step if local else None
        return self.is_local

    def due(self) -> list[tuple[int, int]]:
        """The levels and fragments to exchange after the current step, in order."""
        if not self.settle():
            return []
        since = self._since if callable(self.warmup) else self.warmup
        assert since is not None
        due: list[tuple[int, int]] = []
        higher = False
        for level in reversed(range(len(self.entries))):
            if higher and self.entries[level].can_be_covered:
                continue
            parts = self._parts(level, since)
            due = [(level, part) for part in parts] + due
            higher = higher or (bool(parts) and self.entries[level].covers)
        return due

    def _parts(self, level: int, since: int) -> list[int]:
        entry = self.entries[level]
        made = self.step + 1 - since
        if not callable(entry.every):
            return [f for f, o in enumerate(_offsets(entry)) if made >= o and (made - o) % entry.every == 0]
        steps = entry.every(self.step)
        check_period(steps if not callable(steps) else None, f"what every returned for step {self.step}")
        last = self._last[level]
        passed = made >= (entry.phase or steps) if last is None else self.step - last >= steps
        return [0] if passed else []

    def exchanged(self, level: int) -> None:
        """Record a round after the current step, at this level and at lower levels that it covers."""
        self._last[level] = self.step
        for lower in range(level):
            if self.entries[level].covers and self.entries[lower].can_be_covered:
                self._last[lower] = self.step

    def exchanged_already(self) -> None:
        """Record a round after the previous step, at every level."""
        self._last = [self.step - 1] * len(self._last)

    def go_to(self, step: int) -> None:
        """Set the number of steps, and record a round after the last of them."""
        self.step = step
        self.exchanged_already()

    def advance(self) -> None:
        """Go to the next step."""
        self.step += 1

    def advance_to_due(self, landing: int | None = None) -> None:
        """Go to the next step after which something is due; with a function as a period, to the next step.

        Args:
            landing: a step not to go beyond, unless it is over.
        """
        self.step += 1
        since = self._since if callable(self.warmup) else self.warmup
        if since is None or any(callable(entry.every) for entry in self.entries):
            return
        made = self.step + 1 - since
        nearest = [o + max(0, -((o - made) // e.every)) * e.every for e in self.entries for o in _offsets(e)]
        due = min(nearest) + since - 1
        self.step = max(self.step, due if landing is None else min(due, landing))

    def state_dict(self) -> dict[str, Any]:
        """The counter and the steps of the last rounds."""
        return {"step": self.step, "since": self._since, "last": list(self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, or from a step alone."""
        self.step, self._asked = int(state["step"]), -1
        self._since = state.get("since")
        last = list(state.get("last") or [])
        self._last = last if len(last) == len(self.entries) else [None] * len(self.entries)


def _offsets(entry: Entry) -> list[int]:
    """After how many local steps each fragment is exchanged for the first time, if that is at least 1."""
    start = (entry.phase or entry.every) - entry.every
    return [start + entry.every * (f + 1) // entry.parts for f in range(entry.parts)]
