r"""ASGD: gradient descent that also keeps the average of its iterates.

.. math::
    \theta &\leftarrow (1 - \lambda\eta_t)\,\theta - \eta_t g, \qquad
    \bar\theta \leftarrow \bar\theta + \mu_t (\theta - \bar\theta) \\
    \eta_{t+1} &= \frac{\gamma}{(1 + \lambda\gamma t)^\alpha}, \qquad
    \mu_{t+1} = \frac{1}{\max(1, t - t_0)}

The average is in ``state[p]["ax"]``. A change of the learning rate takes effect one step later, as in torch.optim.

Reference: Polyak and Juditsky, SIAM J. Control Optim. 30, 1992.
"""

from __future__ import annotations

from typing import Any

from offbeat.rules.checks import anything, learning_rate, number, weight_decay
from offbeat.rules.common import decayed, plain_decay
from offbeat.rules.ops import maximum
from offbeat.rules.rule import Rule, Slot, Surface, Values


def advance(h: Values, s: Values) -> dict[str, Any]:
    return {
        "eta": h.lr / ((1 + h.lambd * h.lr * s.step) ** h.alpha),
        "mu": 1 / maximum(s.step - h.t0, 1.0),
    }


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    return {"remains": 1 - h.lambd * s.eta, "eta": s.eta, "mu": s.mu, "weight_decay": h.weight_decay}


def asgd(p, g, ax, c):  # type: ignore[no-untyped-def]
    p, g = decayed(p, g, c)
    p = c.remains * p - c.eta * g
    return p, ax + c.mu * (p - ax)


ASGD = Rule(
    name="ASGD",
    hyper=(
        learning_rate(1e-2),
        number("lambd", 1e-4, "decay term"),
        number("alpha", 0.75, "power in the decay of the learning rate"),
        anything("t0", 1e6, "step at which averaging starts"),
        weight_decay(0),
    ),
    slots=lambda h: (
        Slot("step", scalar=True),
        Slot("eta", init=lambda h: h.lr, scalar=True, late=True),
        Slot("mu", init=1.0, scalar=True),
        Slot("ax"),
    ),
    structure=plain_decay,
    advance=advance,
    advance_first=False,
    coefficients=coefficients,
    update=asgd,
    surface=Surface(positional=("foreach", "maximize", "differentiable", "capturable")),
)
