"""Before an exchange, ranks compare what they are about to exchange; a difference raises on every rank."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.sync.items import Digest, Item, describe, local_part
from offbeat.wire.peers import Peers

__all__ = [
    "Disagreement",
    "Shares",
    "agree",
    "check_same_items",
    "check_same_options",
    "check_same_values",
    "compare_options",
    "name_difference",
    "vote",
]

#: How many elements a fingerprint is made of at once: few enough for little memory.
_PIECE = 1 << 20


class Disagreement(RuntimeError):
    """Ranks were about to exchange different things. Raised on every rank, before anything is changed."""


@dataclass(frozen=True)
class Shares:
    """The weight of each rank in a mean.

    Attributes:
        factor: this rank's weight, from 0 to 1.
        divisor: the number of ranks with a weight if these weights are equal, else None.
        is_first: whether this is the first rank with a weight.
        nobody: whether no rank has a weight.
        all_done: whether all ranks have run out of data.
        same_state: whether all ranks have the same optimizer state to average.
        moved: which ranks have made a step since the last average.
        state_keys: for each column of ``FoundKeys``, the largest value on any rank.
        rounds: how many rounds of this track each rank has completed.
        finite: which ranks have only finite numbers to exchange, or no weight.
        sound: which ranks have only finite numbers.
        unchecked: whether any rank has anchors that have not been compared yet.
        same_options: whether all ranks have the same options of the outer optimizer.
    """

    factor: float
    divisor: int | None
    is_first: bool = False
    nobody: bool = False
    all_done: bool = False
    same_state: bool = True
    moved: tuple[bool, ...] = ()
    state_keys: tuple[int, ...] = ()
    rounds: tuple[int, ...] = ()
    finite: tuple[bool, ...] = ()
    sound: tuple[bool, ...] = ()
    unchecked: bool = False
    same_options: bool = True

    @staticmethod
    def of(weights: Sequence[float], me: int, **more: Any) -> Shares:
        """Make the shares of rank ``me`` from the weights of all ranks."""
        total = sum(weights)
        if not math.isfinite(total):
            raise ValueError(
                f"the weights of all ranks ({', '.join(map(str, weights))}) add up to {total}, and no rank would "
                "count; give seen() smaller units from the start, such as batches instead of samples"
            )
        if total == 0:
            return Shares(0.0, None, False, True, **more)
        counting = [w for w in weights if w > 0]
        equal = all(w == counting[0] for w in counting)
        first = next(i for i, w in enumerate(weights) if w > 0)
        return Shares(weights[me] / total, len(counting) if equal else None, first == me, False, **more)


def agree(
    peers: Peers,
    step: int,
    digests: Sequence[int],
    weight: float,
    items: Callable[[], Sequence[Item]],
    *,
    done: bool = False,
    moved: bool = True,
    state_keys: Sequence[int] = (),
    rounds: int = 0,
    finite: bool = True,
    unchecked: bool = False,
    options: int = 0,
    leave_out: bool = False,
) -> Shares:
    """Compare the step and the items of all ranks, and collect their weights.

    Args:
        step: the step after which ranks exchange.
        digests: two numbers for the items, which must be the same on every rank, and two for optimizer state, which
            may differ.
        weight: this rank's weight.
        items: returns the items; called only if ranks differ, to name the difference.
        done: whether this rank has run out of data.
        moved: whether this rank has made a step since the last average.
        state_keys: the columns of this rank's ``FoundKeys``.
        rounds: how many rounds this rank has completed.
        finite: whether all numbers of this rank are finite.
        unchecked: whether this rank has anchors that have not been compared yet.
        options: a number for the options of the outer optimizer, which may differ.
        leave_out: whether ranks with numbers that are not finite get no weight.
    """
    ranks = peers.ranks
    bits = struct.unpack("<q", struct.pack("<d", weight))[0]
    first, second, *state = (*digests, 0, 0)[:4]
    numbers = [
        step,
        first,
        second,
        *state,
        bits,
        int(done),
        int(moved),
        rounds,
        int(finite),
        int(unchecked),
        options,
        *state_keys,
    ]
    mine = torch.tensor(numbers, dtype=torch.int64, device=peers.device)
    rows = torch.empty(len(numbers) * peers.size, dtype=torch.int64, device=peers.device)
    peers.all_gather(rows, mine).wait()
    table = rows.view(peers.size, -1).tolist()
    if len({row[0] for row in table}) > 1:
        where = ", ".join(f"rank {rank} at step {row[0]}" for rank, row in zip(ranks, table, strict=True))
        raise Disagreement(
            f"ranks are at different steps: {where}; call step() equally often on every rank (and finish() on a rank "
            "that has no data left), and load checkpoints of the same step"
        )
    if len({(row[1], row[2]) for row in table}) > 1:
        name_difference(peers, items())
    weights = [struct.unpack("<d", struct.pack("<q", row[5]))[0] for row in table]
    given, sound = list(weights), tuple(bool(row[9]) for row in table)
    if leave_out:
        weights = [w if ok else 0.0 for w, ok in zip(weights, sound, strict=True)]
    return Shares.of(
        weights,
        peers.rank,
        all_done=all(row[6] for row in table),
        same_state=len({(row[3], row[4]) for row in table}) == 1,
        moved=tuple(bool(row[7]) for row in table),
        state_keys=tuple(max(column) for column in zip(*(row[12:] for row in table), strict=True)),
        rounds=tuple(row[8] for row in table),
        finite=tuple(ok or w == 0 for ok, w in zip(sound, given, strict=True)),
        sound=sound,
        unchecked=any(row[10] for row in table),
        same_options=len({row[11] for row in table}) == 1,
    )


def vote(peers: Peers) -> None:
    """Return only if every rank has got this far."""
    flag = torch.ones(1, dtype=torch.int64, device=peers.device)
    peers.all_reduce(flag, "min").wait()


def name_difference(peers: Peers, items: Sequence[Item]) -> None:
    """Raise the same error on every rank: the first difference between their lists of items."""
    ranks, lists = peers.ranks, peers.gather_objects(describe(items))
    for i in range(max(map(len, lists))):
        here: dict[str, list[int]] = {}
        for rank, rows in zip(ranks, lists, strict=True):
            words = f"{rows[i][0]!r}, {rows[i][1]}" if i < len(rows) else "nothing more"
            here.setdefault(words, []).append(rank)
        if len(here) > 1:
            names = {rows[i][0] for rows in lists if i < len(rows)}
            what = f"{next(iter(names))!r} differs" if len(names) == 1 else "the names differ"
            where = "; ".join(f"on {_ranks(some)}: {words}" for words, some in here.items())
            raise Disagreement(
                f"ranks do not agree on what to average: item {i}, {what}. {where}. Every rank must have the same "
                "parameters with requires_grad, with the same shapes and dtypes; for sharded parameters, group= must "
                "be the ranks that hold the same shards"
            )
    raise Disagreement("ranks did not agree on what to average, but their lists are the same now; call step() again")


def check_same_items(items: Sequence[Item], peers: Peers) -> None:
    """Raise on every rank unless all ranks have items of the same names, shapes and dtypes."""
    bits = Digest().of(items)
    if any(found != bits for found in peers.gather_objects(bits)):
        name_difference(peers, items)


def check_same_values(items: Sequence[Item], peers: Peers) -> None:
    """Raise on every rank unless the items have the same values on every rank."""
    ranks = peers.ranks
    lists = peers.gather_objects([(item.name, _fingerprint(local_part(item.tensor))) for item in items])
    if len({tuple(name for name, _ in rows) for rows in lists}) > 1:
        name_difference(peers, items)
    for rows in zip(*lists, strict=True):
        if len(set(rows)) > 1:
            other = [rank for rank, row in zip(ranks, rows, strict=True) if row != rows[0]]
            raise Disagreement(
                f"replicas do not start from the same parameters: {rows[0][0]!r} of {_ranks(other)} differs from rank "
                f"{ranks[0]}'s; use the same seed on every rank, pass sync_init=True to start from the first rank's "
                "parameters, or wrap the module in DistributedDataParallel over all ranks"
            )


def _fingerprint(part: Tensor) -> int:
    """A number that depends on every element's bits and place: their sum, each multiplied by a number for its place."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = part.contiguous().view(-1).view(kinds[part.itemsize])
    places = torch.arange(1, min(flat.numel(), _PIECE) + 1, device=flat.device)
    for _ in range(2):  # products wrap around; shifting mixes their upper bits into the lower ones
        places.mul_(0x2545F4914F6CDD1D).bitwise_xor_(places >> 31)
    places.bitwise_or_(1)  # an even factor would lose the highest bit, which is the sign
    total = 0
    for piece in torch.split(flat, _PIECE) if flat.numel() else ():
        total = (total * 0x5851F42D4C957F2D + int((piece * places[: len(piece)]).sum())) % 2**64
    return total


def check_same_options(options: Mapping[str, Any], peers: Peers) -> None:
    """Raise on every rank unless all ranks have the same options."""
    compare_options(peers.ranks, peers.gather_objects(dict(options)))


def compare_options(ranks: Sequence[int], lists: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless these ranks have the same options."""
    for name in {name: None for given in lists for name in given}:
        here: dict[str, list[int]] = {}
        for rank, given in zip(ranks, lists, strict=True):
            here.setdefault(str(given.get(name)), []).append(rank)
        if len(here) > 1:
            where = ", ".join(f"{value} on {_ranks(some)}" for value, some in here.items())
            raise Disagreement(f"{name} is not the same on every rank: {where}; use the same value on every rank")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
