"""Pieces of maths that several rules share."""

from __future__ import annotations

from typing import Any

from offbeat.rules.rule import Values

__all__ = ["decayed", "decoupling", "moments", "plain_decay"]


def plain_decay(h: Values) -> dict[str, bool]:
    """The structure of a rule whose weight decay is part of the gradient."""
    return {"maximize": h.maximize, "decay": h.weight_decay != 0}


def decoupling(h: Values) -> dict[str, bool]:
    """The structure of a rule whose weight decay is part of the gradient or, decoupled, shrinks the parameter."""
    decay = h.weight_decay != 0
    return {
        "maximize": h.maximize,
        "decay": decay and not h.decoupled_weight_decay,
        "shrink": decay and h.decoupled_weight_decay,
    }


def decayed(
    p: Any, g: Any, *, weight_decay: Any, maximize: bool, decay: bool, remains: Any = None, shrink: bool = False
) -> tuple[Any, Any]:
    """The parameter and the gradient after the choice of direction and weight decay."""
    if maximize:
        g = -g
    if decay:
        g = g + weight_decay * p
    if shrink:
        p = remains * p
    return p, g


def moments(g: Any, exp_avg: Any, exp_avg_sq: Any, *, rest1: Any, beta2: Any, rest2: Any) -> tuple[Any, Any]:
    """Adam's running averages of the gradient and of its square."""
    return exp_avg + rest1 * (g - exp_avg), beta2 * exp_avg_sq + rest2 * (g * g)
