"""Stored scalars (step counters and the like) of many parameters, and the coefficients made from them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.optim.precision import is_compact
from offbeat.rules.rule import Rule, Values

__all__ = ["Scalars", "coefficient_rows", "move_on", "new_scalars", "scalar_dtype"]


def scalar_dtype(fused: bool | None = None) -> torch.dtype:
    """The dtype torch.optim gives a step counter."""
    return torch.float64 if not fused and torch.get_default_dtype() == torch.float64 else torch.float32


def new_scalars(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """0-d tensors with these values, side by side in one storage so that all can be read or moved on at once."""
    line = torch.tensor(values, dtype=dtype, device=device)
    return [line[i] for i in range(len(values))]


class Scalars:
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
        """Whether :meth:`raw` works: they lie side by side, in the host's memory."""
        return self._bytes is not None

    def raw(self) -> bytes:
        """The bytes of all values."""
        found: bytes = self._bytes.raw
        return found

    def vector(self) -> Tensor:
        """All values as one tensor, where they are stored; not to be written to."""
        return self.line if self.line is not None else torch.stack([t.reshape(()) for t in self.tensors])

    def assign(self, values: Tensor) -> None:
        """Set all, from a tensor of as many."""
        if self.line is not None:
            self.line.copy_(values)
        else:
            pairs = zip(values.unbind(), self.tensors, strict=True)
            torch._foreach_copy_(self.tensors, [v.view(t.shape) for v, t in pairs])

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
                line.add_(torch.tensor(more, dtype=line.dtype))
        elif active is None or active:
            torch._foreach_add_(self.tensors if active is None else [self.tensors[i] for i in active], 1)

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
                line.copy_(torch.tensor(numbers, dtype=line.dtype))
            return
        for t, value in zip(self.tensors, values, strict=True):
            if value is not None:
                t.fill_(value)


def _common_line(tensors: list[Tensor]) -> Tensor | None:
    """The one-dimensional tensor that these 0-d tensors are the elements of, in order and without gaps."""
    first = tensors[0]
    size = first.element_size()
    start = first.data_ptr()
    storage = first.untyped_storage()._cdata
    for i, t in enumerate(tensors):
        if t.dtype != first.dtype or t.device != first.device or t.dim():
            return None
        if t.data_ptr() != start + i * size or t.untyped_storage()._cdata != storage:
            return None
    return first.detach().as_strided((len(tensors),), (1,), first.storage_offset())


def _lines(tensors: list[Tensor]) -> list[tuple[Tensor, list[tuple[int, int]]]]:
    """0-d tensors on the host by the storages they lie in: each as a line, with who of them lies where.

    Counters of parameters that began at different steps lie in different storages, a few in all. Empty if that is not
    so, or if a storage is mostly something else.
    """
    found: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        if t.device.type != "cpu" or t.dim() or t.requires_grad:
            return []
        found.setdefault((t.untyped_storage()._cdata, t.dtype), []).append(i)
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


class Ahead:
    """Coefficients of the next step, worked out while the device is busy with this one.

    They count only if the next step finds hyperparameters and counters as they were left.
    """

    def __init__(self) -> None:
        self._seen: Any = None
        self._made: Any = None
        self._left: list[bytes] = []

    def rows(self, rule: Rule, h: Values, keys: Sequence[str], counters: Sequence[Scalars]) -> Any:
        """What :func:`coefficient_rows` says, worked out now or before."""
        made, self._made = self._made, None
        is_same, self._seen = h is self._seen, h
        if made is not None and is_same and self._left == [counter.raw() for counter in counters]:
            return made
        return coefficient_rows(rule, h, keys, counters, None)

    def work_out(self, rule: Rule, h: Values, keys: Sequence[str], counters: Sequence[Scalars]) -> None:
        """Get ready for the next step; counters have moved on. Not if hyperparameters change at every step."""
        if h is self._seen and all(counter.is_readable for counter in counters):
            try:
                self._made = coefficient_rows(rule, h, keys, counters, None)
            except (ArithmeticError, ValueError, RuntimeError):
                return  # this step is done; the next says what is wrong
            self._left = [counter.raw() for counter in counters]
        self._seen = h


def coefficient_rows(
    rule: Rule, h: Values, keys: Sequence[str], counters: Sequence[Scalars], fresh: Sequence[bool] | None
) -> tuple[list[int] | None, list[dict[str, Any]], list[dict[str, float]]]:
    """The distinct sets of coefficients, and the scalars to store after each.

    ``fresh`` says which parameters are at their first step, for rules that do not count (None: none is).

    Returns:
        Which set each parameter uses (None: all use the first), the sets, the scalars.
    """
    columns = [counter.read() for counter in counters]
    for slot in rule.slots(h):
        if slot.scalar and slot.late:
            i, steps = list(keys).index(slot.key), columns[list(keys).index("step")]
            if 0.0 in steps:
                dtype = counters[i].tensors[0].dtype
                initial = torch.tensor(slot.initial(h), dtype=dtype, device="cpu").item()
                columns[i] = [initial if step == 0 else old for old, step in zip(columns[i], steps, strict=True)]
    if "step" not in keys and fresh is not None:
        columns.append([1.0 if f else 2.0 for f in fresh])
    rows: list[int] | None = None
    number: dict[tuple[float, ...], int] = {}
    if all(column.count(column[0]) == len(column) for column in columns):
        number[tuple(column[0] for column in columns)] = 0
    else:
        rows = [number.setdefault(values, len(number)) for values in zip(*columns, strict=True)]
    table, advanced = [], []
    for values in number:
        s = Values(step=values[-1] if len(values) > len(keys) else 2.0)
        for key, value, counter in zip(keys, values, counters, strict=False):
            dtype = counter.tensors[0].dtype
            setattr(s, key, value + 1 if key == "step" else torch.tensor(value, dtype=dtype, device="cpu"))
        new = {}
        for key, value in rule.advance(h, s).items():
            dtype = counters[list(keys).index(key)].tensors[0].dtype
            new[key] = torch.as_tensor(value, dtype=dtype, device="cpu").item()
        old = {key: getattr(s, key).item() for key in keys if key != "step"}
        s.set(**(old | new if rule.advance_first else old))
        row = {name: float(value) for name, value in rule.coefficients(h, s).items()}
        if is_compact(h):
            row["rounding_step"] = float(s.step)
        table.append(row)
        advanced.append(new)
    return rows, table, advanced


def move_on(
    keys: Sequence[str],
    counters: Sequence[Scalars],
    rows: Sequence[int] | None,
    advanced: Sequence[dict[str, float]],
    active: Sequence[int] | None = None,
) -> None:
    """Store the scalars' new values, for the parameters at the positions ``active`` (None: all)."""
    for key, counter in zip(keys, counters, strict=True):
        if key == "step":
            counter.count(active)
        elif key in advanced[0]:
            everyone = range(len(counter.tensors))
            values: list[float | None] = [advanced[rows[i] if rows else 0][key] for i in everyone]
            if active is not None:
                chosen = set(active)
                values = [value if i in chosen else None for i, value in enumerate(values)]
            counter.write(values)
