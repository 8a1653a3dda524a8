"""Pure optimizers: they return new parameters and new state, and change nothing.

For :mod:`torch.func`, for differentiating through the update, and for ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from offbeat._torch import pytree
from offbeat.engine.gradients import check_gradient
from offbeat.engine.loop import evaluate
from offbeat.engine.options import hyperparameters
from offbeat.engine.scalars import tensor_numbers
from offbeat.optim.lookup import rule_class
from offbeat.rules.rule import FLAGS, Rule, Slot, Values

__all__ = ["PureOptimizer", "as_pure"]

Options = ParamSpec("Options")
Tree = TypeVar("Tree")
State = TypeVar("State")


def as_pure(
    optim_cls: Callable[Concatenate[ParamsT, Options], Optimizer], *args: Options.args, **hyper: Options.kwargs
) -> PureOptimizer:
    """Turn an update rule into two functions without side effects.

    Args:
        optim_cls: an optimizer class of offbeat, or the torch.optim class of the same name.
        args: not allowed; only type checkers need it.
        hyper: hyperparameters of the class, and ``maximize``. Gradients flow to hyperparameters that are tensors. Other
            options of the class raise.

    Returns:
        The functions: :meth:`PureOptimizer.init` and :meth:`PureOptimizer.update`.

    Example:
        >>> import torch, offbeat
        >>> sgd = offbeat.as_pure(offbeat.SGD, lr=0.5)
        >>> params = {"w": torch.ones(2)}
        >>> state = sgd.init(params)
        >>> params, state = sgd.update(params, {"w": torch.ones(2)}, state)
        >>> params["w"]
        tensor([0.5000, 0.5000])
    """
    if args:
        kinds = ", ".join(type(argument).__name__ for argument in args)
        raise TypeError(
            f"as_pure() takes hyperparameters by name, such as lr=0.1, but got {len(args)} by position ({kinds}); "
            "parameters are given to init() and update()"
        )
    rule = rule_class(optim_cls).rule
    if rule.matrix is not None:
        raise TypeError(
            f"as_pure({rule.name}) is not possible: it works on whole matrices and not element by element; use "
            "as_functional, which takes explicit gradients too"
        )
    return PureOptimizer(rule, hyper)


class PureOptimizer:
    """An update rule as functions without side effects. Made by :func:`as_pure`.

    Parameters and gradients are any nesting of dictionaries, lists and tuples of tensors.

    Example:
        >>> import torch, offbeat
        >>> adamw = offbeat.as_pure(offbeat.AdamW)
        >>> params = [torch.ones(2), {"bias": torch.zeros(1)}]
        >>> state = adamw.init(params)
        >>> sorted(state[0])
        ['exp_avg', 'exp_avg_sq', 'step']
        >>> new_params, state = adamw.update(params, [torch.ones(2), {"bias": None}], state, lr=0.5)
    """

    def __init__(self, rule: Rule, hyper: dict[str, Any]) -> None:
        known = {hyper.name: hyper.default for hyper in rule.hyper}
        refused = [name for name in hyper if name not in known and name != "maximize"]
        if refused:
            raise TypeError(
                f"as_pure({rule.name}) does not take {', '.join(refused)}; it takes {', '.join([*known, 'maximize'])}"
            )
        options = {**FLAGS, **known, **hyper, **rule.surface.fixed}
        rule.validate(options)
        self.rule = rule
        self.options: dict[str, Any] = {**options, "differentiable": True}

    def __repr__(self) -> str:
        names = [hyper.name for hyper in self.rule.hyper] + (["maximize"] if self.options["maximize"] else [])
        lines = "".join(f"    {name}: {self.options[name]}\n" for name in sorted(names))
        return f"pure {self.rule.name} (\n{lines})"

    def init(self, params: Any) -> Any:
        """The initial state for ``params``: the same nesting, with a dictionary for each tensor."""
        h = hyperparameters(self.options)
        return pytree.tree_map(lambda p: self._initial(h, p), params)

    def update(self, params: Tree, grads: Any, state: State, **hyper: Any) -> tuple[Tree, State]:
        """Compute the new parameters and the new state.

        Args:
            params: the parameters, nested as for :meth:`init`.
            grads: the gradients, nested like ``params``; None leaves a parameter and its state as they are.
            state: what :meth:`init` or the last :meth:`update` returned.
            hyper: hyperparameters with other values for this update only, such as ``lr``.
        """
        unknown = [name for name in hyper if name not in {known.name for known in self.rule.hyper}]
        if unknown:
            raise TypeError(f"{self.rule.name} has no hyperparameter {', '.join(unknown)}")
        options = {**self.options, **hyper}
        # Numbers are checked. The value of a tensor is unknown while a graph is traced.
        if hyper and not any(isinstance(value, Tensor) for value in pytree.tree_leaves(tuple(hyper.values()))):
            self.rule.validate(options)
        h = hyperparameters(options)
        leaves, spec = pytree.tree_flatten(params)
        gradients = _flatten_like(grads, spec, "gradients")
        states = _flatten_like(state, spec, "state")
        new = [self._one(h, p, g, s) for p, g, s in zip(leaves, gradients, states, strict=True)]
        return pytree.tree_unflatten([p for p, _ in new], spec), pytree.tree_unflatten([s for _, s in new], spec)

    def _initial(self, h: Values, p: Tensor) -> dict[str, Tensor]:
        counter = torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32
        state: dict[str, Tensor] = {}
        for slot in self._slots(h):
            value = slot.initial(h)
            if slot.scalar:
                state[slot.key] = torch.ones((), dtype=counter, device=p.device) * value
            else:
                unit = torch.full_like(p, complex(1, 1) if p.is_complex() else 1, requires_grad=False)
                state[slot.key] = unit * value
        return state

    def _slots(self, h: Values) -> tuple[Any, ...]:
        slots = self.rule.slots(h)
        # The first step of some rules differs, and nothing else in the state tells whether it is the first.
        counts = any(slot.key == "step" for slot in slots)
        return slots if counts else (Slot("step", scalar=True), *slots)

    def _one(
        self, h: Values, p: Tensor, g: Tensor | None, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if g is None:
            return p, state
        check_gradient(self.rule, h, p, g)
        slots = self._slots(h)
        missing = [slot.key for slot in slots if slot.key not in state]
        if missing:
            raise ValueError(
                f"the state has no {', '.join(missing)}: init() made it with other options; "
                "pass options that decide which state there is to as_pure(), not to update()"
            )
        keys = [slot.key for slot in slots if not slot.scalar]
        stored = {slot.key: state[slot.key] for slot in slots if slot.scalar}
        # init() has already set late state: hyperparameters cannot change between init() and the first step.
        begun = [replace(slot, late=False) for slot in slots]
        numbers = tensor_numbers(self.rule, h, begun, stored, p.device, first=False)
        advanced = {key: value.to(stored[key].dtype) for key, value in numbers.stored.items()}
        tensors = [p, g, *(state[key] for key in keys)]
        if p.is_complex():
            tensors = [torch.view_as_real(t) for t in tensors]
        scalars = {**numbers.coefficients, **self.rule.structure(h)}
        values = evaluate(self.rule, ("p", "g", *keys), tensors, scalars)
        results = [v.to(t.dtype) for v, t in zip(values, [tensors[0], *tensors[2:]], strict=True)]
        if p.is_complex():
            results = [torch.view_as_complex(t) for t in results]
        return results[0], {**stored, **advanced, **dict(zip(keys, results[1:], strict=True))}


def _flatten_like(tree: Any, spec: Any, what: str) -> list[Any]:
    try:
        flat: list[Any] = spec.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"{what} are not nested like the parameters: {error}") from None
    return flat
