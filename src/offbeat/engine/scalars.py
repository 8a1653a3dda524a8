"""The numbers of a step: stored scalars before it, coefficients for it, stored scalars after it.

Whoever needs a rule's coefficients calls :func:`work_out`, with Python numbers, with tensors on any device (0-d, or
one element for each parameter), or with symbols that become a kernel. All of them follow the same steps:

1. At a parameter's first step, scalars with a late initial value get it.
2. ``rule.advance`` computes the new scalars in the precision in which they are stored.
3. The new scalars are rounded as they are stored.
4. ``rule.coefficients`` computes the coefficients from them in double precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offbeat.engine.counters import ScalarColumn
from offbeat.rules.ops import where
from offbeat.rules.rule import Rule, Slot, Values

__all__ = [
    "Arithmetic",
    "CoefficientSets",
    "NumbersAhead",
    "TensorArithmetic",
    "coefficient_sets",
    "wide_dtype",
    "work_out",
]


class Arithmetic(Protocol):
    """How stored scalars are represented."""

    def stored(self, key: str, value: Any) -> Any:
        """A value as the scalar ``key`` stores it; arithmetic with it is in the stored precision."""

    def wide(self, value: Any) -> Any:
        """A stored value for arithmetic in double precision."""


class _HostArithmetic:
    """Numbers on the host. Scalars in lower precision are 0-d tensors while they are advanced."""

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        self._dtypes = dtypes

    def stored(self, key: str, value: Any) -> Any:
        return torch.as_tensor(value, dtype=self._dtypes[key], device="cpu")

    def wide(self, value: Any) -> Any:
        return value.item()


class TensorArithmetic:
    """Tensors on one device; autograd may watch them."""

    def __init__(self, dtypes: Mapping[str, torch.dtype], device: torch.device) -> None:
        self._dtypes, self._device = dtypes, device

    def stored(self, key: str, value: Any) -> Any:
        """The value as it is stored."""
        return torch.as_tensor(value, device=self._device).to(self._dtypes[key])

    def wide(self, value: Any) -> Any:
        """The value in double precision, where the device has it."""
        return value.to(wide_dtype(self._device))


def wide_dtype(device: torch.device) -> torch.dtype:
    """Double precision, or the most a device has."""
    return torch.float32 if device.type in ("mps", "xla") else torch.float64


@dataclass
class Numbers:
    """The numbers of one step.

    Attributes:
        coefficients: for the update, by name.
        stored: the stored scalars that change, by key; ``step`` is among them if the rule counts steps.
        begins: whether it is the first step, if the rule counts steps: a bool, a tensor of booleans or a symbol.
        step: the number of this step.
    """

    coefficients: dict[str, Any]
    stored: dict[str, Any]
    begins: Any
    step: Any

    def for_kernel(self, slots: Sequence[Slot], h: Values) -> dict[str, Any]:
        """The coefficients, with those that only kernels read: see :func:`offbeat.engine.trace.trace`."""
        found = dict(self.coefficients)
        if self.begins is not None:
            found |= {"first": where(self.begins, 1.0, 0.0), "rounding_step": self.step}
        return found | {f"initial_{slot.key}": slot.initial(h) for slot in slots if slot.late}


def work_out(
    rule: Rule, h: Values, slots: Sequence[Slot], before: Mapping[str, Any], arithmetic: Arithmetic, *, first: bool
) -> Numbers:
    """The numbers of a step.

    Args:
        slots: the state a parameter has; only scalars matter here.
        before: the stored scalars before the step, by key; ``step`` in double precision.
        arithmetic: how scalars are represented.
        first: whether it is a first step, for rules that do not count steps.
    """
    counts = "step" in before
    begins = before["step"] == 0 if counts else None
    step = before["step"] + 1 if counts else 1.0 if first else 2.0
    stored: dict[str, Any] = {}
    for slot in slots:
        if slot.scalar and slot.key != "step":
            value = arithmetic.stored(slot.key, before[slot.key])
            if slot.late and counts:
                value = where(begins, arithmetic.stored(slot.key, slot.initial(h)), value)
            stored[slot.key] = value
    new = {key: arithmetic.stored(key, v) for key, v in rule.advance(h, Values(step=step, **stored)).items()}
    seen = {key: arithmetic.wide(v) for key, v in (stored | new if rule.advance_first else stored).items()}
    coefficients = dict(rule.coefficients(h, Values(step=step, **seen)))
    return Numbers(coefficients, new | {"step": step} if counts else new, begins, step)


@dataclass
class CoefficientSets:
    """The distinct sets of coefficients of many parameters.

    Attributes:
        chosen: which set each parameter uses; None if all use the first.
        sets: the sets.
        stored: the scalars to store after the step, for each set.
        begins: for each set, whether it is for a first step.
    """

    chosen: list[int] | None
    sets: list[dict[str, Any]]
    stored: list[dict[str, float]]
    begins: list[bool]

    def of(self, i: int) -> dict[str, Any]:
        """The set of a parameter."""
        return self.sets[self.chosen[i] if self.chosen else 0]

    def store(self, keys: Sequence[str], columns: Sequence[ScalarColumn], active: Sequence[int] | None) -> None:
        """Write the new scalars of the parameters at the positions ``active`` (None: all)."""
        for key, column in zip(keys, columns, strict=True):
            if key == "step":
                column.count(active)
            elif key in self.stored[0]:
                chosen = self.chosen
                values: list[float | None]
                values = [self.stored[chosen[i] if chosen else 0][key] for i in range(len(column.tensors))]
                if active is not None:
                    wanted = set(active)
                    values = [value if i in wanted else None for i, value in enumerate(values)]
                column.write(values)


def coefficient_sets(
    rule: Rule,
    h: Values,
    slots: Sequence[Slot],
    columns: Sequence[ScalarColumn],
    first: Sequence[bool] | None,
) -> CoefficientSets:
    """Work out the coefficients of many parameters on the host; parameters with equal scalars share a set.

    Args:
        columns: the stored scalars, one column for each scalar slot.
        first: which parameters are at their first step, for rules that do not count steps (None: none).
    """
    keys = [slot.key for slot in slots if slot.scalar]
    values = [column.read() for column in columns]
    if "step" not in keys and first is not None:
        values.append([float(f) for f in first])
    chosen: list[int] | None = None
    distinct: dict[tuple[float, ...], int] = {}
    if all(column.count(column[0]) == len(column) for column in values):
        distinct[tuple(column[0] for column in values)] = 0
    else:
        chosen = [distinct.setdefault(one, len(distinct)) for one in zip(*values, strict=True)]
    arithmetic = _HostArithmetic({key: c.tensors[0].dtype for key, c in zip(keys, columns, strict=True)})
    found = CoefficientSets(chosen, [], [], [])
    for one in distinct:
        before = dict(zip(keys, one, strict=False))
        is_first = len(one) > len(keys) and bool(one[-1])
        numbers = work_out(rule, h, slots, before, arithmetic, first=is_first)
        row = {name: float(value) for name, value in numbers.coefficients.items()}
        row["rounding_step"] = float(numbers.step)
        found.sets.append(row)
        found.stored.append({key: float(value) for key, value in numbers.stored.items() if key != "step"})
        found.begins.append(bool(numbers.begins))
    return found


class NumbersAhead:
    """Coefficients of the next step, worked out while the device is busy with this one.

    They are used only if the next step finds hyperparameters and stored scalars unchanged.
    """

    def __init__(self) -> None:
        self._seen: Any = None
        self._made: CoefficientSets | None = None
        self._left: list[bytes] = []

    def take(self, rule: Rule, h: Values, slots: Sequence[Slot], columns: Sequence[ScalarColumn]) -> CoefficientSets:
        """The result of :func:`coefficient_sets`, worked out now or before."""
        made, self._made = self._made, None
        is_same, self._seen = h is self._seen, h
        if made is not None and is_same and self._left == [column.raw() for column in columns]:
            return made
        return coefficient_sets(rule, h, slots, columns, None)

    def prepare(self, rule: Rule, h: Values, slots: Sequence[Slot], columns: Sequence[ScalarColumn]) -> None:
        """Get ready for the next step. Does nothing if hyperparameters change at every step."""
        if h is self._seen and all(column.is_readable for column in columns):
            try:
                self._made = coefficient_sets(rule, h, slots, columns, None)
            except (ArithmeticError, ValueError, RuntimeError):
                return  # this step is done; the next one raises
            self._left = [column.raw() for column in columns]
        self._seen = h
