"""Stored scalars (step counters and the like) of many parameters, read and written together."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat._torch import foreach_add_, foreach_copy_, storage_id

__all__ = ["ScalarColumn", "new_scalars", "scalar_dtype"]


def scalar_dtype(fused: bool | None = None) -> torch.dtype:
    """The dtype torch.optim gives a step counter."""
    return torch.float64 if not fused and torch.get_default_dtype() == torch.float64 else torch.float32


def new_scalars(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """0-d tensors with these values, side by side in one storage so that all can be read or written at once."""
    line = torch.tensor(values, dtype=dtype, device=device)
    return [line[i] for i in range(len(values))]


class ScalarColumn:
    """One scalar slot (a step counter, say) of many parameters, read and written as a whole where possible."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.line = _common_line(tensors)
        self._lines = _lines(tensors) if self.line is None else []
        self._bytes: Any = None
        if self.line is not None and self.line.device.type == "cpu":
            self._bytes = (ctypes.c_char * self.line.nbytes).from_address(self.line.data_ptr())

    def read(self) -> list[float]:
        """All values, in order."""
        if self.line is not None:
            return self.line.tolist()
        if not self._lines:
            return [t.item() for t in self.tensors]
        values = [0.0] * len(self.tensors)
        for line, places in self._lines:
            numbers = line.tolist()
            for i, at in places:
                values[i] = numbers[at]
        return values

    @property
    def is_readable(self) -> bool:
        """Whether :meth:`raw` works: the scalars lie side by side in the host's memory."""
        return self._bytes is not None

    def raw(self) -> bytes:
        """The bytes of all values."""
        found: bytes = self._bytes.raw
        return found

    def vector(self) -> Tensor:
        """All values as one tensor, on the device where they are stored. Do not write to it."""
        return self.line if self.line is not None else torch.stack([t.reshape(()) for t in self.tensors])

    def assign(self, values: Tensor) -> None:
        """Set all, from a tensor with one element for each."""
        if self.line is not None:
            self.line.copy_(values)
        else:
            pairs = zip(values.unbind(), self.tensors, strict=True)
            foreach_copy_(self.tensors, [v.view(t.shape) for v, t in pairs])

    def count(self, active: Sequence[int] | None) -> None:
        """Add one to those at the positions ``active``; to all for None."""
        if self.line is not None and active is None:
            self.line.add_(1)
        elif self._lines:
            chosen = range(len(self.tensors)) if active is None else set(active)
            for line, places in self._lines:
                more = [0.0] * len(line)
                for i, at in places:
                    more[at] += i in chosen
                line.add_(torch.tensor(more, dtype=line.dtype, device=line.device))
        elif active is None or active:
            foreach_add_(self.tensors if active is None else [self.tensors[i] for i in active], 1)

    def write(self, values: Sequence[float | None]) -> None:
        """Set each to its value; None leaves one as it is."""
        distinct = set(values)
        if self.line is not None and len(distinct) == 1:
            value = distinct.pop()
            if value is not None:
                self.line.fill_(value)
            return
        if self._lines:
            for line, places in self._lines:
                numbers = line.tolist()
                for i, at in places:
                    new = values[i]
                    numbers[at] = numbers[at] if new is None else new
                line.copy_(torch.tensor(numbers, dtype=line.dtype, device=line.device))
            return
        for t, value in zip(self.tensors, values, strict=True):
            if value is not None:
                t.fill_(value)


def _common_line(tensors: list[Tensor]) -> Tensor | None:
    """The one-dimensional tensor that these 0-d tensors are the elements of, in order and without gaps."""
    first = tensors[0]
    size = first.element_size()
    start = first.data_ptr()
    storage = storage_id(first.untyped_storage())
    for i, t in enumerate(tensors):
        if t.dtype != first.dtype or t.device != first.device or t.dim():
            return None
        if t.data_ptr() != start + i * size or storage_id(t.untyped_storage()) != storage:
            return None
    return first.detach().as_strided((len(tensors),), (1,), first.storage_offset())


def _lines(tensors: list[Tensor]) -> list[tuple[Tensor, list[tuple[int, int]]]]:
    """0-d tensors on the host, by storage: each storage as one tensor, with the positions of its scalars.

    Counters of parameters that began at different steps lie in different storages, usually a few. The result is empty
    if there are many, or if a storage mostly holds something else.
    """
    found: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        if t.device.type != "cpu" or t.dim() or t.requires_grad:
            return []
        found.setdefault((storage_id(t.untyped_storage()), t.dtype), []).append(i)
    if len(found) > max(1, len(tensors) // 8):
        return []
    result = []
    for where in found.values():
        offsets = [int(tensors[i].storage_offset()) for i in where]
        first, size = min(offsets), max(offsets) - min(offsets) + 1
        if size > 4 * len(where):
            return []
        line = tensors[where[0]].detach().as_strided((size,), (1,), first)
        result.append((line, [(i, at - first) for i, at in zip(where, offsets, strict=True)]))
    return result
