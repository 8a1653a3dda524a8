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
from offbeat.sync import (
    Disagreement,
    HierarchicalModelAverager,
    LocalSGD,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_local_sgd_hook,
    post_localSGD_hook,
)
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
    "Disagreement",
    "FunctionalOptimizer",
    "GradientError",
    "HierarchicalModelAverager",
    "Lion",
    "LocalSGD",
    "NAdam",
    "Overlap",
    "OverlappedOptimizer",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
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
    "post_localSGD_hook",
    "post_local_sgd_hook",
    "register_overlapped",
]
