"""``RowCodec``: codecs that encode blocks of a fixed size independently of each other.

A block of ``block`` elements becomes one record: a bfloat16 scale, then the codes. The last block may be shorter. In
plain torch, blocks are the rows of a matrix; this file cuts tensors into such matrices and checks them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from offbeat.wire.base import Codec, check_finite, not_finite
from offbeat.wire.kernels import Kernels, kernels_for

__all__ = ["RowCodec"]

#: Elements that plain torch takes at once: its intermediate results stay in cache, and memory is bounded.
SLICE = 1 << 16


class RowCodec(Codec):
    """A codec of independent blocks. A subclass defines how to encode and decode a matrix of them."""

    @abstractmethod
    def _record_bytes(self, width: int) -> int:
        """The size of the record of a block of ``width`` elements."""

    @abstractmethod
    def _encode_rows(self, rows: Tensor, records: Tensor) -> Tensor:
        """Encode each row of a float32 matrix into a row of ``records`` (uint8), and return what they decode to."""

    @abstractmethod
    def _decode_rows(self, records: Tensor, width: int) -> Tensor:
        """The values in each row of ``records``, ``width`` of them."""

    def encoded_bytes(self, numel: int) -> int:
        """See :class:`Codec`."""
        blocks, rest = divmod(numel, self.block)
        return blocks * self._record_bytes(self.block) + (self._record_bytes(rest) if rest else 0)

    def encode(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """See :class:`Codec`."""
        self._check(x, out, residual)
        kernels = self._kernels(x)
        if kernels is None:
            check_finite(x, self)
            self._encode_in_torch(x, out, residual)
            return
        # Without a residual nothing is lost when a block late in x turns out not to be finite.
        if residual is not None and not kernels.is_finite(x):
            raise not_finite(x, self)
        if not kernels.encode(self, x, out, residual):
            raise not_finite(x, self)

    def encode_finite(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """See :class:`Codec`."""
        self._check(x, out, residual)
        kernels = self._kernels(x)
        if kernels is None:
            self._encode_in_torch(x, out, residual)
        elif not kernels.encode(self, x, out, residual):
            raise not_finite(x, self)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See :class:`Codec`."""
        self._check(out, data)
        kernels = self._kernels(out)
        if kernels is None:
            self._decode_in_torch(data, out, add)
        else:
            kernels.decode(self, data, out, add)

    def decode_sum(self, data: Sequence[Tensor], out: Tensor) -> None:
        """See :class:`Codec`."""
        for one in data:
            self._check(out, one)
        # Part by part, so that a part of out is still in cache when the next message is added to it.
        for values, *messages in self._slices(out, *data):
            super().decode_sum(messages, values)

    def _kernels(self, x: Tensor) -> Kernels | None:
        return kernels_for(x.device) if x.numel() else None

    def _encode_in_torch(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        for values, record, *rest in self._slices(x, out, residual=residual):
            rows, records = self._matrices(values, record)
            decoded = self._encode_rows(rows, records).flatten()[: len(values)]
            if rest:
                torch.sub(values, decoded, out=rest[0])

    def _decode_in_torch(self, data: Tensor, out: Tensor, add: bool) -> None:
        for values, record in self._slices(out, data):
            width = min(len(values), self.block)
            records = record.view(-1, self._record_bytes(width))
            decoded = self._decode_rows(records, width).flatten()
            values.add_(decoded) if add else values.copy_(decoded)

    def _slices(self, values: Tensor, *records: Tensor, residual: Tensor | None = None) -> Iterator[list[Tensor]]:
        """Whole blocks of the tensors, a slice at a time, then the last, shorter block."""
        numel, size = values.numel(), max(1, SLICE // self.block) * self.block
        whole = numel - numel % self.block
        starts = [*range(0, whole, size), whole, numel] if whole < numel else [*range(0, whole, size), whole]
        for start, stop in pairwise(starts):
            if start == stop:
                continue
            first, last = self.encoded_bytes(start), self.encoded_bytes(stop)
            like_values = [] if residual is None else [residual[start:stop]]
            yield [values[start:stop], *(record[first:last] for record in records), *like_values]

    def _matrices(self, values: Tensor, record: Tensor) -> tuple[Tensor, Tensor]:
        width = min(len(values), self.block)
        return values.view(-1, width), record.view(-1, self._record_bytes(width))
