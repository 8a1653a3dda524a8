"""The public optimizers: torch.optim.Optimizer classes, functional and pure forms, all made from rules."""

from offbeat.optim import optimizers
from offbeat.optim.base import RuleOptimizer
from offbeat.optim.chain import Chain
from offbeat.optim.functional import FunctionalOptimizer, as_functional
from offbeat.optim.lbfgs import LBFGS
from offbeat.optim.muon_with_adamw import muon_with_adamw
from offbeat.optim.optimizers import *  # noqa: F403
from offbeat.optim.pure import PureOptimizer, as_pure
from offbeat.optim.split import Split, split_parameters

__all__ = [
    "LBFGS",
    "Chain",
    "FunctionalOptimizer",
    "PureOptimizer",
    "RuleOptimizer",
    "Split",
    "as_functional",
    "as_pure",
    "muon_with_adamw",
    "split_parameters",
]
__all__ += optimizers.__all__
