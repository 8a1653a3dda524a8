"""A traced update as the source of one Triton kernel over many tensors.

The kernel reads a table of addresses, so no tensor is copied. A second table has one number for each block of elements:
the tensor, and the position of the block in it. Full blocks of aligned tensors are read and written sixteen bytes at a
time; the ends of tensors, and tensors at unaligned addresses, element by element in the same launch.

Every operation rounds once, as IEEE 754 requires (no contraction into fused multiply-adds, no approximate division or
root). Kernels that store nothing wider than half precision are less strict: the last bits of a float32 do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offbeat.engine.eight_bit import (
    CODE_DTYPES,
    COLUMN_FACTORS,
    GROUP,
    HASH_FACTORS,
    HASH_ROUNDS,
    HASH_SHIFT,
    LEVELS,
    SMALLEST,
    scaled_columns,
)
from offbeat.engine.trace import Constant, TypedProgram
from offbeat.rules.ops import OPERATIONS

SUPPORTED = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
}

_STORED = SUPPORTED | {dtype: f"tl.{str(dtype).removeprefix('torch.')}" for dtype in CODE_DTYPES.values()}


@dataclass(frozen=True)
class Variant:
    """A variant of a kernel, by what it does besides the update.

    Attributes:
        by_row: coefficients are on the device, one row for each set; else there is one set, passed at the launch.
        scaled: gradients are divided by a number on the device, and the result is stored.
        guarded: the step is skipped if a number on the device is not zero.
        clipped: gradients are multiplied by a number on the device.
        zeroed: gradients are zero afterwards.
    """

    by_row: bool = False
    scaled: bool = False
    guarded: bool = False
    clipped: bool = False
    zeroed: bool = False

    @property
    def transforms(self) -> list[str]:
        """The names of further pointers that the kernel takes, in order."""
        names = {"scale": self.scaled, "found_inf": self.guarded, "clip": self.clipped}
        return [name for name, wanted in names.items() if wanted]


#: How to round a float32 to bfloat16; and the same with integers, for the interpreter, which truncates.
NEAREST = "    return x.to(tl.bfloat16)"
NEAREST_BY_BITS = """\
    bits = x.to(tl.uint32, bitcast=True)
    odd = (bits >> 16) & tl.full([1], 1, tl.uint32)
    bits = (bits + odd + tl.full([1], 0x7FFF, tl.uint32)) & tl.full([1], 0xFFFF0000, tl.uint32)
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x).to(tl.bfloat16)"""

#: A quotient that may be wrong in the last bits; and one for the interpreter and for GPUs that are not NVIDIA's.
QUOTIENT = """\
    a, b = tl.broadcast(a, b)
    return tl.inline_asm_elementwise(
        "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )"""
PLAIN_QUOTIENT = "    return a / b"

#: Compact forms in registers; :mod:`offbeat.engine.eight_bit` defines them.
_COMPACT = f"""
@triton.jit
def random(index, step):
    x = index * tl.full([1], {HASH_FACTORS[0]:#x}, tl.uint32)
    x = x ^ (step * tl.full([1], {HASH_FACTORS[1]:#x}, tl.uint32))
{"".join(f"    x = (x ^ (x >> {n})) * tl.full([1], {factor:#x}, tl.uint32){chr(10)}" for n, factor in HASH_ROUNDS)}\
    return x ^ (x >> {HASH_SHIFT})


@triton.jit
def stochastic(x, chance, COLUMN: tl.constexpr):
    factor = tl.full([1], ({COLUMN_FACTORS[0]} + COLUMN * {COLUMN_FACTORS[1]}) & 4294967295, tl.uint32)
    low = (chance * factor) >> 16
    bits = (x.to(tl.uint32, bitcast=True) + low) & tl.full([1], 0xFFFF0000, tl.uint32)
    finite = tl.abs(x) < tl.full([1], float("inf"), tl.float32)
    return tl.where(finite, bits.to(tl.float32, bitcast=True), x).to(tl.bfloat16)


@triton.jit
def largest(x, BLOCK: tl.constexpr):
    size = tl.where(x == x, tl.abs(x), float("inf"))
    return tl.max(tl.reshape(size, [BLOCK // {GROUP}, {GROUP}]), 1)


@triton.jit
def spread(scale, BLOCK: tl.constexpr):
    return tl.reshape(tl.broadcast_to(scale[:, None], [BLOCK // {GROUP}, {GROUP}]), [BLOCK])


@triton.jit
def inverse(scale, LEVELS: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    return spread(tl.where(scale > SMALLEST, LEVELS / scale, 0.0), BLOCK)


@triton.jit
def encode_signed8(x, scale, BLOCK: tl.constexpr):
    u = tl.sqrt(tl.abs(x) * inverse(scale, {LEVELS["signed8"]}, {SMALLEST["signed8"]}, BLOCK)) + 0.5
    return tl.where(x < 0, -u, u).to(tl.int8)


@triton.jit
def encode_unsigned8(x, scale, BLOCK: tl.constexpr):
    u = tl.sqrt(tl.sqrt(x * inverse(scale, {LEVELS["unsigned8"]}, {SMALLEST["unsigned8"]}, BLOCK))) + 0.5
    return tl.where(x > 0, tl.where(u < 1.0, 1.0, u), 0.0).to(tl.int32).to(tl.uint8)


@triton.jit
def decode_signed8(c, scale, BLOCK: tl.constexpr):
    q = c.to(tl.float32)
    return q * tl.abs(q) * spread(scale * (1 / {LEVELS["signed8"]}), BLOCK)


@triton.jit
def decode_unsigned8(c, scale, BLOCK: tl.constexpr):
    q = c.to(tl.float32)
    return q * q * (q * q) * spread(scale * (1 / {LEVELS["unsigned8"]}), BLOCK)
"""


def triton_source(typed: TypedProgram, variant: Variant) -> str:
    """The source of a program.

    It defines ``kernel(blocks, table, tensors, coefficients..., transforms..., BLOCK)``. ``blocks`` holds
    ``tensor << 32 | block`` for each program, ``table`` the addresses of each column, then the sizes, and with
    ``by_row`` the row of coefficients each tensor uses. Further columns have the addresses of scales.
    """
    rough = is_rough(typed)
    lines = ["import triton", "import triton.language as tl", ""]
    if rough:
        lines += ["@triton.jit", "def quotient(a, b):", QUOTIENT, "", ""]
    lines += [*update_source(typed, rough), ""]
    if torch.bfloat16 in typed.dtypes and typed.compute == torch.float32:
        lines += ["@triton.jit", "def nearest(x):", NEAREST, "", ""]
    if typed.formats:
        lines += [*_COMPACT.strip().splitlines(), "", ""]
    return "\n".join([*lines, *_kernel(typed, variant), ""])


def is_rough(typed: TypedProgram) -> bool:
    """Return whether results are stored in so few bits that the last bits of quotients and roots do not matter."""
    written = [typed.dtypes[0], *typed.dtypes[2:]]
    return bool(scaled_columns(typed.formats)) or all(dtype in (torch.bfloat16, torch.float16) for dtype in written)


def update_source(typed: TypedProgram, rough: bool) -> list[str]:
    """The maths, as a function ``update`` of values in registers."""
    program, compute = typed.program, typed.compute
    inputs = len(program.tensors) + len(program.coefficients)
    lines = ["@triton.jit", f"def update({', '.join(f'v{i}' for i in range(inputs))}):"]
    divided_by = [instruction.args[1] for _, instruction in program.maths if instruction.op == "div"]
    divisors = {number for number in divided_by if isinstance(number, int)}
    inverses = [i for i in sorted(divisors) if rough and program.scalar(i)]
    lines += [f"    w{i} = 1.0 / v{i}" for i in inverses]
    if any(instruction.op == "sign" for _, instruction in program.maths):
        lines.append(f"    one = tl.full([1], 1.0, {SUPPORTED[compute]})")
    for number, instruction in program.maths:
        names = []
        for position, a in enumerate(instruction.args):
            if isinstance(a, Constant):
                # As a tensor, because a literal would be rounded to float32 first.
                lines.append(f"    k{number}_{position} = tl.full([1], {a.value!r}, {SUPPORTED[compute]})")
                names.append(f"k{number}_{position}")
            else:
                names.append(f"v{a}")
        if instruction.op == "div" and instruction.args[1] in inverses:
            lines.append(f"    v{number} = {names[0]} * w{instruction.args[1]}")
        else:
            lines.append(f"    v{number} = {_expression(instruction.op, names, compute, rough)}")
    lines.append(f"    return {', '.join(f'v{output}' for output in program.outputs)}")
    return lines


def _expression(op: str, operands: Sequence[str], compute: torch.dtype, rough: bool = False) -> str:
    """An operation as a Triton expression in this precision."""
    operation = OPERATIONS[op]
    template = operation.triton if compute == torch.float32 else operation.triton_wide or operation.triton
    if rough and operation.triton_rough is not None:
        template = operation.triton_rough
    return template.format(*operands)


def _kernel(typed: TypedProgram, variant: Variant) -> list[str]:
    program, dtypes, formats = typed.program, typed.dtypes, typed.formats
    columns, names = range(len(dtypes)), range(len(program.coefficients))
    c = SUPPORTED[typed.compute]
    scalars = ["rows"] if variant.by_row else [f"c{i}" for i in names]
    arguments = ["blocks", "table", "tensors", *scalars, *variant.transforms, "BLOCK: tl.constexpr"]
    lines = ['@triton.jit(do_not_specialize=["tensors"])', f"def kernel({', '.join(arguments)}):"]
    lines += [
        "    place = tl.load(blocks + tl.program_id(0))",
        "    tensor = place >> 32",
        "    start = (place & 4294967295) * BLOCK",
        *(f"    a{i} = tl.load(table + tensors * {i} + tensor)" for i in columns),
        f"    left = tl.load(table + tensors * {len(dtypes)} + tensor) - start",
        "    there = a1 != 0",
        f"    live = there{' & (tl.load(found_inf) == 0)' if variant.guarded else ''}",
        "    if live:",
    ]
    if variant.by_row:
        lines.append(
            f"        row = rows + tl.load(table + tensors * {len(dtypes) + 1} + tensor) * {len(program.coefficients)}"
        )
        lines += [f"        c{i} = tl.load(row + {i}).to({c})" for i in names]
    for name in variant.transforms:
        if name != "found_inf":
            lines.append(f"        {name}_ = tl.load({name}).to({c})")
    for position, i in enumerate(scaled_columns(formats)):
        at = f"tl.load(table + tensors * {len(dtypes) + 2 + position} + tensor)"
        lines.append(f"        z{i} = {at}.to(tl.pointer_type(tl.float32)) + start // {GROUP}")
    lines.append("        inside = tl.arange(0, BLOCK)")
    if scaled_columns(formats):
        lines.append(f"        groups = tl.arange(0, BLOCK // {GROUP})")
    if "stochastic" in formats:
        step = program.coefficients.index("rounding_step")
        lines.append(f"        step = (c{step} + tl.full([1], 0.0, tl.float32)).to(tl.uint32)")
        lines.append("        chance = random((start + inside).to(tl.uint32), step)")
    lines.append(f"        aligned = (({' | '.join(f'a{i}' for i in columns)}) & 15) == 0")
    lines.append("        if (left >= BLOCK) & aligned:")
    lines += _pass(typed, variant, whole=True)
    lines.append("        else:")
    lines.append("            mask = inside < left")
    lines += _pass(typed, variant, whole=False)
    if variant.guarded and variant.zeroed:  # also where the step does not happen
        kind = SUPPORTED[dtypes[1]]
        lines += ["    if there & (tl.load(found_inf) != 0):", "        inside = tl.arange(0, BLOCK)"]
        lines.append(f"        p1 = a1.to(tl.pointer_type({kind})) + start")
        lines.append(f"        tl.store(p1 + inside, tl.full([BLOCK], 0.0, {kind}), inside < left)")
    return lines


def _pass(typed: TypedProgram, variant: Variant, *, whole: bool) -> list[str]:
    """Load a block, update it, store it."""
    program, dtypes, compute = typed.program, typed.dtypes, typed.compute
    tensors = range(len(program.tensors))
    form = typed.formats or ("plain",) * len(tensors)
    c, mask = SUPPORTED[compute], "" if whole else ", mask"
    load = "tl.load({0} + inside)" if whole else "tl.load({0} + inside, mask, other=0)"
    lines = []
    for i, dtype in enumerate(dtypes):
        pointer = f"a{i}.to(tl.pointer_type({_STORED[dtype]}))"
        lines.append(f"p{i} = {f'tl.multiple_of({pointer}, 16)' if whole else pointer} + start")
    for i in tensors:
        if form[i] in CODE_DTYPES:
            inside = "" if whole else f", groups * {GROUP} < left, other=0.0"
            scale = f"tl.load(z{i} + groups{inside})"
            lines.append(f"v{i} = decode_{form[i]}({load.format(f'p{i}')}, {scale}, BLOCK)")
        else:
            lines.append(f"v{i} = {load.format(f'p{i}')}.to({c})")
    extra = len(tensors)
    if form[0] == "kahan":
        lines.append(f"v0 = v0 + {load.format(f'p{extra}')}.to({c})")
    if variant.scaled:
        lines.append(f"v1 = {_expression('div', ['v1', 'scale_'], compute)}")
    if variant.zeroed:
        lines.append(f"tl.store(p1 + inside, tl.full([BLOCK], 0.0, {SUPPORTED[dtypes[1]]}){mask})")
    elif variant.scaled:
        lines.append(f"tl.store(p1 + inside, {_cast('v1', dtypes[1], compute)}{mask})")
    if variant.clipped:
        lines.append("v1 = v1 * clip_")
        if dtypes[1] != compute:  # as gradient * number is
            lines.append(f"v1 = {_cast('v1', dtypes[1], compute)}.to({c})")
    outputs = [0, *range(2, len(tensors))]
    values = [f"v{i}" for i in tensors] + [f"c{i}" for i in range(len(program.coefficients))]
    lines.append(f"{', '.join(f'n{i}' for i in outputs)} = update({', '.join(values)})")
    for i in outputs:
        stored = _cast(f"n{i}", dtypes[i], compute)
        if form[i] == "stochastic":
            stored = f"stochastic(n{i}, chance, {i})"
        elif form[i] == "kahan":
            lines.append(f"r{i} = {stored}")
            lost = _cast(f"(n{i} - r{i}.to({c}))", dtypes[extra], compute)
            lines.append(f"tl.store(p{extra} + inside, {lost}{mask})")
            stored = f"r{i}"
        elif form[i] in CODE_DTYPES:
            if not whole:
                lines.append(f"n{i} = tl.where(mask, n{i}, 0.0)")
            lines.append(f"s{i} = largest(n{i}, BLOCK)")
            # Stored by one thread of each group: storing it as a vector would need shared memory.
            first = f"(inside % {GROUP} == 0){'' if whole else ' & mask'}"
            lines.append(f"tl.store(z{i} + inside // {GROUP}, spread(s{i}, BLOCK), {first})")
            stored = f"encode_{form[i]}(n{i}, s{i}, BLOCK)"
        lines.append(f"tl.store(p{i} + inside, {stored}{mask})")
    return ["            " + line for line in lines]


def _cast(value: str, dtype: torch.dtype, compute: torch.dtype) -> str:
    if dtype == torch.bfloat16 and compute == torch.float32:
        return f"nearest({value})"
    return f"{value}.to({_STORED[dtype]})"
