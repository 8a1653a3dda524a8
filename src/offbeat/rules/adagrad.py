r"""Adagrad: each element's learning rate shrinks with the squares of its gradients.

.. math::
    G &\leftarrow G + g^2 \\
    \theta &\leftarrow \theta - \frac{\gamma}{1 + (t-1)\eta} \cdot \frac{g}{\sqrt{G} + \epsilon}

A sparse gradient updates only the rows that it contains.

Reference: Duchi, Hazan and Singer, JMLR 12, 2011.
"""

from __future__ import annotations

from typing import Any

from offbeat import _torch
from offbeat.rules.checks import eps, learning_rate, number, weight_decay
from offbeat.rules.common import decayed, plain_decay
from offbeat.rules.ops import sqrt
from offbeat.rules.rule import Rule, Slot, Surface, Values


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    return {"weight_decay": h.weight_decay, "step_size": h.lr / (1 + (s.step - 1) * h.lr_decay), "eps": h.eps}


def adagrad(p, g, sum, c):  # type: ignore[no-untyped-def]
    p, g = decayed(p, g, c)
    sum = sum + g * g
    return p - c.step_size * (g / (sqrt(sum) + c.eps)), sum


def native(h: Values, step: Any, params: Any, grads: Any, state: dict[str, Any]) -> None:
    _torch.FUSED["adagrad"](
        params, grads, state["sum"], state["step"], lr=h.lr, lr_decay=h.lr_decay, weight_decay=h.weight_decay,
        eps=h.eps, maximize=h.maximize,
    )  # fmt: skip


def sparse(h: Values) -> str:
    if h.weight_decay != 0:
        return "weight_decay option is not compatible with sparse gradients; set weight_decay=0 for this group"
    return "rows"


ADAGRAD = Rule(
    name="Adagrad",
    hyper=(
        learning_rate(1e-2),
        number("lr_decay", 0, "learning rate decay"),
        weight_decay(0),
        number("initial_accumulator_value", 0, "initial value of the sum of squares"),
        eps(1e-10),
    ),
    slots=lambda h: (Slot("step", scalar=True), Slot("sum", init=lambda h: h.initial_accumulator_value)),
    structure=plain_decay,
    coefficients=coefficients,
    update=adagrad,
    sparse=sparse,
    surface=Surface(
        flags=("maximize", "foreach", "differentiable", "fused"),
        positional=("foreach",),
        eager_state=True,
        native=native if "adagrad" in _torch.FUSED else None,
    ),
)
