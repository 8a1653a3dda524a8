"""Replicas that average their parameters every few steps instead of their gradients at every step."""

from offbeat.sync.agreement import Disagreement
from offbeat.sync.averagers import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager
from offbeat.sync.local_sgd import LocalSGD
from offbeat.sync.post_local import PostLocalSGDOptimizer, PostLocalSGDState, post_local_sgd_hook, post_localSGD_hook

__all__ = [
    "Disagreement",
    "HierarchicalModelAverager",
    "LocalSGD",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "post_localSGD_hook",
    "post_local_sgd_hook",
]
