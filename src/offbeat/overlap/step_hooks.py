"""Hooks on ``optimizer.step()`` that run before and after all hooks of the user, and the closure given to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat import _torch

__all__ = ["Once", "StepHooks", "check_step_arguments", "closure_of", "with_closure"]

Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_REGISTER = "register_step_pre_hook"


class StepHooks:
    """The step hooks of one overlapped optimizer.

    Args:
        first: runs before all other step pre-hooks.
        last: runs after all other step pre-hooks.
        after: a step post-hook.
    """

    def __init__(self, optimizer: Optimizer, first: Hook, last: Hook, after: Hook) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._order: Any = _torch.step_pre_hooks(optimizer)
        self._first = optimizer.register_step_pre_hook(first)
        self._last = optimizer.register_step_pre_hook(last)
        self._after = optimizer.register_step_post_hook(after)
        self.keep_order()
        # Later is too late: a closure runs backward while torch goes through the hooks, whose order must not change.
        setattr(optimizer, _REGISTER, _Register(self))

    def keep_order(self) -> None:
        """Move the pre-hooks to the first and the last place, if others have been registered since."""
        if next(iter(self._order)) != self._first.id or next(reversed(self._order)) != self._last.id:
            self._order.move_to_end(self._first.id, last=False)
            self._order.move_to_end(self._last.id)

    def register(self, hook: Hook) -> Any:
        """Register a step pre-hook of the user's."""
        optimizer = self._optimizer()
        assert optimizer is not None
        handle = type(optimizer).register_step_pre_hook(optimizer, hook)
        self.keep_order()
        return handle

    def remove(self) -> None:
        """Remove the hooks."""
        optimizer = self._optimizer()
        if optimizer is not None:
            vars(optimizer).pop(_REGISTER, None)
        for hook in (self._first, self._last, self._after):
            hook.remove()


class _Register:
    """In place of an overlapped optimizer's ``register_step_pre_hook``. Copies of the optimizer do not get it."""

    def __init__(self, hooks: StepHooks) -> None:
        self._hooks = hooks

    def __call__(self, hook: Hook) -> Any:
        """As torch's."""
        return self._hooks.register(hook)


class Once:
    """What a closure has returned, for the optimizer's own step, which calls it as it would call the closure.

    Args:
        closure: called once, now, with gradients enabled.
    """

    def __init__(self, closure: Callable[[], Any]) -> None:
        with torch.enable_grad():
            self._loss = closure()
        self._called = False

    def __call__(self) -> Any:
        """The closure's result. Raises if it is asked for again: to evaluate the closure again is not possible."""
        if self._called:
            raise RuntimeError(
                "the optimizer called its closure more than once, but its backward pass has updated parameters, which "
                "overlap() cannot undo; call handle.remove() and step after backward"
            )
        self._called = True
        return self._loss


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure that ``step()`` was given, or None.

    Args:
        args: the positional arguments, with the optimizer as the first.
    """
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Any) -> Arguments:
    """The arguments of ``step()`` with another closure in place of the one there is."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def check_step_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if ``step()`` of an overlapped optimizer was called with an argument that cannot take effect.

    Args:
        args: the positional arguments, with the optimizer as the first.
    """
    asked = [f"{name}=" for name, value in kwargs.items() if value is not None and value is not False]
    asked = [name for name in asked if name != "closure="] + [repr(one) for one in args[2:] if one is not None]
    closure = closure_of(args, kwargs)
    if closure is not None and not callable(closure):
        asked.append(repr(closure))
    if asked:
        raise RuntimeError(
            f"step({', '.join(asked)}) cannot be overlapped: gradients are used before step() is called. Clip with "
            "overlap(..., clip_norm=), call zero_grad() after step(), and call step() with a closure or nothing"
        )
