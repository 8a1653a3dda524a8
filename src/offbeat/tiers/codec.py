r"""Numbers in fewer bits: what the compact forms of state and parameters mean, in torch's operators.

- ``signed8``: blocks of 256 elements share a scale :math:`s`, their largest absolute value; a code :math:`c` of -127 to
  127 stands for :math:`s \, \mathrm{sign}(c) (c/127)^2`.
- ``unsigned8``: as well, a code of 0 to 255 stands for :math:`s \, (c/255)^4`. What is not zero does not become zero.
  In both, a number that is not finite spoils its block.
- ``stochastic``: bfloat16, rounded up or down with the probabilities that make it right on average. What is random is
  a hash of the element's place, the step and the column, so that a step can be repeated.
- ``kahan``: bfloat16, with what rounding took away in a second bfloat16.

The kernels do the same in registers; this is what they are tested against, and what runs where there is no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.tiers.layout import flat

__all__ = ["CODE_DTYPES", "GROUP", "decode", "decode_exactly", "encode", "round_stochastically", "scales_for"]

#: Elements that share a scale.
GROUP = 256

#: What the largest code stands for, in units of the smallest number but zero.
_LEVELS = {"signed8": 127.0**2, "unsigned8": 255.0**4}
#: Scales below this stand for zero, or for the smallest code: their inverses are no float32.
_SMALLEST = {"signed8": 1e-30, "unsigned8": 2e-29}

_LARGEST = {"signed8": 127, "unsigned8": 255}

CODE_DTYPES = {"signed8": torch.int8, "unsigned8": torch.uint8}


def scales_for(elements: int) -> int:
    """How many scales a tensor has."""
    return -(-elements // GROUP)


def decode(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """The numbers that codes stand for, in float32 and laid out as the codes."""
    q = flat(codes).to(torch.float32)
    each = (scales * (1 / _LEVELS[kind])).repeat_interleave(GROUP)[: len(q)]
    x = q * q.abs() * each if kind == "signed8" else q * q * (q * q) * each
    result = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.preserve_format)
    flat(result).copy_(x)
    return result


def decode_exactly(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """As :func:`decode`, with the largest code as its scale to the last bit: encoded again, scales are the same."""
    x = decode(codes, scales, kind)
    q, each = flat(codes).to(torch.int16), scales.repeat_interleave(GROUP)[: codes.numel()]
    largest = _LARGEST[kind]
    flat(x).copy_(torch.where(q == largest, each, torch.where(q == -largest, -each, flat(x))))
    return x


def encode(x: Tensor, codes: Tensor, scales: Tensor, kind: str) -> None:
    """Write numbers as codes and scales; ``x`` is laid out as the codes."""
    values = flat(x).to(torch.float32)
    padded = torch.zeros(len(scales) * GROUP, dtype=torch.float32, device=x.device)
    padded[: len(values)] = values
    largest = padded.view(-1, GROUP).abs().nan_to_num(torch.inf, torch.inf).amax(1)
    inverse = torch.where(largest > _SMALLEST[kind], _LEVELS[kind] / largest, 0.0)
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
    """Float32 numbers as bfloat16."""
    values = flat(x.to(torch.float32))
    index = torch.arange(len(values), dtype=torch.int64, device=x.device)
    random = _hash(index, torch.as_tensor(step, device=x.device).to(torch.int64))
    low = ((random * ((2654435761 + column * 3327595350) & 0xFFFFFFFF)) & 0xFFFFFFFF) >> 16
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = (bits + low) & 0xFFFF0000
    rounded = torch.where(rounded >= 1 << 31, rounded - (1 << 32), rounded).to(torch.int32).view(torch.float32)
    result = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.preserve_format)
    flat(result).copy_(torch.where(values.isfinite(), rounded, values))
    return result


def _hash(index: Tensor, step: Tensor) -> Tensor:
    """32 bits for every element, from its place and the step."""
    low = 0xFFFFFFFF
    x = (index * 0x9E3779B1) & low
    x = x ^ ((step * 0x85EBCA6B) & low)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & low
    x = ((x ^ (x >> 15)) * 0x846CA68B) & low
    return x ^ (x >> 16)
