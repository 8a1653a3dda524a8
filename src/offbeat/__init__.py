"""offbeat: distributed optimizers that update while backward and the network are busy.

The drop-in optimizers take torch.optim's arguments and keep its state-dict format::

    import offbeat
    optimizer = offbeat.AdamW(model.parameters(), lr=1e-3)
"""

from offbeat._version import __version__
from offbeat.errors import CaptureError, GradientError
from offbeat.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    FunctionalOptimizer,
    Lion,
    NAdam,
    PureOptimizer,
    RAdam,
    RMSprop,
    Rprop,
    RuleOptimizer,
    as_functional,
    as_pure,
)
from offbeat.overlap import Overlap, OverlappedOptimizer, overlap, register_overlapped
from offbeat.rules import Rule, Slot
from offbeat.tiers import Choice

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "CaptureError",
    "Choice",
    "FunctionalOptimizer",
    "GradientError",
    "Lion",
    "NAdam",
    "Overlap",
    "OverlappedOptimizer",
    "PureOptimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Rule",
    "RuleOptimizer",
    "Slot",
    "__version__",
    "as_functional",
    "as_pure",
    "overlap",
    "register_overlapped",
]
