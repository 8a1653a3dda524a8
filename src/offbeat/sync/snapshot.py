"""Copies of the items of a round, so that training can go on while they are exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.sync.items import Item, local_part

__all__ = ["Snapshot"]


class Snapshot:
    """A copy of the items in one flat tensor per dtype and device. Its memory is reused.

    Args:
        device: where to store the copy; None is the device of each item.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.flats: list[tuple[str, bool, Tensor]] = []
        self.views: list[Tensor] = []
        self._key: Any = None

    def shape_like(self, items: Sequence[Item]) -> None:
        """Allocate memory for these items, unless it is there already."""
        parts = [local_part(item.tensor) for item in items]
        key = [(i.how, i.late, p.dtype, p.device, p.shape, p.stride()) for i, p in zip(items, parts, strict=True)]
        if key == self._key:
            return
        self.flats, self.views, self._key = [], [], None
        kinds: dict[Any, list[int]] = {}
        for index, (item, part) in enumerate(zip(items, parts, strict=True)):
            kinds.setdefault((item.how, item.late, part.dtype, part.device), []).append(index)
        views: dict[int, Tensor] = {}
        for (how, late, dtype, device), indices in kinds.items():
            target = device if self.device is None else self.device
            pin = target.type == "cpu" and device.type == "cuda"
            flat = torch.empty(sum(parts[i].numel() for i in indices), dtype=dtype, device=target, pin_memory=pin)
            self.flats.append((how, late, flat))
            start = 0
            for i in indices:
                piece = flat[start : start + parts[i].numel()]
                start += parts[i].numel()
                views[i] = _like(piece, parts[i])
        self.views = [views[i] for i in range(len(items))]
        self._key = key

    def take(self, items: Sequence[Item]) -> None:
        """Copy the items."""
        self.shape_like(items)
        if items:
            _torch.foreach_copy_(self.views, [local_part(item.tensor) for item in items], non_blocking=True)


def _like(piece: Tensor, part: Tensor) -> Tensor:
    """A view of the flat piece with the shape of ``part``, and with its strides if these leave no gaps."""
    shape, strides = list(part.shape), list(part.stride())
    order = sorted(range(len(shape)), key=lambda i: (strides[i], shape[i]))
    expected = 1
    for i in order:
        if shape[i] > 1 and strides[i] != expected:
            return piece.view(shape)
        expected *= shape[i]
    return piece.as_strided(shape, strides, piece.storage_offset())
