"""Stored scalars (step counters and the like) of many parameters, read and written together."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat._torch import foreach_add_, storage_id


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
        self._lines = _lines(tensors)
        # Usually all lie side by side, in order.
        in_order = len(self._lines) == 1 and self._lines[0][1] == list(zip(*[range(len(tensors))] * 2, strict=True))
        self._line = self._lines[0][0] if in_order else None
        self._bytes: Any = None
        if self._line is not None and self._line.device.type == "cpu":
            self._bytes = (ctypes.c_char * self._line.nbytes).from_address(self._line.data_ptr())

    def read(self) -> list[float]:
        """All values, in order."""
        if self._line is not None:
            return self._line.tolist()
        if not self._lines:
            return [t.item() for t in self.tensors]
        values = [0.0] * len(self.tensors)
        for line, places in self._lines:
            numbers = line.tolist()
            for i, at in places:
                values[i] = numbers[at]
        return values

    def raw(self) -> bytes | None:
        """The bytes of all values, if they lie side by side in the host's memory."""
        return None if self._bytes is None else self._bytes.raw

    def count(self, active: Sequence[int] | None) -> None:
        """Add one to those at the positions ``active``; to all for None."""
        if self._line is not None and active is None:
            self._line.add_(1)
            return
        chosen: Collection[int] = range(len(self.tensors)) if active is None else active
        if self._lines and self.tensors[0].device.type == "cpu":
            chosen = set(chosen)
            for line, places in self._lines:
                more = [0.0] * len(line)
                for i, at in places:
                    more[at] += i in chosen
                line.add_(torch.tensor(more, dtype=line.dtype, device="cpu"))
        elif chosen:
            foreach_add_([self.tensors[i] for i in chosen], 1)

    def write(self, values: Mapping[int, float]) -> None:
        """Set those at these positions."""
        if self._line is not None and len(values) == len(self.tensors) and len(set(values.values())) == 1:
            self._line.fill_(values[0])
        elif self._lines:
            for line, places in self._lines:
                numbers = line.tolist()
                for i, at in places:
                    numbers[at] = values.get(i, numbers[at])
                line.copy_(torch.tensor(numbers, dtype=line.dtype, device=line.device))
        else:
            for i, value in values.items():
                self.tensors[i].fill_(value)


def _lines(tensors: list[Tensor]) -> list[tuple[Tensor, list[tuple[int, int]]]]:
    """0-d tensors by storage: each storage as one tensor, with the positions of its scalars.

    Counters of parameters that began at different steps lie in different storages, usually a few. The result is empty
    if there are many, or if a storage mostly holds something else.
    """
    found: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        if t.dim() or t.requires_grad:
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
