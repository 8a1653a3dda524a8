r"""Lion: the sign of an interpolated momentum, with decoupled weight decay.

.. math::
    \theta &\leftarrow (1 - \gamma\lambda)\,\theta - \gamma\,\mathrm{sign}(\beta_1 m + (1-\beta_1) g) \\
    m &\leftarrow \beta_2 m + (1-\beta_2) g

It keeps one state tensor instead of Adam's two. Typical learning rates are 3 to 10 times smaller than Adam's.

Reference: Chen et al., arXiv 2302.06675.
"""

from __future__ import annotations

from typing import Any

from offbeat.rules.checks import betas, learning_rate, weight_decay
from offbeat.rules.ops import sign
from offbeat.rules.rule import Rule, Slot, Values


def structure(h: Values) -> dict[str, bool]:
    return {"maximize": h.maximize, "shrink": h.weight_decay != 0}


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    beta1, beta2 = h.betas
    return {
        "lr": h.lr,
        "remains": 1 - h.lr * h.weight_decay,
        "beta1": beta1,
        "rest1": 1 - beta1,
        "beta2": beta2,
        "rest2": 1 - beta2,
    }


def lion(p, g, exp_avg, c):  # type: ignore[no-untyped-def]
    if c.maximize:
        g = -g
    if c.shrink:
        p = c.remains * p
    p = p - c.lr * sign(c.beta1 * exp_avg + c.rest1 * g)
    return p, c.beta2 * exp_avg + c.rest2 * g


LION = Rule(
    name="Lion",
    hyper=(
        learning_rate(1e-4),
        betas((0.9, 0.99), "coefficient of the interpolation for the step, and decay rate of the momentum"),
        weight_decay(0, "decoupled weight decay"),
    ),
    slots=lambda h: (Slot("exp_avg"),),
    structure=structure,
    coefficients=coefficients,
    update=lion,
    compact=True,
)
