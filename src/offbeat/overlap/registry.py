"""How an optimizer steps a bucket: a registry from optimizer classes to overlapped classes.

The entry of a class holds for its subclasses too, unless they have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.optim import LBFGS, Chain, RuleOptimizer
from offbeat.overlap.clipping import multiply

__all__ = ["OverlappedOptimizer", "is_registered", "overlapped", "register_overlapped"]

_registry: dict[type, Any] = {}


class StepsBuckets(Protocol):
    """What a registered class must have at least; see :class:`OverlappedOptimizer`."""

    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Update these parameters with these gradients."""


Steps = TypeVar("Steps", bound=StepsBuckets)


class OverlappedOptimizer:
    """Updates some of an optimizer's parameters and leaves the others alone.

    The default works for every :class:`torch.optim.Optimizer` whose update of a parameter depends only on that
    parameter, its gradient and its state: it shows the optimizer only the parameters of a bucket and runs the ``step``
    of its class. For other optimizers, subclass it, override :meth:`step_bucket`, and register the subclass with
    :func:`register_overlapped`.

    Args:
        optimizer: the optimizer whose parameters are updated.

    Attributes:
        optimizer: the optimizer, with its live ``param_groups``.

    Example:
        >>> import torch, offbeat
        >>> w, b = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> optimizer = torch.optim.SGD([w, b], lr=0.5)
        >>> with torch.no_grad():
        ...     offbeat.OverlappedOptimizer(optimizer).step_bucket([b], [torch.ones(1)])
        >>> w.tolist(), b.tolist()
        ([1.0, 1.0], [0.5])
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer: Any = optimizer  # of the class that a subclass was registered for
        self._calls = 0

    def begin_step(self) -> None:
        """Called before the first bucket of every step; the groups do not change until the last bucket."""

    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Update some parameters, under ``torch.no_grad()``.

        Do not run step hooks: they run once, in ``optimizer.step()``.

        Args:
            params: parameters of the optimizer.
            grads: their gradients; ``.grad`` need not hold them.
        """
        if self._calls > 1:
            self._step_narrowed(params, grads)
            return
        before = _counters(self.optimizer)
        self._step_narrowed(params, grads)
        after = _counters(self.optimizer)
        changed = {key for key in after if after[key] != before.get(key)}
        # What is switched once and for all at the first step, such as "checked", may change in the first bucket.
        flags = {key for key in changed if self._calls == 0 and type(after[key]) is bool}
        if changed - flags:
            raise TypeError(
                f"{type(self.optimizer).__name__}.step() changes {', '.join(sorted(changed - flags))} of the optimizer "
                "itself, which would change once for every bucket instead of once for every step; define how to step a "
                "bucket with offbeat.register_overlapped"
            )
        self._calls += 1

    def step_clipped(self, params: Sequence[Tensor], grads: Sequence[Tensor], clip: Tensor) -> None:
        """Multiply gradients by a number and update the parameters.

        Override this to do both in one pass over memory. The result must have the same bits.

        Args:
            params: parameters of the optimizer.
            grads: their gradients.
            clip: the number, a 0-d tensor.
        """
        multiply(grads, clip)
        self.step_bucket(params, grads)

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
    """Run the step of the optimizer's class, without hooks, profiler and the wrapper of a scheduler."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


@overload
def register_overlapped(optimizer_class: type[Steps]) -> type[Steps]: ...


@overload
def register_overlapped(optimizer_class: type[Optimizer]) -> Callable[[type[Steps]], type[Steps]]: ...


def register_overlapped(optimizer_class: type) -> Any:
    """Define how to step a bucket of an optimizer class and its subclasses.

    A class decorator for a subclass of :class:`OverlappedOptimizer`, or for any class that is constructed with the
    optimizer and has a method ``step_bucket(params, grads)``. An optimizer class that has a method ``step_bucket``
    itself can be decorated directly with ``@register_overlapped``.

    Args:
        optimizer_class: the subclass of :class:`torch.optim.Optimizer` to step in buckets.

    Returns:
        The decorator; or the class itself if it has a method ``step_bucket``.

    Raises:
        TypeError: the class is not an optimizer class, or ``step_bucket`` is missing.
        ValueError: the class has been registered already.

    Example:
        >>> import torch, offbeat
        >>> class Signs(torch.optim.Optimizer):
        ...     def step_some(self, params, grads):
        ...         for p, g in zip(params, grads):
        ...             p.sub_(g.sign(), alpha=self.defaults["lr"])
        >>> @offbeat.register_overlapped(Signs)
        ... class OverlappedSigns(offbeat.OverlappedOptimizer):
        ...     def step_bucket(self, params, grads):
        ...         self.optimizer.step_some(params, grads)
        >>> model = torch.nn.Linear(4, 2)
        >>> handle = offbeat.overlap(Signs(model.parameters(), {"lr": 0.1}), model)
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"register_overlapped() takes a subclass of torch.optim.Optimizer, but got {optimizer_class!r}")

    def register(overlapped_class: type) -> type:
        if not callable(getattr(overlapped_class, "step_bucket", None)):
            raise TypeError(f"{overlapped_class!r} does not define step_bucket(params, grads); add this method")
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
    """Whether this class or one of its bases has been registered."""
    return any(cls in _registry for cls in optimizer_class.__mro__)


