"""The levels of a hierarchy, each with a period and a process group to average over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from offbeat.sync.groups import blocks, members, mesh_group
from offbeat.sync.schedule import check_period

__all__ = ["Level", "make_levels"]


@dataclass(frozen=True)
class Level:
    """One level.

    Attributes:
        period: the number of steps between averages, or a function of the step that returns it.
        group: the process group to average over.
    """

    period: Any
    group: Any


def make_levels(every: Any, group: Any, mesh: Any) -> list[Level]:
    """Make levels from the argument ``every`` of ``LocalSGD``.

    Args:
        every: a period (a number of steps, or a function of the step), or levels, lowest first, as a mapping or list of
            pairs of a period and a group: a size (blocks of consecutive ranks), a process group, or the names of one
            or several dimensions of ``mesh``.
        group: the group of a single period; blocks are parts of it.
        mesh: the :class:`~torch.distributed.device_mesh.DeviceMesh` whose dimensions are named.
    """
    if isinstance(every, Mapping):
        pairs = list(every.items())
    elif isinstance(every, Sequence) and not isinstance(every, str):
        pairs = [tuple(pair) for pair in every]
        if any(len(pair) != 2 for pair in pairs):
            raise TypeError(f"every must be a list of pairs of a period and a group, but got {every!r}")
    else:
        check_period(every, "every")
        return [Level(every, group)]
    if not pairs:
        raise ValueError("every must have at least one level, but it is empty")
    for period, _ in pairs:
        check_period(period, "every")
    numbers = [period for period, _ in pairs if not callable(period)]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"the periods of levels must be in ascending order, but got {numbers}")
    levels = [Level(period, _resolve(where, group, mesh)) for period, where in pairs]
    for lower, higher in pairwise(levels):
        if dist.get_world_size(lower.group) > dist.get_world_size(higher.group):
            raise ValueError(
                f"the groups of levels must not become smaller, but a level of {dist.get_world_size(lower.group)} "
                f"ranks is followed by one of {dist.get_world_size(higher.group)}; average small groups often and "
                "large ones rarely"
            )
    return levels


def _resolve(where: Any, group: Any, mesh: Any) -> Any:
    if isinstance(where, int):
        return blocks(group, where)
    if isinstance(where, str) or (isinstance(where, Sequence) and all(isinstance(name, str) for name in where)):
        if mesh is None:
            raise ValueError(f"every names a dimension of a mesh ({where!r}); pass that DeviceMesh as mesh=")
        return mesh_group(mesh, where)
    if hasattr(where, "get_group"):
        return where.get_group()
    if not isinstance(where, dist.ProcessGroup):
        raise TypeError(
            "a level's group must be a size, a process group, or the name of a mesh dimension, "
            f"but got {type(where).__name__}"
        )
    if dist.get_rank() not in members(where):
        raise ValueError(
            f"rank {dist.get_rank()} is not in the group of a level, {members(where)}; pass a group that contains it"
        )
    return where
