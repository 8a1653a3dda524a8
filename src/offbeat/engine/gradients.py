"""Gradients and saved state, checked against the parameters they belong to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offbeat.engine.matrix.shared import cut_of
from offbeat.engine.tensors import is_dtensor, local
from offbeat.errors import GradientError
from offbeat.rules.rule import Rule, Values


def check_gradient(rule: Rule, h: Values, p: Tensor, g: Any) -> None:
    """Raise unless ``g`` can be the gradient of ``p`` under this rule. NaN and infinity are allowed."""
    if not isinstance(g, Tensor):
        raise TypeError(f"a gradient must be a Tensor or None, but got {type(g).__name__}")
    if g.shape != p.shape:
        raise GradientError(
            f"got a gradient of shape {tuple(g.shape)} for a parameter of shape {tuple(p.shape)}; "
            "pass one gradient for each parameter, in the order of the parameters"
        )
    if g.device != p.device:
        raise GradientError(f"got a gradient on {g.device} for a parameter on {p.device}; move it to {p.device}")
    if g.dtype != p.dtype:
        raise GradientError(
            f"got a gradient of dtype {g.dtype} for a parameter of dtype {p.dtype}; cast it with gradient.to({p.dtype})"
        )
    if is_dtensor(p) != is_dtensor(g):
        raise GradientError(
            f"got a gradient of type {type(g).__name__} for a parameter of type {type(p).__name__}; "
            "a DTensor parameter needs a DTensor gradient, and a plain parameter a plain one"
        )
    rule.check_param(p)
    if rule.matrix is not None:
        _check_whole(rule, p)
    if rule.dense and g.layout == torch.strided:
        raise RuntimeError(f"{rule.name} {rule.dense}")
    if g.layout != torch.strided:
        meaning = rule.sparse(h) if g.layout == torch.sparse_coo else f"does not support gradients of layout {g.layout}"
        if meaning in ("rows", "dense") and h.fused:
            meaning = "with fused=True does not support sparse gradients; leave fused out for this group"
        if meaning not in ("rows", "dense"):
            raise RuntimeError(f"{rule.name} {meaning}")


def _check_whole(rule: Rule, p: Any) -> None:
    """Raise unless ``p`` is real and the rule can be applied to the part of it that this rank has."""
    if p.is_complex():
        raise RuntimeError(f"{rule.name} does not support complex parameters; pass torch.view_as_real(parameter)")
    if not is_dtensor(p):
        return
    assert rule.matrix is not None
    cut = cut_of(p)
    if cut is not None and not rule.matrix.cut and not rule.matrix.pieces:
        raise RuntimeError(
            f"{rule.name} needs whole parameters, but one of shape {tuple(p.shape)} has the placements "
            f"{tuple(p.placements)}, so this rank has only a part of it; leave this parameter unsharded, or use an "
            "elementwise rule such as AdamW for it"
        )


def local_gradient(p: Tensor, g: Tensor) -> Tensor:
    """The part of ``g`` that belongs to this rank's shard of ``p``."""
    if is_dtensor(p) and g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return local(g)


def check_shape(key: str, value: Tensor, shape: tuple[int, ...] | None, p: Tensor) -> None:
    """Raise unless a saved value has the shape that this state entry of ``p`` has."""
    if shape is None or value.shape != shape:
        raise ValueError(
            f"the loaded state dict has {key!r} of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(p.shape)}, which has it with shape {shape}; was it saved from another model?"
        )


def shard_like(key: str, value: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a saved value that belongs to ``p``, on the device of ``p``."""
    check_alike(key, value, p)
    if not is_dtensor(p):
        return value.to(p.device)
    return local(value.redistribute(p.device_mesh, p.placements)).to(local(p).device)  # type: ignore[attr-defined]


def check_alike(key: str, value: Tensor, p: Tensor) -> None:
    """Raise unless a saved value has the shape of ``p``, and both or neither are DTensors."""
    if value.shape != p.shape:
        raise ValueError(
            f"the loaded state dict has {key!r} of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(p.shape)}; was it saved from another model?"
        )
    check_kind(key, value, p)


def check_kind(key: str, value: Tensor, p: Tensor) -> None:
    """Raise unless a saved value is a DTensor exactly if ``p`` is one."""
    if is_dtensor(p) != is_dtensor(value):
        raise ValueError(
            f"the loaded state dict has {key!r} as a {type(value).__name__} for a parameter that is a "
            f"{type(p).__name__}; load sharded parameters through torch.distributed.checkpoint"
        )
