"""Replicas that synchronise every N steps, instead of averaging gradients at every step."""

from offbeat.replicas.averagers import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager
from offbeat.replicas.compare import Disagreement
from offbeat.replicas.diloco import DiLoCo
from offbeat.replicas.level import Level
from offbeat.replicas.local_sgd import LocalSGD
from offbeat.replicas.post_local import (
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_local_sgd_hook,
    post_localSGD_hook,
)
from offbeat.replicas.replica import Replica
from offbeat.replicas.reports import RoundReport, log_rounds
from offbeat.replicas.slowmo import SlowMo

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
    "RoundReport",
    "SlowMo",
    "log_rounds",
    "post_localSGD_hook",
    "post_local_sgd_hook",
]
