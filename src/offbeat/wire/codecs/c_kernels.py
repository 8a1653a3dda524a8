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
    from offbeat.wire.codecs.block_codec import BlockCodec

__all__ = ["CKernels", "c_kernels"]


class CKernels:
    """See :class:`~offbeat.wire.codecs.kernels.Kernels`. Raises :class:`CompilerError` if they cannot be compiled.

    They run in the thread that calls them, without the interpreter's lock: an exchange in the background does not take
    the cores that training uses.
    """

    def __init__(self) -> None:
        self._library = load(Path(__file__).with_name("codecs.c").read_text())
        self._is_finite = self._library.offbeat_is_finite
        self._is_finite.argtypes, self._is_finite.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64

    def is_finite(self, x: Tensor) -> bool:
        """See :class:`~offbeat.wire.codecs.kernels.Kernels`."""
        return bool(self._is_finite(x.data_ptr(), x.numel()))

    def encode(self, codec: BlockCodec, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """See :class:`~offbeat.wire.codecs.kernels.Kernels`."""
        left = None if residual is None else residual.data_ptr()
        self._call("encode", codec, x.numel(), x.data_ptr(), x.numel(), out.data_ptr(), left)

    def decode(self, codec: BlockCodec, data: Tensor, out: Tensor, add: bool) -> None:
        """See :class:`~offbeat.wire.codecs.kernels.Kernels`."""
        self._call("decode", codec, out.numel(), data.data_ptr(), out.numel(), out.data_ptr(), int(add))

    def _call(self, way: str, codec: BlockCodec, numel: int, *arguments: Any) -> None:
        function = getattr(self._library, f"offbeat_{way}_{codec.kernel}")
        if function.argtypes is None:
            address, number = ctypes.c_void_p, ctypes.c_int64
            function.argtypes = (address, number, address, address if way == "encode" else number, address)
            function.restype = None
        more = array("q", codec.kernel_arguments(numel))  # alive during the call
        function(*arguments, more.buffer_info()[0])


def c_kernels() -> CKernels | None:
    """Return the kernels, or None where they can be neither compiled nor loaded."""
    return None if why_not_wanted() else _load_once()


@functools.cache
def _load_once() -> CKernels | None:
    try:
        return CKernels()
    except CompilerError:
        return None
