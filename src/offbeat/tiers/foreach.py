"""The foreach tier: a traced update over lists of tensors, one multi-tensor operator per instruction.

Extra memory is bounded: long lists are cut into pieces, a temporary is overwritten by the next instruction
as soon as nothing else needs it, and state is updated where it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.tiers.layout import flat, is_dense, same_layout
from offbeat.tiers.trace import Constant, Program

__all__ = ["run_foreach"]

#: Parameter bytes handled at once. Temporaries are two or three times that at most.
PIECE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}

_BINARY = {
    "add": (torch._foreach_add, torch._foreach_add_),
    "sub": (torch._foreach_sub, torch._foreach_sub_),
    "mul": (torch._foreach_mul, torch._foreach_mul_),
    "div": (torch._foreach_div, torch._foreach_div_),
    "max": (torch._foreach_maximum, torch._foreach_maximum_),
    "min": (torch._foreach_minimum, torch._foreach_minimum_),
}
_UNARY = {
    "neg": (torch._foreach_neg, torch._foreach_neg_),
    "abs": (torch._foreach_abs, torch._foreach_abs_),
    "sqrt": (torch._foreach_sqrt, torch._foreach_sqrt_),
    "sign": (torch._foreach_sign, torch._foreach_sign_),
}


def run_foreach(
    program: Program, columns: Sequence[Sequence[Tensor]], coefficients: dict[str, float], compute: torch.dtype
) -> None:
    """Apply ``program`` in place. ``columns`` holds one list of tensors for each of the program's inputs."""
    for piece in _pieces(columns):
        _run_piece(program, piece, coefficients, compute)


