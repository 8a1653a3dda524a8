"""The codecs compiled from ``codecs.c``, for tensors in CPU memory."""

from __future__ import annotations

import ctypes
import functools
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from offbeat.engine.cpu.compiler import CompilerError, load, why_not_wanted

if TYPE_CHECKING:
    from offbeat.wire.fused import FusedCodec

__all__ = ["NativeKernels", "native_kernels"]


class NativeKernels:
    """See :class:`~offbeat.wire.kernels.Kernels`. Raises :class:`CompilerError` if they cannot be compiled.

    They run in the thread that calls them, without the interpreter's lock: an exchange in the background does not take
    the cores that training uses.
    """

    names = frozenset(("bf16", "fp16", "int8", "int4", "int2", "topk"))

    def __init__(self) -> None:
        self._library = load(Path(__file__).with_name("codecs.c").read_text())
        self._is_finite = self._library.offbeat_is_finite
        self._is_finite.argtypes, self._is_finite.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64

    def is_finite(self, x: Tensor) -> bool:
        """See :class:`~offbeat.wire.kernels.Kernels`."""
        return bool(self._is_finite(x.data_ptr(), x.numel()))

    def encode(self, codec: FusedCodec, x: Tensor, out: Tensor, residual: Tensor | None) -> bool:
        """See :class:`~offbeat.wire.kernels.Kernels`."""
        arguments = array("q", codec.kernel_arguments(x.numel()))
        left = None if residual is None else residual.data_ptr()
        function = self._function("encode", codec.kernel)
        return bool(function(x.data_ptr(), x.numel(), out.data_ptr(), left, arguments.buffer_info()[0]))

    def decode(self, codec: FusedCodec, data: Tensor, out: Tensor, add: bool) -> None:
        """See :class:`~offbeat.wire.kernels.Kernels`."""
        arguments = array("q", codec.kernel_arguments(out.numel()))
        function = self._function("decode", codec.kernel)
        function(data.data_ptr(), out.numel(), out.data_ptr(), int(add), arguments.buffer_info()[0])

    def _function(self, way: str, kernel: str) -> Any:
        function = getattr(self._library, f"offbeat_{way}_{kernel}")
        if function.argtypes is None:
            address, number = ctypes.c_void_p, ctypes.c_int64
            fourth = address if way == "encode" else number
            function.argtypes = (address, number, address, fourth, address)
            function.restype = number if way == "encode" else None
        return function


def native_kernels() -> NativeKernels | None:
    """The kernels, or None where they can be neither compiled nor loaded."""
    return None if why_not_wanted() else _once()


@functools.cache
def _once() -> NativeKernels | None:
    try:
        return NativeKernels()
    except CompilerError:
        return None
