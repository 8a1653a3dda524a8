"""The mean of a bucket over ranks: as DDP computes it without a communication hook, and as torch's hooks do.

The two round differently when the number of ranks is not a power of two. DDP multiplies gradients that it copies into
a bucket by ``1 / ranks``; torch's communication hooks divide by ``ranks``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from offbeat import _torch

__all__ = ["DdpMean", "as_it_is", "mean_of_bucket"]

_WIDE = (torch.float32, torch.float64)


def as_it_is(bucket: Any) -> Future[Any]:
    """Return this rank's own gradients, not reduced."""
    done: Future[Any] = Future()
    done.set_result(bucket.buffer())
    return done


def mean_of_bucket(group: Any, bucket: Any) -> Future[Any]:
    """The mean over a process group, as torch's ``allreduce_hook`` computes it.

    Gradients are divided before they are summed, so that half precision does not overflow.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return as_it_is(bucket)
    buffer = bucket.buffer()
    buffer.div_(ranks)
    return _sum(buffer, group)


class DdpMean:
    """The mean over a DDP module's process group, bit for bit as DDP computes it without a communication hook."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._storage: dict[int, int] = {}  # by parameter: the storage of its gradient; 0 is the bucket
        self._stand_ins: dict[int, int] = {}  # by parameter: a storage that stands for the bucket
        if ddp.gradient_as_bucket_view and not _is_power_of_two(dist.get_world_size(ddp.process_group)):
            hook = _noter(weakref.ref(self))
            for p in ddp.parameters():
                _on_arrival(p, hook)

    def start(self, bucket: Any, *, defer: bool) -> tuple[Future[Any], int]:
        """Start to reduce a bucket.

        Args:
            defer: whether the caller can divide the result itself, where that gives the same bits.

        Returns:
            The future of the result, and the number that the caller must divide it by: 1, unless deferred.
        """
        ddp, buffer = self._module(), bucket.buffer()
        if _torch.divides_by_ranks_left(ddp):
            raise RuntimeError(
                "join(divide_by_initial_world_size=False) is not supported for a DistributedDataParallel module with "
                "an offbeat communication hook, which always divides gradients by the initial world size; leave "
                "divide_by_initial_world_size=True"
            )
        ranks = dist.get_world_size(ddp.process_group)
        # Dividing by a power of two commutes with adding. (Except in half precision, where small gradients would lose
        # digits.)
        if defer and _is_power_of_two(ranks) and buffer.dtype in _WIDE:
            return _sum(buffer, ddp.process_group), ranks
        self._divide(bucket, buffer, ranks)
        return _sum(buffer, ddp.process_group), 1

    def note(self, p: Tensor) -> None:
        """Called when a gradient has been accumulated in ``p.grad``, before DDP copies it into a bucket."""
        if type(p.grad) is Tensor and not p.grad.is_sparse:
            storage = p.grad.untyped_storage().data_ptr()
            self._storage[id(p)] = 0 if self._stand_ins.get(id(p)) == storage else storage

    def stand_in(self, p: Tensor) -> None:
        """Call when ``p.grad`` has taken the place of a gradient that DDP would have accumulated in its bucket."""
        if p.grad is not None and not p.grad.is_sparse:
            self._stand_ins[id(p)] = p.grad.untyped_storage().data_ptr()
            self.note(p)

    def _divide(self, bucket: Any, buffer: Tensor, ranks: int) -> None:
        if _is_power_of_two(ranks) or not self._module().gradient_as_bucket_view:
            buffer.mul_(1 / ranks)
            return
        # DDP divides a gradient that was accumulated in the bucket itself, or is there from an earlier pass, and
        # multiplies one that it copies there.
        storage = buffer.untyped_storage().data_ptr()
        for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._storage.get(id(p)) in (0, storage):
                view.div_(ranks)
            else:
                view.mul_(1 / ranks)
            self._stand_ins.pop(id(p), None)
            self._storage[id(p)] = 0  # where DDP leaves it

    def _module(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None
        return ddp


def _on_arrival(p: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register a hook on a parameter, also on one that is frozen now and may be unfrozen later."""
    is_free = p.requires_grad
    if is_free or p.is_floating_point() or p.is_complex():
        p.requires_grad_(True)
        try:
            p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        finally:
            p.requires_grad_(is_free)


def _noter(mean: weakref.ref[DdpMean]) -> Callable[[Tensor], None]:
    """Make a hook that parameters can hold without keeping ``mean`` alive."""

    def note(p: Tensor) -> None:
        alive = mean()
        if alive is not None:
            alive.note(p)

    return note


def _sum(buffer: Tensor, group: Any) -> Future[Any]:
    work = dist.all_reduce(buffer, group=group, async_op=True)
    reduced: Future[Any] = work.get_future().then(lambda done: done.value()[0])
    return reduced


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
