"""The codecs by Triton, for tensors in GPU memory."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
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

    names = frozenset(("bf16", "fp16", "int8", "int4", "int2", "topk"))

    def is_finite(self, x: Tensor) -> bool:
        """See :class:`~offbeat.wire.kernels.Kernels`."""
        return is_finite(x)

    def encode(self, codec: FusedCodec, x: Tensor, out: Tensor, residual: Tensor | None) -> bool:
        """See :class:`~offbeat.wire.kernels.Kernels`."""
        flag = torch.zeros(1, dtype=torch.int32, device=x.device)
        if codec.kernel == "topk":
            self._encode_topk(codec, x, out, residual, flag)
            return not flag.item()
        data = _aligned(codec, out)
        self._run(codec, True, residual is not None, x, data, x if residual is None else residual, flag, x.numel())
        if data.data_ptr() != out.data_ptr():
            out.copy_(data.view(torch.uint8))
        return not flag.item()

    def decode(self, codec: FusedCodec, data: Tensor, out: Tensor, add: bool) -> None:
        """See :class:`~offbeat.wire.kernels.Kernels`."""
        if codec.kernel == "topk":
            self._decode_topk(codec, data, out, add)
        else:
            self._run(codec, False, add, _aligned(codec, data), out, out.numel())

    def _run(self, codec: FusedCodec, encode: bool, option: bool, *arguments: Any) -> None:
        name, constants, tile = launch(codec, encode, option)
        _start(name, -(-arguments[-1] // tile), *arguments, **constants)

    def _encode_topk(self, codec: FusedCodec, x: Tensor, out: Tensor, residual: Tensor | None, flag: Tensor) -> None:
        for start, stop, first, last, layout in _topk_parts(codec, x.numel()):
            width, *numbers, size = layout
            words = torch.zeros((stop - start) // width, -(-size // 4), dtype=torch.int32, device=x.device)
            left = x if residual is None else residual
            numbers = [width, *numbers, words.shape[1]]
            constants = topk_constants(codec, layout, True, residual is not None)
            _start("encode_topk", len(words), x[start:stop], words, left[start:stop], flag, *numbers, **constants)
            out[first:last].view(len(words), size).copy_(words.view(torch.uint8)[:, :size])

    def _decode_topk(self, codec: FusedCodec, data: Tensor, out: Tensor, add: bool) -> None:
        if not add:
            out.zero_()
        for start, stop, first, last, layout in _topk_parts(codec, out.numel()):
            chunks, constants = (stop - start) // layout[0], topk_constants(codec, layout, False, add)
            _start("decode_topk", chunks, data[first:last], out[start:stop], *layout, **constants)


_Part = tuple[int, int, int, int, Sequence[int]]


def _topk_parts(codec: FusedCodec, numel: int) -> list[_Part]:
    """Whole chunks, then the last: where their values and records begin and end, and their layout."""
    whole, numbers = numel - numel % codec.block, codec.kernel_arguments(numel)[1:]
    parts = [(0, whole, numbers[:5])] if whole else []
    parts += [(whole, numel, numbers[5:])] if whole < numel else []
    return [(a, b, codec.encoded_bytes(a), codec.encoded_bytes(b), layout) for a, b, layout in parts]


def topk_constants(codec: FusedCodec, layout: Sequence[int], encode: bool, option: bool) -> dict[str, Any]:
    """The constants of the kernels of top-k: limits that are powers of two."""
    bits, (_, k, _, unary, _) = codec.kernel_arguments(1)[0], layout
    if encode:
        return {"CHUNK": codec.block, "BITS": bits, "K_LIMIT": _power(k), "RESIDUAL": option}
    return {"BITS": bits, "UNARY_LIMIT": _power(unary), "ADD": option}


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _start(name: str, programs: int, *arguments: Any, **constants: Any) -> None:
    from offbeat.wire import triton_kernels

    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        getattr(triton_kernels, name)[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def _aligned(codec: FusedCodec, data: Tensor) -> Tensor:
    """Codes of half precision are written two bytes at a time, and a message may begin at any byte."""
    if codec.kernel not in ("bf16", "fp16"):
        return data
    return (data.clone() if data.data_ptr() % 2 else data).view(torch.int16)


def triton_kernels(device: torch.device) -> TritonKernels | None:
    """The kernels for this device, or None if there are none."""
    if os.environ.get("OFFBEAT_NO_TRITON") or device.type != ("cpu" if is_interpreting() else "cuda"):
        return None
    return _tried(device, is_interpreting())


@functools.cache
def _tried(device: torch.device, interpreting: bool) -> TritonKernels | None:
    """The kernels, if they run: Triton may be missing, or have no compiler for this GPU."""
    if importlib.util.find_spec("triton") is None:
        return None
    from offbeat.wire.blocks import Int4

    codec, kernels, x = Int4(), TritonKernels(), torch.full((2,), 8.0, device=device)
    data = torch.empty(codec.encoded_bytes(2), dtype=torch.uint8, device=device)
    try:
        kernels.encode(codec, x, data, None)
        kernels.decode(codec, data, x, True)
        return kernels if x.tolist() == [16.0, 16.0] else None
    except Exception:  # whatever Triton and its compilers raise; plain torch does the same more slowly
        return None
