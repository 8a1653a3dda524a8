r"""Adamax: Adam with the infinity norm.

.. math::
    m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad u \leftarrow \max(\beta_2 u, |g| + \epsilon) \\
    \theta &\leftarrow \theta - \frac{\gamma}{1-\beta_1^t} \cdot \frac{m}{u}

Reference: Kingma and Ba, arXiv 1412.6980.
"""

from __future__ import annotations

from typing import Any

from offbeat.rules.checks import betas, eps, learning_rate, weight_decay
from offbeat.rules.common import decayed, plain_decay
from offbeat.rules.ops import maximum
from offbeat.rules.rule import Rule, Slot, Surface, Values


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    beta1, beta2 = h.betas
    return {
        "weight_decay": h.weight_decay,
        "rest1": 1 - beta1,
        "beta2": beta2,
        "step_size": h.lr / (1 - beta1**s.step),
        "eps": h.eps,
    }


def adamax(p, g, exp_avg, exp_inf, c):  # type: ignore[no-untyped-def]
    p, g = decayed(p, g, c)
    exp_avg = exp_avg + c.rest1 * (g - exp_avg)
    exp_inf = maximum(c.beta2 * exp_inf, abs(g) + c.eps)
    return p - c.step_size * (exp_avg / exp_inf), exp_avg, exp_inf


ADAMAX = Rule(
    name="Adamax",
    hyper=(
        learning_rate(2e-3),
        betas((0.9, 0.999), "decay rates of the average of the gradient and of its infinity norm"),
        eps(1e-8),
        weight_decay(0),
    ),
    slots=lambda h: (Slot("step", scalar=True), Slot("exp_avg"), Slot("exp_inf")),
    structure=plain_decay,
    coefficients=coefficients,
    update=adamax,
    surface=Surface(positional=("foreach",)),
)
