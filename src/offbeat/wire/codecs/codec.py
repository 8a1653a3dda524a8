"""``Codec``: encodes float32 values as bytes, and decodes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.wire.codecs.kernels import all_finite

__all__ = ["TINY", "Codec", "NotFinite", "bf16_up"]

#: A block whose largest absolute value is below this is sent as zeros. Subnormal numbers, which some devices and
#: settings flush to zero, then never occur, so that every device decodes a message to the same bits.
TINY = 2.0**-80


class NotFinite(ValueError):
    """Values to encode contain NaN or infinity.

    Attributes:
        ranks: the ranks whose values were not finite, where they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Codec(ABC):
    """Encodes flat float32 tensors as bytes, and decodes them.

    The base class of all codecs. :class:`offbeat.BlockCodec` is easier to start from: it needs no handling of sizes. A
    codec that derives from this class defines :attr:`name` (or is registered with :func:`offbeat.register_codec`),
    :meth:`encoded_bytes`, :meth:`encode_finite` and :meth:`decode`.

    The same values must encode to the same bytes, and the same bytes decode to the same bits, on every device. That
    keeps replicas equal.

    Example:
        >>> import torch, offbeat
        >>> class Signs(offbeat.Codec):
        ...     name = "signs"
        ...
        ...     def encoded_bytes(self, numel):
        ...         return numel
        ...
        ...     def encode_finite(self, x, out, residual=None):
        ...         out.copy_(x >= 0)
        ...         if residual is not None:
        ...             torch.sub(x, out * 2.0 - 1, out=residual)
        ...
        ...     def decode(self, data, out, *, add=False):
        ...         signs = data * 2.0 - 1
        ...         out.add_(signs) if add else out.copy_(signs)
        >>> codec, x = Signs(), torch.tensor([0.5, -3.0])
        >>> data = torch.empty(codec.encoded_bytes(2), dtype=torch.uint8)
        >>> codec.encode(x, data, residual=x)
        >>> x
        tensor([-0.5000, -2.0000])
    """

    name: str
    #: Tensors are divided among ranks at multiples of this many elements.
    block: int = 1

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """Return the size of the encoding of ``numel`` elements. It depends on nothing else."""

    @abstractmethod
    def encode_finite(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Encode values that are known to be finite. See :meth:`encode` for the arguments."""

    @abstractmethod
    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Decode ``data``, which :meth:`encode` has written, into ``out``.

        Args:
            data: flat, contiguous, uint8.
            out: flat, contiguous, float32, of as many elements as were encoded.
            add: add to ``out`` instead of overwriting it.
        """

    def encode(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Encode ``x`` into ``out``.

        Args:
            x: the values: flat, contiguous, float32, of any size.
            out: flat, contiguous, uint8, of exactly ``encoded_bytes(x.numel())`` elements.
            residual: is set to ``x - decode(encode(x))``; like ``x``, and may be ``x`` itself.

        Raises:
            NotFinite: ``x`` contains NaN or infinity. ``out`` and ``residual`` are unchanged.
        """
        self._check(x, out, residual)
        if not all_finite(x):
            bad = (~torch.isfinite(x)).nonzero().flatten()
            raise NotFinite(
                f"{bad.numel()} of {x.numel()} values to encode as {self.name} are NaN or infinite (first at element "
                f"{int(bad[0])}); look for the overflow that made them, or skip this exchange"
            )
        self.encode_finite(x, out, residual)

    def decode_sum(self, data: Sequence[Tensor], out: Tensor) -> None:
        """Set ``out`` to the sum of the encodings in ``data``, added in this order."""
        if not data:
            out.zero_()
        for i, message in enumerate(data):
            self.decode(message, out, add=i > 0)

    def __repr__(self) -> str:
        return f"<codec {self.name}>"

    def _check(self, values: Tensor, data: Tensor, residual: Tensor | None = None) -> None:
        for label, tensor, dtype in (
            ("values", values, torch.float32),
            ("encoded data", data, torch.uint8),
            ("residual", values if residual is None else residual, torch.float32),
        ):
            if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(
                    f"the codec {self.name} needs {label} as a flat contiguous {dtype} tensor; got "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
                )
            if tensor.device != values.device:
                raise ValueError(
                    f"the codec {self.name} got values on {values.device} and {label} on {tensor.device}; move them "
                    "to one device"
                )
        if data.numel() != self.encoded_bytes(values.numel()):
            raise ValueError(
                f"{values.numel()} values are {self.encoded_bytes(values.numel())} bytes in the codec {self.name}, "
                f"and the encoded data has {data.numel()}; use encoded_bytes() for its size"
            )
        if residual is not None and residual.numel() != values.numel():
            raise ValueError(f"the residual has {residual.numel()} elements for {values.numel()} values")


def bf16_up(magnitude: Tensor) -> Tensor:
    """Round numbers that are not negative up to bfloat16, and return its 16 bits as int32."""
    return (magnitude.view(torch.int32) + 0xFFFF) >> 16
