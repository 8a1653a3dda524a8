"""The codecs by Triton, for tensors in GPU memory."""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat.wire.base import is_finite

if TYPE_CHECKING:
    from offbeat.wire.fused import FusedCodec

__all__ = ["TritonKernels", "is_interpreting", "launch", "triton_kernels"]

#: Elements a program works on.
TILE = 2048


def is_interpreting() -> bool:
    """Whether Triton runs kernels in Python, on CPU tensors (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def launch(codec: FusedCodec, encode: bool, option: bool) -> tuple[str, dict[str, Any], int]:
    """The kernel, its constants, and the elements a program works on.

    Args:
        option: with a residual (encode), or adding (decode).
    """
    last = {"RESIDUAL" if encode else "ADD": option}
    name = f"{'encode' if encode else 'decode'}_{codec.kernel}"
    if codec.kernel == "bf16":
        return name, {"BLOCK": TILE, **last}, TILE
    shape = {"BLOCK": codec.block, "ROWS": TILE // codec.block}
    if codec.kernel == "fp16":
        return name, {**shape, **last}, TILE
    keys = ("bits", "low", "high", "signed", "cap") if encode else ("bits", "low")
    numbers = {key.upper(): getattr(codec, key) for key in keys}
    return name[: name.index("_")] + "_int", {**shape, **numbers, **last}, TILE


class TritonKernels:
    """See :class:`~offbeat.wire.kernels.Kernels`. Encoding waits for the GPU, to know whether values are finite."""

    names = frozenset(("bf16", "fp16", "int8", "int4", "int2"))

    def is_finite(self, x: Tensor) -> bool:
        """See :class:`~offbeat.wire.kernels.Kernels`."""
        return is_finite(x)

    def encode(self, codec: FusedCodec, x: Tensor, out: Tensor, residual: Tensor | None) -> bool:
        """See :class:`~offbeat.wire.kernels.Kernels`."""
        flag = torch.zeros(1, dtype=torch.int32, device=x.device)
        data = _aligned(codec, out)
        self._run(codec, True, residual is not None, x, data, x if residual is None else residual, flag, x.numel())
        if data.data_ptr() != out.data_ptr():
            out.copy_(data.view(torch.uint8))
        return not flag.item()

    def decode(self, codec: FusedCodec, data: Tensor, out: Tensor, add: bool) -> None:
        """See :class:`~offbeat.wire.kernels.Kernels`."""
        self._run(codec, False, add, _aligned(codec, data), out, out.numel())

    def _run(self, codec: FusedCodec, encode: bool, option: bool, *arguments: Any) -> None:
        from offbeat.wire import triton_kernels

        name, constants, tile = launch(codec, encode, option)
        kernel = getattr(triton_kernels, name)
        device = arguments[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[(-(-arguments[-1] // tile),)](*arguments, **constants, enable_fp_fusion=False)


def _aligned(codec: FusedCodec, data: Tensor) -> Tensor:
    """Codes of half precision are written two bytes at a time, and a message may begin at any byte."""
    if codec.kernel not in ("bf16", "fp16"):
        return data
    return (data.clone() if data.data_ptr() % 2 else data).view(torch.int16)


def triton_kernels(device: torch.device) -> TritonKernels | None:
    """The kernels for this device, or None if there are none."""
    if os.environ.get("OFFBEAT_NO_TRITON") or device.type != ("cpu" if is_interpreting() else "cuda"):
        return None
    return _once()


@functools.cache
def _once() -> TritonKernels | None:
    return TritonKernels() if importlib.util.find_spec("triton") is not None else None
