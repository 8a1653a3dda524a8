"""The codecs by name: ``register_codec``, and ``make_codec`` for ``codec=`` arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

from offbeat.wire.codecs.codec import Codec

__all__ = ["CodecName", "CodecSpec", "make_codec", "register_codec"]

AnyCodec = TypeVar("AnyCodec", bound=Codec)

#: The built-in names; :func:`register_codec` adds others.
CodecName: TypeAlias = Literal["bf16", "fp16", "int8", "int4", "int2"] | str

#: A ``codec=`` argument; None sends float32 as it is.
CodecSpec: TypeAlias = CodecName | Codec | None

_CLASSES: dict[str, type[Codec]] = {}


def register_codec(name: str) -> Callable[[type[AnyCodec]], type[AnyCodec]]:
    """Class decorator: give a codec a name that every ``codec=`` argument accepts.

    Register it on every rank, before the name is used. The class is called without arguments.

    Args:
        name: the name. It also becomes the class's attribute ``name``.

    Raises:
        TypeError: the class is not a :class:`offbeat.Codec`, or lacks a method.
        ValueError: the name is empty, or taken.

    Example:
        >>> import torch, offbeat
        >>> @offbeat.register_codec("mantissa7")
        ... class Mantissa7(offbeat.BlockCodec):
        ...     def record_bytes(self, width):
        ...         return 2 * width
        ...
        ...     def encode_rows(self, rows, records):
        ...         records.copy_(rows.bfloat16().view(records.dtype))
        ...         return rows.bfloat16().float()
        ...
        ...     def decode_rows(self, records, width):
        ...         return records.clone().view(torch.bfloat16).float()
        >>> offbeat.CodecState("mantissa7").codec
        <codec mantissa7>
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of a codec must be a string that is not empty, but got {name!r}")

    def register(cls: type[AnyCodec]) -> type[AnyCodec]:
        if not (isinstance(cls, type) and issubclass(cls, Codec)):
            raise TypeError(f"{cls!r} cannot be the codec {name!r}; derive a class from offbeat.BlockCodec or Codec")
        if inspect.isabstract(cls):
            raise TypeError(f"the codec {cls.__name__} lacks {', '.join(sorted(cls.__abstractmethods__))}; define it")
        if name in _CLASSES:
            raise ValueError(f"the codec name {name!r} is taken by {_CLASSES[name].__qualname__}; choose another name")
        cls.name = name
        _CLASSES[name] = cls
        return cls

    return register


def make_codec(spec: CodecSpec) -> Codec | None:
    """Return the codec for a ``codec=`` argument.

    Args:
        spec: a registered name such as "int8", a codec such as ``TopK(0.03)``, or None for float32 as it is.
    """
    if spec is None or isinstance(spec, Codec):
        return spec
    if isinstance(spec, str) and spec in _CLASSES:
        return _CLASSES[spec]()
    raise ValueError(
        f"codec={spec!r} is not known; use None (float32), {', '.join(map(repr, _CLASSES))}, or a codec such as "
        "offbeat.TopK(0.03, bits=2)"
    )
