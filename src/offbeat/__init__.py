"""offbeat: distributed optimizers that update while backward and the network are busy.

The drop-in optimizers take torch.optim's arguments and keep its state-dict format::

    import offbeat
    optimizer = offbeat.AdamW(model.parameters(), lr=1e-3)
"""

from offbeat._version import __version__
from offbeat.engine import Choice
from offbeat.errors import CaptureError, GradientError
from offbeat.optim import (
    LBFGS,
    Chain,
    FunctionalOptimizer,
    PureOptimizer,
    RuleOptimizer,
    Split,
    as_functional,
    as_pure,
    optimizers,
    split_parameters,
)
from offbeat.optim.optimizers import *  # noqa: F403
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

__all__ = [
    "LBFGS",
    "CaptureError",
    "Chain",
    "Choice",
    "Disagreement",
    "FunctionalOptimizer",
    "GradientError",
    "HierarchicalModelAverager",
    "LocalSGD",
    "Overlap",
    "OverlappedOptimizer",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PureOptimizer",
    "Rule",
    "RuleOptimizer",
    "Slot",
    "Split",
    "__version__",
    "as_functional",
    "as_pure",
    "overlap",
    "post_localSGD_hook",
    "post_local_sgd_hook",
    "register_overlapped",
    "split_parameters",
]
__all__ += optimizers.__all__
