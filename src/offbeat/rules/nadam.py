r"""NAdam: Adam with Nesterov momentum and a momentum that warms up.

.. math::
    \mu_t &= \beta_1 \left(1 - \tfrac12 0.96^{t\psi}\right), \qquad M_t = M_{t-1}\,\mu_t \\
    m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
    \theta &\leftarrow \theta - \gamma \left( \frac{1-\mu_t}{1-M_t}\, g
        + \frac{\mu_{t+1}}{1-M_t\mu_{t+1}}\, m \right) \Big/ \left(\sqrt{v/(1-\beta_2^t)} + \epsilon\right)

Reference: Dozat, Incorporating Nesterov Momentum into Adam, 2016.
"""

from __future__ import annotations

from typing import Any

from offbeat.rules.checks import betas, boolean, eps, learning_rate, number, weight_decay
from offbeat.rules.common import decayed, decoupling, moments
from offbeat.rules.ops import sqrt
from offbeat.rules.rule import Rule, Slot, Values


def momentum_at(h: Values, step: Any) -> Any:
    return h.betas[0] * (1.0 - 0.5 * (0.96 ** (step * h.momentum_decay)))


def advance(h: Values, s: Values) -> dict[str, Any]:
    return {"mu_product": s.mu_product * momentum_at(h, s.step)}


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    beta1, beta2 = h.betas
    mu, mu_next = momentum_at(h, s.step), momentum_at(h, s.step + 1)
    return {
        "weight_decay": h.weight_decay,
        "remains": 1 - h.lr * h.weight_decay,
        "rest1": 1 - beta1,
        "beta2": beta2,
        "rest2": 1 - beta2,
        "correction2": 1 - beta2**s.step,
        "eps": h.eps,
        "towards_gradient": h.lr * (1.0 - mu) / (1.0 - s.mu_product),
        "towards_average": h.lr * mu_next / (1.0 - s.mu_product * mu_next),
    }


def nadam(p, g, exp_avg, exp_avg_sq, c):  # type: ignore[no-untyped-def]
    p, g = decayed(p, g, c)
    exp_avg, exp_avg_sq = moments(g, exp_avg, exp_avg_sq, c)
    denominator = sqrt(exp_avg_sq / c.correction2) + c.eps
    return p - (c.towards_gradient * g + c.towards_average * exp_avg) / denominator, exp_avg, exp_avg_sq


NADAM = Rule(
    name="NAdam",
    hyper=(
        learning_rate(2e-3),
        betas((0.9, 0.999), "decay rates of the averages of the gradient and of its square"),
        eps(1e-8),
        weight_decay(0),
        number("momentum_decay", 4e-3, "how fast the momentum warms up"),
        boolean("decoupled_weight_decay", "decay the parameter instead of the gradient, as AdamW"),
    ),
    slots=lambda h: (
        Slot("step", scalar=True),
        Slot("mu_product", init=1.0, scalar=True),
        Slot("exp_avg"),
        Slot("exp_avg_sq"),
    ),
    structure=decoupling,
    advance=advance,
    coefficients=coefficients,
    update=nadam,
)
