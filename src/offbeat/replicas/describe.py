"""The ``repr`` of replicas: how they are set up and what they have done, in a few lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from offbeat.replicas.level import Level
from offbeat.wire.peers import Peers

__all__ = ["block", "bytes_in_words", "level_in_words", "number_of", "ranks_in_words", "warmup_in_words"]


def block(name: str, lines: Sequence[str], inside: object) -> str:
    """``name (...)`` with a line for each entry, and what is inside at the end."""
    every = [*lines, *repr(inside).splitlines()]
    return f"{name} (\n" + "".join(f"    {line}\n" for line in every) + ")"


def number_of(count: int, unit: str) -> str:
    """A count with its unit."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def bytes_in_words(count: int) -> str:
    """A number of bytes, in the unit that fits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def ranks_in_words(ranks: Sequence[int], everyone: Sequence[int]) -> str:
    """Which ranks these are, in short."""
    ranks = sorted(ranks)
    if ranks == sorted(everyone):
        return number_of(len(ranks), "rank") if len(ranks) == 1 else f"all {len(ranks)} ranks"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def warmup_in_words(warmup: int | Callable[[int], bool]) -> str:
    """For how long warm-up lasts."""
    return f"while {_name(warmup)}(step)" if callable(warmup) else number_of(warmup, "step")


def level_in_words(level: Level, peers: Peers, everyone: Peers, outer: Optimizer | None) -> str:
    """What one level does."""
    often = f"{_name(level.every)}(step) steps" if callable(level.every) else number_of(level.every, "step")
    parts = [f"every {often}, {ranks_in_words(peers.ranks, everyone.ranks)}"]
    if outer is not None:
        given = [f"{name}={value:g}" for name, value in outer.param_groups[0].items() if name in ("lr", "momentum")]
        parts.append(f"outer {type(outer).__name__.lstrip('_')}({', '.join(given)})")
    if level.parts > 1:
        parts.append(f"{level.parts} fragments")
    if level.delay:
        parts.append(f"delay {number_of(level.delay, 'step')}")
    if level.kept:
        parts.append(f"mixing {level.kept:g}")
    if level.codec is not None:
        parts.append(f"codec {level.codec}")
    return ", ".join(parts)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
