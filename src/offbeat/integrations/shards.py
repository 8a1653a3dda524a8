"""A rank's shards in its part of a checkpoint: as plain tensors, and put together again where they were cut."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from offbeat.engine.tensors import is_dtensor, is_plain_shard, local

__all__ = ["meshes_of", "pack", "places", "unpack"]

_SHARD = "offbeat_shard"


def meshes_of(module: torch.nn.Module) -> list[Any]:
    """The meshes that the parameters of a module are sharded over, in the order of the parameters."""
    found: list[Any] = []
    for p in module.parameters():
        mesh = getattr(p, "device_mesh", None)
        if mesh is not None and mesh not in found:
            found.append(mesh)
    return found


def places(meshes: list[Any]) -> list[Any]:
    """The size of each mesh, and the place of this rank in it: what must be the same to go on from its shards."""
    return [[list(mesh.shape), list(mesh.get_coordinate() or ())] for mesh in meshes]


def pack(tree: Any, meshes: list[Any]) -> Any:
    """A state dict with this rank's shards in place of its DTensors, to be saved without anything of process groups."""
    if is_dtensor(tree):
        return {
            _SHARD: local(tree).detach(),
            "mesh": meshes.index(tree.device_mesh),
            "cut": [_cut(one) for one in tree.placements],
            "shape": list(tree.shape),
            "stride": list(tree.stride()),
        }
    if isinstance(tree, dict):
        return _with_versions(tree, {key: pack(value, meshes) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return type(tree)(pack(value, meshes) for value in tree)
    return tree


def _with_versions(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, Any]:
    """A module's state dict also holds the versions of its modules, in an attribute."""
    versions = getattr(before, "_metadata", None)
    if versions is None:
        return after
    found: Any = OrderedDict(after)
    found._metadata = versions
    return found  # type: ignore[no-any-return]


def unpack(tree: Any, meshes: list[Any]) -> Any:
    """The state dict that :func:`pack` was given, on the same meshes or on equal ones."""
    if isinstance(tree, dict) and _SHARD in tree:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        cut = [Replicate() if dim is None else Shard(dim) for dim in tree["cut"]]
        mesh = meshes[tree["mesh"]]
        shape, stride = torch.Size(tree["shape"]), tuple(tree["stride"])
        shard = tree[_SHARD].to(mesh.device_type)
        return DTensor.from_local(shard, mesh, cut, run_check=False, shape=shape, stride=stride)
    if isinstance(tree, dict):
        return _with_versions(tree, {key: unpack(value, meshes) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return type(tree)(unpack(value, meshes) for value in tree)
    return tree


def _cut(placement: Any) -> int | None:
    """The dimension that is cut, or None if every rank has all of it."""
    if placement.is_replicate():
        return None
    if not is_plain_shard(placement):
        raise RuntimeError(
            f"a tensor with the placement {placement} cannot be saved in a rank's part of a checkpoint, which is for "
            "tensors that fully_shard has cut along one dimension; save with torch.distributed.checkpoint, under a "
            "name for each replica"
        )
    return int(placement.dim)
