"""Replicas that agree every few steps, instead of averaging gradients at every step."""

from offbeat.sync.agreement import Disagreement
from offbeat.sync.averagers import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager
from offbeat.sync.diloco import DiLoCo
from offbeat.sync.level import Level
from offbeat.sync.local_sgd import LocalSGD
from offbeat.sync.post_local import PostLocalSGDOptimizer, PostLocalSGDState, post_local_sgd_hook, post_localSGD_hook
from offbeat.sync.replica import Replica
from offbeat.sync.slowmo import SlowMo

__all__ = [
    "DiLoCo",
    "Disagreement",
    "HierarchicalModelAverager",
    "Level",
    "LocalSGD",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "Replica",
    "SlowMo",
    "post_localSGD_hook",
    "post_local_sgd_hook",
]
