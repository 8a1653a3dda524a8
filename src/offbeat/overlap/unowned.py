"""Trainable parameters of an overlapped module that no optimizer updates."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from offbeat._torch import version_of
from offbeat._warn import warn

__all__ = ["Unowned"]


class Unowned:
    """Warns once of parameters that get gradients and that no optimizer has updated in the first step.

    Several optimizers may share a module, overlapped or not, and cannot be asked for. But all have stepped by the time
    the next backward pass begins.

    Args:
        named: the parameters of the module, with their names.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._waiting = [_Version(name, weakref.ref(p), -1) for name, p in named]
        self._stepped = False

    def before_backward(self) -> None:
        """Called when a backward pass brings its first gradient: note versions in the first step, compare after it."""
        if not self._waiting:
            return
        if not self._stepped:
            self._waiting = [
                _Version(one.name, one.ref, version_of(p)) if one.version < 0 else one
                for one in self._waiting
                if (p := one.ref()) is not None
            ]
            return
        waiting, self._waiting = self._waiting, []
        every = [(one, one.ref()) for one in waiting]
        names = [one.name for one, p in every if p is not None and p.requires_grad and version_of(p) == one.version]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            warn(
                f"{', '.join(map(repr, names[:3]))}{more} of the overlapped module get gradients, but no optimizer has "
                "updated them in the first step; give them to an optimizer, or freeze them with requires_grad_(False). "
                "Ignore this if another optimizer steps less often"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """Called in ``optimizer.step()``: of those that the optimizer does not have, keep those with a gradient."""
        if self._stepped:
            return
        self._stepped = True
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        every = [(one, one.ref()) for one in self._waiting]
        self._waiting = [one for one, p in every if p is not None and id(p) not in own and p.grad is not None]


class _Version(NamedTuple):
    """A parameter and its version, which every update increments."""

    name: str
    ref: weakref.ref[Tensor]
    version: int
