"""The codecs by Triton, for tensors in GPU memory. The kernels are in triton_kernels.py."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from offbeat.wire.codecs.block_codec import BlockCodec

__all__ = ["TritonKernels", "launch_of", "topk_constants", "triton_kernels"]

#: Elements that a program works on.
TILE = 2048


def _is_interpreting() -> bool:
    """Return whether Triton runs kernels in Python, on CPU tensors (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def launch_of(codec: BlockCodec, way: str, option: bool) -> tuple[str, dict[str, Any]]:
    """Return the name of a kernel, other than top-k's, and its constants.

    Args:
        way: "encode" or "decode".
        option: with a residual (encode), or adding (decode).
    """
    last: dict[str, Any] = {"RESIDUAL" if way == "encode" else "ADD": option}
    if codec.kernel == "bf16":
        return f"{way}_bf16", {"BLOCK": TILE, **last}
    last |= {"BLOCK": codec.block, "ROWS": TILE // codec.block}
    if codec.kernel == "fp16":
        return f"{way}_fp16", last
    keys = ("bits", "low", "high", "signed", "cap") if way == "encode" else ("bits", "low")
    return f"{way}_int", {key.upper(): getattr(codec, key) for key in keys} | last


def topk_constants(codec: BlockCodec, layout: Sequence[int], way: str, option: bool) -> dict[str, Any]:
    """Return the constants of a top-k kernel: limits that are powers of two."""
    bits, (_, k, _, unary, _) = codec.kernel_arguments(1)[0], layout
    if way == "encode":
        return {"CHUNK": codec.block, "BITS": bits, "K_LIMIT": _power(k), "RESIDUAL": option}
    return {"BITS": bits, "UNARY_LIMIT": _power(unary), "ADD": option}


class TritonKernels:
    """See :class:`~offbeat.wire.codecs.kernels.Kernels`. Only :meth:`is_finite` waits for the GPU."""

    def is_finite(self, x: Tensor) -> bool:
        """See :class:`~offbeat.wire.codecs.kernels.Kernels`."""
        return x.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())

    def encode(self, codec: BlockCodec, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """See :class:`~offbeat.wire.codecs.kernels.Kernels`."""
        has_residual, left = residual is not None, x if residual is None else residual
        if codec.kernel != "topk":
            data = _aligned(codec, out)
            name, constants = launch_of(codec, "encode", has_residual)
            _launch(name, -(-x.numel() // TILE), x, data, left, x.numel(), **constants)
            if data.data_ptr() != out.data_ptr():
                out.copy_(data.view(torch.uint8))
            return
        for start, stop, first, last, layout in _topk_parts(codec, x.numel()):
            width, *numbers, size = layout
            words = torch.zeros((stop - start) // width, -(-size // 4), dtype=torch.int32, device=x.device)
            tensors, constants = (
                (x[start:stop], words, left[start:stop]),
                topk_constants(codec, layout, "encode", has_residual),
            )
            _launch("encode_topk", len(words), *tensors, width, *numbers, words.shape[1], **constants)
            out[first:last].view(len(words), size).copy_(words.view(torch.uint8)[:, :size])

    def decode(self, codec: BlockCodec, data: Tensor, out: Tensor, add: bool) -> None:
        """See :class:`~offbeat.wire.codecs.kernels.Kernels`."""
        if codec.kernel != "topk":
            name, constants = launch_of(codec, "decode", add)
            _launch(name, -(-out.numel() // TILE), _aligned(codec, data), out, out.numel(), **constants)
            return
        if not add:
            out.zero_()
        for start, stop, first, last, layout in _topk_parts(codec, out.numel()):
            chunks, constants = (stop - start) // layout[0], topk_constants(codec, layout, "decode", add)
            _launch("decode_topk", chunks, data[first:last], out[start:stop], *layout, **constants)


def _topk_parts(codec: BlockCodec, numel: int) -> list[tuple[int, int, int, int, Sequence[int]]]:
    """Return whole chunks, then the last: the bounds of their values and of their records, and their layout."""
    whole, numbers = numel - numel % codec.block, codec.kernel_arguments(numel)[1:]
    parts = [(0, whole, numbers[:5])] if whole else []
    parts += [(whole, numel, numbers[5:])] if whole < numel else []
    return [(a, b, codec.encoded_bytes(a), codec.encoded_bytes(b), layout) for a, b, layout in parts]


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _launch(name: str, programs: int, *arguments: Any, **constants: Any) -> None:
    from offbeat.wire.codecs import triton_kernels

    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        getattr(triton_kernels, name)[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def _aligned(codec: BlockCodec, data: Tensor) -> Tensor:
    """Return codes of half precision as 16-bit numbers, in a copy if they begin at an odd address."""
    if codec.kernel not in ("bf16", "fp16"):
        return data
    return (data.clone() if data.data_ptr() % 2 else data).view(torch.int16)


def triton_kernels(device: torch.device) -> TritonKernels | None:
    """Return the kernels for this device, or None if there are none."""
    if os.environ.get("OFFBEAT_NO_TRITON") or device.type != ("cpu" if _is_interpreting() else "cuda"):
        return None
    return _try_once(device)


@functools.cache
def _try_once(device: torch.device) -> TritonKernels | None:
    """Return the kernels if they run: Triton may be missing, or have no compiler for this GPU."""
    if importlib.util.find_spec("triton") is None:
        return None
    from offbeat.wire.codecs.integers import Int4

    codec, kernels, x = Int4(), TritonKernels(), torch.full((2,), 8.0, device=device)
    data = torch.empty(codec.encoded_bytes(2), dtype=torch.uint8, device=device)
    try:
        kernels.encode(codec, x, data, None)
        kernels.decode(codec, data, x, True)
        return kernels if x.tolist() == [16.0, 16.0] else None
    except Exception:  # whatever Triton and its compilers raise; plain torch does the same more slowly
        return None
