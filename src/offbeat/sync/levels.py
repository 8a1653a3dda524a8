"""Levels of a hierarchy: each with its period and the group it averages over."""

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
        period: steps from one average to the next, or a function from the step to that.
        group: the ranks that average.
    """

    period: Any
    group: Any


def make_levels(every: Any, group: Any, mesh: Any) -> list[Level]:
    """Levels from what ``LocalSGD(every=)`` takes: a period, or periods with groups, lowest first.

    Args:
        every: a number of steps, a function of the step, or a mapping or list of pairs of such a period and a group:
            its size (blocks of consecutive ranks), a process group, or one or several names of a mesh's dimensions.
        group: the group of a single period, which sizes are parts of.
        mesh: the :class:`~torch.distributed.device_mesh.DeviceMesh` that names are from.
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
        raise ValueError(f"the periods of levels must ascend, since the last that is due is taken, but got {numbers}")
    levels = [Level(period, _resolve(where, group, mesh)) for period, where in pairs]
    for lower, higher in pairwise(levels):
        if dist.get_world_size(lower.group) > dist.get_world_size(higher.group):
            raise ValueError(
                f"a level of {dist.get_world_size(lower.group)} ranks stands below one of "
                f"{dist.get_world_size(higher.group)}; small groups are averaged often and large ones seldom"
            )
    return levels


def _resolve(where: Any, group: Any, mesh: Any) -> Any:
    if isinstance(where, int):
        return blocks(group, where)
    if isinstance(where, str) or (isinstance(where, Sequence) and all(isinstance(name, str) for name in where)):
        if mesh is None:
            raise ValueError(f"every names a dimension of a mesh ({where!r}); give that DeviceMesh as mesh=")
        return mesh_group(mesh, where)
    if hasattr(where, "get_group"):
        return where.get_group()
    if not isinstance(where, dist.ProcessGroup):
        raise TypeError(
            "a level's group is a size, a process group, or the name of a mesh's dimension, "
            f"but got {type(where).__name__}"
        )
    if dist.get_rank() not in members(where):
        raise ValueError(f"this rank ({dist.get_rank()}) is not in the group of a level, {members(where)}")
    return where
