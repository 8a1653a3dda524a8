"""Numbers as symbols: a rule's arithmetic on scalars, traced and written as a Triton kernel.

Where the step counters are on a GPU, coefficients are computed there, by a kernel made from the rule's own functions:
one lane for each parameter, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.engine.cuda.source import SUPPORTED, expression
from offbeat.engine.trace import Constant, Instruction, Tracer, Value
from offbeat.rules.ops import OPERATIONS

#: Operations on numbers that updates do not have. The power is for bases of at least 0.
_MORE = {"pow": "tl.exp2({1} * tl.log2({0}))", "round": "{0}.to(tl.float32).to(tl.float64)"}


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
        return (
            self.emit("sqrt", self) if not isinstance(other, Value) and other == 0.5 else self.emit("pow", self, other)
        )

    def __rpow__(self, other: Any) -> Any:
        return self.emit("pow", other, self)

    def narrowed(self) -> Number:
        """The number as float32 stores it."""
        found: Number = self.emit("round", self)
        found.is_narrow = True
        return found

    def widened(self) -> Number:
        """The same number, with which arithmetic is in double precision."""
        return Number(self.tracer, self.number)


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
        """The value in double precision."""
        return value.widened() if isinstance(value, Number) else value


class _NumberTracer(Tracer):
    kind = Number
    combines_numbers = True

    def emit(self, op: str, *operands: Any) -> Any:
        if op == "round" or not any(isinstance(a, Number) and a.is_narrow for a in operands):
            return super().emit(op, *operands)
        # An operation on float32 numbers in double precision, rounded afterwards, is that operation in float32.
        rounded = [self._narrow(a) if op != "where" or i else a for i, a in enumerate(operands)]
        found = super().emit(op, *rounded)
        if op in OPERATIONS and OPERATIONS[op].compares:
            return found
        return found.narrowed()

    def _narrow(self, a: Any) -> Any:
        return a if isinstance(a, Number) and a.is_narrow else super().emit("round", a)


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
    """Trace a function of named numbers that returns named numbers. Raises :class:`NotTraceable`."""
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


def number_source(
    program: NumberProgram,
    stored: Mapping[str, torch.dtype],
    tensors: Mapping[str, torch.dtype],
    names: tuple[str, ...],
    compute: torch.dtype,
    columns: int,
    guarded: bool,
) -> str:
    """The source of ``kernel(words, rows, count, tensors..., [found_inf], BLOCK)``.

    ``words`` is the content of a :class:`~offbeat.engine.cuda.table.DeviceTable`: after the addresses of ``columns``
    columns, the sizes and the sets in use come the addresses of each parameter's stored numbers, then the other inputs
    as float64.

    Args:
        stored: the inputs that are stored numbers, with their dtypes. Outputs of these names are stored again, for
            parameters that have a gradient.
        tensors: the inputs that are read from 0-d tensors.
        names: the outputs to write to ``rows``, in order and in ``compute``.
        guarded: nothing is stored if ``found_inf`` is not zero.
    """
    numbers = [name for name in program.inputs if name not in stored and name not in tensors]
    arguments = ["words", "rows", "count", *(f"t{i}" for i in range(len(tensors)))]
    arguments += [*(["found_inf"] if guarded else []), "BLOCK: tl.constexpr"]
    body = ["i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "mask = i < count"]
    body.append("zero = tl.full([BLOCK], 0.0, tl.float64)")
    body.append("live = mask & (tl.load(words + count + i, mask, other=0) != 0)")
    if guarded:
        body.append("live = live & (tl.load(found_inf + i * 0, mask, other=1.0) == 0)")
    places: dict[str, str] = {}
    for number, name in enumerate(program.inputs):
        if name in stored:
            place = places[name] = f"a{number}"
            column = columns + 2 + list(stored).index(name)
            body.append(f"{place} = tl.load(words + count * {column} + i, mask, other=0)")
            body.append(f"{place} = {place}.to(tl.pointer_type({SUPPORTED[stored[name]]}))")
            body.append(f"v{number} = tl.load({place}, mask, other=1.0).to(tl.float64)")
        elif name in tensors:
            body.append(f"v{number} = tl.load(t{list(tensors).index(name)}).to(tl.float64)")
        else:
            place = f"words + count * {columns + 2 + len(stored)} + {numbers.index(name)}"
            body.append(f"v{number} = tl.load({place}).to(tl.float64, bitcast=True)")
    if any(one.op == "sign" for one in program.instructions):
        body.append("one = tl.full([1], 1.0, tl.float64)")
    for number, one in enumerate(program.instructions):
        if one.op != "scalar":
            body += _instruction(number, one)
    for name, output in program.outputs:
        value = _operand(output, body, f"o{list(dict(program.outputs)).index(name)}")
        if name in names:
            at = f"rows + i * {len(names)} + {names.index(name)}"
            body.append(f"tl.store({at}, ({value} + zero).to({SUPPORTED[compute]}), mask)")
        if name in stored:
            body.append(f"tl.store({places[name]}, ({value} + zero).to({SUPPORTED[stored[name]]}), live)")
    lines = ["import triton", "import triton.language as tl", ""]
    lines += ['@triton.jit(do_not_specialize=["count"])', f"def kernel({', '.join(arguments)}):"]
    return "\n".join([*lines, *("    " + line for line in body), ""])


def _instruction(number: int, one: Instruction) -> list[str]:
    lines: list[str] = []
    names = [_operand(a, lines, f"k{number}_{position}") for position, a in enumerate(one.args)]
    found = _MORE[one.op].format(*names) if one.op in _MORE else expression(one.op, names, torch.float64)
    return [*lines, f"v{number} = {found}"]


def _operand(a: int | Constant, lines: list[str], name: str) -> str:
    if not isinstance(a, Constant):
        return f"v{a}"
    lines.append(f"{name} = tl.full([1], {a.value!r}, tl.float64)")
    return name
