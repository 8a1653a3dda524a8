"""Who averages with whom: process groups from sizes, from a DeviceMesh, from the launcher, from shards."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.sync.quiet import quiet_new_threads

__all__ = [
    "blocks",
    "is_member",
    "meeting_device",
    "members",
    "mesh_group",
    "node_group",
    "replica_group",
    "twin",
    "whole",
]


def whole(group: Any = None) -> Any:
    """The group itself, or all ranks for None."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "replicas are averaged over a process group, and there is none; call "
            "torch.distributed.init_process_group() first (one rank is enough)"
        )
    return dist.group.WORLD if group is None else group


def is_member(group: Any) -> bool:
    """Whether this rank is in the group."""
    return group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(group) >= 0


def members(group: Any) -> list[int]:
    """Global ranks."""
    return list(dist.get_process_group_ranks(group))


def meeting_device(group: Any) -> torch.device:
    """A device whose tensors the group can exchange: the CPU if it can."""
    kinds = [device.type for device in getattr(group, "_device_types", [])]
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def _new(ranks: Sequence[int], within: Any) -> Any:
    """A new group of these ranks, with the backend and the patience of the one they are within.

    All ranks of ``within`` call this at the same time, each with the group it wants to be in.
    """
    everyone = members(within)
    found: list[Any] = [None] * len(everyone)
    dist.all_gather_object(found, (tuple(ranks), len(dist.distributed_c10d._world.pg_names)), group=within)
    same = dist.get_backend_config(within) == dist.get_backend_config()
    options = {"timeout": _timeout(within), "backend": None if same else dist.get_backend_config(within)}
    if len(everyone) == dist.get_world_size():
        mine = None
        for wanted in sorted({wanted for wanted, _ in found}):
            group = dist.new_group(list(wanted), **options)
            mine = group if wanted == tuple(ranks) else mine
        return mine
    # Ranks outside do not call this, so that torch makes the group's name from its ranks and from how many groups
    # there are: if members have different numbers of groups they would wait for each other under different names.
    counts = {count for wanted, count in found if wanted == tuple(ranks)}
    if len(counts) > 1:
        raise RuntimeError(
            f"a process group of ranks {list(ranks)} is needed, but torch can make one without the other ranks only if "
            f"its members have as many groups as each other, and they have {sorted(counts)}; make process groups with "
            "calls that all ranks share, such as dist.new_subgroups or init_device_mesh"
        )
    return dist.new_group(list(ranks), use_local_synchronization=True, **options)


def _timeout(group: Any) -> Any:
    """How long a group waits; torch would give a new one its default of half an hour."""
    for device in getattr(group, "_device_types", []):
        found = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if found is not None:
            return found
    return None


def twin(group: Any, within: Any) -> Any:
    """Another group of the same ranks: a thread's collectives must not mix with the program's.

    Args:
        within: the ranks that call this together, each with a group of its own or the same.
    """
    with quiet_new_threads("gloo"):
        return _new(members(group), within)


def blocks(group: Any, size: int) -> Any:
    """The block of ``size`` consecutive ranks of the group that this rank is in."""
    ranks = members(group)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or len(ranks) % size:
        raise ValueError(f"a group of {len(ranks)} ranks cannot be cut into blocks of {size!r}; give a divisor of it")
    if size == len(ranks):
        return group  # on every rank
    start = ranks.index(dist.get_rank()) // size * size
    return _new(ranks[start : start + size], group)


def mesh_group(mesh: Any, names: str | Sequence[str]) -> Any:
    """The ranks along one dimension of a DeviceMesh, or along several together."""
    known = mesh.mesh_dim_names or ()
    wanted = (names,) if isinstance(names, str) else tuple(names)
    for name in wanted:
        if name not in known:
            raise ValueError(f"the mesh has no dimension {name!r}; it has {', '.join(map(repr, known)) or 'no names'}")
    if len(wanted) == 1:
        return mesh.get_group(wanted[0])
    part = mesh[wanted]
    return part._flatten("_".join(wanted) + "_offbeat").get_group()


def node_group(group: Any) -> Any:
    """The ranks of this group on this rank's node, or None if it is the only one.

    A node is what the launcher says (``LOCAL_WORLD_SIZE``, as torchrun sets it), else a host name; where no launcher
    says anything and all ranks are on one host, each is a node of its own. The number of devices says nothing about
    it: there may be fewer processes, or none of them uses a device.
    """
    ranks, me = members(group), dist.get_rank()
    found: list[Any] = [None] * len(ranks)
    dist.all_gather_object(found, _node(me), group=group)
    for rank, (kind, value) in zip(ranks, found, strict=True):
        if kind == "bad":
            raise ValueError(f"LOCAL_WORLD_SIZE must be a number of processes, but on rank {rank} it is {value!r}")
    if len({kind for kind, _ in found}) > 1:
        unset = [rank for rank, (kind, _) in zip(ranks, found, strict=True) if kind == "host"]
        raise ValueError(
            f"LOCAL_WORLD_SIZE is set for some ranks and not for others ({', '.join(map(str, unset))}); set it for all "
            "or none, or give subgroup="
        )
    mine = found[ranks.index(me)]
    together = [rank for rank, node in zip(ranks, found, strict=True) if node == mine]
    if len(together) == len(ranks):
        if mine[0] == "host" or len(ranks) == 1:
            return None
        warnings.warn(
            "all ranks are on one node, so gradients are averaged over all of them at every step and averaging "
            "parameters changes nothing; give subgroup=None (or one of your own) to have ranks train by themselves",
            stacklevel=4,
        )
    node = _new(together, group)
    return node if len(together) > 1 else None


def _node(me: int) -> tuple[str, Any]:
    size = os.environ.get("LOCAL_WORLD_SIZE")
    if size is None:
        return "host", socket.gethostname()
    if not size.isdigit() or int(size) < 1:
        return "bad", size  # raised when all ranks know
    local = os.environ.get("LOCAL_RANK")
    first = me - int(local) if local is not None and local.isdigit() else me // int(size) * int(size)
    return "launcher", (first, int(size))


def replica_group(params: Sequence[Tensor], group: Any) -> Any:
    """For sharded parameters the ranks that hold the same shards as this one; for others the group itself."""
    meshes = {p.device_mesh for p in params if hasattr(p, "device_mesh")}
    if not meshes:
        return group
    if len(meshes) > 1:
        raise ValueError(
            f"parameters are sharded over {len(meshes)} meshes; give group= the ranks that hold the same shards"
        )
    mesh: Any = meshes.pop()
    ranks, me = members(group), dist.get_rank()
    found: list[Any] = [None] * len(ranks)
    dist.all_gather_object(found, mesh.get_coordinate(), group=group)
    here = found[ranks.index(me)]
    return _new([rank for rank, place in zip(ranks, found, strict=True) if place == here], group)
