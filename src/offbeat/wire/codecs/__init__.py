"""Codecs: each encodes float32 values in fewer bytes. One file a family; registry.py has them by name."""

from offbeat.wire.codecs.block_codec import BlockCodec
from offbeat.wire.codecs.codec import Codec, NotFinite
from offbeat.wire.codecs.halves import Bf16, Fp16
from offbeat.wire.codecs.integers import Int2, Int4, Int8
from offbeat.wire.codecs.registry import CodecName, CodecSpec, make_codec, register_codec
from offbeat.wire.codecs.topk import TopK

__all__ = [
    "Bf16",
    "BlockCodec",
    "Codec",
    "CodecName",
    "CodecSpec",
    "Fp16",
    "Int2",
    "Int4",
    "Int8",
    "NotFinite",
    "TopK",
    "make_codec",
    "register_codec",
]
