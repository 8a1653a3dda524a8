"""The mean of a bucket over ranks: as DDP computes it without a communication hook, and as torch's hooks do.

The two round differently when the number of ranks is not a power of two. DDP multiplies gradients that it copies into
a bucket by ``1 / ranks``; torch's communication hooks divide by ``ranks``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
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
    """This rank's own gradients, reduced with nobody."""
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
        #: By parameter whose gradients are noted: the storage of the last one; 0 is the bucket, 1 is not known.
        self._storage: dict[int, int] = {}
        self._stand_ins: dict[int, int] = {}  # by parameter: a storage that stands for the bucket

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

    def will_note(self, params: Iterable[Tensor], *, instead_of: Iterable[Tensor]) -> None:
        """Call when the parameters whose gradients are noted change.

        Args:
            params: those whose gradients are noted from now on.
            instead_of: those whose gradients have been noted until now.
        """
        now = {id(p) for p in params}
        for key in {id(p) for p in instead_of} - now:
            self._storage.pop(key, None)
        for key in now:
            self._storage.setdefault(key, 1)

    def note_storage(self, p: Tensor, *, in_bucket: bool = False) -> None:
        """Call when a gradient has been accumulated in ``p.grad`` and DDP has not copied it yet.

        Args:
            in_bucket: whether it stands for one that has been accumulated in DDP's bucket, wherever it is.
        """
        ddp = self._ddp()
        if ddp is not None and ddp.gradient_as_bucket_view and p.grad is not None and not p.grad.is_sparse:
            storage = p.grad.untyped_storage().data_ptr()
            if in_bucket:
                self._stand_ins[id(p)] = storage
            self._storage[id(p)] = 0 if self._stand_ins.get(id(p)) == storage else storage

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
            if id(p) in self._storage:
                self._storage[id(p)] = 0  # where DDP leaves it

    def _module(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None
        return ddp


def _sum(buffer: Tensor, group: Any) -> Future[Any]:
    work = dist.all_reduce(buffer, group=group, async_op=True)
    reduced: Future[Any] = work.get_future().then(lambda done: done.value()[0])
    return reduced


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
