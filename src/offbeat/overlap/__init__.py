"""WHEN an update is executed: inside backward."""

from offbeat.overlap.handle import Overlap, overlap
from offbeat.overlap.registry import OverlappedOptimizer, register_overlapped

__all__ = ["Overlap", "OverlappedOptimizer", "overlap", "register_overlapped"]
