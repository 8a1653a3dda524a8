r"""Muon: momentum, orthogonalised by a Newton-Schulz iteration, for the hidden matrices of a network.

.. math::
    B &\leftarrow \mu B + (1-\mu) g, \qquad
        M = \begin{cases} (1-\mu) g + \mu B & \quad \text{with Nesterov} \\ B & \quad \text{else} \end{cases} \\
    X &\leftarrow M / \max(\lVert M \rVert_F, \epsilon), \qquad
        X \leftarrow a X + b \, (X X^\top) X + c \, (X X^\top)^2 X \quad \text{(} k \text{ times)} \\
    \theta &\leftarrow (1 - \gamma\lambda) \, \theta - \gamma \, s \, X, \qquad
        s = \sqrt{\max(1, \text{rows} / \text{columns})}
        \ \text{ or } \ 0.2 \sqrt{\max(\text{rows}, \text{columns})}
        \ \text{ or } \ \sqrt{\text{rows} / \text{columns}}

The second :math:`s` is for ``adjust_lr_fn="match_rms_adamw"``, the third for ``"spectral_unclamped"``. The iteration
runs in bfloat16, as in torch.optim, or in ``ns_dtype``; matrices of equal shape are stacked. A parameter with three
dimensions is a stack of matrices (experts); each matrix is orthogonalised on its own. Use AdamW for embeddings, heads,
norms and biases, and ``offbeat.Chain`` to combine the two into one optimizer.

References: Jordan et al., kellerjordan.github.io/posts/muon, 2024; Liu et al., arXiv 2502.16982; Bernstein,
jeremybernste.in/writing/deriving-muon, 2025.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from offbeat.rules.checks import anything, at_least, boolean
from offbeat.rules.newton_schulz import newton_schulz
from offbeat.rules.rule import Hyper, Matrix, Rule, Slot, Surface, Values

_ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_adjustment(value: Any) -> None:
    if value not in _ADJUSTMENTS:
        raise ValueError(
            f"Adjust learning rate function {value} is not supported; "
            "use 'original', 'match_rms_adamw', 'spectral_unclamped' or None"
        )


def check_coefficients(value: Any) -> None:
    if not hasattr(value, "__len__") or len(value) != 3:
        raise ValueError(f"Coefficients must be a tuple of exactly 3 values, but got ns_coefficients={value!r}")


def check_steps(value: Any) -> None:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"ns_steps must be a number of steps, 0 or more, but got {value!r}")
    if value >= 100:
        raise ValueError(f"Number of steps must be less than 100 for computational efficiency, but ns_steps={value}")


def check_dtype(value: Any) -> None:
    if value not in _DTYPES:
        raise ValueError(f"ns_dtype must be one of {', '.join(map(str, _DTYPES))}, but got {value!r}")


def check_param(p: Tensor) -> None:
    if p.dim() not in (2, 3):
        raise ValueError(
            f"Muon only supports 2D parameters, and 3D ones as stacks of matrices, whereas we found a parameter with "
            f"size: {tuple(p.shape)}; give it to AdamW (see offbeat.split_parameters and offbeat.Chain)"
        )


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    return {"momentum": h.momentum, "rest": 1 - h.momentum, "remains": 1 - h.lr * h.weight_decay}


def scales(h: Values, shape: tuple[int, ...]) -> dict[str, Any]:
    rows, columns = shape[-2:]
    if h.adjust_lr_fn == "match_rms_adamw":
        return {"step_size": h.lr * (0.2 * math.sqrt(max(rows, columns)))}
    ratio = rows / max(1, columns)
    return {"step_size": h.lr * math.sqrt(ratio if h.adjust_lr_fn == "spectral_unclamped" else max(1.0, ratio))}


def averaged(g, momentum_buffer, c):  # type: ignore[no-untyped-def]
    momentum_buffer = momentum_buffer + c.rest * (g - momentum_buffer)
    return (momentum_buffer + c.rest * (g - momentum_buffer) if c.nesterov else momentum_buffer), momentum_buffer


def orthogonalise(x: Tensor, about: Values) -> tuple[Tensor]:
    stack = x.flatten(0, -3)
    h = about.h
    return (newton_schulz(stack, h.ns_coefficients, h.ns_steps, h.eps, about.products).view_as(x),)


def muon(p, g, c):  # type: ignore[no-untyped-def]
    return (c.remains * p - c.step_size * g,)


MUON = Rule(
    name="Muon",
    hyper=(
        at_least("lr", 1e-3, "learning rate, a number or a tensor of one element", says="Learning rate"),
        at_least("weight_decay", 0.1, "decoupled weight decay", says="weight decay"),
        at_least("momentum", 0.95, "momentum factor"),
        boolean("nesterov", "Nesterov momentum", default=True),
        Hyper(
            "ns_coefficients",
            (3.4445, -4.7750, 2.0315),
            check_coefficients,
            "the coefficients a, b, c of the Newton-Schulz polynomial",
            "tuple[float, float, float]",
        ),
        anything("eps", 1e-7, "smallest norm that a matrix is divided by"),
        Hyper("ns_steps", 5, check_steps, "the number of Newton-Schulz iterations, below 100", "int"),
        Hyper(
            "adjust_lr_fn",
            None,
            check_adjustment,
            "how the learning rate depends on the shape: 'original' (same as None), 'match_rms_adamw' or "
            "'spectral_unclamped'",
            'Literal["original", "match_rms_adamw", "spectral_unclamped"] | None',
        ),
        Hyper("ns_dtype", torch.bfloat16, check_dtype, "the dtype of the Newton-Schulz iteration", "torch.dtype"),
    ),
    slots=lambda h: (Slot("momentum_buffer"),),
    structure=lambda h: {"nesterov": bool(h.nesterov)},
    coefficients=coefficients,
    update=muon,
    check_param=check_param,
    matrix=Matrix(
        transform=orthogonalise, before=averaged, dtype=lambda h: h.ns_dtype, scales=scales, cut=True, copies=3
    ),
    surface=Surface(
        flags=(),
        keyword_only=("ns_dtype",),
        precision=False,
        example=("torch.nn.Linear(4, 2, bias=False)", "torch.ones(3, 4)"),
    ),
)
