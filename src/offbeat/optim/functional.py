"""Functional optimizers: gradients are passed in, not read from ``.grad``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, Concatenate, ParamSpec, overload

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from offbeat._types import Params
from offbeat.optim.base import RuleOptimizer
from offbeat.optim.chain import Chain
from offbeat.optim.lookup import rule_class

__all__ = ["FunctionalOptimizer", "as_functional"]

# One lock for all optimizers: two of them may update the same parameters from different threads. A kernel uses all
# cores anyway, so running one update after the other costs no time.
_updating = threading.RLock()

Options = ParamSpec("Options")


@overload
def as_functional(optim_cls: Chain) -> FunctionalOptimizer: ...


@overload
def as_functional(
    optim_cls: Callable[Concatenate[ParamsT, Options], Optimizer],
    params: Params,
    *args: Options.args,
    **hyper: Options.kwargs,
) -> FunctionalOptimizer: ...


def as_functional(optim_cls: Any, params: Any = None, *args: Any, **hyper: Any) -> FunctionalOptimizer:
    """Make an optimizer that takes explicit gradients and never reads ``.grad``.

    Args:
        optim_cls: an optimizer class of offbeat, or the torch.optim class of the same name. Or a
            :class:`~offbeat.Chain`, without any further argument.
        params: parameters or groups, as for ``optim_cls``; may be empty, see :meth:`FunctionalOptimizer.step_param`.
        args: further arguments of ``optim_cls`` by position.
        hyper: further arguments of ``optim_cls`` by name.

    Returns:
        The functional optimizer. It updates the parameters in place.

    Example:
        >>> import torch, offbeat
        >>> w = torch.ones(3)
        >>> fn = offbeat.as_functional(offbeat.SGD, [w], lr=0.5)
        >>> fn.step([torch.ones(3)])
        >>> w
        tensor([0.5000, 0.5000, 0.5000])
    """
    if isinstance(optim_cls, Chain):
        if params is not None or args or hyper:
            raise TypeError("as_functional(chain) takes nothing else: the chain already has parameters and options")
        return FunctionalOptimizer(lambda _: optim_cls, [None])
    if params is None:
        raise TypeError("as_functional() needs parameters; pass an empty list to add them later")
    return FunctionalOptimizer(rule_class(optim_cls), params, *args, **hyper)


class FunctionalOptimizer:
    """An optimizer that takes explicit gradients. Made by :func:`as_functional`.

    Several threads may call it at the same time, each with its own gradients; updates run one after the other.

    Example:
        >>> import torch, offbeat
        >>> w, b = torch.ones(2), torch.ones(1)
        >>> functional = offbeat.as_functional(offbeat.SGD, [w], lr=0.5)
        >>> functional.step([torch.ones(2)])
        >>> functional.step_param(b, torch.ones(1))  # joins the last group
        >>> w, b
        (tensor([0.5000, 0.5000]), tensor([0.5000]))
    """

    def __init__(self, optim_cls: Callable[..., RuleOptimizer | Chain], params: Any, *args: Any, **hyper: Any) -> None:
        if isinstance(params, Iterable) and not isinstance(params, Tensor):
            params = list(params)
        if isinstance(params, list) and not params:
            params = [{"params": []}]  # torch.optim.Optimizer requires a group, which may be empty
        self._optimizer = optim_cls(params, *args, **hyper)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The live groups: a change of the learning rate takes effect in the next step."""
        return self._optimizer.param_groups

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """The state of each parameter, as in ``optimizer.state``."""
        return self._optimizer.state

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Update all parameters of all groups.

        Args:
            gradients: one for each parameter, groups in order; None leaves a parameter and its state alone.
        """
        gradients = list(gradients)
        with _updating:
            count = sum(len(group["params"]) for group in self.param_groups)
            if len(gradients) != count:
                raise ValueError(
                    f"step() got {len(gradients)} gradients for {count} parameters; "
                    "pass one for each, or None where there is none"
                )
            self._optimizer.step_params([p for group in self.param_groups for p in group["params"]], gradients)

    def step_param(self, param: Tensor, grad: Tensor | None) -> None:
        """Update one parameter.

        Args:
            param: the parameter. One that is in no group yet joins the last group.
            grad: its gradient; None leaves it and its state alone.
        """
        with _updating:
            if any(p is param for group in self.param_groups for p in group["params"]):
                self._optimizer.step_params([param], [grad])
                return
            group = self.param_groups[-1]
            if not isinstance(param, Tensor):
                raise TypeError(f"a parameter must be a Tensor, but got {type(param).__name__}")
            if not (param.is_leaf or param.retains_grad):
                raise ValueError("can't optimize a non-leaf Tensor: detach it first")
            if "param_names" in group:
                raise ValueError(
                    "a parameter without a name cannot join a group of named parameters; use add_param_group"
                )
            group["params"].append(param)
            try:
                self._optimizer.step_params([param], [grad])
            except BaseException:
                group["params"].pop()
                raise

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as :meth:`torch.optim.Optimizer.add_param_group`."""
        with _updating:
            self._optimizer.add_param_group(param_group)

    def init_state(self) -> None:
        """Allocate the state of all parameters now. Changes nothing else."""
        with _updating:
            self._optimizer.init_state()

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer inside, in torch.optim's format. The optimizer class loads it too."""
        with _updating:
            return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of the optimizer class."""
        with _updating:
            self._optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        count = sum(len(group["params"]) for group in self.param_groups)
        head, _, rest = repr(self._optimizer).partition("\n")
        return f"functional {head}\n    parameters: {count}\n{rest}"
