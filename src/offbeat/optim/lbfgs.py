r"""L-BFGS: a quasi-Newton method that keeps the last steps and the changes of the gradient over them.

With :math:`s_i` the last steps, :math:`y_i` the changes of the gradient over them and
:math:`\rho_i = 1 / y_i^\top s_i`, two loops over the history apply an approximation :math:`H` of the inverse Hessian
to the gradient:

.. math::
    q &\leftarrow -g; \qquad
        \text{newest to oldest: } \alpha_i = \rho_i \, s_i^\top q, \quad q \leftarrow q - \alpha_i y_i \\
    d &\leftarrow \frac{y^\top s}{y^\top y} \, q; \qquad
        \text{oldest to newest: } d \leftarrow d + (\alpha_i - \rho_i \, y_i^\top d) \, s_i \\
    \theta &\leftarrow \theta + t \, d

The step :math:`t` is the learning rate or, with ``line_search_fn="strong_wolfe"``, the result of a line search.

Reference: Nocedal and Wright, Numerical Optimization, 2006, chapter 7.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from offbeat._types import Params
from offbeat.engine.tensors import is_dtensor
from offbeat.optim.checkpoint import check_state_dict, numbered

__all__ = ["LBFGS"]

Loss = TypeVar("Loss")


class LBFGS(torch.optim.LBFGS):
    """:class:`torch.optim.LBFGS`, with a clear error for parameters that it cannot update.

    ``step(closure)`` makes up to ``max_iter`` iterations, and evaluates the closure at least once in each.

    Args:
        params: parameters; one group only.
        lr: the step length, or the first trial of the line search (default: 1).
        max_iter: the largest number of iterations in one ``step`` (default: 20).
        max_eval: the largest number of evaluations in one ``step`` (default: ``max_iter * 1.25``).
        tolerance_grad: the step ends if no element of the gradient is larger (default: 1e-7).
        tolerance_change: the step ends if the loss or all parameters change less (default: 1e-9).
        history_size: the number of steps to keep (default: 100).
        line_search_fn: ``"strong_wolfe"``, or None for steps of fixed length (default: None).
        maximize: maximize the closure's result instead of minimizing it (default: False). Needs torch 2.15.

    Example:
        >>> import torch, offbeat
        >>> x = torch.zeros(2, requires_grad=True)
        >>> optimizer = offbeat.LBFGS([x], line_search_fn="strong_wolfe")
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = ((x - torch.tensor([1.0, 2.0])) ** 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)
        >>> x.detach().round(decimals=4)
        tensor([1., 2.])

    Limits: all parameters must be on one device. DTensors (FSDP2 or tensor parallel) are refused: inner products would
    be those of this rank's shards. If several processes each hold all parameters (DDP), the closure must return the
    same loss on each.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: Literal["strong_wolfe"] | None = None,
        *,
        maximize: bool = False,
    ) -> None:
        options: dict[str, Any] = {}
        if maximize:
            if "maximize" not in inspect.signature(torch.optim.LBFGS).parameters:
                raise ValueError(
                    f"LBFGS(maximize=True) needs torch 2.15, but this is torch {torch.__version__}; have the closure "
                    "call backward() on the negative of what is to be maximized, and return that"
                )
            options["maximize"] = True
        super().__init__(
            params,  # type: ignore[arg-type]  # Params is a little wider than torch's ParamsT
            lr, max_iter, max_eval, tolerance_grad, tolerance_change, history_size, line_search_fn, **options,
        )  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise for a second group and for DTensors: L-BFGS needs all of every parameter at once."""
        super().add_param_group(param_group)
        if len(self.param_groups) > 1:
            self.param_groups.pop()
            raise ValueError(
                "LBFGS doesn't support per-parameter options (parameter groups); pass all parameters in one group"
            )
        if any(map(is_dtensor, self.param_groups[0]["params"])):
            self.param_groups.pop()
            raise TypeError(
                "LBFGS does not support DTensor parameters (FSDP2 or tensor parallel): its inner products would be "
                "those of this rank's shards; leave the parameters unsharded, or use an optimizer such as AdamW"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; refuses the state of a wrapper, and takes numbers of parameters that are strings."""
        check_state_dict(state_dict, type(self).__name__)
        super().load_state_dict(numbered(state_dict))

    if TYPE_CHECKING:  # torch's own has no types

        def step(self, closure: Callable[[], Loss]) -> Loss:  # type: ignore[override]  # noqa: D102
            ...

    def init_state(self) -> None:
        """Do nothing: the history begins with the first step."""
