"""offbeat: distributed optimizers that update while backward and the network are busy.

The drop-in optimizers take torch.optim's arguments and keep its state-dict format::

    import offbeat
    optimizer = offbeat.AdamW(model.parameters(), lr=1e-3)
"""

from offbeat._version import __version__
from offbeat.ddp import CodecState, ReducedToOwners, codec_hook, reduce_to_owners
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
from offbeat.replicas import (
    DiLoCo,
    Disagreement,
    HierarchicalModelAverager,
    Level,
    LocalSGD,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    Replica,
    RoundReport,
    SlowMo,
    log_rounds,
    post_local_sgd_hook,
    post_localSGD_hook,
)
from offbeat.rules import Rule, Slot
from offbeat.wire import BlockCodec, Codec, NotFinite, TopK, register_codec
from offbeat.wire.elastic import Elastic
from offbeat.wire.peers import ExchangeError
from offbeat.wire.simulated import Simulation

__all__ = [
    "LBFGS",
    "BlockCodec",
    "CaptureError",
    "Chain",
    "Choice",
    "Codec",
    "CodecState",
    "DiLoCo",
    "Disagreement",
    "Elastic",
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
    "RoundReport",
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
    "log_rounds",
    "overlap",
    "post_localSGD_hook",
    "post_local_sgd_hook",
    "reduce_to_owners",
    "register_codec",
    "register_overlapped",
    "split_parameters",
]
__all__ += optimizers.__all__
