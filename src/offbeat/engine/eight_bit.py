r"""Compact forms of state and parameters, which use fewer bits: their definition, with torch's operators.

- ``signed8``: blocks of 256 elements share a scale :math:`s`, their largest absolute value. A code :math:`c` from -127
  to 127 represents :math:`s \, \mathrm{sign}(c) (c/127)^2`.
- ``unsigned8``: likewise, a code from 0 to 255 represents :math:`s \, (c/255)^4`. A number that is not zero never gets
  the code 0. In both forms, one NaN or infinity makes the whole block invalid.
- ``stochastic``: bfloat16, rounded up or down at random, which is unbiased. The random bits are a hash of the element's
  position, the step and the column, so a step can be repeated.
- ``kahan``: bfloat16, with the rounding error kept in a second bfloat16.

The kernels do the same in registers, with the constants below. Tests compare them with these functions, which also
run where there is no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.engine.tensors import flat

#: Elements that share a scale.
GROUP = 256

#: The largest code's value, in units of the smallest value above zero.
LEVELS = {"signed8": 127.0**2, "unsigned8": 255.0**4}
#: A block with a smaller scale is stored as zeros, or as the smallest code: LEVELS / scale would overflow float32.
SMALLEST = {"signed8": 1e-30, "unsigned8": 2e-29}

_LARGEST = {"signed8": 127, "unsigned8": 255}

CODE_DTYPES = {"signed8": torch.int8, "unsigned8": torch.uint8}

#: The hash behind stochastic rounding, on 32 bits: index and step are multiplied by the factors and combined by xor;
#: each round is ``x = (x ^ x >> shift) * factor``; at the end ``x ^ x >> HASH_SHIFT``.
HASH_FACTORS = (0x9E3779B1, 0x85EBCA6B)
HASH_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
HASH_SHIFT = 16
#: Column ``i`` multiplies the hash by ``first + i * second`` and takes the upper 16 bits.
COLUMN_FACTORS = (2654435761, 3327595350)
_LOW = 0xFFFFFFFF


def scaled_columns(formats: tuple[str, ...]) -> list[int]:
    """The columns that have scales."""
    return [i for i, form in enumerate(formats) if form in CODE_DTYPES]


def scales_for(elements: int) -> int:
    """The number of scales of a tensor with this many elements."""
    return -(-elements // GROUP)


def decode(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """The numbers that codes represent, in float32 and with the strides of the codes."""
    q = flat(codes).to(torch.float32)
    each = (scales * (1 / LEVELS[kind])).repeat_interleave(GROUP)[: len(q)]
    x = q * q.abs() * each if kind == "signed8" else q * q * (q * q) * each
    result = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.preserve_format)
    flat(result).copy_(x)
    return result


def decode_exactly(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Like :func:`decode`, but the largest code gives exactly its scale, so encoding again gives the same scales."""
    x = decode(codes, scales, kind)
    q, each = flat(codes).to(torch.int16), scales.repeat_interleave(GROUP)[: codes.numel()]
    largest = _LARGEST[kind]
    flat(x).copy_(torch.where(q == largest, each, torch.where(q == -largest, -each, flat(x))))
    return x


def encode(x: Tensor, codes: Tensor, scales: Tensor, kind: str) -> None:
    """Encode numbers as codes and scales; ``x`` must have the strides of ``codes``."""
    values = flat(x).to(torch.float32)
    padded = torch.zeros(len(scales) * GROUP, dtype=torch.float32, device=x.device)
    padded[: len(values)] = values
    largest = padded.view(-1, GROUP).abs().nan_to_num(torch.inf, torch.inf).amax(1)
    inverse = torch.where(largest > SMALLEST[kind], LEVELS[kind] / largest, 0.0)
    inverse = inverse.repeat_interleave(GROUP)[: len(values)]
    if kind == "signed8":
        c = (torch.sqrt(values.abs() * inverse) + 0.5).floor()
        c = torch.where(values < 0, -c, c)
    else:
        c = (torch.sqrt(torch.sqrt(values * inverse)) + 0.5).floor()
        c = torch.maximum(c, (values > 0).to(c.dtype))
    flat(codes).copy_(c.nan_to_num(0.0, 0.0, 0.0))
    scales.copy_(largest)


def round_stochastically(x: Tensor, step: float | Tensor, column: int) -> Tensor:
    """Round float32 numbers to bfloat16, up or down at random."""
    values = flat(x.to(torch.float32))
    index = torch.arange(len(values), dtype=torch.int64, device=x.device)
    random = _hash(index, torch.as_tensor(step, device=x.device).to(torch.int64))
    low = ((random * ((COLUMN_FACTORS[0] + column * COLUMN_FACTORS[1]) & _LOW)) & _LOW) >> 16
    bits = values.view(torch.int32).to(torch.int64) & _LOW
    rounded = (bits + low) & 0xFFFF0000
    rounded = torch.where(rounded >= 1 << 31, rounded - (1 << 32), rounded).to(torch.int32).view(torch.float32)
    result = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.preserve_format)
    flat(result).copy_(torch.where(values.isfinite(), rounded, values))
    return result


def _hash(index: Tensor, step: Tensor) -> Tensor:
    """32 bits for every element, from its position and the step."""
    x = ((index * HASH_FACTORS[0]) & _LOW) ^ ((step * HASH_FACTORS[1]) & _LOW)
    for shift, factor in HASH_ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & _LOW
    return x ^ (x >> HASH_SHIFT)
