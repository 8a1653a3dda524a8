"""The two fronts: torch.optim.Optimizer classes and functional optimizers, both made from rules."""

from offbeat.optim.base import RuleOptimizer
from offbeat.optim.functional import FunctionalOptimizer, as_functional
from offbeat.optim.optimizers import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lion,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)
from offbeat.optim.pure import PureOptimizer, as_pure

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "FunctionalOptimizer",
    "Lion",
    "NAdam",
    "PureOptimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "RuleOptimizer",
    "as_functional",
    "as_pure",
]
