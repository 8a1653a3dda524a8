"""Checks of what LocalSGD can wrap."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.ddp import is_inside_ddp
from offbeat.engine.tensors import is_dtensor
from offbeat.frameworks import DDP_IN_FRAMEWORKS, refuse_wrapped
from offbeat.sync.wrapper import OptimizerWrapper
from offbeat.wire.base import Codec
from offbeat.wire.groups import node_group
from offbeat.wire.peers import GroupPeers, Peers

__all__ = ["check_cover", "check_levels", "check_module", "check_not_wrapped_since", "find_subgroup", "in_words"]


def check_levels(levels: Any, state: Any) -> list[Any]:
    """The levels as a list. Raises if they cannot be used together."""
    from offbeat.sync.level import Level

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
        if level.eager and len(found) > 1:
            raise ValueError(
                "eager=True cannot be used with several levels: rounds of one level would mix the steps that replicas "
                "take by themselves at another; use one level, or a delay without eager"
            )
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


def in_words(option: Any) -> str:
    """An option as a string that ranks can compare; functions and process groups by their name or type."""
    if isinstance(option, Mapping):
        return ", ".join(f"{in_words(key)}: {in_words(value)}" for key, value in option.items())
    if isinstance(option, (list, tuple)):
        return ", ".join(map(in_words, option))
    if option is None or isinstance(option, (int, float, str, torch.dtype)):
        return str(option)
    if isinstance(option, Codec):
        return repr(option)
    return f"function {getattr(option, '__name__', '')}" if callable(option) else type(option).__name__


def find_subgroup(subgroup: Any, everyone: Peers, sharded: bool) -> tuple[Peers | None, str]:
    """The ranks that average gradients after warm-up, or None; and in words how they were found."""
    from offbeat.sync.members import peers_of

    if isinstance(subgroup, str):
        if subgroup != "node":
            raise ValueError(f"subgroup must be 'node', a process group or None, but got {subgroup!r}")
        # A sharded module reduces its gradients itself, and simulated ranks are hosts of their own.
        if sharded:
            return None, "the sharded module averages its own"
        if everyone.size == 1 or not isinstance(everyone, GroupPeers):
            return None, "there is one" if everyone.size == 1 else "they are simulated"
        node, why = node_group(everyone.group)
        return None if node is None else peers_of(node), why
    if subgroup is None:
        return None, "subgroup=None"
    try:
        found = peers_of(subgroup)
    except ValueError:
        me = everyone.ranks[everyone.rank]
        raise ValueError(f"rank {me} is not in its subgroup; pass a group that contains it") from None
    return found if found.size > 1 else None, "subgroup= was given"


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


def check_not_wrapped_since(params: Mapping[str, Tensor], wrapper: str, *, sharded: bool, in_ddp: bool) -> None:
    """Raise if parameters of a plain module have been given to DDP or FSDP2, which all ranks do together.

    Frameworks wrap the module after the optimizer is made. What they wrap it in averages gradients over all ranks at
    every step, so that replicas would never train by themselves.

    Args:
        sharded: whether the module was sharded when the wrapper was made.
        in_ddp: whether the module has run inside a DDP module.
    """
    found = "fully_shard" if any(is_dtensor(p) for p in params.values()) and not sharded else None
    if found is None and (in_ddp or is_inside_ddp(list(params.values()))):
        found = "DistributedDataParallel"
    if found is not None:
        raise RuntimeError(
            f"the module is wrapped in {found}, but {wrapper} was made with the bare module, so that gradients are "
            "averaged over all ranks at every step and replicas never train by themselves. Wrap the module first, then "
            f"make the optimizer, then {wrapper}(optimizer, module) with the wrapped module"
            + (f": {DDP_IN_FRAMEWORKS}" if found == "DistributedDataParallel" else "")
        )
