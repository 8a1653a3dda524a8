"""Process groups to average over: from sizes, from a DeviceMesh, from hosts, from shards."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat import _torch
from offbeat.wire.peers import GroupPeers, gather

__all__ = [
    "block_of",
    "blocks",
    "host_group",
    "host_identity",
    "is_group",
    "is_member",
    "is_outside",
    "meeting_device",
    "members",
    "mesh_group",
    "new_group",
    "node_group",
    "replica_group",
    "whole",
]


def whole(group: Any = None) -> Any:
    """The group itself, or all ranks for None."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "averaging replicas needs a process group, but there is none; call "
            "torch.distributed.init_process_group() first (one rank is enough)"
        )
    return dist.group.WORLD if group is None else group


def is_member(group: Any) -> bool:
    """Whether this rank is in the group."""
    return group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(group) >= 0


def is_outside(group: Any) -> bool:
    """Whether this is what ``new_group()`` returns on a rank that is not in the new group; that is a number."""
    return isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER


def members(group: Any) -> list[int]:
    """The global ranks of a group."""
    return list(dist.get_process_group_ranks(group))


def meeting_device(group: Any) -> torch.device:
    """A device whose tensors the group can exchange, preferably the CPU."""
    kinds = _torch.device_types(group)
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def new_group(ranks: Sequence[int], within: Any, backend: str | None = None) -> Any:
    """A new group of these ranks, with the timeout and, unless another is given, the backend of the group ``within``.

    All ranks of ``within`` call this together, each with the ranks of its own new group.
    """
    everyone = members(within)
    rows = [(tuple(wanted), count) for wanted, count in _gather([list(ranks), _torch.count_groups()], within)]
    wanted_backend = backend or dist.get_backend_config(within)
    same = wanted_backend == dist.get_backend_config()
    # torch would give a new group its default patience of half an hour.
    options = {"timeout": _torch.timeout_of(within), "backend": None if same else wanted_backend}
    if len(everyone) == dist.get_world_size():
        mine = None
        for wanted in sorted({wanted for wanted, _ in rows}):
            group = dist.new_group(list(wanted), **options)
            mine = group if wanted == tuple(ranks) else mine
        return mine
    _torch.require("subgroup")
    # Ranks outside of ``within`` do not call this. torch then names the group after its ranks and the number of groups
    # so far; with different numbers, its members would wait for each other under different names.
    counts = {count for wanted, count in rows if wanted == tuple(ranks)}
    if len(counts) > 1:
        raise RuntimeError(
            f"a process group of ranks {list(ranks)} is needed, but torch can make one without the other ranks only if "
            f"all its members have made the same number of groups, and they have made {sorted(counts)}; make process "
            "groups with calls on all ranks, such as dist.new_subgroups or init_device_mesh"
        )
    return dist.new_group(list(ranks), use_local_synchronization=True, **options)


def block_of(ranks: Sequence[int], place: int, size: int) -> list[int]:
    """The block of ``size`` consecutive ranks that the one at this place is in."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or len(ranks) % size:
        raise ValueError(f"{len(ranks)} ranks cannot be split into blocks of {size!r}; use a divisor of {len(ranks)}")
    start = place // size * size
    return list(ranks[start : start + size])


def blocks(group: Any, size: int) -> Any:
    """The process group of the block of ``size`` consecutive ranks of a group that this rank is in."""
    ranks = members(group)
    mine = block_of(ranks, ranks.index(dist.get_rank()), size)
    return group if mine == ranks else new_group(mine, group)


def is_group(group: Any) -> bool:
    """Whether this is a process group."""
    return isinstance(group, dist.ProcessGroup)


def mesh_group(mesh: Any, names: str | Sequence[str]) -> Any:
    """The process group of one dimension of a DeviceMesh, or of several dimensions together."""
    known = mesh.mesh_dim_names or ()
    wanted = (names,) if isinstance(names, str) else tuple(names)
    for name in wanted:
        if name not in known:
            raise ValueError(f"the mesh has no dimension {name!r}; it has {', '.join(map(repr, known)) or 'no names'}")
    if len(wanted) == 1:
        return mesh.get_group(wanted[0])
    part = mesh[wanted]
    return _torch.flat_mesh(part, "_".join(wanted) + "_offbeat").get_group()


def host_identity() -> tuple[str, str]:
    """The name of this host and, on Linux, the id of its boot.

    The name alone is not enough: several machines may all be called ``localhost``.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return socket.gethostname(), boot


