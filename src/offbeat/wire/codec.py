"""For offbeat.sync only; delete this file with it."""

from offbeat.wire.codecs.registry import CodecSpec as CodecSpec
from offbeat.wire.codecs.registry import make_codec as make_codec
