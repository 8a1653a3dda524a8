r"""``TopK``: the largest elements of each chunk, with a few bits for each.

A chunk of 4096 elements (the last may be shorter) sends the $k = \lceil f n \rceil$ of its $n$ elements that are
largest in absolute value; of equals, the first. Those below $2^{-80}$ count as zeros and are not sent. With $b$ bits,
one is the sign and the others are a level $q$ of $M = 2^{b - 1}$ between the smallest ($a$) and the largest ($z$)
absolute value that is sent:

$$q = \min(\lfloor (|x| - a) / s \rfloor, M - 1), \quad |x| \approx a + (q + 1/2) s, \quad s = (z - a) / M$$

with $s$ rounded up to bfloat16. The error of an element that is sent is at most $(z - a) / (1.98 M)$. One that is not
sent has $|x| \le a$ and is its own error: use error feedback. Chunks with at most $k$ elements that are not zero, all
equal in absolute value, are exact.

Indices are ascending, so that they fit in a code of fixed size that is close to the least possible (Elias and Fano's):
the lowest $l = \lfloor \log_2 (n / k) \rfloor$ bits of each as they are, and the rest in unary. At 3 % and 2 bits a
chunk takes 147 bytes, 0.29 bits per element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from offbeat.wire.codecs.block_codec import BlockCodec
from offbeat.wire.codecs.codec import TINY, bf16_up

__all__ = ["TopK"]

CHUNK = 4096
_HEADER = 8


class _Layout(NamedTuple):
    """Where things lie in a chunk's record, by its size. Bits are counted from the lowest of the first byte up."""

    width: int  # elements
    k: int  # of which are sent
    low: int  # bits of an index that are sent as they are
    unary: int  # bits that hold the rest of all indices
    bytes: int  # of the record: count (2), step as bfloat16 (2), smallest as float32 (4), then the bits


