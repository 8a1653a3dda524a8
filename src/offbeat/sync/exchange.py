r"""One exchange: every item becomes the same on all ranks of a group, or nothing changes.

Every item becomes the weighted mean :math:`\bar x = \sum_i w_i x_i / \sum_i w_i` (or the first rank's value) by
all-reduces over two halves of a bucket: while one is on its way the other is filled or emptied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.sync.agreement import Shares
from offbeat.sync.buckets import Bucket, Slots, cut
from offbeat.sync.items import FIRST, Item
from offbeat.sync.undo import Undo

__all__ = ["Exchange"]


class Exchange:
    """Reduces items in place, in bounded memory.

    Args:
        bucket_bytes: how much memory it may take.
        reduce_dtype: for floating-point numbers to travel in; None is their own.
        undo: where values wait until a sync has succeeded; see :class:`offbeat.sync.undo.Undo`.

    Attributes:
        bytes_sent: what this rank has sent, counted as a ring all-reduce sends it: twice a tensor's bytes, less the
            share this rank reduces itself.
    """

    def __init__(self, bucket_bytes: int, reduce_dtype: torch.dtype | None = None, undo: str = "auto") -> None:
        self.bytes_sent = 0
        self.reduce_dtype = reduce_dtype
        self._slots = Slots(bucket_bytes)
        self._undo = Undo(undo)
        self._key: Any = None
        self._buckets: list[Bucket] = []

    @torch.no_grad()
    def average(self, items: Sequence[Item], group: Any, shares: Shares) -> None:
        """Every item becomes the group's. If a collective fails, items are as they were, and its error is raised."""
        buckets = self._cut(items)

        def commit(bucket: Bucket, flat: Tensor, last: bool) -> None:
            if not last:
                self._undo.keep(bucket.pieces)
            torch._foreach_copy_(bucket.pieces, bucket.views(flat))

        try:
            self.reduce(buckets, group, shares, commit)
        except BaseException:
            self._undo.restore()
            raise
        finally:
            self._undo.clear()

    @torch.no_grad()
    def reduce(
        self, buckets: Sequence[Bucket], group: Any, shares: Shares, commit: Callable[[Bucket, Tensor, bool], None]
    ) -> None:
        """Reduce buckets one after the other; ``commit(bucket, result, last)`` is called with each in turn.

        The pieces are only read.
        """
        ranks = dist.get_world_size(group)
        on_the_way: deque[tuple[Bucket, Tensor, Any]] = deque()
        left = len(buckets)

        def land() -> None:
            nonlocal left
            bucket, flat, work = on_the_way.popleft()
            work.wait()
            left -= 1
            commit(bucket, flat, left == 0)

        try:
            for index, bucket in enumerate(buckets):
                if len(on_the_way) == 2:
                    land()
                flat = self._slots.get(index % 2, bucket)
                _fill(bucket, flat, shares)
                on_the_way.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
                self.bytes_sent += 2 * (ranks - 1) * flat.numel() * flat.itemsize // ranks
            while on_the_way:
                land()
        except BaseException:
            self._slots.drop()
            raise

    def cut(self, items: Sequence[Item]) -> list[Bucket]:
        """Buckets for these items."""
        return cut(items, self._slots.bytes, self.reduce_dtype)

    def _cut(self, items: Sequence[Item]) -> list[Bucket]:
        """As :meth:`cut`, remembered for as long as the items are in the same places."""
        key = [
            (item.how, part.data_ptr(), part.dtype, part.device, part.shape, part.stride())
            for item in items
            for part in [getattr(item.tensor, "_local_tensor", item.tensor)]
        ]
        if key != self._key:
            self._buckets, self._key = self.cut(items), key
        return self._buckets


def _fill(bucket: Bucket, flat: Tensor, shares: Shares) -> None:
    """Write this rank's share of the sum."""
    if bucket.how == FIRST:
        if not shares.is_first:
            flat.zero_()
            return
        torch._foreach_copy_(bucket.views(flat), bucket.pieces)
    elif shares.factor == 0:
        flat.zero_()  # not multiplied: a rank that does not count may hold numbers that are not finite
    else:
        torch._foreach_copy_(bucket.views(flat), bucket.pieces)
        if shares.divisor is not None:
            flat.div_(shares.divisor)
        else:
            flat.mul_(shares.factor)
