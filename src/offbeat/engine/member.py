"""One parameter of a step, with its tensors: checked, unwrapped, and in the form that the tiers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat._torch import is_zero_tensor
from offbeat.engine.choice import Choice
from offbeat.engine.eight_bit import CODE_DTYPES, decode, encode, scaled_columns, scales_for
from offbeat.engine.gradients import local_gradient
from offbeat.engine.options import Options
from offbeat.engine.precision import check_compact, is_compact
from offbeat.engine.tensors import distributed_like, is_dtensor, is_plain, local, lost_memory, match_layout
from offbeat.rules.rule import Slot

#: State entries that did not exist in this form: parameter, key, value.
Created = list[tuple[Tensor, str, Tensor]]

_SPARSE = Choice("loop", "sparse gradient: updates only its rows")


@dataclass
class Member:
    """One parameter of a step.

    Attributes:
        param: the parameter.
        columns: p, g and the state tensors, as the tiers take them.
        scalars: the stored scalars, in the order of the slots.
        scales: the scales of 8-bit state.
        first: whether this is the first step of its state.
        simple: whether its columns are its own tensors or their local shards, not copies or views.
        rows: the indices of the rows that a sparse gradient contains.
        choice: the tier that runs it.
        own_gradient: whether the gradient's column is the user's tensor, not a copy of it.
        on_device: whether its coefficients are computed on the device.
        idle: whether it has no gradient in this step.
        keys: the names of the state tensors among the columns.
    """

    param: Tensor
    columns: list[Tensor]
    scalars: list[Tensor]
    scales: list[Tensor] = field(default_factory=list)
    first: bool = False
    simple: bool = True
    rows: tuple[Tensor, ...] | None = None
    choice: Choice = _SPARSE
    own_gradient: bool = True
    on_device: bool = False
    idle: bool = False
    keys: tuple[str, ...] = ()

    @property
    def distributed(self) -> bool:
        """Return whether the parameter is a DTensor."""
        return self.param is not self.columns[0] and is_dtensor(self.param)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the columns."""
        return tuple(t.dtype for t in self.columns)


def make_member(options: Options, p: Tensor, g: Tensor, entry: dict[str, Any], first: bool, created: Created) -> Member:
    """Check a parameter with its gradient and state, and unwrap them. Raises before anything changes."""
    h = options.h
    scalars = [entry[key] for key in options.scalar_keys]
    if h.differentiable:
        _check_differentiable(p, entry.get("step"))
    distributed = not is_plain(p) and is_dtensor(p)
    if is_compact(h):
        check_compact(h, p, sparse=g.layout != torch.strided)
    gradient = local_gradient(p, g) if distributed else g
    keys = options.tensor_keys if options.rule.matrix is None else kept_keys(options.slots, p)
    columns = [p, gradient, *(_dense(created, p, key, entry[key]) for key in keys)]
    if distributed:
        columns = [gradient if t is gradient else local(t) for t in columns]
    _check_columns(options, keys, columns, scalars)
    rows = None
    if gradient.layout != torch.strided:
        if options.rule.sparse(h) == "dense":
            columns[1] = gradient.to_dense()
        else:
            gradient = gradient.coalesce()
            rows, columns[1] = tuple(gradient.indices()), gradient.values()
    elif is_zero_tensor(gradient):
        columns[1] = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    columns[1] = columns[1].resolve_neg()
    if columns[0].is_complex() and rows is None:
        columns = [torch.view_as_real(t.resolve_conj()) for t in columns]
    own = [local(p), local(g)] if distributed else [p, g]
    own_gradient = columns[1] is own[1] and gradient is own[1]
    simple = columns[0] is own[0] and own_gradient
    scales = [entry[key] for key in options.scale_keys]
    _check_scales(options, own[0], scales)
    return Member(p, columns, scalars, scales, first, simple, rows, own_gradient=own_gradient, keys=keys)


def kept_keys(slots: Sequence[Slot], p: Tensor) -> tuple[str, ...]:
    """The state tensors that this parameter has."""
    return tuple(slot.key for slot in slots if not slot.scalar and slot.shape_for(p.shape) is not None)


def _check_differentiable(p: Tensor, step: Tensor | None) -> None:
    if step is not None and step.requires_grad:
        raise RuntimeError("`requires_grad` is not supported for `step` in differentiable mode")
    if p.is_leaf and p.requires_grad:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation: with differentiable=True "
            "pass parameters that are not leaves, such as p.clone()"
        )


def _dense(created: Created, p: Tensor, key: str, t: Tensor) -> Tensor:
    """State as a dense tensor: torch.optim keeps a sparse momentum buffer for sparse gradients."""
    if t.layout is not torch.strided:
        t = t.to_dense()
        created.append((p, key, t))
    return t


def _check_columns(options: Options, keys: Sequence[str], columns: list[Tensor], scalars: list[Tensor]) -> None:
    """Raise unless the state fits the parameter's current shape and device, and the parameter can be updated."""
    p = columns[0]
    shape, device = p.shape, p.device
    for name, t in zip(("parameter", "gradient", *keys), columns, strict=True):
        if lost_memory(t):
            raise RuntimeError(
                f"the memory of a {name} of shape {tuple(t.shape)} has been freed (its storage has "
                f"{t.untyped_storage().nbytes()} bytes); make it again before step()"
            )
    odd = {slot.key: slot.shape_for(shape) for slot in options.slots if slot.shape is not None}
    for key, t in zip(keys, columns[2:], strict=True):
        if t.shape != odd.get(key, shape) or t.device != device:
            raise RuntimeError(
                f"state {key!r} has shape {tuple(t.shape)} on {t.device}, but its parameter now has shape "
                f"{tuple(shape)} on {device}; move or remove optimizer.state[p] along with the parameter"
            )
    for key, t in zip(options.scalar_keys, scalars, strict=True):
        if t.numel() != 1:
            raise RuntimeError(f"state {key!r} must be one number, but it has shape {tuple(t.shape)}")
    if not p.is_contiguous() and any(
        stride == 0 and size > 1 for size, stride in zip(p.shape, p.stride(), strict=True)
    ):
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} and strides {p.stride()} has elements that share memory, so they "
            "cannot be updated one by one; clone it first"
        )


def _check_scales(options: Options, p: Tensor, scales: list[Tensor]) -> None:
    for key, t in zip(options.scale_keys, scales, strict=True):
        wanted = scales_for(p.numel())
        if t.shape != (wanted,) or t.device != p.device or not t.is_contiguous():
            raise RuntimeError(
                f"state {key!r} has shape {tuple(t.shape)} on {t.device}, but its parameter needs "
                f"{wanted} scales on {p.device}; remove optimizer.state[p], or load it again"
            )


def align(options: Options, member: Member, created: Created) -> None:
    """Give all columns the strides of the parameter. A gradient is copied; state is replaced."""
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
        form = options.form[i] if i < len(options.form) else "plain"
        if form in CODE_DTYPES:
            # Elements that share a scale are neighbours in memory, so other strides need other scales.
            which = scaled_columns(options.form).index(i)
            scales = torch.empty_like(member.scales[which])
            encode(match_layout(decode(t, member.scales[which], form), p), aligned, scales, form)
            member.scales[which] = scales
            created.append((member.param, options.scale_keys[which], scales))
        created.append((member.param, options.tensor_keys[i - 2], _as_state(member.param, aligned)))


def _as_state(param: Tensor, value: Tensor) -> Tensor:
    if param.is_complex():
        value = torch.view_as_complex(value)
    return distributed_like(param, value) if is_dtensor(param) else value
