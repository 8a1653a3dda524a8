"""Changes of gradients that a step makes besides the update: unscale, clip, zero them, or skip the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat._torch import foreach_div_, foreach_zero_
from offbeat.engine.cuda.source import Variant
from offbeat.engine.tensors import local


class Work(NamedTuple):
    """A group, some or all of its parameters, and their gradients; None reads gradients from ``.grad``."""

    group: dict[str, Any]
    params: Sequence[Tensor]
    grads: Sequence[Tensor | None] | None

    @property
    def gradients(self) -> Sequence[Tensor | None]:
        """The gradients."""
        return [p.grad for p in self.params] if self.grads is None else self.grads

    @property
    def has_gradients(self) -> bool:
        """Return whether there is at least one gradient."""
        return any(g is not None for g in (self.grads if self.grads is not None else (p.grad for p in self.params)))

    @property
    def key(self) -> tuple[int, ...]:
        """The key under which batches are cached: the group's id, or the ids of some of its parameters."""
        whole = self.params is self.group["params"]
        return (id(self.group),) if whole else tuple(map(id, self.params))


@dataclass(frozen=True)
class GradTransforms:
    """The changes of gradients that a step makes.

    Attributes:
        grad_scale: divide gradients by this number, in place.
        found_inf: skip the step if this is not zero.
        clip: multiply gradients by this number for the update; the gradients themselves do not change.
        zero: set gradients to zero afterwards.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    clip: Tensor | None = None
    zero: bool = False

    def __bool__(self) -> bool:
        return self.zero or any(t is not None for t in self.numbers)

    @property
    def numbers(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The numbers, in the order in which a kernel takes them."""
        return self.grad_scale, self.found_inf, self.clip

    @property
    def changes_gradients(self) -> bool:
        """Return whether gradients are changed."""
        return self.zero or self.grad_scale is not None

    def variant(self, *, by_row: bool) -> Variant:
        """The variant of a kernel that does this in the same pass."""
        scaled, guarded, clipped = (t is not None for t in self.numbers)
        return Variant(by_row, scaled, guarded, clipped, self.zero)


NO_TRANSFORMS = GradTransforms()


def on_one_device(transforms: GradTransforms, work: Sequence[Work]) -> GradTransforms | None:
    """The same transforms with all numbers on the device of the parameters, as kernels take them.

    None if there are several devices, or if two parameters share a gradient that changes: the second update would use
    the changed gradient.
    """
    devices = {p.device for item in work for p in item.params}
    if len(devices) != 1:
        return None
    if transforms.changes_gradients:
        gradients = [g for item in work for g in item.gradients if g is not None]
        places = [local(g).data_ptr() for g in gradients if g.layout is torch.strided and g.numel()]
        if len(set(places)) < len(places):
            return None
    device = devices.pop()
    scale, found_inf = (None if t is None else t.detach().to(device, torch.float32) for t in transforms.numbers[:2])
    clip = None if transforms.clip is None else transforms.clip.detach().to(device, torch.float64)
    return GradTransforms(scale, found_inf, clip, transforms.zero)


@contextmanager
def applied_by_hand(transforms: GradTransforms, work: Sequence[Work]) -> Iterator[list[Work] | None]:
    """Do this for tiers that can only update: yield the work with prepared gradients, or None if the step is skipped.

    On exit, set gradients to zero if ``transforms`` asks for it.
    """
    there = list({id(g): local(g) for item in work for g in item.gradients if g is not None}.values())
    if transforms.found_inf is not None and transforms.found_inf.item():
        yield None
    else:
        if transforms.grad_scale is not None:
            _in_place(there, transforms.grad_scale.item())
        if transforms.clip is None:
            yield list(work)
        else:
            clip = transforms.clip.item()
            yield [item._replace(grads=[None if g is None else g * clip for g in item.gradients]) for item in work]
    if transforms.zero:
        _in_place(there, None)


def _in_place(tensors: Sequence[Tensor], divisor: float | None) -> None:
    """Divide tensors by a number, or set them to zero for None. Plain tensors are handled in one call."""
    plain: list[Tensor] = []
    others: list[Tensor] = []
    for t in tensors:
        is_plain = t.layout is torch.strided and not (t.is_neg() or t.is_conj())
        (plain if is_plain else others).append(t)
    if plain and divisor is None:
        foreach_zero_(plain)
    elif plain:
        foreach_div_(plain, divisor)
    increment_version(plain)  # torch's _foreach_zero_ does not do this on a GPU
    for t in others:
        if divisor is None:
            t.zero_()
        else:
            t.div_(divisor)
