r"""SlowMo's slow momentum, an outer rule: it moves the anchor of replicas that train by themselves in between.

.. math::
    u &\leftarrow \beta u + \frac{1}{\gamma} g \\
    \theta &\leftarrow \theta - \alpha \gamma u

where :math:`g = \theta - \bar x` is the pseudo-gradient and :math:`\gamma` the learning rate of the inner optimizer at
that time, so that the slow momentum keeps its scale when the inner learning rate changes.

References: Wang et al., arXiv 1910.00643.
"""

from __future__ import annotations

from typing import Any

from offbeat.rules.checks import learning_rate, number
from offbeat.rules.rule import Rule, Slot, Surface, Values


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    # At an inner learning rate of zero the replicas have not moved: the pseudo-gradient is zero, whatever divides it.
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
