r"""Stochastic gradient descent, with momentum, dampening and Nesterov's correction.

.. math::
    g &\leftarrow g + \lambda\theta \\
    b_1 &= g_1, \qquad b_t = \mu b_{t-1} + (1-\tau) g_t \\
    \theta &\leftarrow \theta - \gamma \, (g + \mu b \text{ with Nesterov, else } b)

The buffer starts as the first gradient, without dampening, even if :meth:`init_state` has allocated it before: the
first step overwrites it.
"""

from __future__ import annotations

from typing import Any

from offbeat import _torch
from offbeat.rules.checks import anything, boolean, learning_rate, number, weight_decay
from offbeat.rules.common import decayed
from offbeat.rules.ops import where
from offbeat.rules.rule import Rule, Slot, Surface, Values


def check(h: Values) -> None:
    if h.nesterov and (h.momentum <= 0 or h.dampening != 0):
        raise ValueError(
            "Nesterov momentum requires a momentum and zero dampening, but "
            f"momentum={h.momentum} and dampening={h.dampening}"
        )


def slots(h: Values) -> tuple[Slot, ...]:
    return (Slot("momentum_buffer"),) if h.momentum != 0 else ()


def structure(h: Values) -> dict[str, bool]:
    return {"maximize": h.maximize, "decay": h.weight_decay != 0, "nesterov": h.nesterov}


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    first = s.step < 1.5
    return {
        "lr": h.lr,
        "weight_decay": h.weight_decay,
        "momentum": h.momentum,
        "keep": where(first, 0.0, h.momentum),
        "take": where(first, 1.0, 1 - h.dampening),
    }


def sgd(p, g, c, momentum_buffer=None):  # type: ignore[no-untyped-def]
    p, g = decayed(p, g, c)
    if momentum_buffer is None:
        return (p - c.lr * g,)
    momentum_buffer = c.keep * momentum_buffer + c.take * g
    direction = g + c.momentum * momentum_buffer if c.nesterov else momentum_buffer
    return p - c.lr * direction, momentum_buffer


def native(h: Values, step: Any, params: Any, grads: Any, state: dict[str, Any]) -> None:
    _torch.FUSED["sgd"](
        params, grads, state.get("momentum_buffer", []), weight_decay=h.weight_decay, momentum=h.momentum, lr=h.lr,
        dampening=h.dampening, nesterov=h.nesterov, maximize=h.maximize, is_first_step=step == 1,
    )  # fmt: skip


def sparse(h: Values) -> str:
    if h.weight_decay != 0:
        return "weight_decay option is not compatible with sparse gradients; set weight_decay=0 for this group"
    return "rows" if h.momentum == 0 else "dense"


SGD = Rule(
    name="SGD",
    hyper=(
        learning_rate(1e-3),
        number("momentum", 0, "momentum factor"),
        anything("dampening", 0, "dampening for momentum"),
        weight_decay(0),
        boolean("nesterov", "Nesterov momentum; requires a momentum and zero dampening"),
    ),
    slots=slots,
    structure=structure,
    coefficients=coefficients,
    update=sgd,
    check=check,
    sparse=sparse,
    first_step_differs=lambda h: h.dampening != 0,
    compact=True,
    surface=Surface(
        flags=("maximize", "foreach", "differentiable", "fused"),
        native=native if "sgd" in _torch.FUSED else None,
        native_takes=_torch.fused_sgd_is_right,
    ),
)
