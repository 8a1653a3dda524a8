"""The numbers of a step, traced: what a rule works out from its counters and hyperparameters, for a device to do.

An update is elementwise maths on tensors (:mod:`offbeat.tiers.trace`); its coefficients are maths on a few numbers.
Where counters lie on a GPU these are worked out there, by a kernel made from what is written down here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.tiers.trace import Constant, Instruction, Tracer, Value

__all__ = ["NotTraceable", "Number", "NumberProgram", "trace_numbers"]


class NotTraceable(Exception):
    """The functions do something with numbers that cannot be written down, such as branching on them."""


class Number(Value):
    """A symbolic number; it can be raised to a power as well.

    Attributes:
        is_narrow: whether it is a float32 tensor's, and what is done with it happens in float32.
    """

    __slots__ = ("is_narrow",)

    def __init__(self, tracer: Tracer, number: int) -> None:
        super().__init__(tracer, number)
        self.is_narrow = False

    def __eq__(self, other: object) -> bool:
        raise TypeError("whether a number equals another is not known while tracing")

    __hash__ = None  # type: ignore[assignment]

    def __pow__(self, other: Any) -> Value:
        if not isinstance(other, Value) and other == 0.5:
            return self.sqrt()
        return self.tracer.emit("pow", self, other)

    def __rpow__(self, other: Any) -> Value:
        return self.tracer.emit("pow", other, self)

    def narrowed(self) -> Number:
        """As float32 stores it."""
        found = self.tracer.emit("round", self)
        assert isinstance(found, Number)
        found.is_narrow = True
        return found

    def widened(self) -> Number:
        """The same number, with which arithmetic is in double precision."""
        return Number(self.tracer, self.number)


class _NumberTracer(Tracer):
    kind = Number

    def emit(self, op: str, *args: Any, scalars: bool = False) -> Value:
        if op == "round" or not any(isinstance(a, Number) and a.is_narrow for a in args):
            return super().emit(op, *args, scalars=True)
        # One operation on numbers of float32 in double precision, rounded again, is that operation in float32.
        rounded = [self._narrow(a) if op != "where" or i else a for i, a in enumerate(args)]
        found = super().emit(op, *rounded, scalars=True)
        if op in ("gt", "lt"):
            return found
        assert isinstance(found, Number)
        return found.narrowed()

    def _narrow(self, a: Any) -> Any:
        if isinstance(a, Number) and a.is_narrow:
            return a
        return super().emit("round", a, scalars=True)


@dataclass(frozen=True)
class NumberProgram:
    """Traced arithmetic.

    Attributes:
        inputs: the names of the numbers that go in.
        instructions: one ``scalar`` for each input, then the maths.
        outputs: by name, the instruction or constant that comes out.
    """

    inputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[tuple[str, int | Constant], ...]


def trace_numbers(
    inputs: tuple[str, ...], function: Callable[[Mapping[str, Number]], Mapping[str, Any]]
) -> NumberProgram:
    """Write down what a function of named numbers works out. Raises :class:`NotTraceable`."""
    tracer = _NumberTracer()
    values: dict[str, Any] = {name: tracer.input("scalar", name) for name in inputs}
    try:
        found = function(values)
        outputs = tuple(
            (name, value.number if isinstance(value, Value) else Constant(float(value)))
            for name, value in found.items()
        )
    except (TypeError, AttributeError, ValueError) as error:
        raise NotTraceable(str(error)) from error
    return NumberProgram(inputs, tuple(tracer.instructions), outputs)
