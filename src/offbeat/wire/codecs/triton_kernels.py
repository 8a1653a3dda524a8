"""The codecs as Triton kernels, for finite values; integers.py, halves.py and topk.py have the maths.

They must be compiled without fused multiply-adds, or products would not be rounded before they are rounded to integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "decode_bf16",
    "decode_fp16",
    "decode_int",
    "decode_topk",
    "encode_bf16",
    "encode_fp16",
    "encode_int",
    "encode_topk",
]

TINY = tl.constexpr(47 << 23)  # 2 ** -80
#: Adding and subtracting it rounds a float32 to an integer, half to even.
ROUND = tl.constexpr(12582912.0)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _int_places(numel, BLOCK: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Rows of this program, byte and place of each element as (row, plane, byte), and masks of both.

    The last block may be shorter, and so may its bytes.
    """
    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = BLOCK // PER_BYTE
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    width = tl.minimum(tl.maximum(numel - row * BLOCK, 0), BLOCK).to(tl.int32)
    stride = (width + (PER_BYTE - 1)) // PER_BYTE
    byte = tl.arange(0, BYTES)
    plane = tl.arange(0, PER_BYTE)
    has_byte = byte[None, :] < stride[:, None]
    place = plane[None, :, None] * stride[:, None, None] + byte[None, None, :]
    has_place = has_byte[:, None, :] & (place < width[:, None, None])
    return row, byte, plane, place, has_byte, has_place


