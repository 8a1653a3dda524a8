"""Traced arithmetic on a few numbers as the source of a Triton kernel: one lane for each parameter, in float64."""

from __future__ import annotations

import functools

import torch

from offbeat.tiers.numbers import NumberProgram
from offbeat.tiers.trace import Constant, Instruction
from offbeat.tiers.triton_source import EXPRESSIONS, SUPPORTED

__all__ = ["number_source"]


@functools.lru_cache(maxsize=256)
def number_source(
    program: NumberProgram,
    stored: tuple[tuple[str, torch.dtype], ...],
    tensors: tuple[tuple[str, torch.dtype], ...],
    names: tuple[str, ...],
    compute: torch.dtype,
    columns: int,
    guarded: bool,
) -> str:
    """The source of ``kernel(words, rows, count, tensors..., [found_inf], BLOCK)``.

    ``words`` is a table as :class:`~offbeat.tiers.device_table.DeviceTable` keeps it: after the addresses of
    ``columns`` columns, sizes and rows come the addresses of each parameter's stored numbers, then the other inputs as
    float64.

    Args:
        stored: the inputs that are stored numbers, and their dtypes; outputs of these names are stored again, for
            parameters that have a gradient.
        tensors: the inputs that are read from 0-d tensors.
        names: the outputs to write to ``rows``, in order and in ``compute``.
        guarded: nothing is stored if ``found_inf`` is not zero.
    """
    kinds, others = dict(stored), dict(tensors)
    numbers = [name for name in program.inputs if name not in kinds and name not in others]
    arguments = ["words", "rows", "count", *(f"t{i}" for i in range(len(tensors)))]
    arguments += [*(["found_inf"] if guarded else []), "BLOCK: tl.constexpr"]
    body = ["i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "mask = i < count"]
    body.append("live = mask & (tl.load(words + count + i, mask, other=0) != 0)")
    if guarded:
        body.append("live = live & (tl.load(found_inf + i * 0, mask, other=1.0) == 0)")
    places: dict[str, str] = {}
    for number, name in enumerate(program.inputs):
        if name in kinds:
            place = places[name] = f"a{number}"
            column = columns + 2 + list(kinds).index(name)
            body.append(f"{place} = tl.load(words + count * {column} + i, mask, other=0)")
            body.append(f"{place} = {place}.to(tl.pointer_type({SUPPORTED[kinds[name]]}))")
            body.append(f"v{number} = tl.load({place}, mask, other=1.0).to(tl.float64)")
        elif name in others:
            body.append(f"v{number} = tl.load(t{list(others).index(name)}).to(tl.float64)")
        else:
            place = f"words + count * {columns + 2 + len(stored)} + {numbers.index(name)}"
            body.append(f"v{number} = tl.load({place}).to(tl.float64, bitcast=True)")
    for number, one in enumerate(program.instructions):
        if one.op != "scalar":
            body += _instruction(number, one)
    for name, output in program.outputs:
        value = _operand(output, body, f"o{list(dict(program.outputs)).index(name)}")
        if name in names:
            at = f"rows + i * {len(names)} + {names.index(name)}"
            body.append(f"tl.store({at}, ({value} + zero).to({SUPPORTED[compute]}), mask)")
        if name in kinds:
            body.append(f"tl.store({places[name]}, ({value} + zero).to({SUPPORTED[kinds[name]]}), live)")
    body.insert(2, "zero = tl.full([BLOCK], 0.0, tl.float64)")
    lines = ["import triton", "import triton.language as tl", ""]
    lines += ['@triton.jit(do_not_specialize=["count"])', f"def kernel({', '.join(arguments)}):"]
    return "\n".join([*lines, *("    " + line for line in body), ""])


def _instruction(number: int, one: Instruction) -> list[str]:
    lines: list[str] = []
    names = [_operand(a, lines, f"k{number}_{position}") for position, a in enumerate(one.args)]
    if one.op == "pow":
        # For bases above 0, and 0 itself: there the logarithm is minus infinity.
        expression = f"tl.exp2({names[1]} * tl.log2({names[0]}))"
    elif one.op == "round":
        expression = f"{names[0]}.to(tl.float32).to(tl.float64)"
    elif one.op == "div":
        expression = f"{names[0]} / {names[1]}"
    elif one.op == "sqrt":
        expression = f"tl.sqrt({names[0]})"
    else:
        expression = EXPRESSIONS[one.op].format(*names)
    return [*lines, f"v{number} = {expression}"]


def _operand(a: int | Constant, lines: list[str], name: str) -> str:
    if not isinstance(a, Constant):
        return f"v{a}"
    lines.append(f"{name} = tl.full([1], {a.value!r}, tl.float64)")
    return name
