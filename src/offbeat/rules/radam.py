r"""RAdam: Adam that uses the second moment only once its variance is small enough.

.. math::
    \rho_\infty &= \frac{2}{1-\beta_2} - 1, \qquad
    \rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1-\beta_2^t} \\
    r_t &= \sqrt{\frac{(\rho_t-4)(\rho_t-2)\rho_\infty}{(\rho_\infty-4)(\rho_\infty-2)\rho_t}} \\
    \theta &\leftarrow \theta - \frac{\gamma\, m}{1-\beta_1^t}
        \begin{cases} r_t \sqrt{1-\beta_2^t} / (\sqrt v + \epsilon) & \rho_t > 5 \\ 1 & \text{else}\end{cases}

Reference: Liu et al., arXiv 1908.03265.
"""

from __future__ import annotations

from typing import Any

from offbeat.rules.checks import betas, boolean, eps, learning_rate, weight_decay
from offbeat.rules.common import decayed, decoupling, moments
from offbeat.rules.ops import maximum, sqrt, where
from offbeat.rules.rule import Rule, Slot, Values


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    beta1, beta2 = h.betas
    correction2 = 1 - beta2**s.step
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * s.step * (beta2**s.step) / correction2
    # At or below 5 the rectification is not used; another value keeps its square root real.
    trusted = maximum(rho, 5.0)
    large = maximum(rho_inf, 5.0)
    root = sqrt((trusted - 4) * (trusted - 2) * large / ((large - 4) * (large - 2) * trusted))
    rectification = where(rho_inf > 5, root, 0.0)
    step_size = h.lr / (1 - beta1**s.step)
    return {
        "weight_decay": h.weight_decay,
        "remains": 1 - h.lr * h.weight_decay,
        "rest1": 1 - beta1,
        "beta2": beta2,
        "rest2": 1 - beta2,
        "eps": h.eps,
        "rectified": where(rho > 5.0, 1.0, 0.0),
        "step_size": where(rho > 5.0, step_size * rectification * sqrt(correction2), step_size),
    }


def radam(p, g, exp_avg, exp_avg_sq, c):  # type: ignore[no-untyped-def]
    p, g = decayed(p, g, c)
    exp_avg, exp_avg_sq = moments(g, exp_avg, exp_avg_sq, c)
    denominator = where(c.rectified > 0, sqrt(exp_avg_sq) + c.eps, 1.0)
    return p - c.step_size * (exp_avg / denominator), exp_avg, exp_avg_sq


RADAM = Rule(
    name="RAdam",
    hyper=(
        learning_rate(1e-3),
        betas((0.9, 0.999), "decay rates of the averages of the gradient and of its square"),
        eps(1e-8),
        weight_decay(0),
        boolean("decoupled_weight_decay", "decay the parameter instead of the gradient, as AdamW"),
    ),
    slots=lambda h: (Slot("step", scalar=True), Slot("exp_avg"), Slot("exp_avg_sq")),
    structure=decoupling,
    coefficients=coefficients,
    update=radam,
)