@triton.jit
def encode_int(
    x,
    out,
    residual,
    numel,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIGNED: tl.constexpr,
    CAP: tl.constexpr,
    ROWS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    RECORD: tl.constexpr = 2 + BLOCK * BITS // 8
    row, byte, plane, place, has_byte, has_place = _int_places(numel, BLOCK, BITS, ROWS)
    at = row[:, None, None] * BLOCK + place
    values = tl.load(x + at, mask=has_place, other=0.0)
    bits = _bits(values)
    size = bits & 0x7FFFFFFF
    positive = tl.max(tl.max(tl.where(bits >= 0, size, 0), 2), 1)
    negative = tl.max(tl.max(tl.where(bits < 0, size, 0), 2), 1)
    largest = tl.maximum(positive, negative)
    scale_bits = tl.minimum((_bits(_float(largest) * (1.0 / HIGH)) + 0xFFFF) >> 16, CAP)
    scale_bits = tl.where(largest < TINY, 0, scale_bits)
    if SIGNED:
        scale_bits = tl.where((negative > positive) & (scale_bits != 0), scale_bits | 0x8000, scale_bits)
    scale = _float(scale_bits << 16)
    inverse = tl.where(scale_bits == 0, 0.0, tl.div_rn(1.0, tl.where(scale_bits == 0, 1.0, scale)))
    rounded = (values * inverse[:, None, None] + ROUND) - ROUND
    codes = tl.minimum(tl.maximum(rounded, LOW), HIGH).to(tl.int32) - LOW
    if RESIDUAL:
        tl.store(residual + at, values - (codes + LOW).to(tl.float32) * scale[:, None, None], mask=has_place)
    packed = tl.sum(tl.where(has_place, codes << (plane[None, :, None] * BITS), 0), 1)
    record = out + row * RECORD
    has_row = row * BLOCK < numel
    tl.store(record, (scale_bits & 0xFF).to(tl.uint8), mask=has_row)
    tl.store(record + 1, (scale_bits >> 8).to(tl.uint8), mask=has_row)
    tl.store(record[:, None] + 2 + byte[None, :], packed.to(tl.uint8), mask=has_byte)


@triton.jit
def decode_int(
    data,
    out,
    numel,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    LOW: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    RECORD: tl.constexpr = 2 + BLOCK * BITS // 8
    row, byte, plane, place, has_byte, has_place = _int_places(numel, BLOCK, BITS, ROWS)
    record = data + row * RECORD
    has_row = row * BLOCK < numel
    low = tl.load(record, mask=has_row, other=0).to(tl.int32)
    scale_bits = low | tl.load(record + 1, mask=has_row, other=0).to(tl.int32) << 8
    packed = tl.load(record[:, None] + 2 + byte[None, :], mask=has_byte, other=0).to(tl.int32)
    codes = (packed[:, None, :] >> (plane[None, :, None] * BITS)) & ((1 << BITS) - 1)
    values = (codes + LOW).to(tl.float32) * _float(scale_bits << 16)[:, None, None]
    at = out + row[:, None, None] * BLOCK + place
    if ADD:
        values = tl.load(at, mask=has_place, other=0.0) + values
    tl.store(at, values, mask=has_place)


@triton.jit
def encode_bf16(x, out, residual, numel, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    values = tl.load(x + at, mask=mask, other=0.0)
    bits = _bits(values)
    size = bits & 0x7FFFFFFF
    rounded = tl.minimum((size + 0x7FFF + ((size >> 16) & 1)) >> 16, 0x7F7F)
    code = rounded | ((bits >> 16) & 0x8000)
    if RESIDUAL:
        tl.store(residual + at, values - _float(code << 16), mask=mask)
    tl.store(out + at, code.to(tl.int16), mask=mask)


@triton.jit
def decode_bf16(data, out, numel, BLOCK: tl.constexpr, ADD: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    values = _float(tl.load(data + at, mask=mask, other=0).to(tl.int32) << 16)
    if ADD:
        values = tl.load(out + at, mask=mask, other=0.0) + values
    tl.store(out + at, values, mask=mask)


@triton.jit
def encode_fp16(x, out, residual, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr, RESIDUAL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * BLOCK + column[None, :]
    mask = at < numel
    values = tl.load(x + at, mask=mask, other=0.0)
    largest = tl.max(_bits(values) & 0x7FFFFFFF, 1)
    exponent = (largest >> 23) - 15
    is_tiny = largest < TINY
    scale_bits = tl.where(is_tiny, 0, exponent << 23)
    inverse = _float(tl.where(is_tiny, 0, (254 - exponent) << 23))
    scaled = tl.minimum(tl.maximum(values * inverse[:, None], -65504.0), 65504.0)
    halves = scaled.to(tl.float16)
    if RESIDUAL:
        tl.store(residual + at, values - halves.to(tl.float32) * _float(scale_bits)[:, None], mask=mask)
    record = out + row * (1 + BLOCK)
    tl.store(record, (scale_bits >> 16).to(tl.int16), mask=row * BLOCK < numel)
    tl.store(record[:, None] + 1 + column[None, :], halves.to(tl.int16, bitcast=True), mask=mask)


@triton.jit
def decode_fp16(data, out, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * BLOCK + column[None, :]
    mask = at < numel
    record = data + row * (1 + BLOCK)
    scale = _float(tl.load(record, mask=row * BLOCK < numel, other=0).to(tl.int32) << 16)
    halves = tl.load(record[:, None] + 1 + column[None, :], mask=mask, other=0).to(tl.float16, bitcast=True)
    values = halves.to(tl.float32) * scale[:, None]
    if ADD:
        values = tl.load(out + at, mask=mask, other=0.0) + values
    tl.store(out + at, values, mask=mask)


@triton.jit
def _put(row, at, value, mask):
    """Write bits, which are zero before, at a place counted in bits. At most 16 of them."""
    shift = at & 31
    spilt = tl.where(shift > 16, value >> ((32 - shift) & 31), 0)
    tl.atomic_or(row + (at >> 5), value << shift, mask=mask & (value != 0))
    tl.atomic_or(row + (at >> 5) + 1, spilt, mask=mask & (spilt != 0))


@triton.jit
def _get(row, at, count, mask):
    """Read at most 16 bits."""
    byte = row + (at >> 3)
    value = tl.load(byte, mask=mask, other=0).to(tl.int32)
    for i in tl.static_range(1, 3):
        more = mask & ((at & 7) + count > 8 * i)
        value = value | tl.load(byte + i, mask=more, other=0).to(tl.int32) << 8 * i
    return (value >> (at & 7)) & ((1 << count) - 1)


@triton.jit
def _sent(code, smallest, step):
    size = smallest + ((code >> 1).to(tl.float32) + 0.5) * step
    size = tl.minimum(size, 3.4028234663852886e38)
    return tl.where((code & 1) == 1, -size, size)


@triton.jit
def encode_topk(
    x,
    words,
    residual,
    width,
    k,
    low,
    unary,
    word_count,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    K_LIMIT: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """One chunk. Writes its record as 32-bit words, of which the bits must be zero before."""
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    chunk = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, CHUNK)
    inside = j < width
    values = tl.load(x + chunk * width + j, mask=inside, other=0.0)
    bits = _bits(values)
    size = tl.where(inside, bits & 0x7FFFFFFF, -1)
    least = 0
    for i in range(31):
        tried = least | (1 << (30 - i))
        least = tl.where(tl.sum((size >= tried).to(tl.int32), 0) >= k, tried, least)
    equal = size == least
    room = k - tl.sum((size > least).to(tl.int32), 0)
    chosen = (size > least) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    sent = chosen & (size >= TINY)
    count = tl.sum(sent.to(tl.int32), 0)
    order = tl.cumsum(sent.to(tl.int32), 0) - 1
    smallest_bits = tl.min(tl.where(sent, size, 0x7FFFFFFF), 0)
    smallest_bits = tl.where(count == 0, 0, smallest_bits)
    smallest, largest = _float(smallest_bits), _float(tl.max(tl.where(sent, size, 0), 0))
    step_bits = (_bits((largest - smallest) * (1.0 / LEVELS)) + 0xFFFF) >> 16
    step = _float(step_bits << 16)
    inverse = tl.where(step_bits == 0, 0.0, tl.div_rn(1.0, tl.where(step_bits == 0, 1.0, step)))
    level = tl.where(sent, (_float(size) - smallest) * inverse, 0.0).to(tl.int32)
    code = tl.minimum(level, LEVELS - 1) << 1 | (bits < 0).to(tl.int32)
    if RESIDUAL:
        left = tl.where(sent, values - _sent(code, smallest, step), values)
        tl.store(residual + chunk * width + j, left, mask=inside)
    row = words + chunk * word_count
    tl.store(row, count | step_bits << 16)
    tl.store(row + 1, smallest_bits)
    row += 2
    first_code = k * low + unary
    _put(row, order * low, j & ((1 << low) - 1), sent)
    _put(row, k * low + (j >> low) + order, tl.full((CHUNK,), 1, tl.int32), sent)
    _put(row, first_code + order * BITS, code, sent)
    # Places without an element hold the last index.
    empty = tl.arange(0, K_LIMIT)
    is_empty = (empty >= count) & (empty < k)
    last = tl.full((K_LIMIT,), 0, tl.int32) + (width - 1)
    _put(row, empty * low, last & ((1 << low) - 1), is_empty)
    _put(row, k * low + (last >> low) + empty, tl.full((K_LIMIT,), 1, tl.int32), is_empty)


@triton.jit
def decode_topk(
    data,
    out,
    width,
    k,
    low,
    unary,
    record_bytes,
    BITS: tl.constexpr,
    UNARY_LIMIT: tl.constexpr,
    ADD: tl.constexpr,
):
    """One chunk. Without ``ADD``, ``out`` must be zero before."""
    chunk = tl.program_id(0).to(tl.int64)
    record = data + chunk * record_bytes
    count = tl.load(record).to(tl.int32) | tl.load(record + 1).to(tl.int32) << 8
    step_bits = tl.load(record + 2).to(tl.int32) | tl.load(record + 3).to(tl.int32) << 8
    smallest_bits = tl.load(record + 4).to(tl.int32) | tl.load(record + 5).to(tl.int32) << 8
    smallest_bits |= tl.load(record + 6).to(tl.int32) << 16 | tl.load(record + 7).to(tl.int32) << 24
    record += 8
    place = tl.arange(0, UNARY_LIMIT)
    is_set = _get(record, k * low + place, 1, place < unary) == 1
    order = tl.cumsum(is_set.to(tl.int32), 0) - 1
    sent = is_set & (order < count)
    j = (place - order) << low | _get(record, order * low, low, sent)
    code = _get(record, k * low + unary + order * BITS, BITS, sent)
    values = _sent(code, _float(smallest_bits), _float(step_bits << 16))
    at = out + chunk * width + j
    sent = sent & (j < width)
    if ADD:
        values = tl.load(at, mask=sent, other=0.0) + values
    tl.store(at, values, mask=sent)
