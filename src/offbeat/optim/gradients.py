"""Gradients: checked against their parameters, and both unwrapped to the tensors the tiers work on."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import GradientError
from offbeat.rules.rule import Rule, Values

__all__ = ["check_alike", "check_gradient", "distributed_like", "is_dtensor", "local", "local_gradient", "shard_like"]

_PLAIN = (Tensor, torch.nn.Parameter)


def is_dtensor(t: Any) -> bool:
    """Whether ``t`` is a distributed tensor, without importing them where nobody uses them."""
    if type(t) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Tensor) -> Tensor:
    """This rank's shard of a distributed tensor; other tensors as they are."""
    if not is_dtensor(t):
        return t
    shard = t._local_tensor  # type: ignore[attr-defined]
    # A collective may still be on its way into it.
    return shard.wait() if hasattr(shard, "wait") else shard  # type: ignore[no-any-return]


def distributed_like(like: Any, shard: Tensor) -> Tensor:
    """A distributed tensor of which ``shard`` is this rank's part, cut as another."""
    made: Tensor = type(like).from_local(
        shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return made


def shard_like(key: str, value: Tensor, p: Tensor) -> Tensor:
    """What this rank holds of a saved value that goes with ``p``, on its device."""
    check_alike(key, value, p)
    if not is_dtensor(p):
        return value.to(p.device)
    return local(value.redistribute(p.device_mesh, p.placements)).to(local(p).device)  # type: ignore[attr-defined]


def check_alike(key: str, value: Tensor, p: Tensor) -> None:
    """Raise unless a saved value has the shape of ``p``, and is distributed if ``p`` is."""
    if value.shape != p.shape:
        raise ValueError(
            f"loaded state dict has {key!r} of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(p.shape)}; was it saved from another model?"
        )
    if is_dtensor(p) != is_dtensor(value):
        raise ValueError(
            f"loaded state dict has {key!r} as a {type(value).__name__} for a parameter that is a "
            f"{type(p).__name__}; load sharded parameters through torch.distributed.checkpoint"
        )


def local_gradient(p: Tensor, g: Tensor) -> Tensor:
    """The part of ``g`` that belongs to this rank's shard of ``p``."""
    if is_dtensor(p) and g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return local(g)


def check_gradient(rule: Rule, h: Values, p: Tensor, g: Any) -> None:
    """Raise unless ``g`` can be the gradient of ``p`` under this rule. NaN and infinity are values, not errors."""
    if not isinstance(g, Tensor):
        raise TypeError(f"a gradient must be a Tensor or None, but got {type(g).__name__}")
    if g.shape != p.shape:
        raise GradientError(
            f"a gradient of shape {tuple(g.shape)} was given for a parameter of shape {tuple(p.shape)}; "
            "gradients go one to one with parameters, in their order"
        )
    if g.device != p.device:
        raise GradientError(f"a gradient on {g.device} was given for a parameter on {p.device}; move it there")
    if g.dtype != p.dtype:
        raise GradientError(
            f"a gradient of dtype {g.dtype} was given for a parameter of dtype {p.dtype}; "
            f"cast it with gradient.to({p.dtype})"
        )
    if is_dtensor(p) != is_dtensor(g):
        raise GradientError(
            f"a gradient of type {type(g).__name__} was given for a parameter of type {type(p).__name__}; "
            "a distributed parameter needs a distributed gradient"
        )
    if g.layout != torch.strided:
        meaning = rule.sparse(h) if g.layout == torch.sparse_coo else f"does not support gradients of layout {g.layout}"
        if meaning in ("rows", "dense") and h.fused:
            meaning = "with fused=True does not support sparse gradients; leave fused out for this group"
        if meaning not in ("rows", "dense"):
            raise RuntimeError(f"{rule.name} {meaning}")
