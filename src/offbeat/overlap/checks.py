"""What can be overlapped, and clear words about what cannot. Nothing is changed here."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from offbeat.overlap.clipping import MODES
from offbeat.overlap.registry import is_registered

__all__ = [
    "averaged_in_step",
    "check_module",
    "check_options",
    "check_parameters",
    "is_inside_ddp",
    "owners",
    "refuse_inside_ddp",
]

#: By parameter, a weak reference to the handle that overlaps it.
owners: Any = WeakIdKeyDictionary()

#: By optimizer, a weak reference to the wrapper that averages its gradients just before its step.
averaged_in_step: Any = weakref.WeakKeyDictionary()


def check_options(
    accumulate: int, clip_norm: float | None, clip: str, scaler: Any, comm_hook: Any, comm_state: Any
) -> None:
    """Raise if an option makes no sense by itself."""
    if not isinstance(accumulate, int) or isinstance(accumulate, bool):
        raise TypeError(f"accumulate must be a number of backward passes, but got {accumulate!r}")
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1 backward pass, but got {accumulate}")
    if clip not in MODES:
        raise ValueError(f"clip must be one of {', '.join(map(repr, MODES))}, but got {clip!r}")
    if clip_norm is None:
        if clip != "exact":
            raise ValueError(f"clip={clip!r} says how to clip but not to what; give clip_norm= too")
    elif isinstance(clip_norm, (bool, str)) or not isinstance(clip_norm, (int, float)):
        raise TypeError(f"clip_norm must be a number, but got {clip_norm!r}")
    elif math.isnan(clip_norm) or clip_norm <= 0:
        raise ValueError(f"clip_norm must be positive, but got {clip_norm}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, but got {type(scaler).__name__}")
    if comm_hook is None and comm_state is not None:
        raise ValueError("comm_state was given without a comm_hook to use it; give comm_hook= too")
    if comm_hook is not None and not callable(comm_hook):
        raise TypeError(f"comm_hook must be callable as comm_hook(state, bucket), but got {comm_hook!r}")


def check_module(module: Any, comm_hook: Any) -> None:
    """Raise if gradients of this module cannot be had when they are final."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, but got {type(module).__name__}")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for part in module.modules():
        if part is not module and isinstance(part, DistributedDataParallel):
            raise ValueError(
                "a part of this module is wrapped in DistributedDataParallel, whose gradients are reduced only at the "
                "end of backward; call overlap() for the DistributedDataParallel module, with an optimizer of its own"
            )
        if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
            raise TypeError(
                "FullyShardedDataParallel (FSDP1) cannot be overlapped: it reduces flat parameters the optimizer does "
                "not see; use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
    if comm_hook is not None and not isinstance(module, DistributedDataParallel):
        raise ValueError(
            f"comm_hook is for DistributedDataParallel modules, but the module is a {type(module).__name__}"
        )


def check_parameters(optimizer: Any, module: torch.nn.Module, scaler: Any) -> None:
    """Raise if the optimizer is not one for parameters of this module that nobody else overlaps."""
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer with step hooks, but got {type(optimizer).__name__}"
        )
    inner = next((value for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)
    if inner is not None and not is_registered(type(optimizer)):
        raise TypeError(
            f"{type(optimizer).__name__} wraps another optimizer ({type(inner).__name__}), and overlap() cannot know "
            "what it does around it for a part of the parameters; overlap the inner one, or say how it steps a bucket "
            "with offbeat.register_overlapped"
        )
    wrapper = averaged_in_step.get(optimizer, lambda: None)()
    if wrapper is not None:
        raise ValueError(
            f"{type(wrapper).__name__} averages this optimizer's gradients in step(), after overlap() would have used "
            "them; call overlap() before it, with warmup=0 and subgroup=None, or wrap the module in "
            "DistributedDataParallel"
        )
    every = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if len(set(every)) < len(every):
        raise ValueError("a parameter stands twice in the optimizer's groups; give every parameter once")
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    for i, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ValueError("differentiable=True cannot be overlapped: the graph would hold what is updated in place")
        for p in group["params"]:
            _check_parameter(p, i, names.get(id(p)), scaler)


def _check_parameter(p: Tensor, group: int, name: str | None, scaler: Any) -> None:
    if name is None:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(p.shape)} in group {group} that is not in the module; give "
            "overlap() the module the optimizer was made for (after fully_shard, make the optimizer anew)"
        )
    if torch.nn.parameter.is_lazy(p):
        raise ValueError(f"parameter {name!r} has no shape yet; run the module once before overlap()")
    owner = owners.get(p)
    if owner is not None and owner() is not None:
        raise ValueError(
            f"parameter {name!r} is overlapped with an optimizer already; optimizers that are overlapped need disjoint "
            "parameters: call remove() on the other handle, or take the parameter out of one of the optimizers"
        )
    if scaler is not None and scaler.is_enabled() and p.dtype == torch.float16:
        raise ValueError(
            f"parameter {name!r} is float16, and GradScaler does not unscale float16 gradients; "
            "keep parameters in float32 and use torch.autocast"
        )


def is_inside_ddp(params: Sequence[Tensor]) -> bool:
    """Whether a DDP module somewhere in the program reduces one of these, which are taken for a plain module's."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    ours = {id(p) for p in params}
    return any(
        issubclass(type(one), DistributedDataParallel) and any(id(p) in ours for p in one.parameters())
        for one in gc.get_objects()
    )


def refuse_inside_ddp(params: Sequence[Tensor]) -> None:
    """Raise if a DDP module reduces one of these."""
    if is_inside_ddp(params):
        raise RuntimeError(
            "overlapped parameters belong to a DistributedDataParallel module, which has not reduced their gradients "
            "when they would be updated; give the DistributedDataParallel module to overlap() instead"
        )
