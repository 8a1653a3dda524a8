"""The codecs by name; see :class:`Codec` for what one does and docs/codecs.md for their sizes and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from offbeat.wire.base import Codec, NotFinite
from offbeat.wire.blocks import Int2, Int4, Int8
from offbeat.wire.halves import Bf16, Fp16
from offbeat.wire.topk import TopK

__all__ = ["Codec", "CodecName", "CodecSpec", "NotFinite", "TopK", "make_codec"]

CodecName: TypeAlias = Literal["bf16", "fp16", "int8", "int4", "int2"]

#: A ``codec=`` argument; None is float32 as it is.
CodecSpec: TypeAlias = CodecName | Codec | None

_BY_NAME: dict[CodecName, Callable[[], Codec]] = {"bf16": Bf16, "fp16": Fp16, "int8": Int8, "int4": Int4, "int2": Int2}


def make_codec(spec: CodecSpec) -> Codec | None:
    """The codec for a ``codec=`` argument.

    Args:
        spec: "bf16", "fp16", "int8", "int4" or "int2", a codec such as ``TopK(0.03)``, or None for float32 as it is.
    """
    if spec is None or isinstance(spec, Codec):
        return spec
    if isinstance(spec, str) and spec in _BY_NAME:
        return _BY_NAME[spec]()
    raise ValueError(
        f"codec={spec!r} is not known; use None (float32), {', '.join(map(repr, _BY_NAME))}, or a codec such as "
        "offbeat.TopK(0.03, bits=2)"
    )
