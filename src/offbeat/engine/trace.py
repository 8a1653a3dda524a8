"""A rule's update as a list of instructions, for the tiers that do not run it on tensors directly.

The update is called once with symbolic values, which record its operations as a :class:`Program` in single-assignment
form. The foreach tier runs the program over lists of tensors; the fused tier turns it into source code. Branches on
structure (``if amsgrad:``) are decided while tracing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.engine.tensors import compute_dtype
from offbeat.rules.ops import OPERATIONS, where
from offbeat.rules.rule import Rule


@dataclass(frozen=True)
class Constant:
    """A number written in the rule."""

    value: float


@dataclass(frozen=True)
class Instruction:
    """``value[i] = op(*args)``: ``args`` are the numbers of earlier instructions, or :class:`Constant`."""

    op: str
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A traced update. It is traced once and cached, so programs are compared by identity.

    Attributes:
        tensors: the names of the tensor inputs, ``p`` and ``g`` first, then the state.
        coefficients: the names of the scalar inputs.
        instructions: first one ``tensor`` instruction for each name in ``tensors``, then one ``scalar``
            instruction for each coefficient, then the maths.
        outputs: the instructions whose values become the new ``p`` and the new state tensors, in order.
    """

    tensors: tuple[str, ...]
    coefficients: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    @property
    def maths(self) -> list[tuple[int, Instruction]]:
        """The instructions that compute something, with their numbers."""
        first = len(self.tensors) + len(self.coefficients)
        return list(enumerate(self.instructions))[first:]

    def scalar(self, number: int) -> bool:
        """Return whether an instruction's value is one number for the whole tensor."""
        return self.instructions[number].op == "scalar"


@dataclass(frozen=True)
class TypedProgram:
    """A program with the dtypes of its tensors, from which a kernel is made.

    Attributes:
        program: the traced update.
        dtypes: the dtypes of p, g and the state, and with ``kahan`` of the rounding errors.
        formats: how p, g and each state tensor are stored, if not all of them ``plain``: see
            :mod:`offbeat.engine.eight_bit`.
    """

    program: Program
    dtypes: tuple[torch.dtype, ...]
    formats: tuple[str, ...] = ()

    @functools.cached_property
    def compute(self) -> torch.dtype:
        """The dtype to compute in."""
        return compute_dtype(self.dtypes)

    @functools.cached_property
    def converted(self) -> tuple[int, ...]:
        """The tensors that are not stored in that dtype, by their positions."""
        return tuple(i for i, dtype in enumerate(self.dtypes) if dtype != self.compute)


_ALLOWED = (
    "an update may use +, -, *, /, abs, comparisons, and sqrt, sign, maximum, minimum and where from offbeat.rules.ops"
)


