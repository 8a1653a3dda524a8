r"""Block-wise integers: ``int8``, ``int4`` and ``int2``.

A block shares one scale $s$, and an element $x$ is sent as the integer

$$q = \mathrm{clamp}(\mathrm{round}(x \cdot s^{-1}), l, h)$$

rounded half to even, and decoded as $q \cdot s$. With $m$ the largest absolute value of the block:

| codec | $[l, h]$ | block | $s$ | bits per element | error at most |
|---|---|---|---|---|---|
| int8 | [-127, 127] | 256 | $m / 127$ | 8.0625 | $m / 252$ |
| int4 | [-7, 8] | 64 | $\pm m / 8$ | 4.25 | $m / 8$, and $m / 15.8$ for most |
| int2 | [-1, 2] | 32 | $\pm m / 2$ | 2.5 | $m / 2$, and $m / 3.9$ for most |

In int4 and int2, $s$ has the sign of the element that is $m$ in absolute value (plus, if both signs reach it), so that
this element is $h \cdot s$ and no code is wasted. An element of the other sign beyond $(l - 1/2) s$ is clamped; the
larger bound is for those. The mean square error is smaller than with symmetric levels: on normal numbers by 22 % for
int4 and by two thirds for int2. Zeros stay exactly zero.

$s$ is rounded up to bfloat16. The product $q s$ then has at most 15 significant bits and is exact in float32, so that
``out + q * s`` gives the same bits with and without a fused multiply-add: every device decodes to the same sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.wire.codecs.block_codec import BlockCodec
from offbeat.wire.codecs.codec import TINY, bf16_up
from offbeat.wire.codecs.registry import register_codec

__all__ = ["Int2", "Int4", "Int8", "IntCodec"]


class IntCodec(BlockCodec):
    """Integers with a scale for each block. See the module for the maths.

    A record is the scale (2 bytes, little endian) and the codes ``q - low``. With several codes to a byte, byte ``j``
    holds the elements ``j``, ``j + stride``, ``j + 2 * stride``, ... from its lowest bits up, where ``stride`` is the
    number of bytes.
    """

    bits: int
    low: int
    high: int
    #: The scale's sign is that of the element that is largest in absolute value.
    signed: bool
    #: The largest scale, as bits of bfloat16, with which ``high * scale`` is finite.
    cap: int

    def record_bytes(self, width: int) -> int:
        """See :class:`BlockCodec`."""
        return 2 + -(-width * self.bits // 8)

    def encode_rows(self, rows: Tensor, records: Tensor) -> Tensor:
        """See :class:`BlockCodec`."""
        top, bottom = rows.amax(1), -rows.amin(1)
        largest = torch.maximum(top, bottom)
        scale_bits = bf16_up(largest * (1 / self.high)).clamp_(max=self.cap)
        scale_bits.masked_fill_(largest < TINY, 0)
        if self.signed:
            scale_bits |= ((bottom > top) & (scale_bits != 0)).to(torch.int32) << 15
        scale = (scale_bits << 16).view(torch.float32)
        inverse = torch.where(scale_bits == 0, torch.zeros_like(scale), torch.ones_like(scale) / scale)
        codes = (rows * inverse[:, None]).round_().clamp_(self.low, self.high).sub_(self.low).to(torch.uint8)
        records[:, 0] = scale_bits & 0xFF
        records[:, 1] = scale_bits >> 8
        records[:, 2:] = self._pack(codes, records.shape[1] - 2)
        return self._decoded(codes, scale)

    def decode_rows(self, records: Tensor, width: int) -> Tensor:
        """See :class:`BlockCodec`."""
        scale_bits = records[:, 0].to(torch.int32) | records[:, 1].to(torch.int32) << 8
        scale = (scale_bits << 16).view(torch.float32)
        packed, mask = records[:, 2:], (1 << self.bits) - 1
        planes = [(packed >> shift) & mask for shift in range(0, 8, self.bits)]
        return self._decoded(torch.cat(planes, dim=1)[:, :width], scale)

    def _pack(self, codes: Tensor, stride: int) -> Tensor:
        per_byte = 8 // self.bits
        if codes.shape[1] != stride * per_byte:  # the last block
            codes = torch.nn.functional.pad(codes, (0, stride * per_byte - codes.shape[1]))
        packed = codes[:, :stride]
        for plane in range(1, per_byte):
            packed = packed | codes[:, plane * stride : (plane + 1) * stride] << plane * self.bits
        return packed

    def _decoded(self, codes: Tensor, scale: Tensor) -> Tensor:
        # From the integer and not from the rounded float, which can be a negative zero.
        return codes.to(torch.float32).add_(self.low).mul_(scale[:, None])


@register_codec("int8")
class Int8(IntCodec):
    """8-bit integers with a scale for each 256 elements."""

    block, bits, low, high, signed, cap, kernel = 256, 8, -127, 127, False, 0x7C01, "int8"


@register_codec("int4")
class Int4(IntCodec):
    """4-bit integers with a scale for each 64 elements."""

    block, bits, low, high, signed, cap, kernel = 64, 4, -7, 8, True, 0x7DFF, "int4"


@register_codec("int2")
class Int2(IntCodec):
    """2-bit integers with a scale for each 32 elements."""

    block, bits, low, high, signed, cap, kernel = 32, 2, -1, 2, True, 0x7EFF, "int2"
