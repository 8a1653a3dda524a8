r"""Clipping by norm, bucket by bucket, without waiting for the device.

As in :func:`torch.nn.utils.clip_grad_norm_`, gradients are multiplied by :math:`\min(1, c / (n + 10^{-6}))`, where
:math:`c` is the largest norm allowed. The mode decides which norm :math:`n` is:

- ``exact``: the norm of all gradients of the step. Updates wait until the last gradient has arrived.
- ``previous``: the norm of all gradients of the previous step. The first step is exact.
- ``bucket``: the norm of each bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat._torch import foreach_mul_, foreach_norm, order_by_kind
from offbeat.engine.tensors import changes, is_dtensor, local

__all__ = ["MODES", "WAITS", "Clip", "Clipping", "Shards", "multiply", "shard_groups"]

Clip: TypeAlias = Literal["exact", "previous", "bucket"]
MODES: tuple[str, ...] = get_args(Clip)

#: The beginning of the warning that overlap gains nothing.
WAITS = "with clip='exact' every update waits"

#: By id of a parameter, the process groups that hold its other shards.
Shards = dict[int, tuple[Any, ...]]


def shard_groups(param: Tensor) -> tuple[Any, ...]:
    """The process groups whose ranks hold the other shards of a parameter; empty if it is not a DTensor."""
    if not is_dtensor(param):
        return ()
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_shard())


def multiply(grads: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply gradients in place by a 0-d tensor."""
    kinds: dict[Any, list[Tensor]] = {}
    for g in map(local, grads):
        kinds.setdefault((g.device, g.dtype), []).append(g)
    for (device, _), some in kinds.items():
        foreach_mul_(some, coefficient.to(device))


