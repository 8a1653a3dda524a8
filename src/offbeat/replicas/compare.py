"""Compares what ranks have before they exchange it; a difference raises the same error on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.replicas.contents import Item, describe, digest, local_part
from offbeat.wire.peers import Peers, gather

__all__ = [
    "Disagreement",
    "check_same_items",
    "check_same_options",
    "check_same_values",
    "compare_options",
    "have_same_values",
    "name_difference",
    "names_of_ranks",
]

#: How many elements a fingerprint is made of at once: few enough for little memory.
_PIECE = 1 << 20


class Disagreement(RuntimeError):
    """Ranks were about to exchange different things. Raised on every rank, before anything is changed."""


def name_difference(items: Sequence[Item], peers: Peers) -> None:
    """Raise the same error on every rank: the first difference between their lists of items."""
    lists = gather(peers, describe(items))
    for i in range(max(map(len, lists))):
        by_words: dict[str, list[int]] = {}
        for rank, rows in zip(peers.ranks, lists, strict=True):
            words = f"{rows[i][0]!r}, {rows[i][1]}" if i < len(rows) else "nothing more"
            by_words.setdefault(words, []).append(rank)
        if len(by_words) > 1:
            names = {rows[i][0] for rows in lists if i < len(rows)}
            what = f"{next(iter(names))!r} differs" if len(names) == 1 else "the names differ"
            where = "; ".join(f"on {names_of_ranks(ranks)}: {words}" for words, ranks in by_words.items())
            raise Disagreement(
                f"ranks do not agree on what to average: item {i}, {what}. {where}. Every rank must have the same "
                "parameters with requires_grad, with the same shapes and dtypes; for sharded parameters, group= must "
                "be the ranks that hold the same shards"
            )
    raise Disagreement("ranks did not agree on what to average, but their lists are the same now; call step() again")


def check_same_items(items: Sequence[Item], peers: Peers) -> None:
    """Raise on every rank unless all ranks have items of the same names, shapes and dtypes."""
    if len(set(gather(peers, digest(items)))) > 1:
        name_difference(items, peers)


def have_same_values(items: Sequence[Item], peers: Peers) -> bool:
    """Whether the items have the same values on every rank; all ranks get the same answer."""
    rows = gather(peers, [[item.name, _fingerprint(local_part(item.tensor))] for item in items])
    return all(row == rows[0] for row in rows)


def check_same_values(items: Sequence[Item], peers: Peers, remedy: str | None = None) -> None:
    """Raise on every rank unless the items have the same values on every rank.

    Args:
        items: what to compare; DTensors by their local shards.
        peers: the ranks that compare.
        remedy: what to do if they differ, for the error; None explains how replicas start from the same values.
    """
    lists = gather(peers, [[item.name, _fingerprint(local_part(item.tensor))] for item in items])
    if len({tuple(name for name, _ in rows) for rows in lists}) > 1:
        name_difference(items, peers)
    for rows in zip(*lists, strict=True):
        if any(row != rows[0] for row in rows):
            others = [rank for rank, row in zip(peers.ranks, rows, strict=True) if row != rows[0]]
            remedy = remedy or (
                "use the same seed on every rank, pass sync_init=True to start from the first rank's parameters, or "
                "wrap the module in DistributedDataParallel over all ranks"
            )
            raise Disagreement(
                f"replicas do not start from the same parameters: {rows[0][0]!r} of {names_of_ranks(others)} differs "
                f"from rank {peers.ranks[0]}'s; {remedy}"
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
    compare_options(peers.ranks, gather(peers, {name: str(value) for name, value in options.items()}))


def compare_options(ranks: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless these ranks, which have the rows in the same order, have the same options."""
    for name in {name: None for row in rows for name in row}:
        by_value: dict[str, list[int]] = {}
        for rank, row in zip(ranks, rows, strict=True):
            by_value.setdefault(str(row.get(name)), []).append(rank)
        if len(by_value) > 1:
            where = ", ".join(f"{value} on {names_of_ranks(some)}" for value, some in by_value.items())
            raise Disagreement(f"{name} is not the same on every rank: {where}; use the same value on every rank")


def names_of_ranks(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 1, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
