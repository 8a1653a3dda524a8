r"""The schedule of averages, with one counter for gradients and parameters.

Steps are counted from 0. During the first ``warmup`` steps gradients are averaged over all ranks. After that,
step :math:`s` is followed by an average at the highest level :math:`l` with
:math:`(s - \text{warmup}) \bmod \text{every}_l = 0`, as with torch's ``PeriodicModelAverager``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Schedule", "check_period"]


def check_period(period: Any, what: str) -> None:
    """Raise unless this is a positive number of steps or a function."""
    if callable(period):
        return
    if isinstance(period, bool) or not isinstance(period, int):
        raise TypeError(f"{what} must be a number of steps or a function of the step, but got {period!r}")
    if period < 1:
        raise ValueError(f"{what} must be at least 1 step, but got {period}")


class Schedule:
    """Counts steps, and tells whether warm-up is over and which level is due.

    Args:
        periods: one per level, lowest first: a number of steps, or a function of the step that returns it. With a
            function, a level is due when at least that many steps have passed since its last average.
        warmup: the number of steps of warm-up, or a function of the step that returns whether warm-up continues; it is
            called until it returns False.
    """

    def __init__(self, periods: Sequence[Any], warmup: int | Callable[[int], bool]) -> None:
        for period in periods:
            check_period(period, "every")
        if not callable(warmup):
            if isinstance(warmup, bool) or not isinstance(warmup, int):
                raise TypeError(f"warmup must be a number of steps or a function of the step, but got {warmup!r}")
            if warmup < 0:
                raise ValueError(f"warmup must be at least 0 steps, but got {warmup}")
        self.periods = list(periods)
        self.warmup = warmup
        self.step = 0
        self._since: int | None = None  # the first step after warm-up, if warmup is a function
        self._asked = -1
        self._last: list[int | None] = [None] * len(self.periods)

    @property
    def is_local(self) -> bool:
        """Whether the current step is after warm-up. Unlike :meth:`settle` this changes nothing."""
        if not callable(self.warmup):
            return self.step >= self.warmup
        if self._since is None and self._asked != self.step:
            return not self.warmup(self.step)
        return self._since is not None

    def settle(self) -> bool:
        """Decide, once per step, whether the current step is after warm-up."""
        if callable(self.warmup) and self._since is None and self._asked != self.step:
            local = self.is_local
            self._asked = self.step
            self._since = self.step if local else None
        return self.is_local

    def due(self) -> int | None:
        """The level to average at after the current step, or None."""
        if not self.settle():
            return None
        since = self._since if callable(self.warmup) else self.warmup
        assert since is not None
        for level in reversed(range(len(self.periods))):
            period = self.periods[level]
            if not callable(period):
                if (self.step - since) % period == 0:
                    return level
                continue
            steps = period(self.step)
            check_period(steps if not callable(steps) else None, f"what every returned for step {self.step}")
            last = self._last[level]
            if last is None or self.step - last >= steps:
                return level
        return None

    def averaged(self, level: int) -> None:
        """Record an average after the current step, at this level and all lower levels."""
        for lower in range(level + 1):
            self._last[lower] = self.step

    def averaged_already(self) -> None:
        """Record an average after the previous step, at every level."""
        self._last = [self.step - 1] * len(self._last)

    def go_to(self, step: int) -> None:
        """Set the number of steps, and record an average after the last of them."""
        self.step = step
        self.averaged_already()

    def advance(self) -> None:
        """Go to the next step."""
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """The counter and the steps of the last averages."""
        return {"step": self.step, "since": self._since, "last": list(self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, or from a step alone."""
        self.step, self._asked = int(state["step"]), -1
        self._since = state.get("since")
        last = list(state.get("last") or [])
        self._last = last if len(last) == len(self.periods) else [None] * len(self.periods)
