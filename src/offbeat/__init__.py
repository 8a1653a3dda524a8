"""offbeat: distributed optimizers that update while backward and the network are busy.

The drop-in optimizers take torch.optim's arguments and keep its state-dict format::

    import offbeat
    optimizer = offbeat.AdamW(model.parameters(), lr=1e-3)
"""

from offbeat._version import __version__
from offbeat.checkpoint import CheckpointError, list_checkpoints, load_checkpoint, save_checkpoint
from offbeat.ddp import ReducedToOwners, reduce_to_owners
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
    DiLoCo,
    Disagreement,
    HierarchicalModelAverager,
    Level,
    LocalSGD,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    Replica,
    SlowMo,
    post_local_sgd_hook,
    post_localSGD_hook,
)
from offbeat.wire import CodecState, NotFinite, TopK, codec_hook
from offbeat.wire.peers import ExchangeError
from offbeat.wire.simulated import Simulation

__all__ = [
    "LBFGS",
    "CaptureError",
    "Chain",
    "CheckpointError",
    "Choice",
    "CodecState",
    "DiLoCo",
    "Disagreement",
    "ExchangeError",
    "FunctionalOptimizer",
    "GradientError",
    "HierarchicalModelAverager",
    "Level",
    "LocalSGD",
    "NotFinite",
    "Overlap",
    "OverlappedOptimizer",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PureOptimizer",
    "ReducedToOwners",
    "Replica",
    "Rule",
    "RuleOptimizer",
    "Simulation",
    "Slot",
    "SlowMo",
    "Split",
    "TopK",
    "__version__",
    "as_functional",
    "as_pure",
    "codec_hook",
    "list_checkpoints",
    "load_checkpoint",
    "overlap",
    "post_localSGD_hook",
    "post_local_sgd_hook",
    "reduce_to_owners",
    "register_overlapped",
    "save_checkpoint",
    "split_parameters",
]
__all__ += optimizers.__all__
