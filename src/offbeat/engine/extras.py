"""What a step does with gradients beside the update: unscale, skip, clip, set to zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat._torch import foreach_div_, foreach_zero_
from offbeat.engine.cuda.source import Variant
from offbeat.engine.tensors import local

__all__ = ["NOTHING", "Extras", "Work", "by_hand", "fitting", "gradients_of"]

#: A group, parameters of it, and their gradients; None reads them from ``.grad``.
Work = tuple[dict[str, Any], Sequence[Tensor], Sequence[Tensor | None] | None]


@dataclass(frozen=True)
class Extras:
    """What to do with gradients.

    Attributes:
        grad_scale: gradients are divided by this number, and stay divided.
        found_inf: the step is skipped if this is not zero.
        clip: gradients are multiplied by this number for the update; the gradients themselves do not change.
        zero: gradients are set to zero afterwards.
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
        """Whether gradients are different afterwards."""
        return self.zero or self.grad_scale is not None

    def variant(self, *, by_row: bool) -> Variant:
        """The kernel that does this in the same pass."""
        scaled, guarded, clipped = (t is not None for t in self.numbers)
        return Variant(by_row, scaled, guarded, clipped, self.zero)


NOTHING = Extras()


def gradients_of(work: Sequence[Work]) -> list[list[Tensor | None]]:
    """The gradients of each item of work."""
    return [[p.grad for p in params] if grads is None else list(grads) for _, params, grads in work]


def fitting(extras: Extras, work: Sequence[Work]) -> Extras | None:
    """The same extras with all numbers on the one device of the work, as kernels take them.

    None if there are several devices, or if two parameters share a gradient that is to change: the second would find
    it changed.
    """
    devices = {p.device for _, params, _ in work for p in params}
    if len(devices) != 1:
        return None
    if extras.changes_gradients:
        given = [g for some in gradients_of(work) for g in some if g is not None]
        places = [local(g).data_ptr() for g in given if g.layout is torch.strided and g.numel()]
        if len(set(places)) < len(places):
            return None
    device = devices.pop()
    scale, found_inf = (None if t is None else t.detach().to(device, torch.float32) for t in extras.numbers[:2])
    clip = None if extras.clip is None else extras.clip.detach().to(device, torch.float64)
    return Extras(scale, found_inf, clip, extras.zero)


@contextmanager
def by_hand(extras: Extras, work: Sequence[Work]) -> Iterator[list[Work] | None]:
    """For tiers that only update: yields the work with its gradients prepared, or None if the step is skipped.

    On leaving, gradients are set to zero if they are to be.
    """
    gradients = gradients_of(work)
    there = list({id(g): local(g) for some in gradients for g in some if g is not None}.values())
    if extras.found_inf is not None and extras.found_inf.item():
        yield None
    else:
        if extras.grad_scale is not None:
            _in_place(there, extras.grad_scale.item())
        if extras.clip is None:
            yield list(work)
        else:
            clip = extras.clip.item()
            yield [
                (group, params, [None if g is None else g * clip for g in some])
                for (group, params, _), some in zip(work, gradients, strict=True)
            ]
    if extras.zero:
        _in_place(there, None)


def _in_place(tensors: Sequence[Tensor], divisor: float | None) -> None:
    """Divide by a number, or set to zero for None: plain tensors together, others one by one."""
    plain = [t for t in tensors if t.layout is torch.strided and not (t.is_neg() or t.is_conj())]
    if plain:
        if divisor is None:
            foreach_zero_(plain)
        else:
            foreach_div_(plain, divisor)
        increment_version(plain)  # torch's _foreach_zero_ does not do this on a GPU
    chosen = set(map(id, plain))
    for t in tensors:
        if id(t) not in chosen:
            if divisor is None:
                t.zero_()
            else:
                t.div_(divisor)
