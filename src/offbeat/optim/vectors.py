"""All parameters as one vector, without copying them: for optimizers whose update needs inner products.

A :class:`Vector` is one flat tensor with a view for each parameter. Gradients are not copied: they are lists of
tensors. Of a DTensor, each rank uses its own shard, and sums are reduced over the ranks that hold the other shards, so
every rank gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.engine.gradients import local_gradient
from offbeat.engine.tensors import is_dtensor, local

__all__ = ["Layout", "Vector"]


class Vector:
    """A flat tensor, and for each parameter a view of it in the parameter's shape."""

    def __init__(self, flat: Tensor, shapes: Sequence[torch.Size]) -> None:
        self.flat = flat
        pieces = torch.split(flat, [shape.numel() for shape in shapes])
        self.parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class Layout:
    """The place of each parameter in a vector, and the ranks over which sums are reduced.

    Args:
        params: the parameters; they may be complex, and DTensors.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.locals = [_real(local(p).detach()) for p in params]
        self.shapes = [t.shape for t in self.locals]
        self.dtype = reduce(torch.promote_types, (t.dtype for t in self.locals))
        self.device = self.locals[0].device
        self.numel = sum(t.numel() for t in self.locals)
        #: For each set of process groups, the parameters that are sharded over them.
        self._by_ranks: dict[tuple[Any, ...], list[int]] = {}
        for i, p in enumerate(params):
            self._by_ranks.setdefault(_groups(p), []).append(i)

    @property
    def everyone(self) -> list[Any]:
        """The process groups of all dimensions of all meshes."""
        found = {id(p.device_mesh): p.device_mesh for p in self.params if is_dtensor(p)}  # type: ignore[attr-defined]
        return [mesh.get_group(i) for mesh in found.values() for i in range(mesh.ndim)]

    def vector(self, flat: Tensor | None = None) -> Vector:
        """A vector that uses the memory of ``flat``, or a new, uninitialised one."""
        if flat is None:
            flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        return Vector(flat, self.shapes)

    def gradients(self) -> list[Tensor]:
        """This rank's gradients, without copying: real and dense. A missing gradient becomes zeros."""
        found = []
        for p, t in zip(self.params, self.locals, strict=True):
            g = p.grad
            if g is None:
                found.append(torch.zeros_like(t))
                continue
            g = local_gradient(p, g) if is_dtensor(p) else g
            found.append(_real(g.to_dense() if g.layout != torch.strided else g))
        return found

    def copy(self, parts: Sequence[Tensor], into: Vector | None = None) -> Vector:
        """The values of ``parts`` as a vector."""
        into = into or self.vector()
        for target, source in zip(into.parts, parts, strict=True):
            target.copy_(source)
        return into

    def dot(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
        """The inner product."""
        return self._sum([_dot(x, y) for x, y in zip(a, b, strict=True)])

    def norm1(self, a: Sequence[Tensor]) -> float:
        """The sum of absolute values."""
        return self._sum([x.abs().sum() for x in a])

    def largest(self, a: Sequence[Tensor]) -> float:
        """The largest absolute value; NaN if there is one."""
        found = torch.stack([x.abs().max().double() if x.numel() else _zero(self.device) for x in a]).max()
        for group in self.everyone:
            pair = torch.stack([found.nan_to_num(), found.isnan().double()])  # MAX need not keep a NaN
            dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
            found = pair[0] if pair[1] == 0 else torch.full_like(found, torch.nan)
        return found.item()

    def mean(self, value: float) -> float:
        """The mean over all ranks of the mesh: each of them has a part of the data."""
        groups = self.everyone
        if not groups:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self.device)
        for group in groups:
            dist.all_reduce(shared, group=group)
            shared /= dist.get_world_size(group)
        return shared.item()

    def _sum(self, numbers: list[Tensor]) -> float:
        total = 0.0
        for groups, mine in self._by_ranks.items():
            part = torch.stack([numbers[i].double() for i in mine]).sum()
            for group in groups:
                dist.all_reduce(part, group=group)
            total += part.item()
        return total


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    x, y = (t if t.is_contiguous() else t.contiguous() for t in (x, y))
    dtype = torch.promote_types(x.dtype, y.dtype)
    return torch.dot(x.view(-1).to(dtype), y.view(-1).to(dtype))


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def _groups(p: Any) -> tuple[Any, ...]:
    """The process groups over which a parameter is sharded."""
    if not is_dtensor(p):
        return ()
    odd = [one for one in p.placements if one.is_partial()]
    if odd:
        raise ValueError(
            f"a parameter has the placements {tuple(p.placements)}, and a partial sum ({odd[0]}) cannot be updated; "
            "redistribute it to Shard or Replicate"
        )
    return tuple(p.device_mesh.get_group(i) for i, one in enumerate(p.placements) if not one.is_replicate())
