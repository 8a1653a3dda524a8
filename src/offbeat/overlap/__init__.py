"""When parameters are updated: during backward."""

from offbeat.overlap.checks import ReadsGradients
from offbeat.overlap.handle import Overlap, overlap
from offbeat.overlap.registry import OverlappedOptimizer, register_overlapped

__all__ = ["Overlap", "OverlappedOptimizer", "ReadsGradients", "overlap", "register_overlapped"]
