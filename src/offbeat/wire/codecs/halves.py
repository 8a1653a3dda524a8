r"""Half precision: ``bf16`` and ``fp16``.

**bf16** rounds to the nearest bfloat16, half to even: an error of at most $2^{-8} |x|$. The few float32 beyond the
largest bfloat16 become that number, within the same bound, and never infinity.

**fp16** has 3 bits more of precision and little range, so each block of 256 elements is multiplied by a power of two
that brings its largest absolute value $m$ to $[2^{15}, 2^{16})$ first. No value overflows, and small differences keep
their digits: the error is at most $2^{-11} |x|$, or $2^{-39} m$ where that is more. Every float16 is encoded exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.wire.codecs.block_codec import BlockCodec
from offbeat.wire.codecs.codec import TINY
from offbeat.wire.codecs.registry import register_codec

__all__ = ["Bf16", "Fp16"]

_LARGEST_BF16 = torch.finfo(torch.bfloat16).max
_LARGEST_FP16 = torch.finfo(torch.float16).max


@register_codec("bf16")
class Bf16(BlockCodec):
    """bfloat16, two bytes an element. A block is only a size to work in."""

    kernel, block = "bf16", 256

    def record_bytes(self, width: int) -> int:
        """See :class:`BlockCodec`."""
        return 2 * width

    def encode_rows(self, rows: Tensor, records: Tensor) -> Tensor:
        """See :class:`BlockCodec`."""
        rounded = rows.clamp(-_LARGEST_BF16, _LARGEST_BF16).to(torch.bfloat16)
        records.copy_(rounded.view(torch.uint8))
        return rounded.to(torch.float32)

    def decode_rows(self, records: Tensor, width: int) -> Tensor:
        """See :class:`BlockCodec`."""
        return _as(records, torch.bfloat16).to(torch.float32)


@register_codec("fp16")
class Fp16(BlockCodec):
    """float16 with a power of two as the scale of each 256 elements.

    A record is the scale as bfloat16 (2 bytes), and the elements divided by it as float16.
    """

    kernel, block = "fp16", 256

    def record_bytes(self, width: int) -> int:
        """See :class:`BlockCodec`."""
        return 2 + 2 * width

    def encode_rows(self, rows: Tensor, records: Tensor) -> Tensor:
        """See :class:`BlockCodec`."""
        largest = torch.maximum(rows.amax(1), -rows.amin(1))
        exponent = (largest.view(torch.int32) >> 23) - 15  # of the scale, biased as in float32
        is_tiny = largest < TINY
        scale = (exponent << 23).masked_fill_(is_tiny, 0)
        inverse = ((254 - exponent) << 23).masked_fill_(is_tiny, 0).view(torch.float32)
        rounded = (rows * inverse[:, None]).clamp_(-_LARGEST_FP16, _LARGEST_FP16).to(torch.float16)
        records[:, 0] = (scale >> 16) & 0xFF
        records[:, 1] = scale >> 24
        records[:, 2:] = rounded.view(torch.uint8)
        return rounded.to(torch.float32).mul_(scale.view(torch.float32)[:, None])

    def decode_rows(self, records: Tensor, width: int) -> Tensor:
        """See :class:`BlockCodec`."""
        scale = (records[:, 0].to(torch.int32) << 16 | records[:, 1].to(torch.int32) << 24).view(torch.float32)
        return _as(records[:, 2:], torch.float16).to(torch.float32).mul_(scale[:, None])


def _as(data: Tensor, dtype: torch.dtype) -> Tensor:
    # A message may begin at any byte, and torch views only what is aligned.
    return data.clone(memory_format=torch.contiguous_format).view(dtype)
