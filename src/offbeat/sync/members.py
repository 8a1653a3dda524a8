"""Which ranks agree at each level, and their connections."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

from offbeat.sync.level import Level
from offbeat.wire.groups import block_of, is_group, is_outside, members, mesh_group, whole
from offbeat.wire.peers import GroupPeers, Peers, connect, is_gloo
from offbeat.wire.simulated import SimulatedPeers

__all__ = ["connect_all", "connect_levels", "peers_of"]


def peers_of(group: Any) -> Peers:
    """The peers of a process group (None: all ranks), with the group's own connection."""
    if isinstance(group, SimulatedPeers):
        return group
    if is_outside(group):
        raise ValueError(
            "this rank is not in the group that it was given (new_group() returned GroupMember.NON_GROUP_MEMBER); make "
            "the optimizer on the ranks of the group only"
        )
    group = whole(group)
    if not is_group(group):
        raise TypeError(f"group must be a process group or None, but got {group!r}")
    return GroupPeers(group, members(group))


def connect_levels(levels: Sequence[Level], everyone: Peers, mesh: Any, *, quiet: bool) -> list[Peers]:
    """The peers of each level, with connections of their own.

    A level must contain the groups of the levels below it. Where it does not, because one level averages inside sites
    and the next across them, it is taken to be all ranks that both of them connect.

    Args:
        everyone: the ranks that take part; all of them call this together.
        mesh: the DeviceMesh whose dimensions levels name.
        quiet: whether the threads of the connections should not preempt training.
    """
    given: list[list[int]] = []
    problem: Exception | None = None
    try:
        if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(f"mesh must be a DeviceMesh, but got {mesh!r}")
        given = [_ranks(level, everyone, mesh) for level in levels]
        _check_order(levels, given)
    except (TypeError, ValueError) as error:  # perhaps of this rank alone, and the others must not wait for it
        problem = error
    rows = everyone.gather_objects((given, None if problem is None else str(problem)))
    for rank, (_, words) in zip(everyone.ranks, rows, strict=True):
        if words is not None:
            raise problem or ValueError(f"rank {rank} cannot use the levels: {words}")
    parts = _joined([given for given, _ in rows], len(levels))
    mine = [next(part for part in some if everyone.ranks[everyone.rank] in part) for some in parts]
    if mine[-1] != sorted(everyone.ranks):
        raise ValueError(
            f"the top level averages ranks {mine[-1]} among themselves, so that they would never agree with the others "
            f"of {everyone.ranks}; add a level whose group is None, which is all ranks"
        )
    bases: dict[bool, Peers] = {}
    found: list[Peers] = []
    for level, ranks in zip(levels, mine, strict=True):
        background = is_background(level, everyone)
        if background not in bases:
            bases[background] = _base(everyone, levels[-1].deadline, quiet, background)
        base = bases[background]
        same = ranks == sorted(base.ranks) and level.deadline == levels[-1].deadline
        found.append(base if same else base.split(ranks, _timeout(level.deadline)))
    return found


def is_background(level: Level, everyone: Peers) -> bool:
    """Whether rounds of a level must not go through the backend of the group, because a thread exchanges them."""
    return level.delay > 0 and isinstance(everyone, GroupPeers) and not is_gloo(everyone.group)


def _base(everyone: Peers, deadline: float | None, quiet: bool, background: bool) -> Peers:
    if not isinstance(everyone, GroupPeers):
        return everyone.split(everyone.ranks)
    token = everyone.gather_objects(uuid.uuid4().hex)[0]
    return connect(everyone.group, token=token, timeout=_timeout(deadline), quiet=quiet, background=background)


def connect_all(everyone: Peers, levels: Sequence[Level]) -> Peers:
    """All ranks, with a connection of their own: those of a sharded replica decide together."""
    background = any(is_background(level, everyone) for level in levels)
    return _base(everyone, levels[-1].deadline, False, background)


def _timeout(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def _ranks(level: Level, everyone: Peers, mesh: Any) -> list[int]:
    """The ranks of this rank's group at a level."""
    where = level.group
    if where is None:
        return everyone.ranks
    if is_outside(where):
        raise ValueError(
            f"rank {everyone.ranks[everyone.rank]} is not in the group of a level; pass a group that contains it"
        )
    if isinstance(where, int):
        return block_of(everyone.ranks, everyone.rank, where)
    if isinstance(where, SimulatedPeers):
        return where.ranks
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
    if everyone.ranks[everyone.rank] not in ranks:
        raise ValueError(
            f"rank {everyone.ranks[everyone.rank]} is not in the group of a level, {ranks}; pass a group that "
            "contains it"
        )
    return ranks


def _check_order(levels: Sequence[Level], given: Sequence[Sequence[int]]) -> None:
    numbers = [level.every for level in levels if not callable(level.every)]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"the periods of levels must be in ascending order, but got {numbers}")
    for lower, higher in pairwise(given):
        if len(lower) > len(higher):
            raise ValueError(
                f"the groups of levels must not become smaller, but a level of {len(lower)} ranks is followed by one "
                f"of {len(higher)}; average small groups often and large ones rarely"
            )


def _joined(given: Sequence[Sequence[Sequence[int]]], levels: int) -> list[list[list[int]]]:
    """For each level its groups, made to contain those of lower levels.

    Args:
        given: for each rank, its group at each level.
    """
    found: list[list[list[int]]] = []
    parts: list[set[int]] = []
    for level in range(levels):
        for row in given:
            ranks = set(row[level])
            touched = [part for part in parts if part & ranks]
            parts = [part for part in parts if not part & ranks] + [ranks.union(*touched)]
        found.append([sorted(part) for part in parts])
    return found
