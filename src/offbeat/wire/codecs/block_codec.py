"""``BlockCodec``: a codec that encodes each block of a tensor as one record."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offbeat.wire.codecs.codec import Codec
from offbeat.wire.codecs.kernels import Kernels, kernels_for

__all__ = ["BlockCodec"]

#: Elements that plain torch works on at once, and that sums are made of. On the CPU they stay in cache between passes;
#: elsewhere they keep the device busy.
SLICE, SUM_SLICE, DEVICE_SLICE = 1 << 16, 1 << 18, 1 << 24


class BlockCodec(Codec):
    """A codec that encodes each block of a tensor as one record, independently of the others.

    A codec of your own defines :attr:`block`, :meth:`record_bytes`, :meth:`encode_rows` and :meth:`decode_rows` in
    plain torch; sizes, residuals and sums follow. :func:`offbeat.register_codec` gives it a name that every ``codec=``
    argument accepts. docs/custom_codec.md builds one.

    Attributes:
        name: what messages and errors call the codec; :func:`offbeat.register_codec` sets it.
        block: the number of elements in a block. The last block of a tensor may be shorter.
        kernel: the C and Triton kernels of a codec that is part of offbeat. Subclasses do not inherit them.

    Example:
        >>> import torch, offbeat
        >>> class Tenths(offbeat.BlockCodec):
        ...     name, block = "tenths", 32
        ...
        ...     def record_bytes(self, width):
        ...         return width
        ...
        ...     def encode_rows(self, rows, records):
        ...         records.copy_((rows * 10).round().clamp(-128, 127) + 128)
        ...         return self.decode_rows(records, rows.shape[1])
        ...
        ...     def decode_rows(self, records, width):
        ...         return (records.float() - 128) / 10
        >>> codec, out = Tenths(), torch.empty(2)
        >>> data = torch.empty(codec.encoded_bytes(2), dtype=torch.uint8)
        >>> codec.encode(torch.tensor([0.52, -3.0]), data)
        >>> codec.decode(data, out)
        >>> out
        tensor([ 0.5000, -3.0000])
    """

    block: int = 256
    kernel: str | None = None

    @abstractmethod
    def record_bytes(self, width: int) -> int:
        """Return the size of the record of a block of ``width`` elements, at most :attr:`block`."""

    @abstractmethod
    def encode_rows(self, rows: Tensor, records: Tensor) -> Tensor:
        """Encode each row of a matrix into a row of ``records``, and return the values they decode to.

        Args:
            rows: one block a row: float32, finite, not to be changed.
            records: one record a row, to be filled: uint8, ``record_bytes(rows.shape[1])`` wide.
        """

    @abstractmethod
    def decode_rows(self, records: Tensor, width: int) -> Tensor:
        """Return the values in each row of ``records``, a block of ``width`` elements, in float32."""

    def kernel_arguments(self, numel: int) -> Sequence[int]:
        """Return further numbers that the kernels of this codec need for ``numel`` elements."""
        return ()

    def encoded_bytes(self, numel: int) -> int:
        """See :class:`Codec`."""
        blocks, rest = divmod(numel, self.block)
        return (blocks * self.record_bytes(self.block) if blocks else 0) + (self.record_bytes(rest) if rest else 0)

    def encode_finite(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """See :class:`Codec`."""
        kernels = self._kernels(x)
        if kernels is not None:
            kernels.encode(self, x, out, residual)
            return
        for start, stop in self._slices(x, SLICE):
            rows, records = self._matrices(x, out, start, stop)
            decoded = self.encode_rows(rows, records)
            if residual is not None:
                torch.sub(rows, decoded, out=residual[start:stop].view_as(rows))

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See :class:`Codec`."""
        self._check(out, data)
        kernels = self._kernels(out)
        if kernels is not None:
            kernels.decode(self, data, out, add)
            return
        for start, stop in self._slices(out, SLICE):
            rows, records = self._matrices(out, data, start, stop)
            decoded = self.decode_rows(records, rows.shape[1])
            self._add(rows, decoded) if add else rows.copy_(decoded)

    def decode_sum(self, data: Sequence[Tensor], out: Tensor) -> None:
        """See :class:`Codec`."""
        for message in data:
            self._check(out, message)
        # A slice of out is still in cache when the next message is added to it.
        for start, stop in self._slices(out, SUM_SLICE):
            first, last = self.encoded_bytes(start), self.encoded_bytes(stop)
            super().decode_sum([message[first:last] for message in data], out[start:stop])

    def _add(self, rows: Tensor, decoded: Tensor) -> None:
        rows.add_(decoded)

    def _kernels(self, x: Tensor) -> Kernels | None:
        # A subclass may encode differently than the class whose kernels these are.
        return kernels_for(x.device) if x.numel() and vars(type(self)).get("kernel") else None

    def _slices(self, x: Tensor, size_on_cpu: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of slices of whole blocks, then of the last block if it is shorter."""
        numel, size = x.numel(), size_on_cpu if x.device.type == "cpu" else DEVICE_SLICE
        whole, step = numel - numel % self.block, max(1, size // self.block) * self.block
        yield from ((start, min(start + step, whole)) for start in range(0, whole, step))
        if whole < numel:
            yield whole, numel

    def _matrices(self, values: Tensor, data: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        width = min(stop - start, self.block)
        records = data[self.encoded_bytes(start) : self.encoded_bytes(stop)]
        return values[start:stop].view(-1, width), records.view(-1, self.record_bytes(width))
