r"""A line search for the strong Wolfe conditions. It sees numbers only, no tensors.

A step :math:`t` along a direction with slope :math:`\phi'(0) < 0` is accepted if

.. math::
    \phi(t) \le \phi(0) + c_1 t \, \phi'(0) \qquad\text{and}\qquad |\phi'(t)| \le c_2 \, |\phi'(0)|

Trial points come from cubic interpolation, with the safeguards of :class:`torch.optim.LBFGS`, so both try the same
points.

Reference: Nocedal and Wright, Numerical Optimization, 2006, algorithms 3.5 and 3.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Point", "strong_wolfe"]

C1, C2 = 1e-4, 0.9


@dataclass
class Point:
    """A point on the line: its position, value and slope, and further data such as the gradient there."""

    t: float
    value: float
    slope: float
    kept: Any = None


def strong_wolfe(
    start: Point, t: float, evaluate: Callable[[float], Point], *, length: float, tolerance: float, most: int
) -> tuple[Point, int]:
    """The accepted point, or the best one found, and the number of evaluations.

    Args:
        start: the point at 0.
        t: the first trial.
        evaluate: the point at a position.
        length: the largest absolute value in the direction.
        tolerance: the search ends if the bracket times ``length`` is shorter.
        most: the largest number of trials after the first.
    """
    bracket, done, tries = _bracket(start, t, evaluate, most)
    evaluations = tries + 1
    low, high = sorted(bracket, key=lambda point: point.value) if len(bracket) == 2 else bracket * 2
    stuck = False
    while not done and tries < most and abs(high.t - low.t) * length >= tolerance:
        left, right = sorted((low.t, high.t))
        t, stuck = _inside(_cubic(bracket[0], bracket[1]), left, right, stuck)
        new = evaluate(t)
        tries, evaluations = tries + 1, evaluations + 1
        at = 0 if bracket[0] is low else 1
        if new.value > start.value + C1 * t * start.slope or new.value >= low.value:
            bracket[1 - at] = new
            low, high = sorted(bracket, key=lambda point: point.value)
            continue
        done = abs(new.slope) <= -C2 * start.slope
        if not done and new.slope * (high.t - low.t) >= 0:
            bracket[1 - at] = high = low
        bracket[at] = low = new
    return low, evaluations


def _bracket(start: Point, t: float, evaluate: Callable[[float], Point], most: int) -> tuple[list[Point], bool, int]:
    """Two points around an acceptable one, or that one alone; whether it was found; the trials after the first."""
    before, new = start, evaluate(t)
    for tries in range(most):
        if new.value > start.value + C1 * new.t * start.slope or (tries > 1 and new.value >= before.value):
            return [before, new], False, tries
        if abs(new.slope) <= -C2 * start.slope:
            return [new], True, tries
        if new.slope >= 0:
            return [before, new], False, tries
        limits = new.t + 0.01 * (new.t - before.t), new.t * 10
        before, new = new, evaluate(_cubic(before, new, limits))
    return [start, new], False, most


def _cubic(a: Point, b: Point, limits: tuple[float, float] | None = None) -> float:
    """The minimum, within limits, of the cubic through two points with their slopes."""
    if a.t > b.t:
        a, b = b, a
    low, high = limits or (a.t, b.t)
    if a.t == b.t:
        return a.t
    d1 = a.slope + b.slope - 3 * (a.value - b.value) / (a.t - b.t)
    square = d1 * d1 - a.slope * b.slope
    bottom = b.slope - a.slope + 2 * math.sqrt(square) if square >= 0 else 0.0
    if bottom == 0 or math.isnan(bottom):
        return (low + high) / 2
    best = b.t - (b.t - a.t) * ((b.slope + math.sqrt(square) - d1) / bottom)
    return min(max(best, low), high)


def _inside(t: float, left: float, right: float, stuck: bool) -> tuple[float, bool]:
    """The trial point ``t``, moved away from the ends of the bracket if it is too near one for the second time."""
    margin = 0.1 * (right - left)
    if min(right - t, t - left) >= margin:
        return t, False
    if stuck or t >= right or t <= left:
        return (right - margin if abs(t - right) < abs(t - left) else left + margin), False
    return t, True
