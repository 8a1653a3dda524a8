"""What travels between replicas: codecs, which make numbers small, and peers and sums over ranks.

The room stands on torch alone. From the engine it takes only the C compiler, so it sits beside ``optim``, below
``ddp``, ``overlap`` and ``replicas``, all of which may use it.
"""

from offbeat.wire.codecs import BlockCodec, Codec, NotFinite, TopK, make_codec, register_codec
from offbeat.wire.sums import CodedMean

__all__ = [
    "BlockCodec",
    "Codec",
    "CodedMean",
    "NotFinite",
    "TopK",
    "make_codec",
    "register_codec",
]
