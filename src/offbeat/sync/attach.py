"""Hang LocalSGD's gradient averaging into a DDP module, in place of DDP's own."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from offbeat.sync.gradients import bucket_hook

__all__ = ["attach"]

#: By DDP module, the optimizer whose hook it has; DDP cannot have two, nor forget one.
_hooked: Any = WeakIdKeyDictionary()


def attach(optimizer: Any, ddp: DistributedDataParallel, comm_hook: Any, handle: Any) -> None:
    """Have the optimizer say, bucket by bucket, over whom gradients are averaged, and when buffers are broadcast.

    Args:
        optimizer: has ``gradient_group()`` and ``is_local``.
        comm_hook: reduces a bucket, called as ``comm_hook(group, bucket)``; None is a mean.
        handle: the overlap the inner optimizer is in, or None.
    """
    me = weakref.ref(optimizer)
    other = _hooked.get(ddp)
    if other is not None and other() is not None:
        raise ValueError(
            "another LocalSGD averages the gradients of this DistributedDataParallel module, and it can have only one; "
            "wrap the parts that different optimizers train in modules of their own"
        )
    own = ddp.process_group

    def group_now() -> Any:
        found = me()
        return found.gradient_group() if found is not None else own

    hook = bucket_hook(group_now, comm_hook)
    if handle is not None:
        handle.reduce_with(hook)
    elif ddp._comm_hooks:
        name = getattr(ddp._comm_hooks[0][0], "__name__", "a hook")
        raise ValueError(
            f"this DistributedDataParallel module has a communication hook already ({name}) and can have only one; do "
            "not register it, give it as LocalSGD(..., comm_hook=) if its state is a process group (and call "
            "offbeat.overlap() before LocalSGD())"
        )
    else:
        ddp.register_comm_hook(None, hook)
    _hooked[ddp] = me
    if ddp.find_unused_parameters and dist.get_world_size(own) > 1:
        warnings.warn(
            "find_unused_parameters=True makes DistributedDataParallel ask all ranks at every step which parameters "
            "they used, also after warm-up; the numbers are right, but every step waits for the slow link",
            stacklevel=4,
        )
    broadcasts = ddp.broadcast_buffers

    def before_forward(module: Any, args: Any) -> None:
        found = me()
        if found is not None:
            module.broadcast_buffers = broadcasts and not found.is_local

    ddp.register_forward_pre_hook(before_forward)