def host_group(group: Any) -> Any:
    """The ranks of this group on this rank's host; all ranks of the group call it.

    If the launcher sets ``LOCAL_WORLD_SIZE``, as torchrun does, this says which ranks share a host. Otherwise ranks
    compare :func:`host_identity`. The number of accelerators does not matter.
    """
    together, _ = _ranks_of_host(group)
    return group if together == members(group) else new_group(together, group)


def node_group(group: Any) -> tuple[Any, str]:
    """The ranks of this group on this rank's host, or None if this rank trains by itself; and in words why.

    A rank trains by itself if it is alone on its host, or if all ranks are on one host and ``LOCAL_WORLD_SIZE`` is not
    set: they are then taken for what they would be on several hosts. That is a guess, and a warning says so.
    """
    together, by_launcher = _ranks_of_host(group)
    if together == members(group):
        if len(together) == 1:
            return None, "there is one"
        if not by_launcher:
            warnings.warn(
                f"all {len(together)} ranks are on one host, and LOCAL_WORLD_SIZE, which torchrun sets, is not there "
                "to say which of them are a node, so that every rank trains by itself after warm-up; pass "
                "subgroup=None if you want that, or else a process group of ranks that average their gradients",
                stacklevel=4,
            )
            return None, "all are on one host, and LOCAL_WORLD_SIZE is not set"
        warnings.warn(
            "all ranks are on one node, so gradients are averaged over all of them at every step and averaging "
            "parameters changes nothing; pass subgroup=None (or a smaller process group) to let ranks train by "
            "themselves",
            stacklevel=4,
        )
    node = new_group(together, group)
    why = "a node by LOCAL_WORLD_SIZE" if by_launcher else "a node by the names of hosts"
    return (node, why) if len(together) > 1 else (None, f"alone on {why}")


def _ranks_of_host(group: Any) -> tuple[list[int], bool]:
    """The ranks of this group on this rank's host, and whether the launcher has set ``LOCAL_WORLD_SIZE``."""
    ranks, me = members(group), dist.get_rank()
    hosts = _gather(_host_of(me), group)
    for rank, (kind, value) in zip(ranks, hosts, strict=True):
        if kind == "bad":
            raise ValueError(f"LOCAL_WORLD_SIZE must be a number of processes, but on rank {rank} it is {value!r}")
    if len({kind for kind, _ in hosts}) > 1:
        unset = [rank for rank, (kind, _) in zip(ranks, hosts, strict=True) if kind == "host"]
        raise ValueError(
            f"LOCAL_WORLD_SIZE is set for some ranks and not for others ({', '.join(map(str, unset))}); set it for all "
            "or none, or pass subgroup="
        )
    mine = hosts[ranks.index(me)]
    return [rank for rank, host in zip(ranks, hosts, strict=True) if host == mine], mine[0] == "launcher"


def _host_of(me: int) -> list[Any]:
    size = os.environ.get("LOCAL_WORLD_SIZE")
    if size is None:
        return ["host", list(host_identity())]
    if not size.isdigit() or int(size) < 1:
        return ["bad", size]  # raises on all ranks together
    local = os.environ.get("LOCAL_RANK")
    first = me - int(local) if local is not None and local.isdigit() else me // int(size) * int(size)
    return ["launcher", [first, int(size)]]


def replica_group(params: Sequence[Tensor], group: Any) -> Any:
    """For sharded parameters the ranks that hold the same shards as this rank; otherwise the group itself."""
    meshes = {p.device_mesh for p in params if hasattr(p, "device_mesh")}
    if not meshes:
        return group
    if len(meshes) > 1:
        raise ValueError(
            f"parameters are sharded over {len(meshes)} meshes; pass the ranks that hold the same shards as group="
        )
    mesh: Any = meshes.pop()
    ranks, me = members(group), dist.get_rank()
    places = _gather(list(mesh.get_coordinate()), group)
    here = places[ranks.index(me)]
    return new_group([rank for rank, place in zip(ranks, places, strict=True) if place == here], group)


def _gather(value: Any, group: Any) -> list[Any]:
    return gather(GroupPeers(group, members(group)), value)
