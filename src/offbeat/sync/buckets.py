"""Bounded, reused memory through which tensors of any number and size travel.

A tensor may be cut over several buckets, and a bucket may hold pieces of many tensors; all pieces of a bucket have one
dtype, one device and one way to be exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.sync.items import Item, local_part

__all__ = ["Bucket", "Slots", "check_bucket_mb", "cut"]

_ALIGN = 64


@dataclass
class Bucket:
    """Pieces that travel together.

    Attributes:
        how: :data:`offbeat.sync.items.MEAN` or :data:`~offbeat.sync.items.FIRST`.
        dtype: in which they travel.
        pieces: views of the tensors' own memory.
    """

    how: str
    dtype: torch.dtype
    device: torch.device
    pieces: list[Tensor] = field(default_factory=list)
    size: int = 0

    def views(self, flat: Tensor) -> list[Tensor]:
        """The pieces' places in a flat tensor of :attr:`size` elements."""
        parts = torch.split(flat, [piece.numel() for piece in self.pieces])
        return [part if p.dim() == 1 else part.view(p.shape) for part, p in zip(parts, self.pieces, strict=True)]


def cut(items: Sequence[Item], slot_bytes: int, dtype: torch.dtype | None = None) -> list[Bucket]:
    """Buckets of at most ``slot_bytes`` for all items, the same on every rank.

    Args:
        dtype: for floating-point numbers to travel in; None is their own.
    """
    done: list[Bucket] = []
    filling: dict[tuple[str, torch.dtype, torch.dtype, torch.device], Bucket] = {}
    for item in items:
        part = local_part(item.tensor)
        travels = dtype if dtype is not None and part.dtype.is_floating_point else part.dtype
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


def _pieces(part: Tensor, limit: int, used: int) -> Iterator[Tensor]:
    """Views of a tensor's elements, none larger than ``limit``; the first fits where ``used`` are taken already."""
    if part.numel() == 0:
        return
    flat = _flat(part)
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


def _flat(part: Tensor) -> Tensor | None:
    """The tensor's memory in the order it lies in, or None if there are gaps or overlaps."""
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
    """The memory buckets travel in: two halves, so that one is filled or emptied while the other is on its way."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bytes = max(_ALIGN, bucket_bytes // 2 // _ALIGN * _ALIGN)
        self._memory: dict[torch.device, list[Tensor]] = {}

    def get(self, index: int, bucket: Bucket) -> Tensor:
        """A flat tensor for this bucket in one of the halves."""
        halves = self._memory.setdefault(bucket.device, [torch.empty(0), torch.empty(0)])
        needed = bucket.size * bucket.dtype.itemsize
        if halves[index].numel() < needed:
            halves[index] = torch.empty(0)
            halves[index] = torch.empty(needed, dtype=torch.uint8, device=bucket.device)
        return halves[index][:needed].view(bucket.dtype)

    def drop(self) -> None:
        """Forget the memory: a collective that failed may still write there."""
        self._memory = {}


def check_bucket_mb(bucket_mb: float) -> int:
    """Bytes of a bucket, or an error."""
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be a positive number of megabytes, but got {bucket_mb!r}")
    return max(2 * _ALIGN, int(bucket_mb * 2**20))
