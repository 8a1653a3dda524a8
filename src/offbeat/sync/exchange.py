r"""Replaces items by their mean over a process group, or changes nothing if a collective fails.

Every item becomes the weighted mean :math:`\bar x = \sum_i w_i x_i / \sum_i w_i` (or the first rank's value). The
all-reduces use buckets in bounded memory: while one is in flight, another is filled or emptied.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.engine.tensors import local
from offbeat.sync.agreement import Shares
from offbeat.sync.buckets import Bucket, Slots, cut
from offbeat.sync.items import FIRST, Item
from offbeat.sync.undo import Undo
from offbeat.wire.ordered import ordered_sum
from offbeat.wire.peers import Peers

__all__ = ["Exchange"]


class Exchange:
    """Reduces items in place, in bounded memory.

    Args:
        bucket_bytes: the memory for buckets.
        reduce_dtype: the dtype in which floating-point numbers are reduced, if it is wider than their own.
        undo: where old values are kept until an exchange has succeeded; see :class:`offbeat.sync.undo.Undo`.
        remember: cache the buckets, which keeps the items alive; not for gradients, which must be freed.
        ordered: sum in rank order, so that the result does not depend on the backend.

    Attributes:
        bytes_sent: the bytes this rank has sent, counted as for a ring all-reduce of :math:`n` ranks:
            :math:`2 (n-1)/n` times the size of the tensor.
    """

    def __init__(
        self,
        bucket_bytes: int,
        reduce_dtype: torch.dtype | None = None,
        undo: str = "auto",
        *,
        remember: bool = True,
        ordered: bool = False,
    ) -> None:
        self.bytes_sent = 0
        self.bucket_bytes, self.ordered = bucket_bytes, ordered
        self._remember = remember
        self.reduce_dtype = reduce_dtype
        self._slots = Slots(bucket_bytes)
        self._undo = Undo(undo)
        self._remembered: tuple[list[Tensor], list[Any]] = ([], [])
        self._buckets: list[Bucket] = []

    @torch.no_grad()
    def average(
        self, items: Sequence[Item], peers: Peers, shares: Shares, vote: Callable[[], None] = lambda: None
    ) -> None:
        """Replace items by their mean. If a collective fails, items keep their values and its error is raised.

        Args:
            vote: called when every result has arrived and can still be taken back; raises if it must be.
        """
        buckets = self._cut(items)
        changed: list[Bucket] = []
        # If all results fit into the slots, they stay there until the last one has arrived, and nothing must be undone.
        fits = len(buckets) <= Slots.COUNT

        def commit(bucket: Bucket, flat: Tensor, last: bool) -> None:
            if last and not fits:
                vote()  # the last result is still in its slot, and the others can be restored
            elif self._undo.is_on and not fits:
                was = self._slots.get(2, bucket.size, bucket.pieces[0].dtype, bucket.device)
                bucket.pack(was)
                self._undo.keep(was)
                changed.append(bucket)
            bucket.unpack(flat)

        try:
            self.reduce(buckets, peers, shares, commit, before_any=vote if fits else None)
        except BaseException:
            for index in reversed(range(min(len(changed), len(self._undo)))):
                bucket = changed[index]
                was = self._slots.get(2, bucket.size, bucket.pieces[0].dtype, bucket.device)
                self._undo.recall(index, was)
                bucket.unpack(was)
            raise
        finally:
            self._undo.clear()

    @torch.no_grad()
    def reduce(
        self,
        buckets: Sequence[Bucket],
        peers: Peers,
        shares: Shares,
        commit: Callable[[Bucket, Tensor, bool], None],
        *,
        before_any: Callable[[], None] | None = None,
        ordered: bool = False,
    ) -> None:
        """Reduce the buckets in order, and call ``commit(bucket, result, last)`` for each of them.

        The pieces are not changed.

        Args:
            before_any: called when all buckets are reduced, before the first is committed; there must be no more
                buckets than slots.
            ordered: sum these in rank order, also if this object does not otherwise.
        """
        assert not shares.nobody, "a mean needs at least one rank with a weight"
        ranks = peers.size
        on_the_way: deque[tuple[Bucket, Tensor, Any]] = deque()
        slots = 2 if before_any is None else Slots.COUNT
        left = len(buckets)

        def land() -> None:
            nonlocal left
            bucket, flat, work = on_the_way.popleft()
            work.wait()
            left -= 1
            commit(bucket, flat, left == 0)

        try:
            for index, bucket in enumerate(buckets):
                if len(on_the_way) == slots:
                    land()
                flat = self._slots.get(index % slots, bucket.size, bucket.dtype, bucket.device)
                _fill(bucket, flat, shares)
                work = ordered_sum(peers, flat) if self.ordered or ordered else peers.all_reduce(flat)
                on_the_way.append((bucket, flat, work))
                self.bytes_sent += 2 * (ranks - 1) * flat.numel() * flat.itemsize // ranks
            if before_any is not None:
                for *_, work in on_the_way:
                    work.wait()
                before_any()
            while on_the_way:
                land()
        except BaseException:
            self._slots.drop()
            on_the_way.clear()  # what is under way would keep the connection open
            raise

    def cut_for_background(self, item: Item, device: torch.device) -> list[Bucket]:
        """Split one large flat item into buckets that are reduced on this device."""
        buckets = cut([item], self._slots.bytes, self.reduce_dtype)
        for bucket in buckets:
            bucket.device = device
        return buckets

    def _cut(self, items: Sequence[Item]) -> list[Bucket]:
        """Buckets for these items; cached as long as they are the same tensors in the same memory."""
        if not self._remember:
            return cut(items, self._slots.bytes, self.reduce_dtype)
        tensors = [item.tensor for item in items]
        places = [(part.data_ptr(), part.shape, item.how) for item in items for part in [local(item.tensor)]]
        known, where = self._remembered
        if len(known) != len(tensors) or not all(map(operator.is_, known, tensors)) or where != places:
            self._buckets = cut(items, self._slots.bytes, self.reduce_dtype)
            self._remembered = (tensors, places)
        return self._buckets


def _fill(bucket: Bucket, flat: Tensor, shares: Shares) -> None:
    """Write this rank's part of the sum into the flat tensor."""
    if bucket.how == FIRST:
        if not shares.is_first:
            flat.zero_()
            return
        bucket.pack(flat)
    elif shares.factor == 0:
        flat.zero_()  # not multiplied by 0: a rank without a weight may hold inf or NaN
    else:
        source = flat
        piece = bucket.pieces[0]
        if len(bucket.pieces) == 1 and (piece.device, piece.dtype, piece.dim()) == (flat.device, flat.dtype, 1):
            source = piece  # copied and scaled in one pass over memory; of another dtype it would be scaled in its own
        else:
            bucket.pack(flat)
        if shares.divisor is not None:
            torch.div(source, shares.divisor, out=flat)
        else:
            torch.mul(source, shares.factor, out=flat)
