"""The drop-in optimizers: torch.optim's arguments, keys and behaviour, and Lion.

This file is the list of rules: exports, tests and docs pages follow from it.
"""

# Written by tools/make_stubs.py from the rules. Change those, and run it again.

from typing import Literal

import torch
from torch import Tensor

from offbeat._types import Params
from offbeat.optim.base import RuleOptimizer

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
]

class SGD(RuleOptimizer):
    r"""Stochastic gradient descent, with momentum, dampening and Nesterov's correction.

    .. math::
        g &\leftarrow g + \lambda\theta \\
        b_1 &= g_1, \qquad b_t = \mu b_{t-1} + (1-\tau) g_t \\
        \theta &\leftarrow \theta - \gamma \, (g + \mu b \text{ with Nesterov, else } b)

    The buffer starts as the first gradient, without dampening, even if :meth:`init_state` has allocated it before: the
    first step overwrites it.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.001).
        momentum: momentum factor (default: 0).
        dampening: dampening for momentum (default: 0).
        weight_decay: weight decay (L2 penalty) (default: 0).
        nesterov: Nesterov momentum; requires a momentum and zero dampening (default: False).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        state_dtype: how state is stored: None for the parameter's dtype, torch.float32, torch.bfloat16 (rounded
            stochastically, which is unbiased), or '8bit' (blocks of 256 elements share a scale) (default: None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.SGD(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        momentum: float | Tensor = 0,
        dampening: float | Tensor = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | Literal["8bit"] | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...

class Adam(RuleOptimizer):
    r"""Adam and AdamW, with AMSGrad.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
        \theta &\leftarrow \theta - \frac{\gamma}{1-\beta_1^t} \cdot
            \frac{m}{\sqrt{v} / \sqrt{1-\beta_2^t} + \epsilon}

    With AMSGrad the largest :math:`v` so far is used instead of :math:`v`. Weight decay adds
    :math:`\lambda\theta` to the gradient (Adam) or shrinks the parameter by :math:`1 - \gamma\lambda` first
    (AdamW, ``decoupled_weight_decay``).

    References: Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101; Reddi et al., ICLR 2018.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.001).
        betas: decay rates of the averages of the gradient and of its square (default: (0.9, 0.999)).
        eps: term added to the denominator for numerical stability (default: 1e-08).
        weight_decay: weight decay (L2 penalty) (default: 0).
        amsgrad: divide by the largest second moment so far (default: False).
        decoupled_weight_decay: decay the parameter instead of the gradient, as AdamW (default: False).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        capturable: keep step counters and coefficients on the device, so that a step can be captured in a graph
            (default: False).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        state_dtype: how state is stored: None for the parameter's dtype, torch.float32, torch.bfloat16 (rounded
            stochastically, which is unbiased), or '8bit' (blocks of 256 elements share a scale) (default: None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.Adam(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | Literal["8bit"] | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...

class AdamW(Adam):
    r"""Adam and AdamW, with AMSGrad.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
        \theta &\leftarrow \theta - \frac{\gamma}{1-\beta_1^t} \cdot
            \frac{m}{\sqrt{v} / \sqrt{1-\beta_2^t} + \epsilon}

    With AMSGrad the largest :math:`v` so far is used instead of :math:`v`. Weight decay adds
    :math:`\lambda\theta` to the gradient (Adam) or shrinks the parameter by :math:`1 - \gamma\lambda` first
    (AdamW, ``decoupled_weight_decay``).

    References: Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101; Reddi et al., ICLR 2018.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.001).
        betas: decay rates of the averages of the gradient and of its square (default: (0.9, 0.999)).
        eps: term added to the denominator for numerical stability (default: 1e-08).
        weight_decay: decoupled weight decay (default: 0.01).
        amsgrad: divide by the largest second moment so far (default: False).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        capturable: keep step counters and coefficients on the device, so that a step can be captured in a graph
            (default: False).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        state_dtype: how state is stored: None for the parameter's dtype, torch.float32, torch.bfloat16 (rounded
            stochastically, which is unbiased), or '8bit' (blocks of 256 elements share a scale) (default: None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.AdamW(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | Literal["8bit"] | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...

class Adamax(RuleOptimizer):
    r"""Adamax: Adam with the infinity norm.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad u \leftarrow \max(\beta_2 u, |g| + \epsilon) \\
        \theta &\leftarrow \theta - \frac{\gamma}{1-\beta_1^t} \cdot \frac{m}{u}

    Reference: Kingma and Ba, arXiv 1412.6980.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.002).
        betas: decay rates of the average of the gradient and of its infinity norm (default: (0.9, 0.999)).
        eps: term added to the denominator for numerical stability (default: 1e-08).
        weight_decay: weight decay (L2 penalty) (default: 0).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        capturable: keep step counters and coefficients on the device, so that a step can be captured in a graph
            (default: False).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.Adamax(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.002,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...

class NAdam(RuleOptimizer):
    r"""NAdam: Adam with Nesterov momentum and a momentum that warms up.

    .. math::
        \mu_t &= \beta_1 \left(1 - \tfrac12 0.96^{t\psi}\right), \qquad M_t = M_{t-1}\,\mu_t \\
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
        \theta &\leftarrow \theta - \gamma \left( \frac{1-\mu_t}{1-M_t}\, g
            + \frac{\mu_{t+1}}{1-M_t\mu_{t+1}}\, m \right) \Big/ \left(\sqrt{v/(1-\beta_2^t)} + \epsilon\right)

    Reference: Dozat, Incorporating Nesterov Momentum into Adam, 2016.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.002).
        betas: decay rates of the averages of the gradient and of its square (default: (0.9, 0.999)).
        eps: term added to the denominator for numerical stability (default: 1e-08).
        weight_decay: weight decay (L2 penalty) (default: 0).
        momentum_decay: how fast the momentum warms up (default: 0.004).
        decoupled_weight_decay: decay the parameter instead of the gradient, as AdamW (default: False).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        capturable: keep step counters and coefficients on the device, so that a step can be captured in a graph
            (default: False).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.NAdam(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.002,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0,
        momentum_decay: float | Tensor = 0.004,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...

class RAdam(RuleOptimizer):
    r"""RAdam: Adam that uses the second moment only once its variance is small enough.

    .. math::
        \rho_\infty &= \frac{2}{1-\beta_2} - 1, \qquad
        \rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1-\beta_2^t} \\
        r_t &= \sqrt{\frac{(\rho_t-4)(\rho_t-2)\rho_\infty}{(\rho_\infty-4)(\rho_\infty-2)\rho_t}} \\
        \theta &\leftarrow \theta - \frac{\gamma\, m}{1-\beta_1^t}
            \begin{cases} r_t \sqrt{1-\beta_2^t} / (\sqrt v + \epsilon) & \rho_t > 5 \\ 1 & \text{else}\end{cases}

    Reference: Liu et al., arXiv 1908.03265.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.001).
        betas: decay rates of the averages of the gradient and of its square (default: (0.9, 0.999)).
        eps: term added to the denominator for numerical stability (default: 1e-08).
        weight_decay: weight decay (L2 penalty) (default: 0).
        decoupled_weight_decay: decay the parameter instead of the gradient, as AdamW (default: False).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        capturable: keep step counters and coefficients on the device, so that a step can be captured in a graph
            (default: False).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.RAdam(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...

class Adagrad(RuleOptimizer):
    r"""Adagrad: each element's learning rate shrinks with the squares of its gradients.

    .. math::
        G &\leftarrow G + g^2 \\
        \theta &\leftarrow \theta - \frac{\gamma}{1 + (t-1)\eta} \cdot \frac{g}{\sqrt{G} + \epsilon}

    A sparse gradient updates only the rows that it contains.

    Reference: Duchi, Hazan and Singer, JMLR 12, 2011.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.01).
        lr_decay: learning rate decay (default: 0).
        weight_decay: weight decay (L2 penalty) (default: 0).
        initial_accumulator_value: initial value of the sum of squares (default: 0).
        eps: term added to the denominator for numerical stability (default: 1e-10).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.Adagrad(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        lr_decay: float | Tensor = 0,
        weight_decay: float | Tensor = 0,
        initial_accumulator_value: float | Tensor = 0,
        eps: float | Tensor = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...
    def share_memory(self) -> None:
        """Move the sums of squares into shared memory, for several processes that train one model."""

class Adadelta(RuleOptimizer):
    r"""Adadelta: steps scaled by the ratio of two running averages of squares.

    .. math::
        v &\leftarrow \rho v + (1-\rho) g^2, \qquad
        \Delta = \frac{\sqrt{u + \epsilon}}{\sqrt{v + \epsilon}}\, g \\
        u &\leftarrow \rho u + (1-\rho) \Delta^2, \qquad \theta \leftarrow \theta - \gamma\Delta

    Reference: Zeiler, arXiv 1212.5701.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 1.0).
        rho: decay rate of both averages (default: 0.9).
        eps: term added to the denominator for numerical stability (default: 1e-06).
        weight_decay: weight decay (L2 penalty) (default: 0).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        capturable: keep step counters and coefficients on the device, so that a step can be captured in a graph
            (default: False).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.Adadelta(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1.0,
        rho: float | Tensor = 0.9,
        eps: float | Tensor = 1e-06,
        weight_decay: float | Tensor = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...

class RMSprop(RuleOptimizer):
    r"""RMSprop, plain or centered, with or without momentum.

    .. math::
        v &\leftarrow \alpha v + (1-\alpha) g^2, \qquad
        \bar g \leftarrow \alpha \bar g + (1-\alpha) g \quad\text{(centered)} \\
        d &= g \big/ \left(\sqrt{v - \bar g^2} + \epsilon\right), \qquad b \leftarrow \mu b + d \\
        \theta &\leftarrow \theta - \gamma \, (b \text{ with momentum, else } d)

    References: Hinton, lecture notes; Graves, arXiv 1308.0850.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.01).
        alpha: smoothing constant (default: 0.99).
        eps: term added to the denominator for numerical stability (default: 1e-08).
        weight_decay: weight decay (L2 penalty) (default: 0).
        momentum: momentum factor (default: 0).
        centered: normalise by an estimate of the gradient's variance (default: False).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        capturable: keep step counters and coefficients on the device, so that a step can be captured in a graph
            (default: False).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.RMSprop(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        alpha: float | Tensor = 0.99,
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0,
        momentum: float | Tensor = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        fused: bool | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...

class Rprop(RuleOptimizer):
    r"""Rprop: each element has its own step size, which grows while the sign of its gradient stays the same.

    .. math::
        \eta &\leftarrow \begin{cases}
            \min(\eta\,\eta_+, \Gamma_{max}) & g_{prev}\, g > 0 \\
            \max(\eta\,\eta_-, \Gamma_{min}),\; g \leftarrow 0 & g_{prev}\, g < 0 \\
            \text{unchanged} & \text{else}\end{cases} \\
        \theta &\leftarrow \theta - \eta\,\mathrm{sign}(g), \qquad g_{prev} \leftarrow g

    Reference: Riedmiller and Braun, ICNN 1993.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.01).
        etas: factors by which a step size shrinks and grows (default: (0.5, 1.2)).
        step_sizes: smallest and largest step size (default: (1e-06, 50)).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        capturable: keep step counters and coefficients on the device, so that a step can be captured in a graph
            (default: False).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.Rprop(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-06, 50),
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...

