"""The hooks of a replica on its module and on the optimizer inside, and what is said when a program leaves.

None of them keeps the replica alive.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from offbeat.optim.checkpoint import check_state_dict
from offbeat.overlap.handle import overlap_of
from offbeat.overlap.module_hook import ModuleHook

__all__ = ["BeforeForward", "Guard", "Leaving", "refuse_wrapped_state"]


class Guarded(Protocol):
    """What the hooks ask of a replica."""

    _anchoring: Any
    _gradient_mean: Any
    _is_stepping: bool


def refuse_wrapped_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Before the inner optimizer loads: raise if this is the state of a wrapper."""
    check_state_dict(state_dict, type(optimizer).__name__)


class BeforeForward(ModuleHook):
    """A forward pre-hook: anchors are taken before the first local step."""

    def __init__(self, wrapper: Guarded) -> None:
        self._wrapper = weakref.ref(wrapper)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:  # noqa: D102
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper._anchoring.before_forward()


class Guard:
    """Runs before the inner optimizer's step and raises if LocalSGD did not call it: nothing would be averaged."""

    def __init__(self, wrapper: Guarded) -> None:
        self._wrapper = weakref.ref(wrapper)

    @property
    def reads_gradients(self) -> str | None:
        """Why ``overlap()`` must refuse the inner optimizer, if so; see :class:`offbeat.overlap.ReadsGradients`."""
        wrapper = self._wrapper()
        if wrapper is None or wrapper._gradient_mean is None:
            return None
        name = type(wrapper).__name__
        return (
            f"{name} averages this optimizer's gradients in step(), after overlap() would have used them; call "
            f"overlap() first, then {name}(..., warmup=0, subgroup=None), or wrap the module in "
            "DistributedDataParallel"
        )

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: D102
        wrapper = self._wrapper()
        if wrapper is None or wrapper._is_stepping:
            return
        handle = overlap_of(optimizer)
        if handle is None or not handle.is_stepping:
            name = type(wrapper).__name__
            raise RuntimeError(
                f"step() was called on the {type(optimizer).__name__} inside {name}, so that replicas would never "
                f"agree; call step() on {name} (and pass {name} to the scaler), or delete {name} first"
            )


class Leaving:
    """Warns when a replica goes away, or the program ends, while replicas differ and nothing of that is saved.

    Args:
        name: the class of the replica.
        is_real: whether its ranks are processes; threads of a simulation come and go.
    """

    def __init__(self, name: str, *, is_real: bool) -> None:
        self._name, self._is_real = name, is_real
        self._apart = False
        self._syncs, self._saved_at = 0, -1

    def step(self, *, apart: bool, syncs: int) -> None:
        """Note after each step whether replicas differ, and how many rounds there were."""
        self._apart, self._syncs = apart, syncs

    def save(self) -> None:
        """Note that a state dict was made."""
        self._saved_at = self._syncs

    def warn(self) -> None:
        """Say what is lost, if anything is."""
        if self._is_real and self._apart and self._saved_at < self._syncs:
            warnings.warn(
                f"{self._name} ends while replicas differ: what they have learned since the last round is in no other "
                "replica, a round in flight is dropped, and nothing was saved since. Call finish() (or sync()) on "
                "every rank at the end of training",
                stacklevel=2,
            )
