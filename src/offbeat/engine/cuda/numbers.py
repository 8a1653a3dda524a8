"""Coefficients computed on a device: by a kernel made from the rule's own functions, or by torch's operators."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.engine.counters import ScalarColumn
from offbeat.engine.cuda.kernel import NumberKernel
from offbeat.engine.cuda.symbols import NotTraceable, Number, SymbolArithmetic, number_source, trace_numbers
from offbeat.engine.scalars import TensorArithmetic, work_out
from offbeat.rules.rule import Rule, Slot, Values

__all__ = ["DeviceNumbers", "StoredOnDevice"]


@dataclass(frozen=True)
class StoredOnDevice:
    """The stored scalars of many parameters, where coefficients are computed on the device.

    Attributes:
        rule: the rule whose numbers they are.
        slots: its state.
        columns: one column for each scalar slot.
        first: whether all parameters are at their first step, for rules that do not count steps.
    """

    rule: Rule
    slots: tuple[Slot, ...]
    columns: Sequence[ScalarColumn]
    first: bool

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """By key, the dtype in which a scalar is stored."""
        keys = [slot.key for slot in self.slots if slot.scalar]
        return {key: column.tensors[0].dtype for key, column in zip(keys, self.columns, strict=True)}

    @torch.no_grad()
    def by_torch(self, h: Values, names: Sequence[str], rows: Tensor, active: Tensor | None) -> None:
        """Write each parameter's coefficients to a row and store the new scalars, with torch's operators.

        Args:
            names: the coefficients, in order.
            active: for which parameters scalars are stored, as a tensor of booleans (None: for all).
        """
        dtypes, device = self.dtypes, rows.device
        old = {key: column.vector() for key, column in zip(dtypes, self.columns, strict=True)}
        before = {key: values.to(device) for key, values in old.items()}
        if "step" in before:
            before["step"] = before["step"].to(torch.float64)
        arithmetic = TensorArithmetic(dtypes, device)
        numbers = work_out(self.rule, h, self.slots, before, arithmetic, first=self.first)
        found = numbers.for_kernel(self.slots, h)
        for i, name in enumerate(names):
            rows[:, i] = found[name]
        for key, column in zip(dtypes, self.columns, strict=True):
            if key in numbers.stored:
                new = numbers.stored[key].to(old[key]).expand(old[key].shape)
                column.assign(new if active is None else torch.where(active.to(new.device), new, old[key]))


@dataclass(frozen=True)
class DeviceNumbers:
    """The kernel that computes a rule's coefficients, and the hyperparameters that are its inputs.

    All hyperparameters are inputs if the rule's functions can be traced so. If they branch on one, all but the learning
    rate and tensors are fixed, and a change of them needs another kernel.
    """

    kernel: NumberKernel
    first: bool
    _numbers: tuple[str, ...]  # inputs from the host
    _tensors: tuple[str, ...]  # inputs from tensors
    _dtypes: tuple[torch.dtype, ...]  # of these tensors
    _fixed: dict[str, Any]

    @staticmethod
    def make(
        stored: StoredOnDevice, h: Values, names: tuple[str, ...], compute: torch.dtype, columns: int
    ) -> DeviceNumbers | None:
        """For the coefficients ``names``, or None if the rule's functions cannot be traced."""
        values = _every_hyper(stored.rule, h)
        numeric = [n for n, v in values.items() if isinstance(v, (int, float, Tensor)) and not isinstance(v, bool)]
        kinds = {f"s.{key}": dtype for key, dtype in stored.dtypes.items()}
        if not all(dtype in (torch.float32, torch.float64) for dtype in kinds.values()):
            return None
        needed = [name for name in numeric if name == "lr" or isinstance(values[name], Tensor)]
        for inputs in (numeric, needed):
            try:
                program = trace_numbers((*kinds, *inputs), functools.partial(_symbolic, stored, h, tuple(inputs)))
            except NotTraceable:
                continue
            tensors = {name: values[name].dtype for name in inputs if isinstance(values[name], Tensor)}
            source = functools.partial(
                number_source, program, tuple(kinds.items()), tuple(tensors.items()), names, compute, columns
            )
            kernel = NumberKernel(source, compute, tuple(tensors.values()))
            numbers = tuple(name for name in inputs if name not in tensors)
            fixed = {name: value for name, value in values.items() if name not in inputs}
            return DeviceNumbers(kernel, stored.first, numbers, tuple(tensors), tuple(tensors.values()), fixed)
        return None

    def fits(self, h: Values, *, first: bool) -> bool:
        """Whether the kernel is right for these hyperparameters."""
        if first != self.first or any(isinstance(_get(h, name), Tensor) for name in self._numbers):
            return False
        if any(isinstance(now := _get(h, name), Tensor) or now != value for name, value in self._fixed.items()):
            return False
        found = [_get(h, name) for name in self._tensors]
        return all(isinstance(t, Tensor) and t.dtype == kind for t, kind in zip(found, self._dtypes, strict=True))

    def tail(self, h: Values) -> array[float]:
        """The inputs from the host."""
        return array("d", [_get(h, name) for name in self._numbers])

    def tensors(self, h: Values, device: torch.device) -> list[Tensor]:
        """The inputs from tensors."""
        return [_get(h, name).to(device) for name in self._tensors]


def _symbolic(
    stored: StoredOnDevice, h: Values, inputs: tuple[str, ...], given: Mapping[str, Number]
) -> dict[str, Any]:
    """Coefficients, and stored scalars after the step, from symbols."""
    h = _with_inputs(h, inputs, given)
    before = {key: given[f"s.{key}"] for key in stored.dtypes}
    arithmetic = SymbolArithmetic(stored.dtypes)
    numbers = work_out(stored.rule, h, stored.slots, before, arithmetic, first=stored.first)
    return numbers.for_kernel(stored.slots, h) | {f"s.{key}": value for key, value in numbers.stored.items()}


def _every_hyper(rule: Rule, h: Values) -> dict[str, Any]:
    """All hyperparameters, those in tuples by name and position (``betas.0``)."""
    found: dict[str, Any] = {}
    for hyper in rule.hyper:
        value = getattr(h, hyper.name)
        if isinstance(value, tuple):
            found |= {f"{hyper.name}.{i}": part for i, part in enumerate(value)}
        else:
            found[hyper.name] = value
    return found


def _get(h: Values, name: str) -> Any:
    name, _, position = name.partition(".")
    value = getattr(h, name)
    return value[int(position)] if position else value


def _with_inputs(h: Values, inputs: Sequence[str], given: Mapping[str, Number]) -> Values:
    changed = dict(vars(h))
    for name in inputs:
        base, _, position = name.partition(".")
        if position:
            parts = list(changed[base])
            parts[int(position)] = given[name]
            changed[base] = tuple(parts)
        else:
            changed[base] = given[name]
    return Values(**changed)
