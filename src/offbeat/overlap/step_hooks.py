"""Hooks on ``optimizer.step()`` that run before and after all hooks of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from offbeat import _torch

__all__ = ["StepHooks", "check_step_arguments"]

Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]


class StepHooks:
    """The step hooks of one overlapped optimizer.

    Args:
        first: runs before all other step pre-hooks.
        last: runs after all other step pre-hooks.
        after: a step post-hook.
    """

    def __init__(self, optimizer: Optimizer, first: Hook, last: Hook, after: Hook) -> None:
        self._order: Any = _torch.step_pre_hooks(optimizer)
        self._first = optimizer.register_step_pre_hook(first)
        self._last = optimizer.register_step_pre_hook(last)
        self._after = optimizer.register_step_post_hook(after)

    def keep_order(self) -> None:
        """Move the pre-hooks to the first and the last place; the user may have registered others since."""
        self._order.move_to_end(self._first.id, last=False)
        self._order.move_to_end(self._last.id)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in (self._first, self._last, self._after):
            hook.remove()


def check_step_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if ``step()`` of an overlapped optimizer was called with an argument that cannot take effect.

    Args:
        args: the positional arguments, with the optimizer as the first.
    """
    asked = [name for name, value in kwargs.items() if value is not None and value is not False]
    if asked and asked != ["closure"]:
        raise RuntimeError(
            f"step({', '.join(f'{name}=' for name in asked)}) cannot be overlapped: gradients are used before step() "
            "is called. Clip with overlap(..., clip_norm=), call zero_grad() after step(), and call step() without "
            "arguments"
        )
    if asked or any(argument is not None for argument in args[1:]):
        raise RuntimeError(
            "step(closure) cannot be overlapped: the backward pass in the closure would update parameters, and the "
            "closure may run again; call backward() yourself and step() without arguments"
        )
