r"""Adafactor: second moments as the product of a row and a column, and steps in proportion to the parameter.

.. math::
    R &\leftarrow \hat\beta R + (1-\hat\beta) \, \operatorname{mean}_{\text{columns}}(g^2), \qquad
        C \leftarrow \hat\beta C + (1-\hat\beta) \, \operatorname{mean}_{\text{rows}}(g^2), \qquad
        1 - \hat\beta = t^{\text{beta2\_decay}} \\
    V &= \frac{R \, C}{\max(\operatorname{mean}(R), \epsilon_1)}, \qquad
        U = \frac{g}{\max(\sqrt{V}, \epsilon_1)} \\
    \theta &\leftarrow (1 - \gamma\lambda) \, \theta - \max(\epsilon_2, \operatorname{rms}(\theta)) \,
        \min(\gamma, t^{-1/2}) \, \frac{U}{\max(1, \operatorname{rms}(U) / d)}

A vector keeps :math:`V` itself. A parameter with more than two dimensions is a stack of matrices over its last two,
each with a row and a column; its rms is that of the whole parameter, as in torch.optim. The state of an
:math:`n \times m` matrix has :math:`n + m` numbers.

Reference: Shazeer and Stern, arXiv 1804.04235.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from offbeat._torch import foreach_norm
from offbeat.rules.checks import at_least, pair, require_number
from offbeat.rules.ops import minimum
from offbeat.rules.rule import Hyper, Matrix, Rule, Slot, Surface, Total, Values


def check_eps(value: Any) -> None:
    pair("eps", value)
    for i, one in enumerate(value):
        if i == 0 and one is None:
            continue
        require_number(f"eps[{i}]", one)
        if not one >= 0.0:
            raise ValueError(f"epsilon{i + 1} should be >= 0 but is: {one}")


def check_decay(value: Any) -> None:
    require_number("beta2_decay", value)
    if not value <= 0.0:
        raise ValueError(f"beta2_decay should be <= 0 but is: {value}")


def slots(h: Values) -> tuple[Slot, ...]:
    return (
        Slot("step", scalar=True),
        Slot("row_var", positive=True, shape=lambda shape: (*shape[:-1], 1) if len(shape) > 1 else None),
        Slot("col_var", positive=True, shape=lambda shape: (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else None),
        Slot("variance", positive=True, shape=lambda shape: shape if len(shape) < 2 else None),
    )


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    return {
        "remains": 1 - h.lr * h.weight_decay,
        "take": s.step**h.beta2_decay,
        "rho": minimum(h.lr, 1 / s.step**0.5),
    }


def factored(
    x: Tensor,
    about: Values,
    row_var: Tensor | None = None,
    col_var: Tensor | None = None,
    variance: Tensor | None = None,
) -> Generator[list[Total], list[Tensor], tuple[Tensor, ...]]:
    take, n, shape = about.c.take, len(x), about.shape
    eps1, eps2 = about.h.eps
    eps1 = torch.finfo(about.dtype).eps if eps1 is None else eps1
    state: tuple[Tensor, ...]
    squares = x * x
    if row_var is not None and col_var is not None:
        (rows,) = yield [Total(squares.sum(-1, keepdim=True), -1)]
        row_var = torch.lerp(row_var, rows.div_(shape[-1]), take)
        columns, rows = yield [
            Total(squares.sum(-2, keepdim=True), -2),
            Total(row_var.sum(-2, keepdim=True), -2),
        ]
        col_var = torch.lerp(col_var, columns.div_(shape[-2]), take)
        # The root of a product is the product of the roots, of far fewer numbers.
        rows = (row_var / rows.div_(shape[-2]).clamp_(min=eps1)).rsqrt_()
        inverse, state = torch.mul(rows, col_var.rsqrt(), out=squares), (row_var, col_var)
    else:
        assert variance is not None
        variance = torch.lerp(variance, squares, take)
        inverse, state = variance.rsqrt(), (variance,)
    update = inverse.clamp_(max=1 / eps1 if eps1 else math.inf).mul_(x)
    rms, size = yield [
        Total(torch.linalg.vector_norm(update.reshape(n, x[0].numel()), dim=1), None, norm=True),
        Total(torch.stack(foreach_norm(about.params, 2, x.dtype)).to(x.dtype), None, norm=True),
    ]
    root = math.sqrt(max(1, math.prod(shape)))
    alpha = (size / root).clamp(min=eps2) * about.c.rho / (rms / root / about.h.d).clamp(min=1.0)
    return update.mul_(alpha.view(n, *[1] * (x.dim() - 1))), *state


def adafactor(p, g, c):  # type: ignore[no-untyped-def]
    p = c.remains * p
    return (p + g if c.maximize else p - g,)


ADAFACTOR = Rule(
    name="Adafactor",
    hyper=(
        at_least("lr", 1e-2, "learning rate, a number or a tensor of one element", says="Learning rate"),
        Hyper("beta2_decay", -0.8, check_decay, "the power of the step by which new squares count less"),
        Hyper(
            "eps",
            (None, 1e-3),
            check_eps,
            "the least root of a second moment (None: the precision of the dtype), and the least rms of a parameter",
            "tuple[float | None, float]",
        ),
        at_least("d", 1.0, "the largest rms of an update before it is scaled", says="Clipping threshold d", low=1),
        at_least("weight_decay", 0.0, "decoupled weight decay"),
    ),
    slots=slots,
    structure=lambda h: {"maximize": bool(h.maximize)},
    coefficients=coefficients,
    update=adafactor,
    matrix=Matrix(transform=factored, pieces=True, copies=3),
    surface=Surface(flags=("foreach", "maximize"), precision=False),
)