class ASGD(RuleOptimizer):
    r"""ASGD: gradient descent that also keeps the average of its iterates.

    .. math::
        \theta &\leftarrow (1 - \lambda\eta_t)\,\theta - \eta_t g, \qquad
        \bar\theta \leftarrow \bar\theta + \mu_t (\theta - \bar\theta) \\
        \eta_{t+1} &= \frac{\gamma}{(1 + \lambda\gamma t)^\alpha}, \qquad
        \mu_{t+1} = \frac{1}{\max(1, t - t_0)}

    The average is in ``state[p]["ax"]``. A change of the learning rate takes effect one step later, as in torch.optim.

    Reference: Polyak and Juditsky, SIAM J. Control Optim. 30, 1992.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.01).
        lambd: decay term (default: 0.0001).
        alpha: power in the decay of the learning rate (default: 0.75).
        t0: step at which averaging starts (default: 1000000.0).
        weight_decay: weight decay (L2 penalty) (default: 0).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        capturable: keep step counters and coefficients on the device, so that a step can be captured in a graph
            (default: False).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.ASGD(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        lambd: float | Tensor = 0.0001,
        alpha: float | Tensor = 0.75,
        t0: float | Tensor = 1000000.0,
        weight_decay: float | Tensor = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        *,
        fused: bool | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...

class Lion(RuleOptimizer):
    r"""Lion: the sign of an interpolated momentum, with decoupled weight decay.

    .. math::
        \theta &\leftarrow (1 - \gamma\lambda)\,\theta - \gamma\,\mathrm{sign}(\beta_1 m + (1-\beta_1) g) \\
        m &\leftarrow \beta_2 m + (1-\beta_2) g

    It keeps one state tensor instead of Adam's two. Typical learning rates are 3 to 10 times smaller than Adam's.

    Reference: Chen et al., arXiv 2302.06675.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.0001).
        betas: coefficient of the interpolation for the step, and decay rate of the momentum (default: (0.9, 0.99)).
        weight_decay: decoupled weight decay (default: 0).
        maximize: maximize the objective instead of minimizing it (default: False).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        capturable: keep step counters and coefficients on the device, so that a step can be captured in a graph
            (default: False).
        differentiable: let autograd record the step (default: False).
        fused: True runs the fused tier or raises, False never runs it; None lets the library choose (default:
            None).
        state_dtype: how state is stored: None for the parameter's dtype, torch.float32, torch.bfloat16 (rounded
            stochastically, which is unbiased), or '8bit' (blocks of 256 elements share a scale) (default: None).
        rounding: how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is
            unbiased, 'kahan' to nearest with the rounding error kept in a second tensor (default: None).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.Lion(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.0001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float | Tensor = 0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | Literal["8bit"] | None = None,
        rounding: Literal["stochastic", "kahan"] | None = None,
    ) -> None: ...

