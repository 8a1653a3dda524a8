"""The tensors that replicas exchange: the same list of names and shapes on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat._torch import shard_place
from offbeat.engine.tensors import is_dtensor, local

__all__ = ["FIRST", "MEAN", "Digest", "Item", "describe", "local_part"]

#: Every rank gets the weighted mean.
MEAN = "mean"
#: Every rank gets the value of the first rank with a weight: for tensors that cannot be averaged.
FIRST = "first"


class Item(NamedTuple):
    """One tensor to exchange.

    Attributes:
        name: used in errors and checkpoints; the same on every rank.
        tensor: changed in place; of a DTensor, the local shard.
        how: :data:`MEAN` or :data:`FIRST`.
        late: whether a delayed exchange adds the difference (True) or replaces the value (False). Adding a difference
            could make a running variance negative.
    """

    name: str
    tensor: Tensor
    how: str = MEAN
    late: bool = True


def local_part(tensor: Tensor) -> Tensor:
    """The local shard of a tensor, in a dtype that a collective can reduce."""
    part = local(tensor.detach())
    if part.is_complex():
        part = torch.view_as_real(part)
    return part.view(torch.uint8) if part.dtype == torch.bool else part


def describe(items: Sequence[Item]) -> list[tuple[str, str]]:
    """For each item its name and a description, which must be the same on every rank."""
    return [(item.name, _form(item)) for item in items]


def _form(item: Item) -> str:
    tensor = item.tensor
    words = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
    if tensor.device.type != "cpu":
        words += f" on {tensor.device.type}"
    if is_dtensor(tensor):
        shape, offset = shard_place(tensor)
        words += f", shard {shape} at {offset}"
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
    """A cached 128-bit hash of the names and descriptions of items."""

    def __init__(self) -> None:
        self._key: Any = None
        self._bits = (0, 0)

    def of(self, items: Sequence[Item]) -> tuple[int, int]:
        """The hash of these items, as two numbers."""
        key = [
            (item.name, item.how, item.tensor.shape, item.tensor.dtype, item.tensor.device, item.tensor.stride())
            for item in items
        ]
        if key != self._key:
            self._key, self._bits = key, _digest(items)
        return self._bits


def _digest(items: Sequence[Item]) -> tuple[int, int]:
    hashed: Any = hashlib.sha256()
    for name, form in describe(items):
        hashed.update(f"{name}\0{form}\0".encode())
    raw = hashed.digest()
    return int.from_bytes(raw[:8], "little", signed=True), int.from_bytes(raw[8:16], "little", signed=True)
