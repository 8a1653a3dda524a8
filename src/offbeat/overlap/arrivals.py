"""Hooks on parameters that report when a gradient has been accumulated in ``.grad``, and keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Arrivals"]


class Arrivals:
    """Calls ``arrived(p)`` for the parameters it covers, as long as the object of this method lives.

    Args:
        arrived: a bound method.
        module: only parameters of this module are covered.
    """

    def __init__(self, arrived: Callable[[Tensor], None], module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self._hooks: dict[int, Any] = {}
        method = weakref.WeakMethod(arrived)

        def call(p: Tensor) -> None:
            found = method()
            if found is not None:
                found(p)

        self._call = call

    def inside(self) -> list[Tensor]:
        """All parameters of the module."""
        module = self._module()
        return list(module.parameters()) if module is not None else []

    def cover(self, params: Iterable[Tensor]) -> None:
        """Cover those of ``params`` that are in the module and require a gradient, and no others."""
        inside = {id(p) for p in self.inside()}
        wanted: dict[int, Any] = {id(p): p for p in params if p.requires_grad and id(p) in inside}
        for key in list(self._hooks):
            if key not in wanted:
                self._hooks.pop(key).remove()
        for key, p in wanted.items():
            if key not in self._hooks:
                self._hooks[key] = p.register_post_accumulate_grad_hook(self._call)

    def __contains__(self, p: Tensor) -> bool:
        return id(p) in self._hooks

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
