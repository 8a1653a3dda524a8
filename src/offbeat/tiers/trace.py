"""A rule's update as a list of instructions, for the tiers that do not run it on tensors directly.

The update is called once on symbolic values; what it does with them is written down as a
:class:`Program` in single-assignment form. The foreach tier interprets the program over lists of tensors,
the fused tier turns it into source code. Branches on structure (``if amsgrad:``) are taken while tracing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Constant", "Instruction", "Program", "Tracer", "Value", "trace"]


@dataclass(frozen=True)
class Instruction:
    """``value[i] = op(*args)``: ``args`` are the numbers of earlier instructions, or :class:`Constant`."""

    op: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Constant:
    """A number written in the rule."""

    value: float


@dataclass(frozen=True)
class Program:
    """A traced update.

    Attributes:
        tensors: the names of the tensor inputs, ``p`` and ``g`` first, then the state.
        coefficients: the names of the scalar inputs.
        instructions: first one ``tensor`` instruction for each name in ``tensors``, then one ``scalar``
            instruction for each coefficient, then the maths.
        outputs: the instruction whose value becomes the new ``p``, and each state tensor in order.
    """

    tensors: tuple[str, ...]
    coefficients: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    def scalar(self, number: int) -> bool:
        """Whether an instruction's value is one number for the whole tensor."""
        return self.instructions[number].op == "scalar"


class Value:
    """A symbolic tensor or coefficient that writes down what is done with it."""

    __slots__ = ("number", "tracer")

    def __init__(self, tracer: Tracer, number: int) -> None:
        self.tracer, self.number = tracer, number

    def __add__(self, other: Any) -> Value:
        return self.tracer.emit("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return self.tracer.emit("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return self.tracer.emit("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return self.tracer.emit("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return self.tracer.emit("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return self.tracer.emit("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return self.tracer.emit("div", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return self.tracer.emit("div", other, self)

    def __neg__(self) -> Value:
        return self.tracer.emit("neg", self)

    def __abs__(self) -> Value:
        return self.tracer.emit("abs", self)

    def __gt__(self, other: Any) -> Value:
        return self.tracer.emit("gt", self, other, scalars=True)

    def __lt__(self, other: Any) -> Value:
        return self.tracer.emit("lt", self, other, scalars=True)

    def sqrt(self) -> Value:
        """Square root."""
        return self.tracer.emit("sqrt", self)

    def sign(self) -> Value:
        """-1, 0 or 1."""
        return self.tracer.emit("sign", self)

    def maximum(self, other: Any) -> Value:
        """The larger."""
        return self.tracer.emit("max", self, other)

    def minimum(self, other: Any) -> Value:
        """The smaller."""
        return self.tracer.emit("min", self, other)

    def select(self, a: Any, b: Any) -> Value:
        """The first where this holds, else the second."""
        return self.tracer.emit("where", self, a, b, scalars=True)

    def __bool__(self) -> bool:
        raise TypeError(
            "an update rule cannot branch on a value: use offbeat.rules.ops.where(condition, a, b), "
            "or put the condition into the rule's structure"
        )


class Tracer:
    """Writes down instructions."""

    kind: type[Value] = Value

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []

    def input(self, kind: str, name: str) -> Value:
        """A value that comes from outside."""
        self.instructions.append(Instruction(kind, (name,)))
        return self.kind(self, len(self.instructions) - 1)

    def emit(self, op: str, *args: Any, scalars: bool = False) -> Value:
        """The value of an operation; ``scalars`` says whether it may be one of numbers alone."""
        operands = tuple(a.number if isinstance(a, Value) else Constant(float(a)) for a in args)
        if not scalars and not any(isinstance(a, int) and self.instructions[a].op != "scalar" for a in operands):
            names = [self.instructions[a].args[0] if isinstance(a, int) else a.value for a in operands]
            raise TypeError(
                f"an update rule combines coefficients ({op} of {names}): work the number out in the rule's "
                "coefficients, where it is done in double precision"
            )
        self.instructions.append(Instruction(op, operands))
        return self.kind(self, len(self.instructions) - 1)


@functools.lru_cache(maxsize=1024)
def trace(
    update: Callable[..., Sequence[Any]],
    state: tuple[str, ...],
    coefficients: tuple[str, ...],
    structure: tuple[tuple[str, bool], ...],
    late: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> Program:
    """Write down what ``update`` does with a parameter, a gradient, these state tensors and coefficients.

    Args:
        late: state that begins at the first step, where the program itself must see to that. Further coefficients say
            whether it is the first (``first``) and what each begins with (``initial_`` and its name).
        more: further coefficients, for who executes the program and not for the maths.
    """
    wanted = inspect.signature(update).parameters
    tracer = Tracer()
    tensors = ("p", "g", *state)
    if late:
        coefficients = (*coefficients, "first", *(f"initial_{name}" for name in late))
    coefficients = (*coefficients, *more)
    inputs: dict[str, Any] = {name: tracer.input("tensor", name) for name in tensors}
    inputs |= {name: tracer.input("scalar", name) for name in coefficients}
    for name in late:
        inputs[name] = (inputs["first"] > 0).select(inputs[f"initial_{name}"], inputs[name])
    inputs |= dict(structure)
    outputs = update(**{name: value for name, value in inputs.items() if name in wanted})
    if len(outputs) != 1 + len(state):
        raise TypeError(
            f"{update.__name__} returned {len(outputs)} values, but a parameter with state {list(state)} "
            f"has {1 + len(state)}: return the new p and the new state, in the slots' order"
        )
    return Program(tensors, coefficients, tuple(tracer.instructions), tuple(value.number for value in outputs))
