"""The types of options that several classes take, for type checkers and for the checks of the classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import torch
from torch.optim import Optimizer

from offbeat.wire.codecs import Codec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from offbeat._types import CommHook, Group
    from offbeat.wire.codecs import CodecSpec
    from offbeat.wire.elastic import Elastic
    from offbeat.wire.simulated import SimulatedPeers

__all__ = [
    "Anchor",
    "Buffers",
    "Every",
    "Fragments",
    "LevelOptions",
    "Levels",
    "MakeOuter",
    "NonFinite",
    "Ranks",
    "ReplicaOptions",
    "SlowMoLevelOptions",
    "Snapshot",
    "State",
    "Warmup",
    "Where",
    "check_bool",
    "check_float_dtype",
    "check_one_number",
    "check_outer",
    "in_words",
    "with_options",
]

#: The number of steps between rounds, or a function of the step that returns it.
Every: TypeAlias = int | Callable[[int], int]

#: The number of steps of warm-up, or a function of the step that returns whether warm-up continues.
Warmup: TypeAlias = int | Callable[[int], bool]

#: Ranks that take part.
Ranks: TypeAlias = "Group | SimulatedPeers"

#: The ranks of a level: all, blocks of so many, a process group, or dimensions of a mesh.
Where: TypeAlias = "int | str | Sequence[str] | DeviceMesh | Ranks | None"

#: ``every`` of LocalSGD: a period, or levels as pairs of a period and their ranks.
Levels: TypeAlias = "Every | Mapping[int, Where] | Sequence[tuple[Every, Where]]"

#: Makes an outer optimizer from parameter groups.
MakeOuter: TypeAlias = Callable[[list[dict[str, Any]]], Optimizer]

#: Not a sequence of any sequences of names: a string would be one.
Fragments: TypeAlias = int | tuple[Literal["strided"], int] | Sequence[list[str] | tuple[str, ...]]

State: TypeAlias = Literal["keep", "average", "reset"]
Buffers: TypeAlias = Literal["average", "broadcast", "keep"]
Snapshot: TypeAlias = Literal["device", "cpu"]
NonFinite: TypeAlias = Literal["raise", "leave_out", "skip"]
Anchor: TypeAlias = Literal["device", "cpu"]


class ReplicaOptions(TypedDict, total=False):
    """The keyword arguments of :class:`offbeat.Replica`, for the classes that pass them on."""

    group: Ranks | Elastic | None
    subgroup: Literal["node"] | Ranks | None
    mesh: DeviceMesh | None
    state: State | Mapping[str, State]
    buffers: Buffers
    weighted: bool
    sync_init: bool
    comm_hook: CommHook | None
    bucket_mb: float
    reduce_dtype: torch.dtype | None
    snapshot: Snapshot


class LevelOptions(TypedDict, total=False):
    """Further options of the :class:`offbeat.Level` of :class:`offbeat.DiLoCo`."""

    phase: int | None
    group: Where
    deadline: float | None
    nonfinite: NonFinite
    anchor: Anchor
    anchor_dtype: torch.dtype | None
    ordered: bool


class SlowMoLevelOptions(LevelOptions, total=False):
    """Further options of the :class:`offbeat.Level` of :class:`offbeat.SlowMo`."""

    fragments: Fragments
    delay: int
    mixing: float | None
    codec: CodecSpec
    error_feedback: float | bool | None


def with_options(level: Any, *, deadline: float | None, nonfinite: str | None, **given: Any) -> dict[str, Any]:
    """The options of a level: those of ``level=``, and those that are arguments of their own.

    Args:
        deadline: None if it was not given as an argument; the same for ``nonfinite``.
    """
    if level is not None and not isinstance(level, Mapping):
        raise TypeError(f"level must be a dictionary of options of offbeat.Level, but got {level!r}")
    found = dict(level or {})
    optional = {"deadline": deadline, "nonfinite": nonfinite}
    given.update({name: value for name, value in optional.items() if value is not None})
    for name in given:
        if name in found:
            raise ValueError(f"{name} is given twice, as an argument and in level=; leave it out of level=")
    return {**found, **given}


def in_words(option: Any) -> str:
    """An option as a string that ranks can compare; functions and process groups by their name or type."""
    if isinstance(option, Mapping):
        return ", ".join(f"{in_words(key)}: {in_words(value)}" for key, value in option.items())
    if isinstance(option, (list, tuple)):
        return ", ".join(map(in_words, option))
    if option is None or isinstance(option, (int, float, str, torch.dtype)):
        return str(option)
    if isinstance(option, Codec):
        return repr(option)
    return f"function {getattr(option, '__name__', '')}" if callable(option) else type(option).__name__


def check_bool(**options: Any) -> None:
    """Raise unless all of these are True or False."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, but got {value!r}")


def check_float_dtype(name: str, dtype: Any) -> None:
    """Raise unless this is None or a floating-point dtype."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype such as torch.float32, but got {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"{name} must be a floating-point dtype, but got {dtype}")


def check_one_number(what: str, value: Any) -> None:
    """Raise unless this is a number, or a tensor or array of one element."""
    try:
        fine = not isinstance(value, (bool, str)) and math.isfinite(float(value)) in (True, False)
    except (TypeError, ValueError, RuntimeError):
        fine = False
    if not fine:
        raise TypeError(f"{what} must be one number, but it is {value!r}")


def check_outer(below: float | None = None, **numbers: Any) -> None:
    """Raise unless these options of an outer optimizer are finite, not negative and below the limit."""
    for name, value in numbers.items():
        check_one_number(name, value)
        if not (0 <= value < math.inf and (below is None or value < below)):
            limit = "a finite number that is not negative" if below is None else f"at least 0 and below {below:g}"
            raise ValueError(f"{name} must be {limit}, but got {value!r}; anchors would not stay finite")
