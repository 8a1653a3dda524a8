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
from offbeat.overlap.numbers import Changes, Numbers
from offbeat.overlap.trial import check_buckets, check_kinds

__all__ = ["OverlappedOptimizer", "is_registered", "overlapped", "register_overlapped"]

_registry: dict[type, Any] = {}

#: Classes whose update of a parameter depends on nothing else, and which keep no numbers for all parameters.
_OF_TORCH = {one for one in vars(torch.optim).values() if isinstance(one, type) and issubclass(one, Optimizer)}


class StepsBuckets(Protocol):
    """What a registered class must have at least; see :class:`OverlappedOptimizer`."""

    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Update these parameters with these gradients."""


Steps = TypeVar("Steps", bound=StepsBuckets)


class OverlappedOptimizer:
    """Updates some of an optimizer's parameters and leaves the others alone.

    The default works for every :class:`torch.optim.Optimizer` whose update of a parameter depends only on that
    parameter, its gradient, its state and numbers that change once in a step: it shows the optimizer only the
    parameters of a bucket and runs the ``step`` of its class. :func:`offbeat.overlap` tries with small tensors
    whether that is so, unless the class is one of torch's. For other optimizers, subclass it, override
    :meth:`step_bucket`, and register the subclass with :func:`register_overlapped`.

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

    _numbers: Numbers | None = None

    def begin_step(self) -> None:
        """Called before the first bucket of every step; the groups do not change until the last bucket."""

    def _take_changes(self) -> list[Changes]:
        """What buckets have changed in the numbers of the optimizer, to be written after ``optimizer.step()``."""
        changes = None if self._numbers is None else self._numbers.take()
        return [] if changes is None else [changes]

    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Update some parameters, under ``torch.no_grad()``.

        Do not run step hooks: they run once, in ``optimizer.step()``. Step counters and other numbers that the
        optimizer keeps in its groups or attributes are as before afterwards; they change once, in
        ``optimizer.step()``.

        Args:
            params: parameters of the optimizer.
            grads: their gradients; ``.grad`` need not hold them.
        """
        if self._numbers is None:
            self._numbers = Numbers(self.optimizer)
        with self._numbers.bucket(params):
            self._step_narrowed(params, grads)

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


class _Tried(OverlappedOptimizer):
    """An optimizer from elsewhere, after a trial has shown that its buckets add up to a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        check_kinds(optimizer)
        self._open = check_buckets(optimizer, _steps_of)

    def begin_step(self) -> None:
        """Try again what could not be tried before training began."""
        if self._open is not None:
            self._open = check_buckets(self.optimizer, _steps_of)
        if self._open is not None:
            raise TypeError(
                f"{type(self.optimizer).__name__} cannot be overlapped: its step has raised in a trial with small "
                f"tensors ({type(self._open).__name__}: {self._open}); if it should not have, define how to step a "
                "bucket with offbeat.register_overlapped"
            ) from self._open


def _steps_of(optimizer: Optimizer) -> tuple[Any, Any, Any]:
    stepper = OverlappedOptimizer(optimizer)

    def end() -> None:
        changes = stepper._take_changes()
        _bare_step(optimizer)
        for change in changes:
            change.write()

    return lambda: _bare_step(optimizer), stepper.step_bucket, end


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
    return OverlappedOptimizer(optimizer) if type(optimizer) in _OF_TORCH else _Tried(optimizer)


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

    def _take_changes(self) -> list[Changes]:
        return [change for part in self._parts.values() for change in part._take_changes()]

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
