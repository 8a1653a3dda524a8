r"""When replicas agree: one counter for the gradient hook and for the averaging.

Steps are counted from 0. During the first ``warmup`` steps gradients are averaged over all ranks. From then on step
:math:`s` is followed by an average at the highest level :math:`l` that is due:
:math:`(s - \text{warmup}) \bmod \text{every}_l = 0`, which is the schedule of torch's ``PeriodicModelAverager``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Schedule", "check_period"]


def check_period(period: Any, what: str) -> None:
    """Raise if this is neither a positive number nor a function."""
    if callable(period):
        return
    if isinstance(period, bool) or not isinstance(period, int):
        raise TypeError(f"{what} must be a number of steps or a function of the step, but got {period!r}")
    if period < 1:
        raise ValueError(f"{what} must be at least 1 step, but got {period}")


class Schedule:
    """The step, the phase, and the level that is due.

    Args:
        periods: one for each level, lowest first: a number of steps, or a function from the step to one. With a
            function a level is due when at least that many steps have passed since it last was.
        warmup: how many steps gradients are averaged globally, or a function from the step to whether they still are;
            once it has said no for a step it is not asked again.
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
        self._since: int | None = None  # the first local step, where a function decides
        self._asked = -1
        self._last: list[int | None] = [None] * len(self.periods)

    @property
    def is_local(self) -> bool:
        """Whether the step that is being made is after warm-up, as far as is known. Looking decides nothing."""
        if not callable(self.warmup):
            return self.step >= self.warmup
        if self._since is None and self._asked != self.step:
            return not self.warmup(self.step)
        return self._since is not None

    def settle(self) -> bool:
        """Decide, once for the step that is being made, whether it is after warm-up."""
        if callable(self.warmup) and self._since is None and self._asked != self.step:
            local = self.is_local
            self._asked = self.step
            self._since = self.step if local else None
        return self.is_local

    def due(self) -> int | None:
        """The level to average at after this step."""
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
        """Replicas have been averaged after this step; a higher level does for the lower ones too."""
        for lower in range(level + 1):
            self._last[lower] = self.step

    def averaged_already(self) -> None:
        """Replicas have been averaged after the last step, at every level."""
        self._last = [self.step - 1] * len(self._last)

    def go_to(self, step: int) -> None:
        """So many steps have been made, and replicas have been averaged after the last."""
        self.step = step
        self.averaged_already()

    def advance(self) -> None:
        """The step is over."""
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything that is not given to the constructor."""
        return {"step": self.step, "since": self._since, "last": list(self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`, or from a step alone."""
        self.step, self._asked = int(state["step"]), -1
        self._since = state.get("since")
        last = list(state.get("last") or [])
        self._last = last if len(last) == len(self.periods) else [None] * len(self.periods)