class TopK(BlockCodec):
    """A codec that sends the largest elements of each chunk, with a few bits each.

    Elements that are not sent are lost unless error feedback is on. docs/codecs.md has the maths and the error.

    Args:
        fraction: the fraction of the elements to send, above 0 and at most 1. SparseLoCo uses 0.01 to 0.03.
        bits: how many bits the sign and the size of an element take: 2, 4 or 8.

    Example:
        >>> import torch, offbeat
        >>> codec = offbeat.TopK(0.25, bits=8)
        >>> x = torch.tensor([0.0, 4.0, 0.5, -1.0])
        >>> encoded = torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8)
        >>> codec.encode(x, encoded)
        >>> decoded = torch.empty(4)
        >>> codec.decode(encoded, decoded)
        >>> decoded
        tensor([0., 4., 0., 0.])
    """

    kernel, block = "topk", CHUNK

    def __init__(self, fraction: float = 0.03, bits: Literal[2, 4, 8] = 2) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction} of TopK must be above 0 and at most 1")
        if bits not in (2, 4, 8):
            raise ValueError(f"bits={bits} of TopK must be 2, 4 or 8")
        self.fraction, self.bits = float(fraction), bits
        self.name = f"topk({self.fraction:g}, bits={bits})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopK) and (self.fraction, self.bits) == (other.fraction, other.bits)

    def __hash__(self) -> int:
        return hash((self.fraction, self.bits))

    def layout(self, width: int) -> _Layout:
        """Return the layout of the record of a chunk of ``width`` elements."""
        k = min(width, max(1, math.ceil(width * self.fraction - 1e-9)))
        low = (width // k).bit_length() - 1
        unary = ((width - 1) >> low) + k
        return _Layout(width, k, low, unary, _HEADER + -(-(k * (low + self.bits) + unary) // 8))

    def record_bytes(self, width: int) -> int:
        """See :class:`BlockCodec`."""
        return self.layout(width).bytes

    def kernel_arguments(self, numel: int) -> Sequence[int]:
        """Return the bits, and the layouts of a whole chunk and of the last chunk of ``numel`` elements."""
        return (self.bits, *self.layout(CHUNK), *self.layout(numel % CHUNK or CHUNK))

    def encode_rows(self, rows: Tensor, records: Tensor) -> Tensor:
        """See :class:`BlockCodec`."""
        layout, levels = self.layout(rows.shape[1]), 1 << (self.bits - 1)
        index, values, count = _select(rows, layout)
        sizes, is_sent = values.abs(), _is_sent(count, layout)
        largest = torch.where(is_sent, sizes, torch.zeros_like(sizes)).amax(1)
        smallest = torch.where(is_sent, sizes, largest[:, None]).amin(1)
        step_bits = bf16_up((largest - smallest) * (1 / levels))
        step = (step_bits << 16).view(torch.float32)
        inverse = torch.where(step_bits == 0, torch.zeros_like(step), torch.ones_like(step) / step)
        level = ((sizes - smallest[:, None]) * inverse[:, None]).to(torch.int32).clamp_(max=levels - 1)
        code = torch.where(is_sent, level << 1 | (values < 0).to(torch.int32), torch.zeros_like(level))
        records[:, :2] = _to_bytes(count.to(torch.int32), 2)
        records[:, 2:4] = _to_bytes(step_bits, 2)
        records[:, 4:8] = _to_bytes(smallest.view(torch.int32), 4)
        unary = torch.zeros(len(rows), layout.unary, dtype=torch.bool, device=rows.device)
        unary.scatter_(1, (index >> layout.low) + torch.arange(layout.k, device=rows.device), True)
        records[:, 8:] = _pack(torch.cat([_to_bits(index, layout.low), unary, _to_bits(code, self.bits)], dim=1))
        return _dense(index, _values(code, smallest, step), is_sent, layout)

    def decode_rows(self, records: Tensor, width: int) -> Tensor:
        """See :class:`BlockCodec`."""
        layout = self.layout(width)
        count, step_bits = _from_bytes(records[:, :2]), _from_bytes(records[:, 2:4])
        smallest = _from_bytes(records[:, 4:8]).view(torch.float32)
        stream = (records[:, 8:, None] >> torch.arange(8, dtype=torch.uint8, device=records.device) & 1).flatten(1)
        ends = [layout.k * layout.low, layout.unary, layout.k * self.bits]
        low, unary, codes, _ = torch.split(stream, [*ends, stream.shape[1] - sum(ends)], dim=1)
        index = _from_bits(low, layout.k, layout.low)
        order = torch.arange(layout.k, device=records.device)
        index += (unary.nonzero()[:, 1].view(-1, layout.k) - order) << layout.low
        values = _values(_from_bits(codes, layout.k, self.bits), smallest, (step_bits << 16).view(torch.float32))
        return _dense(index, values, _is_sent(count, layout), layout)

    def _add(self, rows: Tensor, decoded: Tensor) -> None:
        # As the kernels do: adding 0 would make a negative zero positive.
        rows.copy_(torch.where(decoded == 0, rows, rows + decoded))


def _select(rows: Tensor, layout: _Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of the largest elements, ascending, their values, and how many are sent: the first."""
    order = rows.view(torch.int32) & 0x7FFFFFFF  # as the absolute values
    least = order.topk(layout.k, dim=1).values[:, -1:]
    above, equal = order > least, order == least
    room = layout.k - above.sum(1, keepdim=True)
    index = (above | (equal & (equal.cumsum(1) <= room))).nonzero()[:, 1].view(-1, layout.k)
    values = rows.gather(1, index)
    is_sent = values.abs() >= TINY
    count = is_sent.sum(1)
    if int(count.min()) < layout.k:
        index, moved = torch.where(is_sent, index, layout.width).sort(dim=1, stable=True)
        index, values = index.clamp_(max=layout.width - 1), values.gather(1, moved)
    return index, values, count


def _is_sent(count: Tensor, layout: _Layout) -> Tensor:
    return torch.arange(layout.k, device=count.device) < count[:, None]


def _values(code: Tensor, smallest: Tensor, step: Tensor) -> Tensor:
    # The product is exact (8 bits by 8), so that a fused multiply-add gives the same bits.
    sizes = smallest[:, None] + ((code >> 1).to(torch.float32) + 0.5) * step[:, None]
    sizes.clamp_(max=torch.finfo(torch.float32).max)
    return torch.where((code & 1).bool(), -sizes, sizes)


def _dense(index: Tensor, values: Tensor, is_sent: Tensor, layout: _Layout) -> Tensor:
    """Return whole chunks, with zeros where nothing was sent."""
    chunks = torch.zeros(len(index), layout.width, device=index.device)
    chunks.view(-1)[(index + torch.arange(len(index), device=index.device)[:, None] * layout.width)[is_sent]] = values[
        is_sent
    ]
    return chunks


def _to_bytes(numbers: Tensor, count: int) -> Tensor:
    return torch.stack([(numbers >> 8 * i) & 0xFF for i in range(count)], dim=1).to(torch.uint8)


def _from_bytes(data: Tensor) -> Tensor:
    parts = [data[:, i].to(torch.int32) << 8 * i for i in range(data.shape[1])]
    number = parts[0]
    for part in parts[1:]:
        number = number | part
    return number


def _to_bits(numbers: Tensor, count: int) -> Tensor:
    """The lowest bits of each number of a matrix, lowest first, row by row."""
    return (numbers[:, :, None] >> torch.arange(count, device=numbers.device) & 1).flatten(1).to(torch.bool)


def _from_bits(bits: Tensor, numbers: int, count: int) -> Tensor:
    weights = 1 << torch.arange(count, device=bits.device)
    return (bits.view(len(bits), numbers, count).to(torch.int64) * weights).sum(2)


def _pack(bits: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).view(len(bits), -1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded.to(torch.uint8) * weights).sum(2, dtype=torch.uint8)
