"""How an optimizer steps a bucket: a registry from optimizer classes to overlapped classes.

The entry for a class serves its subclasses too, unless they have one of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.optim import RuleOptimizer
from offbeat.optim.base import PartPlans
from offbeat.optim.extras import Extras
from offbeat.optim.plan import Plan

__all__ = ["OverlappedOptimizer", "is_registered", "overlapped", "register_overlapped"]

T = TypeVar("T")

_registry: dict[type, Any] = {}


class OverlappedOptimizer:
    """How an optimizer updates some of its parameters, the rest being none of its business.

    The default serves every :class:`torch.optim.Optimizer` whose update of a parameter depends on that parameter, its
    gradient and its state alone: it shows the optimizer only the bucket's parameters and runs the ``step`` of its
    class. Subclass it, override :meth:`step_bucket` and register it for what needs something else.

    Attributes:
        optimizer: the optimizer, with its live ``param_groups``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._watches = True  # once: whether a step is more than the update of its parameters

    def begin_step(self) -> None:
        """Called before the first bucket of every step; groups do not change until the last."""

    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Update these parameters with these gradients, under ``torch.no_grad()``.

        ``.grad`` need not hold the gradients and is not to be relied on. Step hooks are not to be run: they run once,
        in ``optimizer.step()``.
        """
        counters = _counters(self.optimizer) if self._watches else {}
        self._step_narrowed(params, grads)
        if self._watches and (changed := _counters(self.optimizer)) != counters:
            names = sorted(key for key in changed if changed[key] != counters.get(key))
            raise TypeError(
                f"{type(self.optimizer).__name__}.step() changes {', '.join(names)} of the optimizer itself, so "
                "stepping bucket by bucket would change it several times a step; say how a bucket is stepped with "
                "offbeat.register_overlapped"
            )
        self._watches = False

    def _step_narrowed(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        groups = self.optimizer.param_groups
        everyone = [group["params"] for group in groups]
        before = [p.grad for p in params]
        members = set(map(id, params))
        try:
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            for group, whole in zip(groups, everyone, strict=True):
                group["params"] = [p for p in whole if id(p) in members]
            _bare_step(self.optimizer)
        finally:
            for group, whole in zip(groups, everyone, strict=True):
                group["params"] = whole
            for p, g_before in zip(params, before, strict=True):
                p.grad = g_before


def _counters(optimizer: Optimizer) -> dict[str, Any]:
    return {key: value for key, value in vars(optimizer).items() if type(value) in (int, float, bool)}


def _bare_step(optimizer: Optimizer) -> None:
    """The step of the optimizer's class, without hooks, profiler and what a scheduler wrapped around it."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def register_overlapped(optimizer_class: type[T]) -> Callable[[type], type]:
    """Say how the buckets of an optimizer class (and its subclasses) are stepped.

    A class decorator for a subclass of :class:`OverlappedOptimizer`, or for any class that is made from the optimizer
    and has its method ``step_bucket(params, grads)``::

        @offbeat.register_overlapped(MyOptimizer)
        class OverlappedMine(offbeat.OverlappedOptimizer):
            def step_bucket(self, params, grads):
                self.optimizer.update_some(params, grads)

    An optimizer class that has a method ``step_bucket`` itself may be decorated directly, ``@register_overlapped``.

    Raises:
        TypeError: not an optimizer class, or ``step_bucket`` is missing.
        ValueError: the class has an entry already.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"register_overlapped() takes a subclass of torch.optim.Optimizer, but got {optimizer_class!r}")

    def register(overlapped_class: type) -> type:
        if not callable(getattr(overlapped_class, "step_bucket", None)):
            raise TypeError(
                f"{overlapped_class!r} says not how a bucket is stepped; give it a method step_bucket(params, grads)"
            )
        if optimizer_class in _registry:
            raise ValueError(
                f"{optimizer_class.__name__} has been registered with {_registry[optimizer_class].__name__} already; "
                "register a subclass of it instead"
            )
        _registry[optimizer_class] = overlapped_class
        return overlapped_class

    if callable(getattr(optimizer_class, "step_bucket", None)):
        return register(optimizer_class)
    return register


def is_registered(optimizer_class: type) -> bool:
    """Whether this class or one of its bases says how it steps a bucket."""
    return any(cls in _registry for cls in optimizer_class.__mro__)


def overlapped(optimizer: Optimizer) -> Any:
    """The object that steps the buckets of this optimizer, by the nearest of its classes that has an entry."""
    for cls in type(optimizer).__mro__:
        found = _registry.get(cls)
        if found is _OverlappedRule and unwrap(type(optimizer).step) is not unwrap(RuleOptimizer.step):
            break  # a subclass whose step does more than the rule
        if found is not None:
            return optimizer if found is cls else found(optimizer)
    return OverlappedOptimizer(optimizer)


@register_overlapped(RuleOptimizer)
class _OverlappedRule(OverlappedOptimizer):
    """Our own optimizers take gradients as arguments, and keep the tables of each bucket."""

    def __init__(self, optimizer: RuleOptimizer) -> None:
        super().__init__(optimizer)
        self._plans: PartPlans = {}
        self._group: dict[int, int] = {}

    def begin_step(self) -> None:
        groups = self.optimizer.param_groups
        self._group = {id(p): i for i, group in enumerate(groups) for p in group["params"]} if len(groups) > 1 else {}

    def skip_step(self, *, on: bool) -> None:
        """Every gradient has been used: let the optimizer's own step, which comes next, do nothing."""
        optimizer: Any = self.optimizer
        optimizer._nothing_left = on

    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor], clip: Tensor | None = None) -> None:
        if len(self._plans) > 1024:  # buckets that are cut otherwise every time
            self._plans.clear()
        optimizer: Any = self.optimizer
        extras = None if clip is None else Extras(clip=clip)
        optimizer._apply(self._by_group(params, grads), self._plans, extras)

    def takes_clip(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
        """Whether gradients can be multiplied in the pass that updates, with the bits of a pass of its own."""
        plans = [self._plans.get(tuple(map(id, mine))) for _, mine, _ in self._by_group(params, grads)]
        return all(isinstance(plan, Plan) and plan.clips_exactly for plan in plans)

    def _by_group(
        self, params: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> list[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
        groups = self.optimizer.param_groups
        if not self._group:
            return [(groups[0], list(params), list(grads))]
        work: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for p, g in zip(params, grads, strict=True):
            mine = work.setdefault(self._group[id(p)], ([], []))
            mine[0].append(p)
            mine[1].append(g)
        return [(groups[i], *lists) for i, lists in work.items()]


@register_overlapped(torch.optim.LBFGS)
class _NoLBFGS:
    def __init__(self, optimizer: Optimizer) -> None:
        raise TypeError(
            "LBFGS looks at all parameters at once and evaluates a closure many times, so it cannot be overlapped with "
            "backward; call its step(closure) after backward"
        )

    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Never reached."""
