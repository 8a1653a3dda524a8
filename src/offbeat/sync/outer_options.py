"""The numbers among the options of an outer optimizer, which ranks must have in common for anchors to stay equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from offbeat.sync.agreement import compare_options
from offbeat.wire.peers import Peers

__all__ = ["Numbers", "check_same_numbers", "digest_of", "number_of", "numbers_of"]

#: For parameters in order: how many in a row have the same options, and the numbers among these.
Numbers = list[tuple[int, dict[str, Any]]]

#: The option that is each rank's own: its inner optimizer's learning rate.
INNER_RATE = "inner_lr"


def numbers_of(groups: Sequence[Mapping[str, Any]]) -> Numbers:
    """The numbers among the options of groups, given one for each parameter."""
    found = {id(group): _numbers(group) for group in groups}
    return [(len(list(same)), one) for one, same in groupby(found[id(group)] for group in groups)]


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: number_of(value) for key, value in group.items() if key != "params"}
    return {key: number for key, number in found.items() if number is not None}


def number_of(value: Any) -> Any:
    """A number, or a tuple of numbers, as every rank has it; None if it is something else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    if isinstance(value, (tuple, list)):
        parts = tuple(map(number_of, value))
        return None if None in parts else parts
    return None


def digest_of(numbers: Numbers) -> int:
    """A number that is the same on two ranks if these are."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little", signed=True)


def check_same_numbers(numbers: Numbers, peers: Peers, *, done: bool, moved: bool) -> Numbers:
    """What all ranks use: the numbers of the first rank that trains. Raises on every rank unless all that train agree.

    Ranks that have no data left do not go on with their schedules. The inner learning rate is each rank's own, which
    may differ by a step of a schedule that a GradScaler has skipped on one of them; the first one's does for all.

    Args:
        done: whether this rank has run out of data.
        moved: whether it has made a step since the last round.
    """
    rows = peers.gather_objects((not done, moved, numbers))
    training = [(rank, given) for rank, (trains, _, given) in zip(peers.ranks, rows, strict=True) if trains]
    compare_options([rank for rank, _ in training], [_in_words(given) for _, given in training])
    chosen: Numbers = max(rows, key=lambda row: row[:2])[2]
    return chosen


def _in_words(numbers: Numbers) -> dict[str, str]:
    found = {}
    for key in {key: None for _, one in numbers for key in one if key != INNER_RATE}:
        values = [one.get(key) for number, one in numbers for _ in range(number)]
        runs = [(value, len(list(same))) for value, same in groupby(values)]
        words = f"{runs[0][0]}" if len(runs) == 1 else ", ".join(f"{value} ({number} times)" for value, number in runs)
        found[f"{key!r} of the outer optimizer"] = words
    return found