def _pieces(columns: Sequence[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """The columns in pieces of bounded size; a tensor that is too large by itself is cut along its memory."""
    limit = PIECE_BYTES.get(columns[0][0].device.type, 64 << 20)
    piece: list[list[Tensor]] = [[] for _ in columns]
    size = 0
    for row in zip(*columns, strict=True):
        nbytes = row[0].nbytes
        for part in (row,) if nbytes <= limit else _cut(row, limit // row[0].element_size()):
            part_bytes = nbytes if part is row else part[0].nbytes
            if size and size + part_bytes > limit:
                yield piece
                piece, size = [[] for _ in columns], 0
            for column, t in zip(piece, part, strict=True):
                column.append(t)
            size += part_bytes
    yield piece


def _cut(row: Sequence[Tensor], elements: int) -> Iterator[Sequence[Tensor]]:
    p = row[0]
    if p.numel() <= elements or not all(is_dense(t) and same_layout(p, t) for t in row):
        yield row
        return
    lines = [flat(t.detach()) for t in row]
    for start in range(0, p.numel(), elements):
        yield [line[start : start + elements] for line in lines]


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
        torch._foreach_copy_(targets, sources)


@functools.lru_cache(maxsize=1024)
def _plan(program: Program) -> list[tuple[int, Any]]:
    """For each instruction of the maths, a function that computes it, in place wherever that is safe."""
    instructions = program.instructions
    first = len(program.tensors) + len(program.coefficients)
    last_use = {a: number for number, one in enumerate(instructions) for a in one.args if isinstance(a, int)}
    uses: dict[int, int] = {}
    for one in instructions[first:]:
        for a in one.args:
            if isinstance(a, int):
                uses[a] = uses.get(a, 0) + 1
    last_use |= {output: len(instructions) for output in program.outputs}
    # A choice made once for the whole list is one of its operands under another name: they live as long as it does.
    for number in reversed(range(first, len(instructions))):
        if instructions[number].op == "where":
            for a in instructions[number].args:
                if isinstance(a, int):
                    last_use[a] = max(last_use[a], last_use.get(number, number))
    gradient = 1
    # Which list each value lies in: an in-place result lies where its operand lay.
    home = {number: number for number in range(len(program.tensors))}
    absorbed = _scaled_additions(program, first, uses)
    # A product that is computed inside the addition after it keeps its operand alive until then.
    for number, (_, tensor, _, product) in absorbed.items():
        last_use[tensor] = max(last_use[tensor], number)
        last_use.pop(product, None)
    steps: list[tuple[int, Any]] = []
    products = {product for *_, product in absorbed.values()}

    def overwritable(a: Any, number: int) -> bool:
        return (
            isinstance(a, int)
            and not program.scalar(a)
            and last_use[a] == number
            and home.get(a) != gradient
            and instructions[a].op != "where"  # may be one of its operands under another name
        )

    for number in range(first, len(instructions)):
        if number in products:
            continue
        one = instructions[number]
        if number in absorbed:
            base, tensor, scale, product = absorbed[number]
            sign = -1.0 if one.op == "sub" else 1.0
            in_place = overwritable(base, number) and base != tensor
            steps.append((number, functools.partial(_add_scaled, base, tensor, scale, sign, in_place)))
            home[number] = home.get(base, number) if in_place else number
            continue
        args = one.args
        if one.op in ("add", "mul") and (isinstance(args[0], Constant) or program.scalar(args[0])):
            args = (args[1], args[0])
        in_place = one.op in _BINARY.keys() | _UNARY.keys() and overwritable(args[0], number)
        in_place = in_place and args[0] not in args[1:]
        steps.append((number, functools.partial(_apply, one.op, args, in_place)))
        home[number] = home.get(args[0], number) if in_place else number
    return steps


def _scaled_additions(program: Program, first: int, uses: dict[int, int]) -> dict[int, tuple[int, int, Any, int]]:
    """Additions ``a ± s * b`` whose product nobody else needs: one operator instead of two."""
    found: dict[int, tuple[int, int, Any, int]] = {}
    for number in range(first, len(program.instructions)):
        one = program.instructions[number]
        if one.op not in ("add", "sub"):
            continue
        base, product = one.args
        if not isinstance(base, int) or program.scalar(base) or not isinstance(product, int):
            continue
        inner = program.instructions[product]
        if inner.op != "mul" or uses.get(product) != 1 or product in program.outputs or product in found:
            continue
        scalars = [a for a in inner.args if isinstance(a, Constant) or program.scalar(a)]
        tensors = [a for a in inner.args if a not in scalars]
        if len(scalars) == 1 and len(tensors) == 1:
            found[number] = (base, tensors[0], scalars[0], product)
    return found


def _value(values: list[Any], a: Any) -> Any:
    return a.value if isinstance(a, Constant) else values[a]


def _add_scaled(
    base: int, tensor: int, scale: Any, sign: float, in_place: bool, values: list[Any], compute: torch.dtype
) -> Any:
    alpha = sign * _value(values, scale)
    if in_place:
        torch._foreach_add_(values[base], values[tensor], alpha=alpha)
        return values[base]
    return list(torch._foreach_add(values[base], values[tensor], alpha=alpha))


def _apply(op: str, args: tuple[Any, ...], in_place: bool, values: list[Any], compute: torch.dtype) -> Any:
    operands = [_value(values, a) for a in args]
    if op in _UNARY:
        if in_place:
            _UNARY[op][1](operands[0])
            return operands[0]
        return list(_UNARY[op][0](operands[0]))
    if op in _BINARY:
        a, b = operands
        if not isinstance(a, list):
            return _scalar_first(op, a, b)
        if in_place:
            _BINARY[op][1](a, b)
            return a
        return list(_BINARY[op][0](a, b))
    if op in ("gt", "lt"):
        a, b = operands
        if not isinstance(a, list):  # two numbers: decided once for the whole list
            return a > b if op == "gt" else a < b
        return [t.gt(_at(b, i)) if op == "gt" else t.lt(_at(b, i)) for i, t in enumerate(a)]
    condition, a, b = operands
    if isinstance(condition, bool):
        return a if condition else b
    if not isinstance(a, list):
        a = [torch.full((), a, dtype=compute, device=c.device) for c in condition]
    return [torch.where(c, a[i], _at(b, i)) for i, c in enumerate(condition)]


def _at(x: Any, i: int) -> Any:
    return x[i] if isinstance(x, list) else x


def _scalar_first(op: str, a: float, b: list[Tensor]) -> list[Tensor]:
    if op in ("max", "min"):
        return list(_BINARY[op][0](b, a))
    if op == "sub":
        return list(torch._foreach_add(torch._foreach_neg(b), a))
    return list(torch._foreach_mul(torch._foreach_reciprocal(b), a))
