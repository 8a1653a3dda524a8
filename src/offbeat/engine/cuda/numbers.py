"""Coefficients computed on a device: by a kernel made from the rule's own functions, or by torch's operators."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.engine.counters import ScalarColumn
from offbeat.engine.cuda.kernel import bind, compile_source
from offbeat.engine.cuda.symbols import NotTraceable, Number, SymbolArithmetic, number_source, trace_numbers
from offbeat.engine.options import Options
from offbeat.engine.scalars import tensor_numbers, work_out
from offbeat.rules.rule import Rule, Values

__all__ = ["DeviceNumbers"]

#: Parameters whose coefficients one block computes.
BLOCK = 128


class DeviceNumbers:
    """Computes the coefficients of many parameters on their device, and stores the new scalars there.

    All hyperparameters are inputs of the kernel if the rule's functions can be traced so. If they branch on one, all
    but the learning rate and tensors are fixed, and a change of them needs another kernel. If the functions cannot be
    traced at all, torch's operators do the same.

    Args:
        columns: the stored scalars, one column for each scalar slot.
        names: the coefficients.
        rows: where they are written, one row for each parameter.
        before: how many columns of addresses the table has before those of the stored scalars.
        first: whether all parameters are at their first step, for rules that do not count steps.

    Attributes:
        traced: whether there is a kernel.
    """

    def __init__(
        self,
        options: Options,
        columns: Sequence[ScalarColumn],
        names: tuple[str, ...],
        rows: Tensor,
        before: int,
        first: bool,
    ) -> None:
        self._rule, self._slots, self._h = options.rule, options.slots, options.h
        self._columns = dict(zip(options.scalar_keys, columns, strict=True))
        self._dtypes = {key: column.tensors[0].dtype for key, column in self._columns.items()}
        self._names, self._rows, self._before, self._first = names, rows, before, first
        values = _every_hyper(options.rule, options.h)
        numeric = [n for n, v in values.items() if isinstance(v, (int, float, Tensor)) and not isinstance(v, bool)]
        needed = [name for name in numeric if name == "lr" or isinstance(values[name], Tensor)]
        self.traced = all(dtype in (torch.float32, torch.float64) for dtype in self._dtypes.values())
        self.traced = self.traced and (self._trace(numeric) or self._trace(needed))
        inputs = self._inputs if self.traced else []
        self._tensors = {name: values[name].dtype for name in inputs if isinstance(values[name], Tensor)}
        self._numbers = [name for name in inputs if name not in self._tensors]
        self._fixed = {name: value for name, value in values.items() if self.traced and name not in inputs}

    def _trace(self, inputs: list[str]) -> bool:
        try:
            self._program = trace_numbers((*(f"s.{key}" for key in self._dtypes), *inputs), self._symbolic(inputs))
        except NotTraceable:
            return False
        self._inputs = inputs
        return True

    def _symbolic(self, inputs: Sequence[str]) -> Callable[[Mapping[str, Number]], dict[str, Any]]:
        """A function of symbols: coefficients, and stored scalars after the step."""

        def function(given: Mapping[str, Number]) -> dict[str, Any]:
            h = _with_inputs(self._h, inputs, given)
            before = {key: given[f"s.{key}"] for key in self._dtypes}
            numbers = work_out(self._rule, h, self._slots, before, SymbolArithmetic(self._dtypes), first=self._first)
            return numbers.for_kernel(self._slots, h) | {f"s.{key}": value for key, value in numbers.stored.items()}

        return function

    def give_up(self) -> None:
        """There is no kernel: it could not be compiled."""
        self.traced = False

    def fits(self, h: Values, first: bool) -> bool:
        """Whether this is right for these hyperparameters."""
        if first != self._first or any(isinstance(_get(h, name), Tensor) for name in self._numbers):
            return False
        if any(isinstance(now := _get(h, name), Tensor) or now != value for name, value in self._fixed.items()):
            return False
        found = [(_get(h, name), dtype) for name, dtype in self._tensors.items()]
        return all(isinstance(t, Tensor) and t.dtype == dtype for t, dtype in found)

    def tail(self, h: Values) -> array[float]:
        """The inputs from the host."""
        return array("d", [_get(h, name) for name in self._numbers])

    def tensors(self, h: Values) -> list[Tensor]:
        """The inputs from tensors."""
        return [_get(h, name).to(self._rows.device) for name in self._tensors]

    def source(self, guarded: bool) -> str:
        """The source of the kernel."""
        stored = {f"s.{key}": dtype for key, dtype in self._dtypes.items()}
        return number_source(self._program, stored, self._tensors, self._names, self._rows.dtype, self._before, guarded)

    def bind(self, words: Tensor, guarded: bool) -> Callable[..., None]:
        """The launch: call it with the tensors, then with ``found_inf`` if guarded. Raises :class:`TritonError`."""
        rows, guards = self._rows, [torch.float32] if guarded else []
        types = (torch.int64, rows.dtype, 2, *self._tensors.values(), *guards)
        compiled = compile_source(self.source(guarded), types, BLOCK, rows.device)
        return bind(compiled, -(-len(rows) // BLOCK), rows.device, (words, rows, len(rows)), BLOCK)

    @torch.no_grad()
    def by_torch(self, h: Values, active: Tensor | None, gradients: Sequence[int]) -> None:
        """The same with torch's operators.

        Args:
            active: whether the step happens, as a tensor on the device (None: it does).
            gradients: the gradients' addresses; where there is none, scalars are not stored.
        """
        device = self._rows.device
        if 0 in gradients:
            here = torch.tensor([address != 0 for address in gradients]).to(device)
            active = here if active is None else here & active
        old = {key: column.vector() for key, column in self._columns.items()}
        before = {key: values.to(device) for key, values in old.items()}
        numbers = tensor_numbers(self._rule, h, self._slots, before, device, first=self._first)
        found = numbers.for_kernel(self._slots, h)
        for i, name in enumerate(self._names):
            self._rows[:, i] = found[name]
        for key, value in numbers.stored.items():
            new = value.to(old[key]).expand(old[key].shape)
            new = new if active is None else torch.where(active.to(new.device), new, old[key])
            self._columns[key].assign(new)


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
