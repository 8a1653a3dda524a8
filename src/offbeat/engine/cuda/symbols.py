"""Numbers as symbols: a rule's arithmetic on scalars, traced so that it can be written as a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from offbeat.engine.trace import Program, Tracer, Value
from offbeat.rules.ops import OPERATIONS


class NotTraceable(Exception):
    """The functions do something with numbers that cannot be traced, such as branching on them."""


class Number(Value):
    """A symbolic number, which can also be raised to a power.

    Attributes:
        is_narrow: whether it stands for a float32 tensor, with which arithmetic is in float32.
    """

    __slots__ = ("is_narrow",)

    def __init__(self, tracer: Tracer, number: int) -> None:
        super().__init__(tracer, number)
        self.is_narrow = False

    def __pow__(self, other: Any) -> Any:
        is_root = not isinstance(other, Value) and other == 0.5
        return self.emit("sqrt", self) if is_root else self.emit("pow", self, other)

    def __rpow__(self, other: Any) -> Any:
        return self.emit("pow", other, self)

    def narrowed(self) -> Number:
        """The number as float32 stores it."""
        found: Number = self.emit("round", self)
        found.is_narrow = True
        return found


class SymbolArithmetic:
    """Stored scalars as symbols; see :class:`offbeat.engine.scalars.Arithmetic`."""

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        self._dtypes = dtypes

    def stored(self, key: str, value: Any) -> Any:
        """The value as it is stored."""
        if self._dtypes[key] == torch.float64:
            return value
        return value.narrowed() if isinstance(value, Number) else torch.tensor(value, dtype=self._dtypes[key]).item()

    def wide(self, value: Any) -> Any:
        """The same number, with which arithmetic is in double precision."""
        return Number(value.tracer, value.number) if isinstance(value, Number) else value


class _NumberTracer(Tracer):
    kind = Number
    combines_numbers = True

    def emit(self, op: str, *operands: Any) -> Any:
        if op == "round" or not any(isinstance(a, Number) and a.is_narrow for a in operands):
            return super().emit(op, *operands)
        # An operation on float32 numbers in double precision, rounded afterwards, is that operation in float32.
        rounded = [self._narrow(a) if op != "where" or i else a for i, a in enumerate(operands)]
        found = super().emit(op, *rounded)
        return found if OPERATIONS[op].compares else found.narrowed()

    def _narrow(self, a: Any) -> Any:
        return a if isinstance(a, Number) and a.is_narrow else super().emit("round", a)


def trace_numbers(
    inputs: tuple[str, ...], function: Callable[[Mapping[str, Number]], Mapping[str, Any]]
) -> tuple[Program, tuple[str, ...]]:
    """Trace a function of named numbers that returns named numbers: the program, and the names of its outputs.

    Raises :class:`NotTraceable`.
    """
    tracer = _NumberTracer()
    values: dict[str, Any] = {name: tracer.input("tensor", name) for name in inputs}
    try:
        found = function(values)
        outputs = [value if isinstance(value, Value) else tracer.emit("add", value, 0.0) for value in found.values()]
    except (TypeError, AttributeError, ValueError) as error:
        raise NotTraceable(str(error)) from error
    return Program(inputs, (), tuple(tracer.instructions), tuple(value.number for value in outputs)), tuple(found)
