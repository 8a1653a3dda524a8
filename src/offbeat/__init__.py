"""offbeat: distributed optimizers that update while backward and the network are busy.

The drop-in optimizers take torch.optim's arguments and keep its state-dict format::

    import offbeat
    optimizer = offbeat.AdamW(model.parameters(), lr=1e-3)
"""

import importlib
from typing import TYPE_CHECKING, Any

from offbeat._version import __version__
from offbeat.checkpoint import CheckpointError, list_checkpoints, load_checkpoint, save_checkpoint
from offbeat.ddp import CodecState, codec_hook
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
    muon_with_adamw,
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
    "CheckpointError",
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
    "list_checkpoints",
    "load_checkpoint",
    "log_rounds",
    "muon_with_adamw",
    "overlap",
    "post_localSGD_hook",
    "post_local_sgd_hook",
    "register_codec",
    "register_overlapped",
    "save_checkpoint",
    "split_parameters",
]
__all__ += optimizers.__all__

#: Public names that are gone, and what to use instead.
_REMOVED = {
    "reduce_to_owners": "use optimizer.share_matrices() under DDP, or FSDP2, which needs no call",
    "ReducedToOwners": "use optimizer.share_matrices() under DDP, or FSDP2, which needs no call",
}


if TYPE_CHECKING:
    from offbeat import plan as plan
else:  # to type checkers, a module with this function has every name

    def __getattr__(name: str) -> Any:
        """Import ``offbeat.plan`` when it is first used: training does not need it."""
        if name == "plan":
            return importlib.import_module("offbeat.plan")
        if name in _REMOVED:
            raise AttributeError(f"offbeat.{name} was removed: {_REMOVED[name]}")
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
