"""The hooks of a replica: on its module and on the optimizer inside, which do not keep it alive, and for Join."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer

from offbeat.optim.checkpoint import check_state_dict
from offbeat.overlap.handle import overlap_of
from offbeat.overlap.module_hook import ModuleHook

if TYPE_CHECKING:
    from offbeat.sync.replica import Replica

__all__ = ["BeforeForward", "Guard", "ReplicaJoinHook", "refuse_wrapped_state"]


def refuse_wrapped_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Before the inner optimizer loads: raise if this is the state of a wrapper."""
    check_state_dict(state_dict, type(optimizer).__name__)


class BeforeForward(ModuleHook):
    """A forward pre-hook: anchors are taken before the first local step."""

    def __init__(self, wrapper: Replica) -> None:
        self._wrapper = weakref.ref(wrapper)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:  # noqa: D102
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper._start.before_forward()


class Guard:
    """Runs before the inner optimizer's step and raises if LocalSGD did not call it: nothing would be averaged."""

    def __init__(self, wrapper: Replica) -> None:
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


class ReplicaJoinHook(JoinHook):
    """On a rank that has run out of data, takes part in the collectives of the others with a weight of zero."""

    def __init__(self, optimizer: Replica) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Shadow one step of the other ranks."""
        self._optimizer._shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Average once more when all ranks are done."""
        self._optimizer._last_average()