class Clipping:
    """Collects the norms of a step and computes the coefficients that gradients are multiplied by.

    Attributes:
        last: the norm of the last finished step, a 0-d tensor, or None before the first.
    """

    def __init__(self, limit: float, mode: Clip) -> None:
        self.limit, self.mode = limit, mode
        self.last: Tensor | None = None
        self._norms: dict[int, tuple[Tensor, Tensor, int]] = {}  # by parameter: norm, gradient and its changes()
        self._coefficients: dict[int, Tensor] = {}  # by parameter: the coefficient of its bucket

    @property
    def waits(self) -> bool:
        """Whether updates must wait for the norm of the whole step."""
        return self.mode == "exact" or (self.mode == "previous" and self.last is None)

    def measure(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Compute the norms of a bucket's gradients."""
        kinds: dict[Any, list[int]] = {}
        parts = [local(g) for g in grads]
        for i, g in enumerate(parts):
            kinds.setdefault((g.device, g.dtype), []).append(i)
        result: dict[int, Tensor] = {}
        for index in kinds.values():
            result.update(zip(index, foreach_norm([parts[i] for i in index]), strict=True))
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            self._norms[id(p)] = (result[i], g, changes(g))

    def moved(self, param: Tensor) -> None:
        """Called when a measured gradient was copied into ``.grad`` without a change."""
        g = param.grad
        if id(param) in self._norms and not self._is_stepped(param) and g is not None:
            self._norms[id(param)] = (self._norms[id(param)][0], g, changes(g))

    def forget_gradients(self, params: Sequence[Tensor]) -> None:
        """Keep the norms but not the gradients of parameters that have been updated."""
        for p in params:
            norm, *_ = self._norms[id(p)]
            self._norms[id(p)] = (norm, norm, -1)

    def weigh_bucket(self, params: Sequence[Tensor], shards: Shards) -> None:
        """Compute the coefficient of a measured bucket, for those of its parameters that are updated now or later."""
        if self.mode == "bucket":
            coefficient = self._coefficient(self._total(params, params, shards))
            self._coefficients.update((id(p), coefficient) for p in params)

    def coefficient_of(self, params: Sequence[Tensor]) -> Tensor:
        """The coefficient of parameters of one bucket, in the modes that do not wait."""
        return self._coefficients[id(params[0])] if self.mode == "bucket" else self._coefficient(self.last)

    def norm(self, everyone: Sequence[Tensor], left: Sequence[Tensor], shards: Shards) -> Tensor | None:
        """The norm of all gradients of this step, those used already and those of the parameters ``left``.

        The arguments are those of :meth:`finish`. Changes nothing.
        """
        before = dict(self._norms)
        try:
            return self._measure_all(everyone, left, shards)
        finally:
            self._norms = before

    def finish(self, everyone: Sequence[Tensor], left: Sequence[Tensor], shards: Shards, *, counts: bool) -> None:
        """End the step: compute the norm of all its gradients, and clip the gradients of the parameters ``left``.

        Args:
            everyone: all parameters, in the order in which norms are added up.
            left: those that have not been updated, with their gradients in ``.grad``.
            shards: by id of a parameter, the process groups that hold its other shards.
            counts: whether backward has run in this step, so that its norm is to be kept as the last.
        """
        changed = {id(p) for p in left if not self._is_fresh(p)}
        total = self._measure_all(everyone, left, shards)
        if self.mode == "bucket":
            weighed = [p for p in left if id(p) in self._coefficients and id(p) not in changed]
            for coefficient, some in _by_coefficient(weighed, self._coefficients):
                multiply(_gradients(some), coefficient)
            here = {id(p) for p in weighed}
            left = [p for p in left if id(p) not in here]
            norm = self._total(left, everyone, shards)
        else:
            norm = total if self.waits else self.last
        if left:
            multiply(_gradients(left), self._coefficient(norm))
        self.drop()
        if counts and total is not None:
            self.last = total

    def drop(self) -> None:
        """Forget the norms of a step."""
        self._norms, self._coefficients = {}, {}

    def _measure_all(self, everyone: Sequence[Tensor], left: Sequence[Tensor], shards: Shards) -> Tensor | None:
        stale = [p for p in left if not self._is_fresh(p)]
        self.measure(stale, _gradients(stale))
        # A parameter that DDP found unused on all ranks was measured as zero, and has no gradient after all.
        waiting = {id(p) for p in left}
        counted = [p for p in everyone if id(p) in waiting or self._is_stepped(p)]
        return self._total(counted, everyone, shards)

    def _is_stepped(self, p: Tensor) -> bool:
        return id(p) in self._norms and self._norms[id(p)][2] == -1

    def _is_fresh(self, p: Tensor) -> bool:
        found, g = self._norms.get(id(p)), p.grad
        return found is not None and found[1] is g and g is not None and found[2] == changes(g)

    def _coefficient(self, norm: Tensor | None) -> Tensor:
        assert norm is not None
        return torch.clamp(self.limit / (norm + 1e-6), max=1.0)

    def _total(self, measured: Sequence[Tensor], everyone: Sequence[Tensor], shards: Shards) -> Tensor | None:
        """The norm of all measured gradients, across the ranks that hold shards of ``everyone``.

        The parameters decide which ranks take part, not the gradients: a rank without a gradient takes part too.
        """
        found = [p for p in measured if id(p) in self._norms]
        classes = list(dict.fromkeys(shards[id(p)] for p in everyone if shards[id(p)]))
        if not classes:  # bit for bit as torch.nn.utils.get_total_norm
            if not found:
                return None
            order = order_by_kind(tuple((p.device, p.dtype) for p in found))
            norms = [self._norms[id(found[i])][0].to(found[0].device) for i in order]
            total: Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
            return total
        squares = []
        for groups in [(), *classes]:
            like = local(next((p for p in everyone if shards[id(p)] == groups), everyone[0]))
            square = torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
            norms = [self._norms[id(p)][0] for p in found if shards[id(p)] == groups]
            if norms:
                square += torch.stack([n.to(square) for n in norms]).square().sum()
            for group in groups:
                dist.all_reduce(square, group=group)
            squares.append(square)
        return torch.stack([square.to(squares[-1]) for square in squares]).sum().sqrt()


def _gradients(params: Sequence[Tensor]) -> list[Tensor]:
    return [g for p in params if (g := p.grad) is not None]


def _by_coefficient(params: Sequence[Tensor], coefficients: dict[int, Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    found: dict[int, tuple[Tensor, list[Tensor]]] = {}
    for p in params:
        coefficient = coefficients[id(p)]
        found.setdefault(id(coefficient), (coefficient, []))[1].append(p)
    return list(found.values())
