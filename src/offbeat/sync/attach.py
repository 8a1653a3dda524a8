"""Hang LocalSGD's gradient averaging into a DDP module, in place of DDP's own."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from offbeat.sync.gradients import bucket_hook, mean_of_bucket

__all__ = ["attach"]

#: By DDP module, what has been hung into it. DDP cannot forget a hook, so the next LocalSGD takes over the last one's.
_attached: Any = WeakIdKeyDictionary()


class _Attachment:
    """Asks the LocalSGD there is, bucket by bucket, over whom to average; without one DDP does as it always did."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._group = ddp.process_group
        self._broadcasts = ddp.broadcast_buffers
        self.owner: Any = lambda: None
        self.comm_hook: Any = None
        self.hook = bucket_hook(self.group_now, self.reduce)
        self.hook.keeps_its_place = True
        self.is_registered = False
        ddp.register_forward_pre_hook(self.before_forward)

    def group_now(self) -> Any:
        owner = self.owner()
        return owner._gradient_group() if owner is not None else self._group

    def reduce(self, group: Any, bucket: Any) -> Any:
        return (self.comm_hook or mean_of_bucket)(group, bucket)

    def before_forward(self, module: Any, args: Any) -> None:
        owner = self.owner()
        module.broadcast_buffers = self._broadcasts and not (owner is not None and owner.is_local)


def attach(optimizer: Any, ddp: DistributedDataParallel, comm_hook: Any, handle: Any) -> None:
    """Have the optimizer say, bucket by bucket, over whom gradients are averaged, and when buffers are broadcast.

    Args:
        optimizer: has ``_gradient_group()`` and ``is_local``.
        comm_hook: reduces a bucket, called as ``comm_hook(group, bucket)``; None is a mean.
        handle: the overlap the inner optimizer is in, or None.
    """
    found = _attached.get(ddp)
    if found is not None and found.owner() is not None:
        raise ValueError(
            "another LocalSGD averages the gradients of this DistributedDataParallel module, and it can have only one; "
            "wrap the parts that different optimizers train in modules of their own, or delete the other one first"
        )
    if handle is None and ddp._comm_hooks and (found is None or not found.is_registered):
        name = getattr(ddp._comm_hooks[0][0], "__name__", "a hook")
        raise ValueError(
            f"this DistributedDataParallel module has a communication hook already ({name}) and can have only one; do "
            "not register it, give it as LocalSGD(..., comm_hook=) if its state is a process group (and call "
            "offbeat.overlap() before LocalSGD())"
        )
    if found is None:
        found = _Attachment(ddp)
    if handle is not None:
        handle.reduce_with(found.hook)
    elif not found.is_registered:
        ddp.register_comm_hook(None, found.hook)
        found.is_registered = True
    _attached[ddp] = found
    found.owner, found.comm_hook = weakref.ref(optimizer), comm_hook
    if ddp.find_unused_parameters and dist.get_world_size(ddp.process_group) > 1:
        warnings.warn(
            "find_unused_parameters=True makes DistributedDataParallel ask all ranks at every step which parameters "
            "they used, also after warm-up; the numbers are right, but every step waits for the slow link",
            stacklevel=4,
        )
