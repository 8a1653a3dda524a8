"""What travels between replicas: codecs, which make numbers small, and reducers, which sum them over ranks.

The room stands on torch alone. From the engine it takes only the C compiler, so it sits beside ``optim``, below
``ddp``, ``overlap`` and ``sync``, all of which may use it.
"""

from offbeat.wire.codec import Codec, NotFinite, TopK, make_codec
from offbeat.wire.coded import CodedMean
from offbeat.wire.feedback import ErrorFeedback
from offbeat.wire.hooks import CodecState, codec_hook

__all__ = [
    "Codec",
    "CodecState",
    "CodedMean",
    "ErrorFeedback",
    "NotFinite",
    "TopK",
    "codec_hook",
    "make_codec",
]
