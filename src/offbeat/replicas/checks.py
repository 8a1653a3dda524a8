"""Checks of what a replica can wrap."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.frameworks import refuse_wrapped
from offbeat.replicas.level import Level
from offbeat.replicas.wrapper import OptimizerWrapper

__all__ = [
    "check_cover",
    "check_elastic",
    "check_inner",
    "check_levels",
    "check_module",
    "check_reduce_dtype",
    "check_trains",
]


def check_levels(levels: Any, state: Any) -> list[Any]:
    """The levels as a list. Raises if they cannot be used together."""
    found: list[Any] = [levels] if isinstance(levels, Level) or not isinstance(levels, Iterable) else list(levels)
    for level in found:
        if not isinstance(level, Level):
            raise TypeError(f"levels must be an offbeat.Level or a list of them, but got {level!r}")
    if not found:
        raise ValueError("there must be at least one level, but levels is empty")
    for i, level in enumerate(found):
        if level.parts > 1 and state != "keep":
            raise ValueError(
                f"state={state!r} cannot be used with fragments, which are exchanged at different steps; use "
                "state='keep'"
            )
        averages = state == "average" or (isinstance(state, Mapping) and "average" in state.values())
        if level.kept and averages:
            raise ValueError("state='average' cannot be used with mixing, which keeps replicas apart; use 'keep'")
        lower = [one for one in found[:i] if one.outer is not None]
        if lower and level.outer is None and (level.delay or level.kept):
            raise ValueError(
                "a level with a delay or mixing and without an outer optimizer cannot be above one with an outer "
                "optimizer: what it adds differs from rank to rank, and the anchors of the lower level would not be "
                "the same; use delay=0 and no mixing, or give it an outer optimizer"
            )
    return found


def check_module(opt: Any, module: Any, wrapper: str) -> None:
    """Raise if a wrapper of this name, such as LocalSGD, cannot wrap this optimizer or this module."""
    if not isinstance(module, torch.nn.Module):
        order = "; the optimizer comes first, then the module" if isinstance(module, Optimizer) else ""
        raise TypeError(f"module must be a torch.nn.Module, but got {type(module).__name__}{order}")
    refuse_wrapped(opt, wrapper)
    if not isinstance(opt, Optimizer):
        raise TypeError(f"opt must be a torch.optim.Optimizer, but got {type(opt).__name__}")
    if isinstance(opt, OptimizerWrapper):
        raise TypeError(f"opt already averages replicas ({type(opt).__name__}); pass the optimizer that it wraps")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in module.modules()):
        raise TypeError(
            "FullyShardedDataParallel (FSDP1) is not supported, because it does not tell which shard a rank holds; use "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )


#: Optimizers that exchange updates by themselves at every step, by module and name; none of these is imported here.
_COMMUNICATE = {
    (
        "torch.distributed.optim.zero_redundancy_optimizer",
        "ZeroRedundancyOptimizer",
    ): "its ranks' updates at every step",
    ("torch.distributed.optim.optimizer", "DistributedOptimizer"): "with remote workers at every step",
    ("torch.distributed.optim.post_localSGD_optimizer", "PostLocalSGDOptimizer"): "parameters every few steps",
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"): "its ranks' updates at every step",
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"): "its ranks' updates at every step",
    ("hivemind.optim.optimizer", "Optimizer"): "with its peers",
}


def check_inner(opt: Optimizer, wrapper: str) -> None:
    """Raise if the optimizer communicates by itself: each part would learn from one rank's data only, in silence."""
    for (place, name), what in _COMMUNICATE.items():
        cls = getattr(sys.modules.get(place), name, None)
        if isinstance(cls, type) and isinstance(opt, cls):
            raise TypeError(
                f"{name} exchanges {what}, which {wrapper} cannot know of: replicas would mix one rank's updates into "
                "all of them, and nothing would tell. Pass a plain optimizer; to shard its state inside each replica, "
                "use torch.distributed.fsdp.fully_shard"
            )


def check_elastic(levels: Sequence[Level], *, sync_init: bool, sharded: bool) -> None:
    """Raise if these options cannot be used with :class:`offbeat.Elastic`."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 or sharded:
        raise ValueError(
            f"group=Elastic(...) needs replicas of one rank, and this process group has {ranks}; start each replica as "
            "a program of its own, or use a process group as group="
        )
    if len(levels) > 1 or levels[0].group is not None:
        raise ValueError(
            "group=Elastic(...) takes one level, whose group is whoever is there; leave out other levels and group="
        )
    if sync_init:
        raise ValueError("sync_init=True cannot be used with Elastic: who joins starts from a replica that trains")


def check_trains(opt: Optimizer, module: torch.nn.Module, wrapper: str) -> None:
    """Raise if the optimizer has none of the module's parameters.

    It must have all of those of a DDP module, which :func:`check_cover` looks at.
    """
    if isinstance(module, DistributedDataParallel):
        return
    theirs = {id(p) for p in module.parameters()}
    if not any(id(p) in theirs for group in opt.param_groups for p in group["params"]):
        raise ValueError(
            f"the optimizer has none of the parameters of the module that {wrapper} was given, so that the module "
            "would never be averaged; pass the module that the optimizer trains, and if it was sharded since, make the "
            "optimizer after that"
        )


def check_reduce_dtype(dtype: torch.dtype | None, params: Iterable[Tensor]) -> None:
    """Raise if no parameter would be reduced in this dtype, because all of them have a wider one."""
    widths = [p.dtype.itemsize for p in params if p.is_floating_point()]
    if dtype is not None and widths and min(widths) > dtype.itemsize:
        raise ValueError(
            f"reduce_dtype={dtype} is narrower than all parameters, and would not be used: they are averaged in their "
            "own dtype at least; leave it out, or use a codec to send less"
        )


def check_cover(ddp: DistributedDataParallel | None, params: Mapping[str, Tensor], ranks: int) -> None:
    """Raise unless the DDP module and the optimizer train the same parameters."""
    if ddp is None or ranks == 1:
        return
    ours = {id(p) for p in params.values()}
    theirs = {id(p): name for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}
    for name, p in ddp.module.named_parameters():
        if p.requires_grad and id(p) in theirs and id(p) not in ours:
            raise ValueError(
                f"parameter {name!r} of the DistributedDataParallel module is not in this optimizer, so that after "
                "warm-up neither its gradient nor the parameter itself would be averaged over all ranks. Pass all of "
                "the module's parameters to one optimizer, use one DistributedDataParallel module per optimizer, or "
                "set requires_grad=False"
            )
    for name, p in params.items():
        if id(p) not in theirs:
            raise ValueError(
                f"{name} of the optimizer is not in the DistributedDataParallel module, so that its gradient would not "
                "be averaged; pass the module that the optimizer trains"
            )
