"""What replicas exchange: tensors with a name and a way to become one, the same list on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["FIRST", "MEAN", "Digest", "Item", "describe", "local_part"]

#: Every rank gets the weighted mean.
MEAN = "mean"
#: Every rank gets what the group's first rank that takes part has: for numbers that cannot be averaged.
FIRST = "first"


class Item(NamedTuple):
    """One tensor to exchange.

    Attributes:
        name: for errors and for checkpoints; the same on every rank.
        tensor: changed in place; a DTensor is exchanged shard by shard.
        how: :data:`MEAN` or :data:`FIRST`.
        late: what a delayed exchange does: add the difference (True), or put the exchanged value in its place. A
            running variance must not go below zero, which a difference could bring about.
    """

    name: str
    tensor: Tensor
    how: str = MEAN
    late: bool = True


def local_part(tensor: Tensor) -> Tensor:
    """This rank's own memory of a tensor, as numbers a collective can add."""
    part = tensor.detach()
    part = getattr(part, "_local_tensor", part)
    if part.is_complex():
        part = torch.view_as_real(part)
    return part.view(torch.uint8) if part.dtype == torch.bool else part


def describe(items: Sequence[Item]) -> list[tuple[str, str]]:
    """For each item its name and everything about it that ranks must have in common."""
    return [(item.name, _form(item)) for item in items]


def _form(item: Item) -> str:
    tensor = item.tensor
    words = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
    spec = getattr(tensor, "_spec", None)
    if spec is not None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(tensor.shape, spec.mesh, spec.placements)
        words += f", shard {tuple(shape)} at {tuple(offset)}"
    strides = local_part(tensor).stride()
    if strides != _row_major(local_part(tensor)):
        words += f" with strides {tuple(strides)}"
    return words if item.how == MEAN else f"{words} ({item.how})"


def _row_major(tensor: Tensor) -> tuple[int, ...]:
    strides, size = [], 1
    for length in reversed(tensor.shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))


class Digest:
    """128 bits that differ if the items of two ranks differ in anything they must have in common; remembered."""

    def __init__(self) -> None:
        self._key: Any = None
        self._bits = (0, 0)

    def of(self, items: Sequence[Item]) -> tuple[int, int]:
        """The bits for these items."""
        key = [(item.name, item.how, item.tensor.shape, item.tensor.dtype, item.tensor.stride()) for item in items]
        if key != self._key:
            self._key, self._bits = key, _digest(items)
        return self._bits


def _digest(items: Sequence[Item]) -> tuple[int, int]:
    hashed: Any = hashlib.sha256()
    for name, form in describe(items):
        hashed.update(f"{name}\0{form}\0".encode())
    raw = hashed.digest()
    return int.from_bytes(raw[:8], "little", signed=True), int.from_bytes(raw[8:16], "little", signed=True)
