"""``RowCodec``: in plain torch, blocks are the rows of a matrix. This file cuts tensors into such matrices."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from offbeat.wire.fused import FusedCodec

__all__ = ["RowCodec"]


class RowCodec(FusedCodec):
    """A codec that makes one record of each block. The last block may be shorter, and its record is then too."""

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

    def _encode_in_torch(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        for start, stop in self._slices(x):
            rows, records = self._matrices(x, out, start, stop)
            decoded = self._encode_rows(rows, records)
            if residual is not None:
                torch.sub(rows, decoded, out=residual[start:stop].view_as(rows))

    def _decode_in_torch(self, data: Tensor, out: Tensor, add: bool) -> None:
        for start, stop in self._slices(out):
            rows, records = self._matrices(out, data, start, stop)
            decoded = self._decode_rows(records, rows.shape[1])
            rows.add_(decoded) if add else rows.copy_(decoded)

    def _matrices(self, values: Tensor, data: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        width = min(stop - start, self.block)
        records = data[self.encoded_bytes(start) : self.encoded_bytes(stop)]
        return values[start:stop].view(-1, width), records.view(-1, self._record_bytes(width))
