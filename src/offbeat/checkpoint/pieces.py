"""Tensors in a checkpoint: whole ones, and pieces of sharded ones with their place in the whole."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.checkpoint.errors import CheckpointError
from offbeat.checkpoint.tensors import DTYPES, dtype_name
from offbeat.checkpoint.tree import Place, place_name
from offbeat.engine.tensors import distributed_like, is_dtensor, is_plain, local

__all__ = ["Entry", "Region", "cut", "describe", "overlap", "ranks_of", "region_of", "replicated", "sharded", "whole"]


@dataclass(frozen=True)
class Region:
    """A box in a tensor.

    Attributes:
        offset: where it begins.
        size: its shape.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.size)


@dataclass(frozen=True)
class Entry:
    """How one rank has a tensor.

    Attributes:
        kind: ``"tensor"``; ``"dtensor"``, a rank's shard of one; ``"shard"``, a plain tensor that is the shard of a
            sharded parameter; ``"local"``, another plain tensor that belongs to a sharded parameter.
        dtype: its dtype.
        shape: the shape of the whole tensor.
        offset: where this rank's piece begins.
        size: the shape of this rank's piece.
        ranks: the ranks that have the other pieces; empty for a whole tensor.
    """

    kind: Literal["tensor", "dtensor", "shard", "local"]
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def region(self) -> Region:
        """The place of this rank's piece."""
        return Region(self.offset, self.size)

    @property
    def is_piece(self) -> bool:
        """Whether other ranks may have other pieces."""
        return self.kind in ("dtensor", "shard")

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Entry:
        """An entry from a file, checked.

        Raises:
            ValueError, TypeError, KeyError: it is malformed.
        """
        numbers = {key: tuple(value[key]) for key in ("shape", "offset", "size", "ranks")}
        if not all(type(n) is int and n >= 0 for some in numbers.values() for n in some):
            raise ValueError(f"{value} has a number that is not allowed")
        entry = cls(kind=value["kind"], dtype=value["dtype"], **numbers)
        if entry.kind not in ("tensor", "dtensor", "shard", "local") or entry.dtype not in DTYPES:
            raise ValueError(f"{value} is of an unknown kind")
        if not len(entry.shape) == len(entry.offset) == len(entry.size):
            raise ValueError(f"{value} has more dimensions in one place than in another")
        if any(o + n > s for o, n, s in zip(entry.offset, entry.size, entry.shape, strict=True)):
            raise ValueError(f"{value} lies outside of its tensor")
        if not entry.is_piece and entry.size != entry.shape:
            raise ValueError(f"{value} is not whole")
        return entry


def describe(place: Place, value: Tensor, param: Tensor | None) -> tuple[Entry, Tensor]:
    """The entry of a tensor, and this rank's part of its values.

    Args:
        place: where it is.
        value: the tensor.
        param: the parameter that it belongs to, if any.
    """
    name = dtype_name(value.dtype)
    if name is None or value.layout is not torch.strided or value.device.type == "meta":
        raise CheckpointError(
            f"{place_name(place)} is a tensor of {value.dtype}, {value.layout}, on {value.device}, which a checkpoint "
            "cannot hold; convert it (.to_dense(), .dequantize(), .to(device)), or leave it out"
        )
    if is_dtensor(value):
        if any(one.is_partial() for one in value.placements):  # type: ignore[attr-defined]
            raise CheckpointError(
                f"{place_name(place)} is a DTensor with a sum still to be made; redistribute it first"
            )
        region = region_of(value)
        return Entry("dtensor", name, tuple(value.shape), region.offset, region.size, ranks_of(value)), local(value)
    if not is_plain(value) and type(value) is not torch.nn.Buffer:
        raise CheckpointError(
            f"{place_name(place)} is a {type(value).__name__}, a kind of tensor that a checkpoint cannot hold; save "
            "the plain tensors that it is made of"
        )
    shape = tuple(value.shape)
    if param is not None and is_dtensor(param):
        region = region_of(param)
        if shape == region.size and shape:
            return Entry("shard", name, tuple(param.shape), region.offset, region.size, ranks_of(param)), value
        return Entry("local", name, shape, (0,) * len(shape), shape, ()), value
    return Entry("tensor", name, shape, (0,) * len(shape), shape, ()), value


def region_of(tensor: Tensor) -> Region:
    """This rank's part of a DTensor; all of another tensor."""
    if not is_dtensor(tensor):
        return whole(tensor.shape)
    size, offset = _torch.shard_place(tensor)
    return Region(tuple(offset), tuple(size))


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region((0,) * len(shape), tuple(shape))


def overlap(a: Region, b: Region) -> Region | None:
    """The part that two regions of a tensor have in common; None if there is none."""
    start = [max(x, y) for x, y in zip(a.offset, b.offset, strict=True)]
    end = [min(x + n, y + m) for x, n, y, m in zip(a.offset, a.size, b.offset, b.size, strict=True)]
    if any(stop <= first for first, stop in zip(start, end, strict=True)):
        return None
    return Region(tuple(start), tuple(stop - first for first, stop in zip(start, end, strict=True)))


def cut(region: Region, inside: Region) -> tuple[slice, ...]:
    """The slices of a region in a tensor that holds ``inside``."""
    starts = [a - b for a, b in zip(region.offset, inside.offset, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, region.size, strict=True))


def replicated(like: Any, value: Tensor) -> Tensor:
    """A DTensor on the mesh of ``like`` that every rank has whole."""
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    mesh = like.device_mesh
    result: Tensor = type(like).from_local(value.to(local(like).device), mesh, [replicate] * mesh.ndim)
    return result


def sharded(like: Tensor, value: Tensor) -> Tensor:
    """A DTensor placed as ``like``, of which ``value`` is this rank's shard."""
    return distributed_like(like, value.to(local(like).device))


def ranks_of(tensor: Any) -> tuple[int, ...]:
    """The ranks that hold the shards of a DTensor."""
    return tuple(tensor.device_mesh.mesh.flatten().tolist())
