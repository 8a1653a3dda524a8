"""The foreach tier: a traced update over lists of tensors, one multi-tensor operator per instruction.

Extra memory is bounded: long lists are cut into pieces, a temporary is overwritten by the next instruction
as soon as nothing else needs it, and state is updated where it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat._torch import FOREACH, foreach_add, foreach_copy_
from offbeat.engine.tensors import cut
from offbeat.engine.trace import Constant, Program, TypedProgram
from offbeat.rules.ops import OPERATIONS

#: Parameter bytes handled at once, on the CPU what a cache holds. Temporaries are two or three times that at most.
PIECE_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}


def run_foreach(typed: TypedProgram, columns: Sequence[Sequence[Tensor]], coefficients: dict[str, float]) -> None:
    """Run a program in place. ``columns`` holds one list of tensors for each of its inputs."""
    for piece in _pieces(columns):
        _run_piece(typed.program, piece, coefficients, typed.compute)


def _pieces(columns: Sequence[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """The columns in pieces of bounded size; a tensor that is too large by itself is cut along its memory."""
    limit = PIECE_BYTES.get(columns[0][0].device.type, 64 << 20)
    piece: list[list[Tensor]] = [[] for _ in columns]
    size = 0
    for row in zip(*columns, strict=True):
        nbytes = row[0].nbytes
        for part in (row,) if nbytes <= limit else cut(row, limit // row[0].element_size()):
            part_bytes = nbytes if part is row else part[0].nbytes
            if size and size + part_bytes > limit:
                yield piece
                piece, size = [[] for _ in columns], 0
            for column, t in zip(piece, part, strict=True):
                column.append(t)
            size += part_bytes
    yield piece


def _run_piece(
    program: Program, columns: list[list[Tensor]], coefficients: dict[str, float], compute: torch.dtype
) -> None:
    plan = _plan(program)
    values: list[Any] = [None] * len(program.instructions)
    for number, column in enumerate(columns):
        values[number] = [t if t.dtype == compute else t.to(compute) for t in column]
    for number, name in enumerate(program.coefficients, start=len(columns)):
        values[number] = coefficients[name]
    for number, step in plan:
        values[number] = step(values, compute)
    # A result may lie where another's old value lay; it must be out of the way before that one is written.
    places = {id(t) for column in (columns[0], *columns[2:]) for t in column}
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for column, output in zip([columns[0], *columns[2:]], program.outputs, strict=True):
        for target, source in zip(column, values[output], strict=True):
            if source is not target:
                targets.append(target)
                sources.append(source.clone() if id(source) in places else source)
    if targets:
        foreach_copy_(targets, sources)


@functools.lru_cache(maxsize=1024)
def _plan(program: Program) -> list[tuple[int, Any]]:
    """For each instruction of the maths, a function that computes it, in place wherever that is safe."""
    instructions, maths = program.instructions, program.maths
    last_use = {a: number for number, one in maths for a in one.args if isinstance(a, int)}
    uses = [a for _, one in maths for a in one.args if isinstance(a, int)]
    last_use |= {output: len(instructions) for output in program.outputs}
    # A choice made once for the whole list is one of its operands under another name: they live as long as it does.
    for number, one in reversed(maths):
        if one.op == "where":
            for a in one.args:
                if isinstance(a, int):
                    last_use[a] = max(last_use[a], last_use.get(number, number))
    gradient = 1
    # Which list each value lies in: an in-place result lies where its operand lay.
    home = {number: number for number in range(len(program.tensors))}
    absorbed = _scaled_additions(program, uses)
    # What is computed inside an addition keeps its operands alive until then.
    for number, sum in absorbed.items():
        for tensor in sum.tensors:
            last_use[tensor] = max(last_use[tensor], number)
        for inner in sum.inner:
            last_use.pop(inner, None)
    steps: list[tuple[int, Any]] = []
    computed_inside = {inner for sum in absorbed.values() for inner in sum.inner}

    def overwritable(a: Any, number: int) -> bool:
        return (
            isinstance(a, int)
            and not program.scalar(a)
            and last_use[a] == number
            and home.get(a) != gradient
            and instructions[a].op != "where"  # may be one of its operands under another name
        )

    for number, one in maths:
        if number in computed_inside:
            continue
        if number in absorbed:
            base, tensors = absorbed[number].base, absorbed[number].tensors
            in_place = overwritable(base, number) and base not in tensors
            steps.append((number, functools.partial(_add_product, absorbed[number], in_place)))
            home[number] = home.get(base, number) if in_place else number
            continue
        args = one.args
        if one.op in ("add", "mul") and (isinstance(args[0], Constant) or program.scalar(args[0])):
            args = (args[1], args[0])
        in_place = OPERATIONS[one.op].foreach is not None and overwritable(args[0], number)
        in_place = in_place and args[0] not in args[1:]
        steps.append((number, functools.partial(_apply, one.op, args, in_place)))
        home[number] = home.get(args[0], number) if in_place else number
    return steps


class _Sum(NamedTuple):
    """An addition that computes its second operand too: one operator instead of two or three.

    Attributes:
        op: the operator: ``add`` for ``base ± scale * a``, ``addcmul`` for ``base ± scale * (a * b)``, ``addcdiv`` for
            ``base ± scale * (a / b)``, ``lerp`` for ``base + scale * (a - base)``.
        tensors: ``a`` and ``b``.
        inner: the instructions that are computed inside.
    """

    op: str
    base: int
    tensors: tuple[int, ...]
    scale: Any
    sign: float
    inner: tuple[int, ...]


def _scaled_additions(program: Program, uses: list[int]) -> dict[int, _Sum]:
    """Additions ``a ± s * b`` whose product nobody else needs."""

    def is_inner(a: Any) -> bool:
        return isinstance(a, int) and uses.count(a) == 1 and a not in program.outputs and a not in found

    def is_tensor(a: Any) -> bool:
        if not isinstance(a, int) or program.scalar(a):
            return False
        one = program.instructions[a]  # a choice made once for the whole list may be a number
        return one.op != "where" or all(map(is_tensor, one.args[1:]))

    found: dict[int, _Sum] = {}
    for number, one in program.maths:
        if one.op not in ("add", "sub") or not is_tensor(one.args[0]) or not is_inner(one.args[1]):
            continue
        base, product = one.args
        scalars = [a for a in program.instructions[product].args if not is_tensor(a)]
        tensors = [a for a in program.instructions[product].args if is_tensor(a)]
        if program.instructions[product].op != "mul" or len(scalars) != 1 or len(tensors) != 1:
            continue
        sign, last = -1.0 if one.op == "sub" else 1.0, program.instructions[tensors[0]]
        found[number] = _Sum("add", base, (tensors[0],), scalars[0], sign, (product,))
        op = {"mul": "addcmul", "div": "addcdiv", "sub": "lerp"}.get(last.op)
        if op is None or not is_inner(tensors[0]) or not all(map(is_tensor, last.args)):
            continue
        if op != "lerp":
            found[number] = _Sum(op, base, last.args, scalars[0], sign, (product, tensors[0]))
        elif last.args[1] == base and one.op == "add":
            found[number] = _Sum(op, base, last.args[:1], scalars[0], sign, (product, tensors[0]))
    return found


def _value(values: list[Any], a: Any) -> Any:
    return a.value if isinstance(a, Constant) else values[a]


def _add_product(sum: _Sum, in_place: bool, values: list[Any], compute: torch.dtype) -> Any:
    base, scale = values[sum.base], sum.sign * _value(values, sum.scale)
    name = {"add": "alpha", "lerp": "weight"}.get(sum.op, "value")
    result = FOREACH[sum.op + "_" * in_place](base, *(values[a] for a in sum.tensors), **{name: scale})
    return base if in_place else list(result)


def _apply(op: str, args: tuple[Any, ...], in_place: bool, values: list[Any], compute: torch.dtype) -> Any:
    """One instruction over lists; operands that are not lists are numbers."""
    operands = [_value(values, a) for a in args]
    operation = OPERATIONS[op]
    if op == "where" and not isinstance(operands[0], list):  # decided once for the whole list
        return operands[1] if operands[0] else operands[2]
    lists = [x for x in operands if isinstance(x, list)]
    if not lists:  # numbers alone: computed once for the whole list
        return operation.number(*operands)
    if operation.foreach is None:
        if op == "where" and not isinstance(operands[1], list):
            operands[1] = [torch.full((), operands[1], dtype=compute, device=c.device) for c in lists[0]]
        return [operation.tensor(*(_at(x, i) for x in operands)) for i in range(len(lists[0]))]
    if not isinstance(operands[0], list):
        return _scalar_first(op, operands[0], operands[1])
    if in_place:
        FOREACH[operation.foreach + "_"](*operands)
        return operands[0]
    return list(FOREACH[operation.foreach](*operands))


def _at(x: Any, i: int) -> Any:
    return x[i] if isinstance(x, list) else x


def _scalar_first(op: str, a: float, b: list[Tensor]) -> list[Tensor]:
    """torch's multi-tensor operators take a number only as the second operand."""
    if op == "sub":
        return list(foreach_add(FOREACH["neg"](b), a))
    if op == "div":
        return list(FOREACH["mul"](FOREACH["reciprocal"](b), a))
    return list(FOREACH[str(OPERATIONS[op].foreach)](b, a))
