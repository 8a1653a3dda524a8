"""Hooks on parameters that tell when a gradient is in ``.grad``, and that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Arrivals", "refuse_graph"]


class Arrivals:
    """Calls ``listener.arrived(p)`` for the parameters of ``module`` it covers, as long as the listener lives."""

    def __init__(self, listener: Any, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self._hooks: dict[int, Any] = {}
        ref = weakref.ref(listener)

        def arrived(p: Tensor) -> None:
            found = ref()
            if found is not None:
                found.arrived(p)

        self._arrived = arrived

    def cover(self, params: Iterable[Tensor]) -> None:
        """Have a hook on each of these that is in the module and trained, and on no other."""
        module = self._module()
        inside = {id(p) for p in module.parameters()} if module is not None else set()
        wanted: dict[int, Any] = {id(p): p for p in params if p.requires_grad and id(p) in inside}
        for key in list(self._hooks):
            if key not in wanted:
                self._hooks.pop(key).remove()
        for key, p in wanted.items():
            if key not in self._hooks:
                self._hooks[key] = p.register_post_accumulate_grad_hook(self._arrived)

    def __contains__(self, p: Tensor) -> bool:
        return id(p) in self._hooks

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}


def refuse_graph(g: Tensor | None) -> None:
    """Raise if a gradient that arrived is part of a graph."""
    if g is not None and g.requires_grad:
        raise RuntimeError(
            "backward(create_graph=True) cannot be overlapped: the graph of the gradients holds parameters that would "
            "be updated under it; call handle.remove() and step after backward"
        )
