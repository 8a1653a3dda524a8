"""What can be overlapped. Everything here raises for what cannot, and changes nothing."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat import _torch, frameworks
from offbeat.overlap.clipping import MODES
from offbeat.overlap.registry import is_registered

__all__ = ["ReadsGradients", "check_module", "check_options", "check_parameters", "check_wrapper", "owners"]

#: By parameter, a weak reference to the handle that overlaps it.
owners: Any = _torch.weak_table()


@runtime_checkable
class ReadsGradients(Protocol):
    """A step pre-hook that reads or changes gradients in ``optimizer.step()``, when ``overlap()`` has used them.

    ``overlap()`` refuses an optimizer that has such a hook. Other hooks need not declare anything: if they touch a
    gradient that has been used, that raises.
    """

    @property
    def reads_gradients(self) -> str | None:
        """The error message: why the hook needs gradients, and what to do instead. None if it does not need them."""


def check_options(
    accumulate: int | Callable[[], bool],
    clip_norm: float | None,
    clip: str,
    scaler: Any,
    comm_hook: Any,
    comm_state: Any,
    bucket_cap_mb: float | None,
) -> None:
    """Raise if an option is invalid by itself."""
    if not callable(accumulate) and (not isinstance(accumulate, int) or isinstance(accumulate, bool)):
        raise TypeError(
            "accumulate must be an int, the number of backward passes in a step, or a function that returns whether "
            f"more passes follow, but got {accumulate!r}"
        )
    if not callable(accumulate) and accumulate < 1:
        raise ValueError(f"accumulate must be at least 1 backward pass, but got {accumulate}")
    if clip not in MODES:
        raise ValueError(f"clip must be one of {', '.join(map(repr, MODES))}, but got {clip!r}")
    if clip_norm is None:
        if clip != "exact":
            raise ValueError(f"clip={clip!r} has no effect without a norm to clip to; give clip_norm= too")
    elif isinstance(clip_norm, (bool, str)) or not isinstance(clip_norm, (int, float)):
        raise TypeError(f"clip_norm must be a number, but got {clip_norm!r}")
    elif math.isnan(clip_norm) or clip_norm <= 0:
        raise ValueError(f"clip_norm must be positive, but got {clip_norm}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, but got {type(scaler).__name__}")
    if comm_hook is None and comm_state is not None:
        raise ValueError("comm_state has no effect without a communication hook; give comm_hook= too")
    if comm_hook is not None and not callable(comm_hook):
        raise TypeError(f"comm_hook must be callable as comm_hook(state, bucket), but got {comm_hook!r}")
    if bucket_cap_mb is not None and (not isinstance(bucket_cap_mb, (int, float)) or not bucket_cap_mb > 0):
        raise ValueError(f"bucket_cap_mb must be a positive number of megabytes, but got {bucket_cap_mb!r}")


def check_module(module: Any, comm_hook: Any) -> None:
    """Raise if it is not known when the gradients of this module are final."""
    if not isinstance(module, torch.nn.Module):
        order = "; the optimizer comes first, then the module" if isinstance(module, Optimizer) else ""
        raise TypeError(f"module must be a torch.nn.Module, but got {type(module).__name__}{order}")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for part in module.modules():
        if part is not module and isinstance(part, DistributedDataParallel):
            raise ValueError(
                "a part of this module is wrapped in DistributedDataParallel, which reduces its gradients only at the "
                "end of backward; call overlap() with the DistributedDataParallel module and an optimizer of its own"
            )
        if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
            raise TypeError(
                "FullyShardedDataParallel (FSDP1) cannot be overlapped: it reduces flat parameters that the optimizer "
                "does not have; use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
    if comm_hook is not None and not isinstance(module, DistributedDataParallel):
        raise ValueError(
            f"comm_hook is for DistributedDataParallel modules, but the module is a {type(module).__name__}"
        )


def check_wrapper(optimizer: Any, scaler: Any) -> None:
    """Raise if a framework's wrapper around the optimizer does what overlap must be told of."""
    theirs = getattr(optimizer, "scaler", None) if frameworks.is_wrapped(optimizer) else None
    if theirs is not None and theirs is not scaler and theirs.is_enabled():
        raise ValueError(
            f"this {type(optimizer).__name__} has a GradScaler, and gradients must not be used before they are "
            "unscaled; pass it to overlap() too, as scaler=accelerator.scaler"
        )


def check_parameters(optimizer: Any, module: torch.nn.Module, scaler: Any) -> None:
    """Raise if the optimizer cannot be overlapped, or not with this module."""
    _check_kind(optimizer)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty and not is_registered(type(optimizer)):
        raise TypeError(
            f"{type(optimizer).__name__}.step() cannot do without a closure, so that it evaluates the closure several "
            "times and updates all parameters together; that cannot be overlapped with backward"
        )
    if scaler is not None and scaler.is_enabled():
        _torch.require("scaler")
    for hook in _torch.step_pre_hooks(optimizer).values():
        if isinstance(hook, ReadsGradients) and hook.reads_gradients is not None:
            raise ValueError(hook.reads_gradients)
    every = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if len(set(every)) < len(every):
        raise ValueError("a parameter occurs twice in the optimizer's groups; pass every parameter once")
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    for i, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ValueError(
                f"differentiable=True (in group {i}) cannot be overlapped: the graph would hold parameters that are "
                "updated in place; step after backward"
            )
        for p in group["params"]:
            _check_parameter(p, i, names.get(id(p)), scaler)


def _check_kind(optimizer: Any) -> None:
    """Raise if this is no optimizer, or one around another."""
    name = type(optimizer).__name__
    distributed = sys.modules.get("torch.distributed.optim")
    if isinstance(optimizer, getattr(distributed, "ZeroRedundancyOptimizer", ())):
        raise TypeError(
            f"{name} cannot be overlapped: it sends parameters to the other ranks in step(), and makes the optimizer "
            "inside itself; shard the module with torch.distributed.fsdp.fully_shard and overlap an optimizer of its "
            "parameters"
        )
    inside = {key: value for key, value in getattr(optimizer, "__dict__", {}).items() if isinstance(value, Optimizer)}
    if inside and not is_registered(type(optimizer)):
        key, inner = next(iter(inside.items()))
        raise TypeError(
            f"{name} wraps another optimizer ({type(inner).__name__}, its attribute {key!r}), and overlap() does not "
            f"know what it does besides calling it; call overlap() first, with the {type(inner).__name__}, then make "
            f"the {name} around it, or define how to step a bucket with offbeat.register_overlapped"
        )
    if not isinstance(optimizer, Optimizer) or _torch.step_pre_hooks(optimizer) is None:
        raise TypeError(f"optimizer must be a torch.optim.Optimizer with step hooks, but got {name}")


def _check_parameter(p: Tensor, group: int, name: str | None, scaler: Any) -> None:
    if name is None:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(p.shape)} in group {group} that is not in the module; pass "
            "the module whose parameters the optimizer has (and create the optimizer after fully_shard)"
        )
    if torch.nn.parameter.is_lazy(p):
        raise ValueError(f"parameter {name!r} has no shape yet; run the module once before overlap()")
    owner = owners.get(p)
    if owner is not None and owner() is not None:
        raise ValueError(
            f"parameter {name!r} is overlapped with an optimizer already, and overlapped optimizers must not share "
            "parameters; call remove() on the other handle, or remove the parameter from one of the optimizers"
        )
    if scaler is not None and scaler.is_enabled() and p.dtype == torch.float16:
        raise ValueError(
            f"parameter {name!r} is float16, and GradScaler does not unscale float16 gradients; "
            "keep parameters in float32 and use torch.autocast"
        )
