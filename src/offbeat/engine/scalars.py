"""The numbers of a step: its coefficients, and the stored scalars (such as step counters) before and after it.

All code that needs a rule's coefficients calls :func:`work_out`, with Python numbers, with tensors on any device (0-d,
or one element for each parameter), or with symbols that become a kernel. The computation is always the same:

1. At a parameter's first step, scalars with a late initial value are set to it.
2. ``rule.advance`` computes the new scalars in the precision in which they are stored.
3. The new scalars are rounded to the dtype in which they are stored.
4. ``rule.coefficients`` computes the coefficients from them in double precision.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offbeat._torch import foreach_add_, storage_id
from offbeat.engine.options import Options
from offbeat.rules.ops import where
from offbeat.rules.rule import Rule, Slot, Values, no_scalars


@dataclass
class Numbers:
    """The numbers of one step.

    Attributes:
        coefficients: for the update, by name.
        stored: the stored scalars that change, by key; ``step`` is among them if the rule counts steps.
        begins: whether this is the first step, if the rule counts steps: a bool, a tensor of booleans or a symbol.
        step: the number of this step.
    """

    coefficients: dict[str, Any]
    stored: dict[str, Any]
    begins: Any
    step: Any

    def for_kernel(self, slots: Sequence[Slot], h: Values) -> dict[str, Any]:
        """The coefficients, including those that only kernels read: see :func:`offbeat.engine.trace.trace`."""
        numbers = dict(self.coefficients)
        if self.begins is not None:
            numbers |= {"first": where(self.begins, 1.0, 0.0), "rounding_step": self.step}
        return numbers | {f"initial_{slot.key}": slot.initial(h) for slot in slots if slot.late}


def work_out(
    rule: Rule,
    h: Values,
    slots: Sequence[Slot],
    before: Mapping[str, Any],
    store: Callable[[str, Any], Any],
    widen: Callable[[Any], Any],
    *,
    first: bool,
    rounded: Callable[[str, Any], Any] | None = None,
) -> Numbers:
    """The numbers of a step.

    Args:
        slots: the state a parameter has; only scalars matter here.
        before: the stored scalars before the step, by key; ``step`` in double precision.
        store: ``store(key, value)`` rounds a value to the dtype of the scalar ``key``. Arithmetic with the result has
            that precision.
        widen: ``widen(value)`` is the same number, for arithmetic in double precision.
        first: whether this is a first step, for rules that do not count steps.
        rounded: like ``store``, for new scalars, with which there is no more arithmetic before they are widened.
    """
    counts = "step" in before
    begins = before["step"] == 0 if counts else None
    step = before["step"] + 1 if counts else 1.0 if first else 2.0
    stored: dict[str, Any] = {}
    for slot in slots:
        if slot.scalar and slot.key != "step":
            value = store(slot.key, before[slot.key])
            if slot.late and counts and begins is not False:
                value = where(begins, store(slot.key, slot.initial(h)), value)
            stored[slot.key] = value
    new = {}
    if rule.advance is not no_scalars:
        rounded = rounded or store
        new = {key: rounded(key, value) for key, value in rule.advance(h, Values(step=step, **stored)).items()}
    seen = {key: widen(value) for key, value in (stored | new if rule.advance_first else stored).items()}
    coefficients = dict(rule.coefficients(h, Values(step=step, **seen)))
    return Numbers(coefficients, new | {"step": step} if counts else new, begins, step)


def tensor_numbers(
    rule: Rule, h: Values, slots: Sequence[Slot], stored: Mapping[str, Tensor], device: torch.device, *, first: bool
) -> Numbers:
    """The numbers of a step as tensors, from stored scalars that are tensors on ``device``; see :func:`work_out`."""
    wide = torch.float32 if device.type in ("mps", "xla") else torch.float64  # the widest dtype of the device
    before = dict(stored)
    if "step" in before:
        before["step"] = before["step"].to(wide)
    store = _storing({key: t.dtype for key, t in stored.items()}, device)
    return work_out(rule, h, slots, before, store, lambda value: value.to(wide), first=first)


def _storing(dtypes: Mapping[str, torch.dtype], device: torch.device) -> Callable[[str, Any], Tensor]:
    return lambda key, value: torch.as_tensor(value, dtype=dtypes[key], device=device)


@dataclass
class CoefficientSets:
    """The distinct sets of coefficients of many parameters.

    Attributes:
        chosen: the index of the set that each parameter uses; None if all use the first.
        sets: the sets.
        stored: the scalars to store after the step, for each set.
        begins: for each set, whether it belongs to a first step.
    """

    chosen: list[int] | None
    sets: list[dict[str, Any]] = field(default_factory=list)
    stored: list[dict[str, float]] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)

    def number(self, i: int) -> int:
        """The index of the set that a parameter uses."""
        return self.chosen[i] if self.chosen else 0

    def of(self, i: int) -> dict[str, Any]:
        """The coefficients of a parameter."""
        return self.sets[self.number(i)]

    def store(self, keys: Sequence[str], columns: Sequence[ScalarColumn], active: Sequence[int] | None) -> None:
        """Write the new scalars of the parameters with the indices ``active`` (None: all)."""
        for key, column in zip(keys, columns, strict=True):
            if key == "step":
                column.count(active)
            elif key in self.stored[0] and active is None and len(self.stored) == 1:
                column.fill(self.stored[0][key])
            elif key in self.stored[0]:
                there = range(len(column.tensors)) if active is None else active
                column.write({i: self.stored[self.number(i)][key] for i in there})


def coefficient_sets(
    options: Options, columns: Sequence[ScalarColumn], first: Sequence[bool] | None
) -> CoefficientSets:
    """Compute the coefficients of many parameters on the host. Parameters with equal scalars share a set.

    Args:
        columns: the stored scalars, one column for each scalar slot.
        first: which parameters are at their first step, for rules that do not count steps (None: none).
    """
    keys = options.scalar_keys
    values = [column.read() for column in columns]
    if "step" not in keys and first is not None:
        values.append([float(f) for f in first])
    first_row = [column[0] for column in values]
    if not any(column.count(column[0]) != len(column) for column in values):
        result = CoefficientSets(None)
        _add_set(result, options, columns, first_row, 0)
        return result
    distinct: dict[tuple[float, ...], int] = {}
    result = CoefficientSets([distinct.setdefault(row, len(distinct)) for row in zip(*values, strict=True)])
    assert result.chosen is not None
    for row, number in distinct.items():
        _add_set(result, options, columns, row, result.chosen.index(number))
    return result


def _add_set(
    result: CoefficientSets, options: Options, columns: Sequence[ScalarColumn], values: Sequence[float], at: int
) -> None:
    """Add the coefficients for the scalars ``values``, which the parameter with the index ``at`` has."""
    keys, rule, h = options.scalar_keys, options.rule, options.on_host()
    before = dict(zip(keys, values, strict=False))
    is_first = len(values) > len(keys) and bool(values[-1])
    if keys in ((), ("step",)):  # nothing is stored that must be rounded
        numbers = work_out(rule, h, (), before, _unused, _number, first=is_first)
    else:
        tensors = {key: column.tensors[at] for key, column in zip(keys, columns, strict=True)}
        store, rounded = partial(_stored, before, tensors), partial(_rounded, tensors)
        numbers = work_out(rule, h, options.slots, before, store, _number, first=is_first, rounded=rounded)
    row = {name: float(value) for name, value in numbers.coefficients.items()}
    row["rounding_step"] = float(numbers.step)
    result.sets.append(row)
    result.stored.append({key: float(value) for key, value in numbers.stored.items() if key != "step"})
    result.begins.append(bool(numbers.begins))


def _unused(key: str, value: Any) -> Any:
    raise AssertionError(f"there is no scalar {key}")


def _stored(before: Mapping[str, float], tensors: Mapping[str, Tensor], key: str, value: Any) -> Tensor:
    """A number as a tensor on the host: the stored scalar itself if that is its value, which takes less time."""
    t = tensors[key]
    return t if value is before[key] and t.device.type == "cpu" else _on_host(tensors, key, value)


def _on_host(like: Mapping[str, Tensor], key: str, value: Any) -> Tensor:
    if isinstance(value, (float, int)):
        return torch.full((), value, dtype=like[key].dtype, device="cpu")
    return torch.as_tensor(value, dtype=like[key].dtype, device="cpu")


def _rounded(like: Mapping[str, Tensor], key: str, value: Any) -> Any:
    """A number rounded to the dtype of the scalar ``key``, as a Python number where that is quicker."""
    if isinstance(value, (float, int)) and like[key].dtype is torch.float32:
        return ctypes.c_float(value).value
    return _on_host(like, key, value)


def _number(value: Any) -> float:
    number: float = value.item() if isinstance(value, Tensor) else value
    return number


def scalar_dtype(fused: bool | None = None) -> torch.dtype:
    """The dtype torch.optim gives a step counter."""
    return torch.float64 if not fused and torch.get_default_dtype() == torch.float64 else torch.float32


def new_scalars(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """0-d tensors with these values, next to each other in one storage, so that one call reads or writes all."""
    line = torch.tensor(values, dtype=dtype, device=device)
    return [line[i] for i in range(len(values))]


class ScalarColumn:
    """One stored scalar, such as the step counter, of many parameters. Read and written in one call if possible."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._lines = _lines(tensors)
        # Usually all are next to each other in memory, in order.
        in_order = len(self._lines) == 1 and self._lines[0][1] == list(zip(*[range(len(tensors))] * 2, strict=True))
        self._line = self._lines[0][0] if in_order else None
        self._one = torch.ones((), dtype=tensors[0].dtype, device=tensors[0].device)
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
        """The bytes of all values, if they are next to each other in the host's memory."""
        return None if self._bytes is None else self._bytes.raw

    def count(self, active: Sequence[int] | None) -> None:
        """Add one to the values with the indices ``active``, or to all if it is None."""
        if self._line is not None and active is None:
            self._line.add_(self._one)
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

    def fill(self, value: float) -> None:
        """Set all values to one number."""
        if self._line is not None:
            self._line.fill_(value)
        else:
            self.write(dict.fromkeys(range(len(self.tensors)), value))

    def write(self, values: Mapping[int, float]) -> None:
        """Set the values with these indices."""
        if self._lines:
            for line, places in self._lines:
                numbers = line.tolist()
                for i, at in places:
                    numbers[at] = values.get(i, numbers[at])
                line.copy_(torch.tensor(numbers, dtype=line.dtype, device=line.device))
        else:
            for i, value in values.items():
                self.tensors[i].fill_(value)


def _lines(tensors: list[Tensor]) -> list[tuple[Tensor, list[tuple[int, int]]]]:
    """Group 0-d tensors by storage: each storage as one tensor, with the positions of its scalars.

    Counters of parameters that had their first step at different times are in different storages, usually a few. The
    result is empty if there are many storages, or if a storage mostly holds something else.
    """
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        if t.dim() or t.requires_grad:
            return []
        groups.setdefault((storage_id(t.untyped_storage()), t.dtype), []).append(i)
    if len(groups) > max(1, len(tensors) // 8):
        return []
    result = []
    for rows in groups.values():
        offsets = [int(tensors[i].storage_offset()) for i in rows]
        first, size = min(offsets), max(offsets) - min(offsets) + 1
        if size > 4 * len(rows):
            return []
        line = tensors[rows[0]].detach().as_strided((size,), (1,), first)
        result.append((line, [(i, at - first) for i, at in zip(rows, offsets, strict=True)]))
    return result
