r"""Adam and AdamW, with AMSGrad.

.. math::
    m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
    \theta &\leftarrow \theta - \frac{\gamma}{1-\beta_1^t} \cdot
        \frac{m}{\sqrt{v} / \sqrt{1-\beta_2^t} + \epsilon}

With AMSGrad the largest :math:`v` so far is used instead of :math:`v`. Weight decay adds
:math:`\lambda\theta` to the gradient (Adam) or shrinks the parameter by :math:`1 - \gamma\lambda` first
(AdamW, ``decoupled_weight_decay``).

References: Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101; Reddi et al., ICLR 2018.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from offbeat import _torch
from offbeat.rules.checks import betas, boolean, eps, learning_rate, weight_decay
from offbeat.rules.common import decayed, decoupling, moments
from offbeat.rules.ops import maximum, sqrt
from offbeat.rules.rule import Rule, Slot, Surface, Values


def check(h: Values) -> None:
    if h.foreach and not h.capturable:
        for name, value in (("lr", h.lr), ("betas[0]", h.betas[0]), ("betas[1]", h.betas[1])):
            if isinstance(value, Tensor):
                raise ValueError(
                    f"{name} as a Tensor is not supported for capturable=False and foreach=True; "
                    "leave foreach out, or pass a number"
                )


def slots(h: Values) -> tuple[Slot, ...]:
    always = (Slot("step", scalar=True), Slot("exp_avg"), Slot("exp_avg_sq", positive=True))
    return (*always, Slot("max_exp_avg_sq", positive=True)) if h.amsgrad else always


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    beta1, beta2 = h.betas
    return {
        "weight_decay": h.weight_decay,
        "remains": 1 - h.lr * h.weight_decay,
        "rest1": 1 - beta1,
        "beta2": beta2,
        "rest2": 1 - beta2,
        "step_size": h.lr / (1 - beta1**s.step),
        "correction2": (1 - beta2**s.step) ** 0.5,
        "eps": h.eps,
    }


def adam(p, g, exp_avg, exp_avg_sq, c, max_exp_avg_sq=None):  # type: ignore[no-untyped-def]
    p, g = decayed(p, g, c)
    exp_avg, exp_avg_sq = moments(g, exp_avg, exp_avg_sq, c)
    if max_exp_avg_sq is None:
        return p - c.step_size * (exp_avg / (sqrt(exp_avg_sq) / c.correction2 + c.eps)), exp_avg, exp_avg_sq
    max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
    p = p - c.step_size * (exp_avg / (sqrt(max_exp_avg_sq) / c.correction2 + c.eps))
    return p, exp_avg, exp_avg_sq, max_exp_avg_sq


def native(h: Values, step: Any, params: Any, grads: Any, state: dict[str, Any]) -> None:
    operator = _torch.FUSED["adamw" if h.decoupled_weight_decay else "adam"]
    operator(
        params, grads, state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq", []), state["step"],
        amsgrad=h.amsgrad, lr=h.lr, beta1=float(h.betas[0]), beta2=float(h.betas[1]), weight_decay=h.weight_decay,
        eps=h.eps, maximize=h.maximize,
    )  # fmt: skip


NATIVE = native if {"adam", "adamw"} <= set(_torch.FUSED) else None

ADAM = Rule(
    name="Adam",
    hyper=(
        learning_rate(1e-3),
        betas((0.9, 0.999), "decay rates of the averages of the gradient and of its square"),
        eps(1e-8),
        weight_decay(0),
        boolean("amsgrad", "divide by the largest second moment so far"),
        boolean("decoupled_weight_decay", "decay the parameter instead of the gradient, as AdamW"),
    ),
    slots=slots,
    structure=decoupling,
    coefficients=coefficients,
    update=adam,
    check=check,
    sparse=lambda h: "does not support sparse gradients, please consider SparseAdam instead",
    compact=True,
    surface=Surface(keyword_only=("decoupled_weight_decay",), native=NATIVE),
)

ADAMW = replace(
    ADAM,
    name="AdamW",
    hyper=tuple(
        weight_decay(1e-2, "decoupled weight decay") if one.name == "weight_decay" else one
        for one in ADAM.hyper
        if one.name != "decoupled_weight_decay"
    ),
    surface=Surface(fixed={"decoupled_weight_decay": True}, native=NATIVE),
)
