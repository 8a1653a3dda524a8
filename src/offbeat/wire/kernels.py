"""Which kernels encode and decode on a device: compiled C on the CPU, Triton on a GPU, or none (plain torch)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from offbeat.wire.base import is_finite
from offbeat.wire.gpu import triton_kernels
from offbeat.wire.native import native_kernels

if TYPE_CHECKING:
    from offbeat.wire.fused import FusedCodec

__all__ = ["Kernels", "all_finite", "kernels_for"]


class Kernels(Protocol):
    """Encodes and decodes in one pass over memory. Gives the same bytes as plain torch."""

    #: The codecs that there are kernels for, by :attr:`FusedCodec.kernel`.
    names: frozenset[str]

    def is_finite(self, x: Tensor) -> bool:
        """Whether no element is NaN or infinite."""

    def encode(self, codec: FusedCodec, x: Tensor, out: Tensor, residual: Tensor | None) -> bool:
        """Encode, and return whether ``x`` is finite."""

    def decode(self, codec: FusedCodec, data: Tensor, out: Tensor, add: bool) -> None:
        """Decode."""


def kernels_for(device: torch.device) -> Kernels | None:
    """The kernels for tensors of this device, or None if there are none."""
    found = triton_kernels(device)
    return native_kernels() if found is None and device.type == "cpu" else found


def all_finite(x: Tensor) -> bool:
    """Whether no element of ``x`` is NaN or infinite."""
    kernels = kernels_for(x.device)
    return is_finite(x) if kernels is None else kernels.is_finite(x)
