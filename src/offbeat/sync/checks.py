"""Checks of what LocalSGD can wrap."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.sync.groups import members, node_group
from offbeat.sync.wrapper import OptimizerWrapper

__all__ = ["check_cover", "check_delay", "check_module", "find_subgroup", "in_words"]


def check_delay(delay: int, every: Any) -> None:
    """Raise unless a delayed average is applied before the next one begins."""
    if isinstance(delay, bool) or not isinstance(delay, int):
        raise TypeError(f"delay must be a number of steps, but got {delay!r}")
    if delay < 0:
        raise ValueError(f"delay must be at least 0 steps, but got {delay}")
    periods = list(every) if isinstance(every, Mapping) else every
    periods = [pair if isinstance(pair, int) else pair[0] for pair in periods] if isinstance(periods, list) else [every]
    for period in periods:
        if isinstance(period, int) and delay > period:
            raise ValueError(
                f"delay={delay} is longer than the {period} steps between averages, but only one can be in flight; "
                f"use a delay of at most {period}"
            )


def check_module(opt: Any, module: Any) -> None:
    """Raise if LocalSGD cannot wrap this optimizer or this module."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, but got {type(module).__name__}")
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


def in_words(option: Any) -> str:
    """An option as a string that ranks can compare; functions and process groups by their name or type."""
    if isinstance(option, Mapping):
        return ", ".join(f"{in_words(key)}: {in_words(value)}" for key, value in option.items())
    if isinstance(option, (list, tuple)):
        return ", ".join(map(in_words, option))
    if option is None or isinstance(option, (int, float, str)):
        return str(option)
    return f"function {getattr(option, '__name__', '')}" if callable(option) else type(option).__name__


def find_subgroup(subgroup: Any, group: Any, sharded: bool) -> Any:
    """The process group that averages gradients after warm-up, or None."""
    if isinstance(subgroup, str):
        if subgroup != "node":
            raise ValueError(f"subgroup must be 'node', a process group or None, but got {subgroup!r}")
        # A sharded module reduces its gradients itself.
        return None if sharded or dist.get_world_size(group) == 1 else node_group(group)
    if subgroup is None:
        return None
    if dist.get_rank() not in members(subgroup):
        raise ValueError(
            f"rank {dist.get_rank()} is not in its subgroup {members(subgroup)}; pass a group that contains it"
        )
    return subgroup if dist.get_world_size(subgroup) > 1 else None


def check_cover(ddp: DistributedDataParallel | None, params: Mapping[str, Tensor], group: Any) -> None:
    """Raise unless the DDP module and the optimizer train the same parameters."""
    if ddp is None or dist.get_world_size(group) == 1:
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
                "be averaged; pass LocalSGD the module that the optimizer trains"
            )