class SparseAdam(RuleOptimizer):
    r"""Adam for sparse gradients: updates only the rows that the gradient contains, and only their state.

    .. math::
        m_i &\leftarrow \beta_1 m_i + (1-\beta_1) g_i, \qquad v_i \leftarrow \beta_2 v_i + (1-\beta_2) g_i^2
            \qquad \text{for rows } i \text{ of } g \\
        \theta_i &\leftarrow \theta_i - \gamma \, \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} \cdot
            \frac{m_i}{\sqrt{v_i} + \epsilon}

    The step :math:`t` counts the updates of the parameter, not those of a row. ``nn.Embedding(sparse=True)`` produces such
    gradients. If a gradient contains a row more than once, its values are summed first.

    Reference: Kingma and Ba, arXiv 1412.6980.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.001).
        betas: decay rates of the averages of the gradient and of its square (default: (0.9, 0.999)).
        eps: term added to the denominator for numerical stability (default: 1e-08).
        maximize: maximize the objective instead of minimizing it (default: False).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Embedding(4, 2, sparse=True)
        >>> optimizer = offbeat.SparseAdam(model.parameters(), lr=0.01)
        >>> model(torch.tensor([0, 2])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-08,
        maximize: bool = False,
    ) -> None: ...

class Muon(RuleOptimizer):
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

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.001).
        weight_decay: decoupled weight decay (default: 0.1).
        momentum: momentum factor (default: 0.95).
        nesterov: Nesterov momentum (default: True).
        ns_coefficients: the coefficients a, b, c of the Newton-Schulz polynomial (default: (3.4445, -4.775,
            2.0315)).
        eps: smallest norm that a matrix is divided by (default: 1e-07).
        ns_steps: the number of Newton-Schulz iterations, below 100 (default: 5).
        adjust_lr_fn: how the learning rate depends on the shape: 'original' (same as None), 'match_rms_adamw' or
            'spectral_unclamped' (default: None).
        ns_dtype: the dtype of the Newton-Schulz iteration (default: torch.bfloat16).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> optimizer = offbeat.Muon(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        weight_decay: float | Tensor = 0.1,
        momentum: float | Tensor = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float | Tensor = 1e-07,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None: ...

class Adafactor(RuleOptimizer):
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

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        lr: learning rate, a number or a tensor of one element (default: 0.01).
        beta2_decay: the power of the step by which new squares count less (default: -0.8).
        eps: the least root of a second moment (None: the precision of the dtype), and the least rms of a parameter
            (default: (None, 0.001)).
        d: the largest rms of an update before it is scaled (default: 1.0).
        weight_decay: decoupled weight decay (default: 0.0).
        foreach: True runs the foreach tier, False the loop tier; None lets the library choose (default: None).
        maximize: maximize the objective instead of minimizing it (default: False).

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.Adafactor(model.parameters(), lr=0.01)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        beta2_decay: float | Tensor = -0.8,
        eps: tuple[float | None, float] = (None, 0.001),
        d: float | Tensor = 1.0,
        weight_decay: float | Tensor = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None: ...