class Value:
    """A symbolic value. Its operators record instructions; they come from the table of operations."""

    __slots__ = ("number", "tracer")

    def __init__(self, tracer: Tracer, number: int) -> None:
        self.tracer, self.number = tracer, number

    def emit(self, op: str, *operands: Any) -> Any:
        """Record an operation and return its value."""
        return self.tracer.emit(op, *operands)

    def __bool__(self) -> bool:
        raise TypeError(
            "an update rule cannot branch on a value: use offbeat.rules.ops.where(condition, a, b), "
            "or put the condition into the rule's structure"
        )

    def __pow__(self, exponent: Any) -> Any:
        raise TypeError(f"an update rule cannot raise a value to a power; write g * g for a square; {_ALLOWED}")

    __rpow__ = __pow__

    def __float__(self) -> float:
        raise TypeError(f"an update rule cannot turn a value into a number; {_ALLOWED}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a value in an update rule has no attribute {name!r}; {_ALLOWED}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Say what to call instead of torch's functions."""
        name = getattr(function, "__name__", function)
        raise TypeError(f"an update rule cannot call torch.{name}; {_ALLOWED}")

    __hash__ = object.__hash__


def _method(name: str, *, reflected: bool) -> Callable[..., Any]:
    def method(self: Value, *others: Any) -> Any:
        return self.emit(name, *others, self) if reflected else self.emit(name, self, *others)

    return method


def _add_operators() -> None:
    for name, operation in OPERATIONS.items():
        if operation.python is not None:
            setattr(Value, operation.python, _method(name, reflected=False))
        if name in ("add", "sub", "mul", "div"):
            setattr(Value, str(operation.python).replace("__", "__r", 1), _method(name, reflected=True))


class Tracer:
    """Records instructions."""

    kind: type[Value] = Value
    #: Whether an operation may combine numbers only. An update must not: see :meth:`emit`.
    combines_numbers = False

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []

    def input(self, kind: str, name: str) -> Any:
        """Record an input and return its value."""
        self.instructions.append(Instruction(kind, (name,)))
        return self.kind(self, len(self.instructions) - 1)

    def emit(self, op: str, *operands: Any) -> Any:
        """Record an operation and return its value."""
        if op == "where" and isinstance(operands[0], bool):
            return operands[1] if operands[0] else operands[2]
        numbers = tuple(a.number if isinstance(a, Value) else Constant(float(a)) for a in operands)
        allowed = self.combines_numbers or op == "where" or OPERATIONS[op].compares
        if not allowed and not any(isinstance(a, int) and self.instructions[a].op != "scalar" for a in numbers):
            names = [self.instructions[a].args[0] if isinstance(a, int) else a.value for a in numbers]
            raise TypeError(
                f"an update rule combines coefficients ({op} of {names}): compute that number in the rule's "
                "coefficients, where it is done in double precision"
            )
        self.instructions.append(Instruction(op, numbers))
        return self.kind(self, len(self.instructions) - 1)


@functools.lru_cache(maxsize=1024)
def trace(
    rule: Rule,
    state: tuple[str, ...],
    coefficients: tuple[str, ...],
    structure: tuple[tuple[str, bool], ...],
    late: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> Program:
    """Record what the rule's update does with a parameter, a gradient, these state tensors and coefficients.

    Args:
        late: state tensors that the program itself initialises at the first step. The coefficient ``first`` is 1 at the
            first step, and ``initial_KEY`` is the initial value.
        more: further coefficients, which the kernel needs but the maths does not.
    """
    tracer = Tracer()
    names = ("p", "g", *state)
    if late:
        coefficients = (*coefficients, "first", *(f"initial_{name}" for name in late))
    coefficients = (*coefficients, *more)
    tensors = {name: tracer.input("tensor", name) for name in names}
    scalars = {name: tracer.input("scalar", name) for name in coefficients}
    for name in late:
        tensors[name] = where(scalars["first"] > 0, scalars[f"initial_{name}"], tensors[name])
    _check_arguments(rule.update, names, {*scalars, *dict(structure), "c"})
    outputs = rule.apply(tensors, scalars | dict(structure))
    _check_outputs(rule.update, outputs, state)
    return Program(names, coefficients, tuple(tracer.instructions), tuple(value.number for value in outputs))


def _check_arguments(update: Callable[..., Any], tensors: Sequence[str], others: set[str]) -> None:
    """Raise unless the update takes the parameter, the gradient and the state by these names, and nothing unknown."""
    parameters = inspect.signature(update).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    missing = [] if len(named) < len(parameters) else [name for name in tensors if name not in named]
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    unknown = sorted(needed - set(tensors) - others)
    if missing or unknown:
        words = [f"does not take {', '.join(missing)}"] * bool(missing)
        words += [f"takes {', '.join(unknown)}, which is no slot or coefficient"] * bool(unknown)
        raise TypeError(
            f"{update.__name__} {' and '.join(words)}: its arguments are {', '.join(tensors)} (p, g and the slots by "
            "name) and c"
        )


def _check_outputs(update: Callable[..., Any], outputs: Any, state: Sequence[str]) -> None:
    if not isinstance(outputs, (tuple, list)):
        raise TypeError(
            f"{update.__name__} must return a tuple, the new p and the new state, but it returned "
            f"{'one value' if isinstance(outputs, Value) else repr(outputs)}"
        )
    if len(outputs) != 1 + len(state):
        raise TypeError(
            f"{update.__name__} returned {len(outputs)} values, but a parameter with state {list(state)} "
            f"needs {1 + len(state)}: return the new p and the new state, in the order of the slots"
        )
    odd = next((value for value in outputs if not isinstance(value, Value)), None)
    if odd is not None:
        raise TypeError(
            f"{update.__name__} returned {odd!r}, which depends on none of its arguments: compute every result from "
            "the parameter, the gradient or the state"
        )


_add_operators()
