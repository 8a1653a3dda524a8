"""Who agrees with whom at each level, and their connections."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from offbeat import _torch
from offbeat.wire.connect import Connector, GroupConnector, is_gloo
from offbeat.wire.groups import block_of, is_group, is_outside, members, mesh_group, node_group, replica_group, whole
from offbeat.wire.membership import StaticMembership
from offbeat.wire.peers import GroupPeers, Traffic, gather
from offbeat.wire.simulated import SimulatedConnector, SimulatedPeers

__all__ = ["Route", "all_arrive", "memberships", "peers_of", "same_shards", "subgroup_of"]


@dataclass(frozen=True)
class Route:
    """What a level says about its connection.

    Attributes:
        group: None for all, a number of consecutive ranks, a process group, or names of dimensions of a mesh.
        every: the period, or a function.
        deadline: how many seconds a collective may take.
        background: whether rounds are exchanged in a thread.
    """

    group: Any
    every: Any
    deadline: float | None
    background: bool


def peers_of(group: Any, traffic: Traffic | None = None) -> Any:
    """The peers of a process group (None: all ranks), on the group's own connection, or those of a simulation."""
    if isinstance(group, SimulatedPeers):
        return SimulatedPeers(group.simulation, group.ranks[group.rank], group.ranks, group.name, traffic, group.turns)
    if is_outside(group):
        raise ValueError(
            "this rank is not in the group that it was given (new_group() returned GroupMember.NON_GROUP_MEMBER); make "
            "the optimizer on the ranks of the group only"
        )
    group = whole(group)
    if not is_group(group):
        raise TypeError(f"group must be a process group or None, but got {group!r}")
    return GroupPeers(group, members(group), traffic=traffic)


def same_shards(params: Sequence[Any], within: Any, traffic: Traffic) -> Any:
    """The peers that hold the same shards as this rank. All ranks of ``within`` call this together."""
    return peers_of(replica_group(params, within.group), traffic)


def subgroup_of(subgroup: Any, everyone: Any, traffic: Traffic, *, sharded: bool) -> tuple[Any, str]:
    """The ranks that average gradients after warm-up, or None; and in words how they were found."""
    if isinstance(subgroup, str):
        if subgroup != "node":
            raise ValueError(f"subgroup must be 'node', a process group or None, but got {subgroup!r}")
        if sharded:  # it reduces its gradients itself
            return None, "the sharded module averages its own"
        if everyone.size == 1 or everyone.group is None:  # simulated ranks are hosts of their own
            return None, "there is one" if everyone.size == 1 else "they are simulated"
        node, why = node_group(everyone.group)
        return None if node is None else peers_of(node, traffic), why
    if subgroup is None:
        return None, "subgroup=None"
    try:
        found = peers_of(subgroup, traffic)
    except ValueError:
        me = everyone.ranks[everyone.rank]
        raise ValueError(f"rank {me} is not in its subgroup; pass a group that contains it") from None
    return found if found.size > 1 else None, "subgroup= was given"


def all_arrive(peers: Any, name: str, seconds: float = 10.0) -> bool:
    """Whether all of these ranks call this within a few seconds of each other. Uses none of their connections.

    Args:
        peers: the ranks.
        name: what they call this meeting; the same on all of them, and for nothing else.
        seconds: how long to wait.
    """
    end = time.monotonic() + seconds
    if isinstance(peers, SimulatedPeers):
        return peers.simulation.network.arrive((name, tuple(peers.ranks)), peers.ranks[peers.rank], seconds)
    if not _torch.has_store():
        return False
    store = PrefixStore(name, _torch.default_store())
    store.set(str(peers.ranks[peers.rank]), "here")
    keys = [str(rank) for rank in peers.ranks]
    while not store.check(keys):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def memberships(
    routes: Sequence[Route], everyone: Any, within: Any, mesh: Any, token: str, traffic: Traffic
) -> list[StaticMembership]:
    """Connect the ranks of each level. All ranks of ``within`` call this together.

    A level must contain the groups of the levels below it. Where it does not, because one level averages inside sites
    and the next across them, it is taken to be all ranks that both of them connect.

    Args:
        routes: lowest level first.
        everyone: the ranks that hold the same shards as this one, one of each replica.
        within: all ranks of all replicas.
        mesh: the DeviceMesh whose dimensions levels name.
        token: a name that all ranks have agreed on and that has not been used before.
        traffic: counts what is sent.
    """
    groups = _groups_of_levels(routes, everyone, mesh)
    quiet = any(route.background for route in routes)
    found = []
    for level, (route, ranks) in enumerate(zip(routes, groups, strict=True)):
        # The replicas of this level, as places among everyone; the ranks of all their shards decide together.
        places = [everyone.ranks.index(rank) for rank in ranks]
        rows = gather(within, [everyone.rank, places])
        together = [rank for rank, row in zip(within.ranks, rows, strict=True) if row[1] == places]
        sets = [together] if together == sorted(ranks) else [together, ranks]
        name = f"offbeat/{token}/{level}.{min(together)}"
        found.append(StaticMembership(_connector(within, sets, name, route, quiet, traffic)))
    return found


