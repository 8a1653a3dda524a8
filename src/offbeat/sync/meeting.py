"""The start of a round: ranks compare what they are about to exchange, and look for NaN and infinity."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from offbeat.sync.agreement import Shares, agree, check_same_values
from offbeat.sync.outer_options import check_same_numbers, digest_of
from offbeat.wire.base import NotFinite
from offbeat.wire.peers import Peers

if TYPE_CHECKING:
    from offbeat.sync.rounds import Round

__all__ = ["meet", "not_finite"]


def meet(one: Round, peers: Peers) -> Shares:
    """Let ranks compare what they are about to exchange in a round, and collect their weights.

    Raises the same error on every rank if they cannot go on. What they find out is noted in the round.
    """
    level = one.track.level
    bad = one.not_finite()
    everywhere = _ask_all_shards(one, not bad)
    sound = not bad if everywhere is None else everywhere.sound
    outer = one.track.outer
    new = outer is not None and not outer.unchecked.isdisjoint(one.names)
    if peers.size == 1:
        one.keys.check(one.keys.columns, peers)
        nobody = one.weight == 0.0 or (level.nonfinite == "leave_out" and not sound)
        fine = sound or one.weight == 0.0
        found = Shares(1.0, 1, True, nobody, one.done, True, (one.moved,), (), (), (fine,), (sound,))
    else:
        peers.renew_if_lost(one.meeting)
        found = agree(
            peers,
            one.step,
            one.digests,
            one.weight,
            lambda: one.items,
            done=one.done,
            moved=one.moved,
            state_keys=one.keys.columns,
            rounds=one.rounds,
            finite=sound,
            unchecked=new,
            options=digest_of(one.numbers),
            leave_out=level.nonfinite == "leave_out",
        )
        if everywhere is not None:
            found = dataclasses.replace(found, moved=everywhere.moved)
        one.keys.check(found.state_keys, peers)
        if not found.same_options:
            one.numbers = check_same_numbers(one.numbers, peers, done=one.done, moved=one.moved)
    if not all(found.finite):
        _handle_not_finite(one, found, bad if one.weight else [], peers)
    if not sound and one.weight == 0.0:  # it counts for nothing, and nothing of it is to be kept
        one.left_out = one.final = True
    if found.nobody and not found.all_done and not one.skipped and not one.final:
        raise ValueError(
            "no rank has a weight; with weighted=True call optimizer.seen(number of samples) before optimizer.step()"
        )
    if outer is not None and peers.size > 1 and not one.skipped:
        if len(set(found.rounds)) > 1:
            _repair(one, found, peers)
        elif everywhere is not None and everywhere.differ:
            one.skipped = one.repaired = True  # as the ranks with other shards do
            one.notes.append("ranks with other shards had missed the end of a round; this round was skipped")
        elif found.unchecked:
            check_same_values(outer.items(one.names), peers)
            outer.unchecked.difference_update(one.names)
    return found


class _Everywhere(NamedTuple):
    """What the ranks of all shards of all replicas have said.

    Attributes:
        sound: whether this replica is finite, whichever ranks its shards are on.
        moved: which replicas have made a step since the last round.
        differ: whether some ranks with the same shards have completed different numbers of rounds.
    """

    sound: bool
    moved: tuple[bool, ...]
    differ: bool


def _ask_all_shards(one: Round, mine: bool) -> _Everywhere | None:
    """Ask the ranks of all shards, so that no shard goes on alone. None if replicas are not sharded."""
    shards, peers = one.track.shards, one.track.peers
    if shards is None:
        return None
    shards.renew_if_lost(one.meeting)
    # A rank's place among its peers says to which replica it belongs, and the first of its peers which shards it has.
    row = [peers.rank, peers.ranks[0], int(mine), int(one.moved), one.rounds]
    rows = torch.empty(len(row) * shards.size, dtype=torch.int64, device=shards.device)
    shards.all_gather(rows, torch.tensor(row, dtype=torch.int64, device=shards.device)).wait()
    every = rows.view(-1, len(row)).tolist()
    rounds: dict[int, set[int]] = {}
    for _, first, _, _, completed in every:
        rounds.setdefault(first, set()).add(completed)
    return _Everywhere(
        all(fine for place, _, fine, _, _ in every if place == peers.rank),
        tuple(any(moved for place, _, _, moved, _ in every if place == i) for i in range(peers.size)),
        one.track.outer is not None and any(len(found) > 1 for found in rounds.values()),
    )


def _handle_not_finite(one: Round, found: Shares, bad: list[str], peers: Peers) -> None:
    lists = peers.gather_objects(bad[:4]) if peers.size > 1 else [bad[:4]]
    there = [(rank, names) for rank, names in zip(peers.ranks, lists, strict=True) if names]
    where = "; ".join(f"on rank {rank}: {', '.join(names)}" for rank, names in there) or "in other shards"
    policy = one.track.level.nonfinite
    if policy == "raise" or found.nobody:
        only_state = there and all(name.startswith("state ") for _, names in there for name in names)
        raise NotFinite(
            f"some parameters are NaN or infinite ({where}), and averaging would spread that to every replica; "
            "nothing was changed. Lower the learning rate, clip gradients, or choose nonfinite='leave_out' or "
            "'skip'"
            if not only_state
            else f"some optimizer state is NaN or infinite ({where}), and state='average' would spread that to every "
            "replica; nothing was changed. It stays so until it is set anew, for example to zero in optimizer.state; "
            "nonfinite='leave_out' does that"
        )
    words = "this round was skipped" if policy == "skip" else "those ranks did not count in this round"
    one.notes.append(f"some parameters are NaN or infinite ({where}); {words}")
    one.skipped = policy == "skip"
    # What this replica has is not to be kept.
    one.left_out = policy == "leave_out" and not found.finite[peers.rank]
    one.final = one.final or one.left_out


def _repair(one: Round, found: Shares, peers: Peers) -> None:
    """Some ranks have completed a round that others have not: all take over the anchors of those who have.

    It was a round of this level, or one of a level above, which moves these anchors too. That can happen only if a
    connection breaks in the middle of a vote. No outer step is taken this time.
    """
    outer, most = one.track.outer, max(found.rounds)
    assert outer is not None
    root = found.rounds.index(most)
    lists = peers.gather_objects([(name, tuple(t.shape)) for name, t in outer.tensors(one.names)])
    if any(row != lists[root] for row in lists):  # some have no state yet, and it is not known how to make it
        mine = outer.state_of(one.names) if peers.rank == root else None
        outer.take_state(peers.gather_objects(mine)[root])
    for _, t in outer.tensors(one.names):
        moved = t.to(peers.device, copy=True).contiguous()
        peers.broadcast(moved, root).wait()
        t.copy_(moved)
    one.track.rounds = most
    one.skipped = one.repaired = True
    behind = [rank for rank, count in zip(peers.ranks, found.rounds, strict=True) if count < most]
    one.notes.append(
        f"ranks {behind} had missed the end of a round, and have taken over the anchors of rank "
        f"{peers.ranks[root]}; this round was skipped"
    )


def not_finite(tensors: Sequence[tuple[str, Tensor]], masks: Collection[str] = ()) -> list[str]:
    """The names of the tensors that have NaN or infinity among their elements.

    Args:
        masks: names of tensors that may have infinite elements.
    """
    tensors = [(name, t) for name, t in tensors if t.is_floating_point() and t.numel()]
    found = [name for name, t in tensors if name in masks and bool(t.isnan().any())]
    tensors = [(name, t) for name, t in tensors if name not in masks]
    # A sum is finite only if its terms are. It can overflow too, so that single ones are looked at again.
    sums: dict[Any, list[Tensor]] = {}
    for _, t in tensors:
        sums.setdefault(t.device, []).append(t.sum(dtype=torch.float32 if t.itemsize < 4 else None))
    if all(bool(torch.stack([s.double() for s in some]).isfinite().all()) for some in sums.values()):
        return found
    return [name for name, t in tensors if not bool(t.isfinite().all())] + found
