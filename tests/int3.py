"""A codec as a user would write one: the example of docs/custom_codec.md."""

from __future__ import annotations

import torch
from torch import Tensor

import offbeat

__all__ = ["Int3"]


@offbeat.register_codec("int3")
class Int3(offbeat.BlockCodec):
    """Integers from -3 to 3 with a scale for each 64 elements, eight of them in three bytes."""

    block = 64

    def record_bytes(self, width: int) -> int:
        return 2 + 3 * -(-width // 8)

    def encode_rows(self, rows: Tensor, records: Tensor) -> Tensor:
        # Rounded up to bfloat16: q * scale is then exact in float32, so that sums have the same bits on every device.
        largest = rows.abs().amax(1, keepdim=True)
        scale = ((largest / 3).view(torch.int32) + 0xFFFF >> 16).clamp(max=0x7EAA).masked_fill(largest < 2**-80, 0)
        records[:, 0:1], records[:, 1:2] = scale & 0xFF, scale >> 8
        step = (scale << 16).view(torch.float32)
        inverse = torch.where(step > 0, 1 / step, 0)
        codes = (rows * inverse).round().clamp(-3, 3).int() + 3
        codes = torch.nn.functional.pad(codes, (0, -rows.shape[1] % 8)).view(len(rows), -1, 8)
        packed = (codes << 3 * torch.arange(8, device=rows.device)).sum(2)  # 24 bits
        for i in range(3):
            records[:, 2 + i :: 3] = packed >> 8 * i & 0xFF
        return self.decode_rows(records, rows.shape[1])

    def decode_rows(self, records: Tensor, width: int) -> Tensor:
        scale = records[:, 0:1].int() << 16 | records[:, 1:2].int() << 24
        first, second, third = (records[:, 2 + i :: 3].int() for i in range(3))
        packed = first | second << 8 | third << 16
        codes = packed[:, :, None] >> 3 * torch.arange(8, device=records.device) & 7
        return (codes.flatten(1)[:, :width] - 3).float() * scale.view(torch.float32)