def _connector(within: Any, sets: list[list[int]], name: str, route: Route, quiet: bool, traffic: Traffic) -> Connector:
    if isinstance(within, SimulatedPeers):
        return SimulatedConnector(within.simulation, within.ranks[within.rank], sets, name, traffic)
    return GroupConnector(
        within.group,
        sets,
        name,
        timeout=None if route.deadline is None else timedelta(seconds=route.deadline),
        quiet=quiet,
        # What a thread exchanges must not go through the backend of the group.
        background=route.background and not is_gloo(within.group),
        traffic=traffic,
    )


def _groups_of_levels(routes: Sequence[Route], everyone: Any, mesh: Any) -> list[list[int]]:
    """The ranks that this rank agrees with at each level, ascending."""
    wanted: list[list[int]] = []
    problem: Exception | None = None
    try:
        if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(f"mesh must be a DeviceMesh, but got {mesh!r}")
        wanted = [_ranks(route.group, everyone, mesh) for route in routes]
        _check_order(routes, wanted)
    except (TypeError, ValueError) as error:  # perhaps of this rank alone, and the others must not wait for it
        problem = error
    rows = gather(everyone, [wanted, None if problem is None else str(problem)])
    for rank, (_, words) in zip(everyone.ranks, rows, strict=True):
        if words is not None:
            raise problem or ValueError(f"rank {rank} cannot use the levels: {words}")
    me = everyone.ranks[everyone.rank]
    groups = [next(part for part in parts if me in part) for parts in _joined([row for row, _ in rows], len(routes))]
    if groups[-1] != sorted(everyone.ranks):
        raise ValueError(
            f"the top level averages ranks {groups[-1]} among themselves, so that they would never agree with the "
            f"others of {everyone.ranks}; add a level whose group is None, which is all ranks"
        )
    return groups


def _ranks(where: Any, everyone: Any, mesh: Any) -> list[int]:
    """The ranks of this rank's group at a level."""
    me = everyone.ranks[everyone.rank]
    if where is None:
        return list(everyone.ranks)
    if is_outside(where):
        raise ValueError(f"rank {me} is not in the group of a level; pass a group that contains it")
    if isinstance(where, int):
        return block_of(everyone.ranks, everyone.rank, where)
    if isinstance(where, SimulatedPeers):
        return list(where.ranks)
    if isinstance(where, str) or (isinstance(where, Sequence) and all(isinstance(name, str) for name in where)):
        if mesh is None:
            raise ValueError(f"every names a dimension of a mesh ({where!r}); pass that DeviceMesh as mesh=")
        return members(mesh_group(mesh, where))
    where = where.get_group() if hasattr(where, "get_group") else where
    if not is_group(where):
        raise TypeError(
            "a level's group must be a size, a process group, or the name of a mesh dimension, "
            f"but got {type(where).__name__}"
        )
    ranks = members(where)
    if me not in ranks:
        raise ValueError(f"rank {me} is not in the group of a level, {ranks}; pass a group that contains it")
    return ranks


def _check_order(routes: Sequence[Route], groups: Sequence[Sequence[int]]) -> None:
    numbers = [route.every for route in routes if not callable(route.every)]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"the periods of levels must be in ascending order, but got {numbers}")
    for lower, higher in pairwise(groups):
        if len(lower) > len(higher):
            raise ValueError(
                f"the groups of levels must not become smaller, but a level of {len(lower)} ranks is followed by one "
                f"of {len(higher)}; average small groups often and large ones rarely"
            )


def _joined(wanted: Sequence[Sequence[Sequence[int]]], levels: int) -> list[list[list[int]]]:
    """For each level its groups, made to contain those of lower levels.

    Args:
        wanted: for each rank, its group at each level.
        levels: the number of levels.
    """
    found: list[list[list[int]]] = []
    parts: list[set[int]] = []
    for level in range(levels):
        for row in wanted:
            ranks = set(row[level])
            touched = [part for part in parts if part & ranks]
            parts = [part for part in parts if not part & ranks] + [ranks.union(*touched)]
        found.append([sorted(part) for part in parts])
    return found
