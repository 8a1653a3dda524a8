"""The kernels of a device: compiled C on the CPU, Triton on a GPU, or none, where codecs run in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from offbeat.wire.codecs.c_kernels import c_kernels
from offbeat.wire.codecs.triton_launch import triton_kernels

if TYPE_CHECKING:
    from offbeat.wire.codecs.block_codec import BlockCodec

__all__ = ["Kernels", "all_finite", "kernels_for"]


class Kernels(Protocol):
    """Encodes and decodes in one pass over memory, with the same bytes and bits as plain torch."""

    def is_finite(self, x: Tensor) -> bool:
        """Return whether no element is NaN or infinite."""

    def encode(self, codec: BlockCodec, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """Encode finite values."""

    def decode(self, codec: BlockCodec, data: Tensor, out: Tensor, add: bool) -> None:
        """Decode."""


def kernels_for(device: torch.device) -> Kernels | None:
    """Return the kernels for tensors on this device, or None if there are none."""
    kernels = triton_kernels(device)
    return c_kernels() if kernels is None and device.type == "cpu" else kernels


def all_finite(x: Tensor) -> bool:
    """Return whether no element of ``x`` is NaN or infinite."""
    kernels = kernels_for(x.device)
    if kernels is not None:
        return kernels.is_finite(x)
    return x.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())
