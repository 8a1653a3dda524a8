"""For offbeat.sync only; delete this file with it."""

from offbeat.wire.sums import CodedMean as CodedMean
