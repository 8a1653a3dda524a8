r"""Adadelta: steps scaled by the ratio of two running averages of squares.

.. math::
    v &\leftarrow \rho v + (1-\rho) g^2, \qquad
    \Delta = \frac{\sqrt{u + \epsilon}}{\sqrt{v + \epsilon}}\, g \\
    u &\leftarrow \rho u + (1-\rho) \Delta^2, \qquad \theta \leftarrow \theta - \gamma\Delta

Reference: Zeiler, arXiv 1212.5701.
"""

from __future__ import annotations

from typing import Any

from offbeat.rules.checks import eps, learning_rate, number, weight_decay
from offbeat.rules.common import decayed, plain_decay
from offbeat.rules.ops import sqrt
from offbeat.rules.rule import Rule, Slot, Surface, Values


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    return {"lr": h.lr, "rho": h.rho, "rest": 1 - h.rho, "eps": h.eps, "weight_decay": h.weight_decay}


def adadelta(p, g, square_avg, acc_delta, c):  # type: ignore[no-untyped-def]
    p, g = decayed(p, g, c)
    square_avg = c.rho * square_avg + c.rest * (g * g)
    delta = sqrt(acc_delta + c.eps) / sqrt(square_avg + c.eps) * g
    acc_delta = c.rho * acc_delta + c.rest * (delta * delta)
    return p - c.lr * delta, square_avg, acc_delta


ADADELTA = Rule(
    name="Adadelta",
    hyper=(
        learning_rate(1.0),
        number("rho", 0.9, "decay rate of both averages", high=1.0),
        eps(1e-6),
        weight_decay(0),
    ),
    slots=lambda h: (Slot("step", scalar=True), Slot("square_avg"), Slot("acc_delta")),
    structure=plain_decay,
    coefficients=coefficients,
    update=adadelta,
    surface=Surface(positional=("foreach",)),
)
