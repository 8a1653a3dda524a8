r"""RMSprop, plain or centered, with or without momentum.

.. math::
    v &\leftarrow \alpha v + (1-\alpha) g^2, \qquad
    \bar g \leftarrow \alpha \bar g + (1-\alpha) g \quad\text{(centered)} \\
    d &= g \big/ \left(\sqrt{v - \bar g^2} + \epsilon\right), \qquad b \leftarrow \mu b + d \\
    \theta &\leftarrow \theta - \gamma \, (b \text{ with momentum, else } d)

References: Hinton, lecture notes; Graves, arXiv 1308.0850.
"""

from __future__ import annotations

from typing import Any

from offbeat.rules.checks import boolean, eps, learning_rate, number, weight_decay
from offbeat.rules.common import decayed, plain_decay
from offbeat.rules.ops import sqrt
from offbeat.rules.rule import Rule, Slot, Surface, Values


def slots(h: Values) -> tuple[Slot, ...]:
    momentum = (Slot("momentum_buffer"),) if h.momentum > 0 else ()
    centered = (Slot("grad_avg"),) if h.centered else ()
    return (Slot("step", scalar=True), Slot("square_avg"), *momentum, *centered)


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    return {
        "lr": h.lr,
        "alpha": h.alpha,
        "rest": 1 - h.alpha,
        "eps": h.eps,
        "momentum": h.momentum,
        "weight_decay": h.weight_decay,
    }


def rmsprop(p, g, square_avg, c, momentum_buffer=None, grad_avg=None):  # type: ignore[no-untyped-def]
    p, g = decayed(p, g, c)
    square_avg = c.alpha * square_avg + c.rest * (g * g)
    variance = square_avg
    if grad_avg is not None:
        grad_avg = grad_avg + c.rest * (g - grad_avg)
        variance = square_avg - grad_avg * grad_avg
    direction = g / (sqrt(variance) + c.eps)
    if momentum_buffer is not None:
        direction = momentum_buffer = c.momentum * momentum_buffer + direction
    p = p - c.lr * direction
    return tuple(x for x in (p, square_avg, momentum_buffer, grad_avg) if x is not None)


RMSPROP = Rule(
    name="RMSprop",
    hyper=(
        learning_rate(1e-2),
        number("alpha", 0.99, "smoothing constant"),
        eps(1e-8),
        weight_decay(0),
        number("momentum", 0, "momentum factor"),
        boolean("centered", "normalise by an estimate of the gradient's variance"),
    ),
    slots=slots,
    structure=plain_decay,
    coefficients=coefficients,
    update=rmsprop,
    surface=Surface(positional=("capturable", "foreach", "maximize", "differentiable")),
)
