"""Buckets of bounded size, through which tensors of any number and size are reduced.

A tensor may be split over several buckets, and a bucket may hold pieces of many tensors. All pieces of a bucket have
the same dtype and device, and are exchanged in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offbeat._torch import foreach_copy_
from offbeat.sync.items import FIRST, Item, local_part

__all__ = ["Bucket", "Slots", "check_bucket_mb", "cut", "flat_view"]

_ALIGN = 64

_TRAVELS = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
}


class Bucket:
    """Pieces of tensors that are reduced together.

    Attributes:
        how: :data:`offbeat.sync.items.MEAN` or :data:`~offbeat.sync.items.FIRST`.
        dtype: the dtype they are reduced in.
        device: the device they are reduced on.
        pieces: views of the tensors' own memory.
        size: the number of elements of all pieces.
    """

    def __init__(self, how: str, dtype: torch.dtype, device: torch.device) -> None:
        self.how, self.dtype, self.device = how, dtype, device
        self.pieces: list[Tensor] = []
        self.size = 0
        self._views: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor of :attr:`size` elements, one per piece; cached, because the memory is reused."""
        found = self._views.get(flat.data_ptr())
        if found is None or found[0].dtype != flat.dtype:
            parts = torch.split(flat, [piece.numel() for piece in self.pieces])
            shaped = [part if p.dim() == 1 else part.view(p.shape) for part, p in zip(parts, self.pieces, strict=True)]
            if len(self._views) > 2 * Slots.COUNT:
                self._views.clear()
            found = self._views[flat.data_ptr()] = (flat, shaped)
        return found[1]

    def pack(self, flat: Tensor) -> None:
        """Copy the pieces into a flat tensor."""
        one_kind = all(p.dim() == 1 for p in self.pieces) and self.pieces[0].dtype == flat.dtype
        if one_kind and self.pieces[0].device == flat.device:
            torch.cat(self.pieces, out=flat)  # much faster than one copy per piece
        else:
            foreach_copy_(self.views(flat), self.pieces)

    def unpack(self, flat: Tensor) -> None:
        """Copy the pieces back."""
        foreach_copy_(self.pieces, self.views(flat))


def cut(items: Sequence[Item], slot_bytes: int, dtype: torch.dtype | None = None) -> list[Bucket]:
    """Split the items into buckets of at most ``slot_bytes``, the same on every rank.

    Args:
        dtype: the dtype in which floating-point numbers are reduced, if it is wider than their own.
    """
    done: list[Bucket] = []
    filling: dict[tuple[str, torch.dtype, torch.dtype, torch.device], Bucket] = {}
    for item in items:
        part = local_part(item.tensor)
        if part.dtype not in _TRAVELS:
            part = _as_bytes(item, part)
        travels = part.dtype
        if dtype is not None and part.dtype.is_floating_point:
            travels = torch.promote_types(dtype, part.dtype)  # never narrower, which would round parameters
        limit = max(1, slot_bytes // travels.itemsize)
        key = (item.how, part.dtype, travels, part.device)
        for piece in _pieces(part, limit, filling[key].size if key in filling else 0):
            bucket = filling.get(key)
            if bucket is not None and bucket.size + piece.numel() > limit:
                done.append(filling.pop(key))
                bucket = None
            if bucket is None:
                bucket = filling[key] = Bucket(item.how, travels, part.device)
            bucket.pieces.append(piece)
            bucket.size += piece.numel()
    return done + list(filling.values())


def _as_bytes(item: Item, part: Tensor) -> Tensor:
    """A dtype that no backend can add, as bytes. Possible only if all ranks take one rank's value."""
    flat = flat_view(part)
    if item.how != FIRST or flat is None:
        raise TypeError(
            f"{item.name} is {part.dtype}, which cannot be reduced; use another dtype, or buffers='keep' for a buffer"
        )
    return flat.view(torch.uint8)


def _pieces(part: Tensor, limit: int, used: int) -> Iterator[Tensor]:
    """Views of a tensor's elements, none larger than ``limit``; the first fits into a bucket that holds ``used``."""
    if part.numel() == 0:
        return
    flat = flat_view(part)
    if flat is None:
        if part.numel() <= limit:
            yield part
        else:
            for row in part:
                yield from _pieces(row, limit, 0)
        return
    start = 0
    while start < flat.numel():
        length = min(flat.numel() - start, limit - used if limit > used else limit)
        yield flat[start : start + length]
        start, used = start + length, 0


def flat_view(part: Tensor) -> Tensor | None:
    """The tensor as a flat view in memory order, or None if it has gaps or overlaps."""
    if part.is_contiguous():
        return part.view(-1)
    strides = sorted((stride, size) for stride, size in zip(part.stride(), part.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return None
        expected *= size
    return part.as_strided((part.numel(),), (1,))


class Slots:
    """The memory for buckets: three slots, so that two can be in flight while the third is filled or emptied.

    A quarter of ``bucket_bytes`` is left to the backend: gloo allocates half as much as is in flight.
    """

    COUNT = 3

    def __init__(self, bucket_bytes: int) -> None:
        self.bytes = max(_ALIGN, bucket_bytes // (self.COUNT + 1) // _ALIGN * _ALIGN)
        self._memory: dict[torch.device, list[Tensor]] = {}

    def get(self, index: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor in one of the slots, which is as large as the largest tensor asked of it so far."""
        parts = self._memory.setdefault(device, [torch.empty(0, dtype=torch.uint8)] * self.COUNT)
        needed = size * dtype.itemsize
        if parts[index].numel() < needed:
            parts[index] = torch.empty(0, dtype=torch.uint8)
            parts[index] = torch.empty(needed, dtype=torch.uint8, device=device)
        return parts[index][:needed].view(dtype)

    def drop(self) -> None:
        """Release the memory: a collective that failed may still write to it."""
        self._memory = {}


def check_bucket_mb(bucket_mb: float) -> int:
    """``bucket_mb`` in bytes. Raises if it is not a positive number."""
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not 0 < bucket_mb < math.inf:
        raise ValueError(f"bucket_mb must be a positive number of megabytes, but got {bucket_mb!r}")
    return max((Slots.COUNT + 1) * _ALIGN, int(bucket_mb * 2**20))
