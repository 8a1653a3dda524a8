"""Lets a replica decide which ranks average the gradients of a DDP module, in place of DDP itself."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from typing import Any, Protocol

import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from offbeat import _torch
from offbeat.ddp import CommHook, as_it_is, mean_of_bucket
from offbeat.overlap.module_hook import ModuleHook
from offbeat.replicas.anchoring import Anchoring
from offbeat.wire.groups import members
from offbeat.wire.peers import Traffic

__all__ = ["Local", "attach"]


class Local(Protocol):
    """What decides."""

    _traffic: Traffic
    _anchoring: Anchoring

    @property
    def is_local(self) -> bool:
        """Whether warm-up is over."""

    def _gradient_group(self) -> Any:
        """The process group that averages the gradients of this step; None leaves them as they are."""


class _Attachment:
    """Reduces a DDP module's buckets, and switches DDP's broadcast of buffers off after warm-up.

    Args:
        comm_hook: reduces a bucket, called as ``comm_hook(group, bucket)``; None computes the mean.
    """

    def __init__(self, optimizer: Local, ddp: DistributedDataParallel, comm_hook: Any) -> None:
        self.name = type(optimizer).__name__
        self._optimizer = weakref.ref(optimizer)
        self._ddp = weakref.ref(ddp)
        self._group = ddp.process_group
        self._comm_hook = comm_hook or mean_of_bucket
        self._counts = comm_hook is None  # what another hook sends is not known
        self._broadcasts = ddp.broadcast_buffers
        self._has_reduced = False  # whether there was a backward pass
        self._rebuilding: threading.Thread | None = None
        self._hook = ddp.register_forward_pre_hook(_BeforeForward(self))

    @property
    def conflict(self) -> str:
        """Why nobody else may have the module's communication hook."""
        return (
            f"{self.name} averages the gradients of this DistributedDataParallel module; to use a communication hook, "
            f"give it the communication hook as {self.name}(..., comm_hook=)"
        )

    def reduce(self, bucket: Any) -> Future[Any]:
        self._has_reduced = True
        optimizer = self._optimizer()
        group = optimizer._gradient_group() if optimizer is not None else self._group
        if group is None:
            return as_it_is(bucket)
        if optimizer is not None and self._counts:
            ranks = len(members(group))
            optimizer._traffic.sent += 2 * (ranks - 1) * bucket.buffer().nbytes // ranks
        reduced: Future[Any] = self._comm_hook(group, bucket)
        return reduced

    @property
    def lacks_first_pass(self) -> bool:
        """Whether the others' first backward pass waits for one of this rank, which only a batch can make."""
        ddp = self._ddp()
        return ddp is not None and _torch.lacks_first_pass(ddp)

    def take_part_in_first_passes(self) -> threading.Thread | None:
        """On a rank without data: do with the others what DDP does once, at the beginning of its second forward pass.

        All ranks take over the first one's order of buckets there, which its first backward pass has shown. Rounds may
        come before that or after it, so that it is done in a thread, which is returned.
        """
        ddp = self._ddp()
        if ddp is None or not _torch.rebuilds_buckets(ddp):
            return None
        if self._rebuilding is None or not self._rebuilding.is_alive():
            self._rebuilding = threading.Thread(
                target=_torch.rebuild_buckets, args=(ddp,), name="offbeat-buckets", daemon=True
            )
            self._rebuilding.start()
        return self._rebuilding

    def before_forward(self, module: DistributedDataParallel) -> None:
        optimizer = self._optimizer()
        is_local = optimizer is not None and optimizer.is_local
        module.broadcast_buffers = self._broadcasts and not is_local
        if is_local and self._has_reduced and torch.is_grad_enabled() and _torch.rebuilds_buckets(module):
            assert optimizer is not None
            optimizer._anchoring.compare_anchors()  # first, as on a rank in finish() that has had no batch

    def remove(self, hook: CommHook) -> None:
        """Let DDP average gradients and broadcast buffers by itself again."""
        hook.release(self)
        self._hook.remove()
        ddp = self._ddp()
        if ddp is not None:
            ddp.broadcast_buffers = self._broadcasts


class _BeforeForward(ModuleHook):
    """A forward pre-hook."""

    def __init__(self, attachment: _Attachment) -> None:
        self._attachment = attachment

    def __call__(self, module: DistributedDataParallel, args: Any) -> None:
        self._attachment.before_forward(module)


def attach(optimizer: Local, ddp: DistributedDataParallel, comm_hook: Any) -> _Attachment:
    """Ask the optimizer, bucket by bucket, which ranks average gradients, as long as it lives.

    Args:
        comm_hook: reduces a bucket, called as ``comm_hook(group, bucket)``; None computes the mean.
    """
    name = type(optimizer).__name__
    hook = CommHook.find(ddp, instead=f"pass it as {name}(..., comm_hook=) if its state is a process group")
    if hook is not None and isinstance(hook.reducer, _Attachment):
        gc.collect()  # one that was deleted may still be there: a scheduler makes a cycle of it
    if hook is not None and isinstance(hook.reducer, _Attachment):
        raise ValueError(
            f"another {hook.reducer.name} averages the gradients of this DistributedDataParallel module, and it can "
            "have only one; wrap the parts that different optimizers train in modules of their own, or delete the "
            "other one first"
        )
    if hook is not None and hook.reducer is not None:
        raise ValueError(
            f"{hook.reducer.conflict}; do not pass it to overlap(), pass it as {name}(..., comm_hook=) if its state "
            "is a process group"
        )
    hook = CommHook.register(ddp)
    attachment = _Attachment(optimizer, ddp, comm_hook)
    hook.reduce_with(attachment)
    weakref.finalize(optimizer, attachment.remove, hook).atexit = False
    if ddp.find_unused_parameters and len(members(ddp.process_group)) > 1:
        warnings.warn(
            "find_unused_parameters=True makes DistributedDataParallel ask all ranks at every step which parameters "
            "they used, also after warm-up: every step waits for the slow link, and a parameter that only other ranks "
            "used has a gradient of zero here, so that weight decay and momentum move it. If every rank uses all "
            "parameters, pass find_unused_parameters=False (ddp_find_unused_parameters=False in Transformers)",
            stacklevel=4,
        )
    return attachment
