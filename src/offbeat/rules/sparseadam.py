r"""Adam for sparse gradients: updates only the rows that the gradient contains, and only their state.

.. math::
    m_i &\leftarrow \beta_1 m_i + (1-\beta_1) g_i, \qquad v_i \leftarrow \beta_2 v_i + (1-\beta_2) g_i^2
        \qquad \text{for rows } i \text{ of } g \\
    \theta_i &\leftarrow \theta_i - \gamma \, \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} \cdot
        \frac{m_i}{\sqrt{v_i} + \epsilon}

The step :math:`t` counts the updates of the parameter, not those of a row. ``nn.Embedding(sparse=True)`` produces such
gradients. If a gradient contains a row more than once, its values are summed first.

Reference: Kingma and Ba, arXiv 1412.6980.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from offbeat.rules.checks import above_zero, betas
from offbeat.rules.common import moments
from offbeat.rules.ops import sqrt
from offbeat.rules.rule import Rule, Slot, Surface, Values


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    beta1, beta2 = h.betas
    return {
        "rest1": 1 - beta1,
        "beta2": beta2,
        "rest2": 1 - beta2,
        "step_size": h.lr * (1 - beta2**s.step) ** 0.5 / (1 - beta1**s.step),
        "eps": h.eps,
    }


def sparse_adam(p, g, exp_avg, exp_avg_sq, c):  # type: ignore[no-untyped-def]
    g = -g if c.maximize else g
    exp_avg, exp_avg_sq = moments(g, exp_avg, exp_avg_sq, c)
    return p - c.step_size * (exp_avg / (sqrt(exp_avg_sq) + c.eps)), exp_avg, exp_avg_sq


def check_param(p: Tensor) -> None:
    if p.is_sparse:
        raise ValueError(
            f"SparseAdam requires dense parameter tensors, but one of shape {tuple(p.shape)} is sparse; only gradients "
            "are sparse: pass parameter.to_dense()"
        )
    if p.is_complex():
        raise ValueError(
            f"SparseAdam does not support complex parameters, but one of shape {tuple(p.shape)} is {p.dtype}; pass "
            "torch.view_as_real(parameter)"
        )


SPARSEADAM = Rule(
    name="SparseAdam",
    hyper=(
        above_zero("lr", 1e-3, "learning rate, a number or a tensor of one element", label="learning rate"),
        betas((0.9, 0.999), "decay rates of the averages of the gradient and of its square"),
        above_zero("eps", 1e-8, "term added to the denominator for numerical stability", label="epsilon value"),
    ),
    slots=lambda h: (
        Slot("step", scalar=True, saved=int),
        Slot("exp_avg"),
        Slot("exp_avg_sq", positive=True),
    ),
    structure=lambda h: {"maximize": h.maximize},
    coefficients=coefficients,
    update=sparse_adam,
    sparse=lambda h: "rows",
    dense="does not support dense gradients, please consider Adam instead",
    check_param=check_param,
    surface=Surface(
        flags=("maximize",),
        positional=("maximize",),
        precision=False,
        example=("torch.nn.Embedding(4, 2, sparse=True)", "torch.tensor([0, 2])"),
    ),
)