def overlapped(optimizer: Optimizer) -> OverlappedOptimizer:
    """The object that steps the buckets of this optimizer, by the nearest of its classes that is registered."""
    for cls in type(optimizer).__mro__:
        found = _registry.get(cls)
        if found is _OverlappedRule and unwrap(type(optimizer).step) is not unwrap(RuleOptimizer.step):
            break  # a subclass whose step does more than the rule
        if found is not None:
            made: Any = optimizer if found is cls else found(optimizer)
            return made if isinstance(made, OverlappedOptimizer) else _Adapted(optimizer, made)
    return OverlappedOptimizer(optimizer)


class _Adapted(OverlappedOptimizer):
    """A registered class, or an optimizer, that has ``step_bucket`` and need not have anything else."""

    def __init__(self, optimizer: Optimizer, stepper: StepsBuckets) -> None:
        super().__init__(optimizer)
        self._stepper = stepper

    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self._stepper.step_bucket(params, grads)


@register_overlapped(RuleOptimizer)
class _OverlappedRule(OverlappedOptimizer):
    """Our own optimizers take gradients as arguments."""

    def __init__(self, optimizer: RuleOptimizer) -> None:
        super().__init__(optimizer)
        self._rule_optimizer = optimizer

    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self._rule_optimizer.step_params(params, grads)

    def step_clipped(self, params: Sequence[Tensor], grads: Sequence[Tensor], clip: Tensor) -> None:
        if self._rule_optimizer.clips_exactly(params):
            self._rule_optimizer.step_params(params, grads, clip=clip)
        else:
            super().step_clipped(params, grads, clip)


@register_overlapped(Chain)
class _OverlappedChain(OverlappedOptimizer):
    """Each optimizer of a chain steps its own parameters of a bucket."""

    def __init__(self, optimizer: Chain) -> None:
        super().__init__(optimizer)
        self._chain = optimizer
        self._parts = {id(one): overlapped(one) for one in optimizer.optimizers}

    def begin_step(self) -> None:
        for part in self._parts.values():
            part.begin_step()

    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        for one, mine, given in self._chain.by_owner(params, grads):
            self._parts[id(one)].step_bucket(mine, given)

    def step_clipped(self, params: Sequence[Tensor], grads: Sequence[Tensor], clip: Tensor) -> None:
        for one, mine, given in self._chain.by_owner(params, grads):
            self._parts[id(one)].step_clipped(mine, given, clip)


@register_overlapped(LBFGS)
@register_overlapped(torch.optim.LBFGS)
class _NoLBFGS:
    def __init__(self, optimizer: Optimizer) -> None:
        raise TypeError(
            "LBFGS updates all parameters together and evaluates a closure several times, so it cannot be overlapped "
            "with backward; call its step(closure) after backward"
        )

    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Never called."""
