"""Maths that several rules share."""

from __future__ import annotations

from typing import Any

from offbeat.rules.rule import Values

__all__ = ["decayed", "decoupling", "moments", "plain_decay"]


def plain_decay(h: Values) -> dict[str, bool]:
    """The structure of a rule whose weight decay is added to the gradient."""
    return {"maximize": h.maximize, "decay": h.weight_decay != 0}


def decoupling(h: Values) -> dict[str, bool]:
    """The structure of a rule whose weight decay is added to the gradient or, if decoupled, shrinks the parameter."""
    decay = h.weight_decay != 0
    return {
        "maximize": h.maximize,
        "decay": decay and not h.decoupled_weight_decay,
        "shrink": decay and h.decoupled_weight_decay,
    }


def decayed(p: Any, g: Any, c: Values) -> tuple[Any, Any]:
    """The parameter and the gradient after ``maximize`` and weight decay, according to the structure in ``c``."""
    if c.maximize:
        g = -g
    if c.decay:
        g = g + c.weight_decay * p
    if vars(c).get("shrink"):
        p = c.remains * p
    return p, g


def moments(g: Any, exp_avg: Any, exp_avg_sq: Any, c: Values) -> tuple[Any, Any]:
    """Adam's running averages of the gradient and of its square."""
    return exp_avg + c.rest1 * (g - exp_avg), c.beta2 * exp_avg_sq + c.rest2 * (g * g)
