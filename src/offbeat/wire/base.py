"""For offbeat.sync only; delete this file with it."""

from offbeat.wire.codecs.codec import Codec as Codec
from offbeat.wire.codecs.codec import NotFinite as NotFinite
