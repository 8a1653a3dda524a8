"""One parameter of an update: its tensors checked, unwrapped and brought into the form the tiers take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat.optim.gradients import distributed_like, is_dtensor, local, local_gradient
from offbeat.optim.precision import check_compact, is_compact
from offbeat.tiers.choice import Choice
from offbeat.tiers.codec import CODE_DTYPES, decode, encode, scales_for
from offbeat.tiers.layout import match_layout
from offbeat.tiers.triton_source import scaled_columns

if TYPE_CHECKING:
    from offbeat.optim.update import Update

__all__ = ["Member", "align", "make_member"]

_PLAIN = (Tensor, torch.nn.Parameter)
_SPARSE = Choice("loop", "sparse gradient: only the rows it touches")


@dataclass
class Member:
    """One parameter of an update."""

    param: Tensor
    columns: list[Tensor]  # p, g, then the state tensors, as the tiers take them
    scalars: list[Tensor]  # the stored scalars, in the slots' order
    fresh: bool  # its state has not seen a step
    simple: bool  # its columns are its own tensors, or their local shards: nothing was copied or viewed
    distributed: bool
    rows: tuple[Tensor, ...] | None = None  # the rows a sparse gradient touches
    choice: Choice = _SPARSE
    own_gradient: bool = True  # the gradient's column is the user's tensor, not a copy of it
    on_device: bool = False  # the numbers of its update stay on the device
    scales: list[Tensor] = field(default_factory=list)  # of state in 8 bits


def make_member(update: Update, p: Tensor, g: Tensor, entry: dict[str, Any], fresh: bool) -> Member:
    """Check a parameter with its gradient and state, and unwrap them. Raises before anything has changed."""
    h = update.h
    scalars = [entry[key] for key in update.scalar_keys]
    if h.differentiable and any(
        t.requires_grad for k, t in zip(update.scalar_keys, scalars, strict=True) if k == "step"
    ):
        raise RuntimeError("`requires_grad` is not supported for `step` in differentiable mode")
    if h.differentiable and p.is_leaf and p.requires_grad:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation: with differentiable=True "
            "pass parameters that are not leaves, such as p.clone()"
        )
    distributed = type(p) not in _PLAIN and is_dtensor(p)
    if is_compact(h):
        check_compact(h, p, sparse=g.layout != torch.strided)
    gradient = local_gradient(p, g) if distributed else g
    columns = [p, gradient, *(_dense(update, p, key, entry[key]) for key in update.tensor_keys)]
    if distributed:
        columns = [gradient if t is gradient else local(t) for t in columns]
    _check_columns(update, columns, scalars)
    rows = None
    if gradient.layout != torch.strided:
        if update.rule.sparse(h) == "dense":
            columns[1] = gradient.to_dense()
        else:
            gradient = gradient.coalesce()
            rows, columns[1] = tuple(gradient.indices()), gradient.values()
    elif gradient._is_zerotensor():
        columns[1] = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    columns[1] = columns[1].resolve_neg()
    if columns[0].is_complex() and rows is None:
        columns = [torch.view_as_real(t.resolve_conj()) for t in columns]
    own = [local(p), local(g)] if distributed else [p, g]
    simple = columns[0] is own[0] and columns[1] is own[1] and gradient is own[1]
    scales = [entry[key] for key in update.scale_keys]
    wanted, device = scales_for(own[0].numel()), own[0].device
    for key, t in zip(update.scale_keys, scales, strict=True):
        if t.shape != (wanted,) or t.device != device or not t.is_contiguous():
            raise RuntimeError(
                f"state {key!r} is of shape {tuple(t.shape)} on {t.device}, but its parameter needs "
                f"{wanted} scales on {device}; remove optimizer.state[p], or load it again"
            )
    own_gradient = columns[1] is own[1] and gradient is own[1]
    return Member(p, columns, scalars, fresh, simple, distributed, rows, own_gradient=own_gradient, scales=scales)


def _dense(update: Update, p: Tensor, key: str, t: Tensor) -> Tensor:
    """State as the rules keep it: torch.optim keeps a sparse momentum buffer for sparse gradients."""
    if t.layout is not torch.strided:
        t = t.to_dense()
        update.created.append((p, key, t))
    return t


def _check_columns(update: Update, columns: list[Tensor], scalars: list[Tensor]) -> None:
    """Raise unless state fits the parameter as it is now, and the parameter can be written to."""
    p = columns[0]
    shape, device = p.shape, p.device
    for key, t in zip(update.tensor_keys, columns[2:], strict=True):
        if t.shape != shape or t.device != device:
            raise RuntimeError(
                f"state {key!r} is of shape {tuple(t.shape)} on {t.device}, but its parameter is now of shape "
                f"{tuple(p.shape)} on {p.device}; move or remove optimizer.state[p] along with the parameter"
            )
    for key, t in zip(update.scalar_keys, scalars, strict=True):
        if t.numel() != 1:
            raise RuntimeError(f"state {key!r} must be one number, but it is of shape {tuple(t.shape)}")
    if not p.is_contiguous() and any(
        stride == 0 and size > 1 for size, stride in zip(p.shape, p.stride(), strict=True)
    ):
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} and strides {p.stride()} has elements that share memory and "
            "cannot be updated one by one; clone it first"
        )


def align(update: Update, member: Member) -> None:
    """Give all columns the parameter's layout: a gradient by a copy, state for good."""
    p = member.columns[0]
    for i, t in enumerate(member.columns[1:], start=1):
        aligned = match_layout(t, p)
        if aligned is t:
            continue
        member.columns[i] = aligned
        member.simple = False
        if i == 1:
            member.own_gradient = False
            continue
        form = update.form[i] if i < len(update.form) else "plain"
        if form in CODE_DTYPES:
            # Blocks that share a scale are blocks of memory: other elements share it now.
            which = scaled_columns(update.form).index(i)
            scales = torch.empty_like(member.scales[which])
            encode(match_layout(decode(t, member.scales[which], form), p), aligned, scales, form)
            member.scales[which] = scales
            update.created.append((member.param, update.scale_keys[which], scales))
        _replace_state(update, member.param, update.tensor_keys[i - 2], aligned)


def _replace_state(update: Update, param: Tensor, key: str, value: Tensor) -> None:
    if param.is_complex():
        value = torch.view_as_complex(value)
    if is_dtensor(param):
        value = distributed_like(param, value)
    update.created.append((param, key, value))
