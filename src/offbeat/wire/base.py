"""``Codec``: float32 values to bytes and back, with checks that all codecs share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["TINY", "Codec", "NotFinite", "bf16_up", "check_finite", "is_finite"]

#: A block whose largest absolute value is below this is sent as zeros. Everything else then stays clear of subnormal
#: numbers, which some devices and settings flush to zero, so that all decode a message to the same bits.
TINY = 2.0**-80


class NotFinite(ValueError):
    """Values that hold NaN or infinity were to be encoded.

    Attributes:
        ranks: the ranks whose values were not finite, where they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Codec(ABC):
    """Encodes flat float32 tensors as bytes, and decodes them.

    The same bytes decode to the same bits on every device and by every implementation (C, Triton, plain torch), which
    is what keeps replicas equal. For a codec of your own, define :attr:`name`, :meth:`encoded_bytes`, :meth:`encode`
    and :meth:`decode`.
    """

    name: str
    #: Tensors are divided among ranks at multiples of this many elements.
    block: int = 1

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """The size of the encoding of ``numel`` elements. Depends on nothing else."""

    @abstractmethod
    def encode(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Encode ``x`` into ``out``.

        Args:
            x: the values: flat, contiguous, float32, of any size.
            out: flat, contiguous, uint8, of exactly ``encoded_bytes(x.numel())`` elements.
            residual: is set to ``x - decode(encode(x))``; like ``x``, and may be ``x`` itself.

        Raises:
            NotFinite: ``x`` holds NaN or infinity. ``residual`` is unchanged then, and ``out`` has no meaning.
        """

    @abstractmethod
    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Decode ``data``, which :meth:`encode` wrote, into ``out``.

        Args:
            out: flat, contiguous, float32, of as many elements as were encoded.
            add: add to ``out`` instead of overwriting it.
        """

    def encode_finite(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Encode values that are known to be finite. A codec can save a pass over them here."""
        self.encode(x, out, residual)

    def decode_sum(self, data: Sequence[Tensor], out: Tensor) -> None:
        """Set ``out`` to the sum of several encodings, added in the order given. A codec can do it in one pass."""
        if not data:
            out.zero_()
        for i, one in enumerate(data):
            self.decode(one, out, add=i > 0)

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


def is_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass and without a copy of ``x``."""
    return x.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())


def check_finite(x: Tensor, codec: Codec) -> None:
    """Raise :class:`NotFinite` unless all of ``x`` is finite."""
    if not is_finite(x):
        raise not_finite(x, codec)


def not_finite(x: Tensor, codec: Codec) -> NotFinite:
    """The error for ``x``, with the number and the place of what is not finite."""
    bad = (~torch.isfinite(x)).nonzero().flatten()
    return NotFinite(
        f"{bad.numel()} of {x.numel()} values to encode as {codec.name} are NaN or infinite (first at element "
        f"{int(bad[0])}); look for the overflow that made them, or skip this exchange"
    )


def bf16_up(magnitude: Tensor) -> Tensor:
    """Numbers that are not negative, rounded up to bfloat16; as its 16 bits in int32."""
    return (magnitude.view(torch.int32) + 0xFFFF) >> 16
