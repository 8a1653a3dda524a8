"""``FusedCodec``: a codec with kernels that work in one pass, and a definition in plain torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import Tensor

from offbeat.wire.base import Codec, check_finite, not_finite
from offbeat.wire.kernels import Kernels, kernels_for

__all__ = ["FusedCodec"]

#: Elements that plain torch works on at once, and that sums are made of: on the CPU few enough to stay in cache between
#: passes, elsewhere enough to keep the device busy.
SLICE, SUM_SLICE, DEVICE_SLICE = 1 << 16, 1 << 18, 1 << 24


class FusedCodec(Codec):
    """Runs the kernels of the device, or plain torch where it has none. Both give the same bytes.

    Blocks of :attr:`block` elements are encoded independently of each other, one after the other, so that the encoding
    of whole blocks can be cut between them.
    """

    #: The name of its kernels.
    kernel: str

    @abstractmethod
    def _encode_in_torch(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """Encode finite values."""

    @abstractmethod
    def _decode_in_torch(self, data: Tensor, out: Tensor, add: bool) -> None:
        """Decode."""

    def kernel_arguments(self, numel: int) -> Sequence[int]:
        """What else the kernels need to know."""
        return ()

    def encode(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """See :class:`Codec`."""
        self._check(x, out, residual)
        kernels = self._kernels(x)
        # Without a residual nothing is lost when a block late in x turns out not to be finite.
        if kernels is None:
            check_finite(x, self)
        elif residual is not None and not kernels.is_finite(x):
            raise not_finite(x, self)
        self._encode(kernels, x, out, residual)

    def encode_finite(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """See :class:`Codec`."""
        self._check(x, out, residual)
        self._encode(self._kernels(x), x, out, residual)

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
        # A part of out is still in cache when the next message is added to it.
        for start, stop in self._slices(out, SUM_SLICE):
            first, last = self.encoded_bytes(start), self.encoded_bytes(stop)
            super().decode_sum([one[first:last] for one in data], out[start:stop])

    def _encode(self, kernels: Kernels | None, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        if kernels is None:
            self._encode_in_torch(x, out, residual)
        elif not kernels.encode(self, x, out, residual):
            raise not_finite(x, self)

    def _kernels(self, x: Tensor) -> Kernels | None:
        found = kernels_for(x.device) if x.numel() else None
        return found if found is not None and self.kernel in found.names else None

    def _slices(self, x: Tensor, on_cpu: int = SLICE) -> Iterator[tuple[int, int]]:
        """Where slices of whole blocks begin and end, and then the last, shorter block."""
        numel, size = x.numel(), on_cpu if x.device.type == "cpu" else DEVICE_SLICE
        whole, step = numel - numel % self.block, max(1, size // self.block) * self.block
        bounds = [*range(0, whole, step), whole, *([numel] if whole < numel else [])]
        return pairwise(bounds)
