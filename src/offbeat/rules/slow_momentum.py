r"""SlowMo's slow momentum, an outer rule: it updates the parameters from which all replicas continue.

.. math::
    u &\leftarrow \beta u + \frac{1}{\gamma} g \\
    \theta &\leftarrow \theta - \alpha \gamma u

where :math:`g = \theta - \bar x` is the pseudo-gradient and :math:`\gamma` the current learning rate of the inner
optimizer. So the slow momentum keeps its scale when the inner learning rate changes.

References: Wang et al., arXiv 1910.00643.
"""

from __future__ import annotations

from typing import Any

from offbeat.rules.checks import learning_rate, number
from offbeat.rules.rule import Rule, Slot, Surface, Values


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    # With an inner learning rate of zero the replicas have not changed and the pseudo-gradient is zero.
    rate = h.inner_lr if h.inner_lr > 0 else 1.0
    return {"momentum": h.momentum, "inverse": 1 / rate, "rate": h.lr * h.inner_lr}


def slow_momentum(p, g, c, slow_momentum_buffer):  # type: ignore[no-untyped-def]
    slow_momentum_buffer = c.momentum * slow_momentum_buffer + c.inverse * g
    return p - c.rate * slow_momentum_buffer, slow_momentum_buffer


SLOW_MOMENTUM = Rule(
    name="SlowMomentum",
    hyper=(
        learning_rate(1.0),
        number("momentum", 0.5, "slow momentum"),
        number("inner_lr", 1.0, "learning rate of the inner optimizer; set before every step"),
    ),
    slots=lambda h: (Slot("slow_momentum_buffer"),),
    structure=lambda h: {},
    coefficients=coefficients,
    update=slow_momentum,
    surface=Surface(flags=("foreach", "differentiable", "fused")),
)
