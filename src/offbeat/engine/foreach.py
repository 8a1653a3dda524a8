"""The foreach tier: a traced update over lists of tensors, one multi-tensor operator per instruction.

Extra memory is bounded: long lists and large tensors are cut into pieces, an operator overwrites a temporary as soon
as nothing else needs it, and state is updated where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from offbeat._torch import foreach_copy_, join_tensors, split_like
from offbeat.engine.foreach_plan import Numbers, Plan, make_plan, numbers_of
from offbeat.engine.tensors import cut
from offbeat.engine.trace import Constant, Program, TypedProgram
from offbeat.rules.ops import OPERATIONS

#: Elements of the parameters that are updated at once. On a CPU they fit into a cache, with their gradients, state and
#: temporaries. Tensors that must be converted are copied, so fewer of them fit.
ELEMENTS = {"cpu": 1 << 19, "other": 1 << 24}
CONVERTED = {"cpu": 1 << 18, "other": 1 << 22}
#: On a CPU, lists of tensors with fewer elements than this on average are joined if they must be converted anyway.
SMALL = 1 << 12


def run_foreach(
    typed: TypedProgram,
    columns: Sequence[Sequence[Tensor]],
    coefficients: dict[str, float],
    pieces: Sequence[Sequence[int]] | None = None,
) -> None:
    """Run a program in place.

    Args:
        columns: one list of tensors for each of the program's inputs.
        coefficients: its coefficients by name.
        pieces: the result of :func:`pieces_of` for these columns, if it is known.
    """
    program, compute, first = typed.program, typed.compute, columns[0][0]
    on_cpu = first.device.type == "cpu"
    constant = numbers_of(program)
    numbers = _numbers(program, constant, coefficients)
    decided = tuple([bool(numbers[a]) for a in constant.conditions])
    plan = make_plan(program, decided, 1 in typed.converted, on_cpu)
    limit = _limit(typed, first)
    pieces = pieces_of(typed, columns[0]) if pieces is None else pieces
    if len(pieces) == 1 and len(columns[0]) > 1 and not typed.converted:
        _run_piece(plan, columns, numbers, compute, ())
        return
    for piece in pieces:
        whole = len(piece) == len(columns[0])
        rows: list[Sequence[Tensor]] = list(columns) if whole else [[column[i] for i in piece] for column in columns]
        if len(rows[0]) == 1 and rows[0][0].numel() > limit:
            for part in cut([column[0] for column in rows], limit):
                _run_piece(plan, [[t] for t in part], numbers, compute, typed.converted)
        elif typed.converted and on_cpu and sum([p.numel() for p in rows[0]]) < SMALL * (len(rows[0]) - 1):
            _run_joined(plan, rows, numbers, compute)
        else:
            _run_piece(plan, rows, numbers, compute, typed.converted)


def pieces_of(typed: TypedProgram, tensors: Sequence[Tensor]) -> list[list[int]]:
    """Which of these tensors to update at once: a bounded number of elements, or one tensor that has more."""
    limit, size = _limit(typed, tensors[0]), 0
    pieces: list[list[int]] = []
    small: list[int] = []
    for i, t in enumerate(tensors):
        numel = t.numel()
        if numel > limit:
            pieces.append([i])
            continue
        if small and size + numel > limit:
            pieces.append(small)
            small, size = [], 0
        small.append(i)
        size += numel
    return [*pieces, small] if small else pieces


def _limit(typed: TypedProgram, t: Tensor) -> int:
    return (CONVERTED if typed.converted else ELEMENTS)["cpu" if t.device.type == "cpu" else "other"]


def _numbers(program: Program, constant: Numbers, coefficients: dict[str, float]) -> list[Any]:
    """The values of the instructions that are one number for all tensors, by their numbers."""
    values: list[Any] = [None] * len(program.tensors)
    values += [coefficients[name] for name in program.coefficients]
    values += [None] * (len(program.instructions) - len(values))
    for number, instruction in constant.maths:
        operands = (a.value if isinstance(a, Constant) else values[a] for a in instruction.args)
        values[number] = OPERATIONS[instruction.op].number(*operands)
    return values


def _run_piece(
    plan: Plan, columns: Sequence[Sequence[Tensor]], numbers: list[Any], compute: torch.dtype, converted: Sequence[int]
) -> None:
    inputs: Sequence[Sequence[Tensor]] = columns
    if converted:
        inputs = copies = list(columns)
        for i in converted:
            copies[i] = [t.to(compute) for t in columns[i]]
    results = plan(*inputs, numbers=numbers, dtype=compute)
    targets = [columns[0], *columns[2:]]
    if any(map(is_not, results, targets)):
        _write(targets, results)


def _run_joined(plan: Plan, columns: list[Sequence[Tensor]], numbers: list[Any], compute: torch.dtype) -> None:
    """Copy each list to one tensor, and update that: an operator then takes as long as for one small tensor."""
    inputs = [[join_tensors(column).to(compute)] for column in columns]
    targets = [columns[0], *columns[2:]]
    results = plan(*inputs, numbers=numbers, dtype=compute)
    _write(
        targets,
        [x if _is_number(x) else split_like(x[0].to(t[0].dtype), t) for t, x in zip(targets, results, strict=True)],
    )


def _write(targets: list[Sequence[Tensor]], results: Sequence[Any]) -> None:
    """Copy results to where they belong. A number is the new value of every element."""
    changed = [(target, new) for target, new in zip(targets, results, strict=True) if new is not target]
    # A result may be stored in the list of another target; it must be copied before that one is written.
    sources: list[Any] = [
        [t.clone() for t in new] if any(new is other for other in targets) else new for _, new in changed
    ]
    for (target, _), source in zip(changed, sources, strict=True):
        if _is_number(source):
            for t in target:
                t.fill_(source)
        else:
            foreach_copy_(target, source)


def _is_number(x: Any) -> bool:
    return isinstance(x, (float, int))
