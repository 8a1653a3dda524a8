r"""One round, from what a replica offers to what the exchange has brought.

Everything goes through :func:`exchange`, whether training waits for the round or goes on meanwhile. It writes to
neither the model nor the fragment: :mod:`offbeat.replicas.landing` applies the outcome. With a delay of :math:`k` steps
that is

.. math:: x_i(t+k) \leftarrow x_i(t+k) + (1 - \alpha) \bigl(\bar x(t) - x_i(t)\bigr)

without an outer optimizer, which keeps the updates of the :math:`k` steps in between, and with one

.. math:: a \leftarrow \mathrm{outer}\bigl(a,\; a - \bar x(t)\bigr), \qquad
   x_i(t+k) \leftarrow \alpha\, x_i(t+k) + (1 - \alpha)\, a .
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat.replicas.compare import check_same_values, name_difference
from offbeat.replicas.contents import MEAN, Item
from offbeat.replicas.fragment import Fragment
from offbeat.replicas.hello import Hello, OuterOptions, Rules, Verdict, decide, merge
from offbeat.replicas.values import Values
from offbeat.wire.codecs import NotFinite
from offbeat.wire.membership import Meeting, Membership
from offbeat.wire.peers import ExchangeError, Peers
from offbeat.wire.tree import broadcast_tree

__all__ = ["Codes", "Offer", "Outcome", "exchange"]

#: Elements that are encoded and sent at once are a multiple of this, so that codes do not depend on the bucket's size.
ALIGN = 1 << 16


@dataclass(frozen=True)
class Codes:
    """Differences from the anchors that are about to be encoded, in one flat float32 tensor.

    Attributes:
        flat: the differences of all parameters.
        sizes: the names and numbers of elements of these parameters, in order.
        views: the differences by parameter.
    """

    flat: Tensor
    sizes: list[tuple[str, int]]
    views: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a replica brings to a round. Made on the training thread; nothing in it changes afterwards.

    Attributes:
        fragment: what is exchanged. No other round changes its anchors and outer state meanwhile: a fragment has one
            round in flight, and rounds of higher levels land those of lower ones first.
        hello: what this rank says before the round.
        rules: how the level decides.
        step: the step after which the round began.
        done: whether this rank has no data left.
        final: whether this rank does not train until the round is over, so that the result replaces its parameters.
        items: the parameters and buffers, in their own memory.
        names: the names of the parameters among them.
        values: a copy of what travels uncoded; None in a round that training waits for, which needs none.
        codes: differences to encode, if the level has a codec.
        streams: on a GPU, the streams that the exchange works on, by device.
    """

    fragment: Fragment
    hello: Hello
    rules: Rules
    step: int
    done: bool
    final: bool
    items: list[Item]
    names: list[str]
    values: Values | None
    codes: Codes | None
    streams: dict[torch.device, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an exchange has brought, failure included. This is what a checkpoint stores of a round in flight.

    Attributes:
        status: ``"averaged"``; ``"rest"`` if nobody has trained since the last round; ``"skipped"`` if replicas agreed
            to exchange nothing; ``"failed"``.
        step: the step after which the round began.
        error: why it failed.
        notes: warnings to give on landing.
        differences: see :class:`Verdict`.
        final: whether the result replaces the parameters, whatever the level's mixing is.
        final_below: the same for the anchors of lower levels.
        alone: whether there was nobody to exchange with.
        all_done: whether no replica has data left.
        most_steps: the largest number of steps that any replica has made.
        left_out: whether nothing of this replica is kept.
        average_state: whether optimizer state may be averaged, too.
        meeting: the ranks that are still connected, for averaging state. None in a round in flight.
        verdict: the weights and the rest of what ranks agreed on.
        outer: the numbers among the outer optimizer's options to use.
        names: the parameters it is about.
        values: means, or differences to add; None if there are none.
        gradients: decoded pseudo-gradients by parameter, if the level has a codec.
        residual: what encoding has lost, and for which parameters.
        base: anchors and outer state to take over first, for a replica that was behind, with version and lineage.
        has_compared: whether the anchors of all replicas were compared and are equal.
        fresh: whether the mean becomes the anchors, because there were none.
        members: the ranks that took part.
        weights: their weights.
        seconds: how long ``"comparing"`` and ``"exchanging"`` took.
        bytes_sent: what this rank has sent, by kind: ``"agreement"``, ``"parameters"``.
        streams: on a GPU, the streams that the exchange has worked on, by device.
    """

    status: Literal["averaged", "rest", "skipped", "failed"]
    step: int
    error: BaseException | None = None
    notes: tuple[str, ...] = ()
    differences: tuple[tuple[str, str], ...] = ()
    final: bool = False
    final_below: bool = False
    alone: bool = False
    all_done: bool = False
    most_steps: int = 0
    left_out: bool = False
    average_state: bool = True
    meeting: Meeting | None = None
    verdict: Verdict | None = None
    outer: OuterOptions = ()
    names: Sequence[str] = ()
    values: Values | None = None
    gradients: Mapping[str, Tensor] | None = None
    residual: tuple[list[tuple[str, int]], Tensor] | None = None
    base: tuple[dict[str, Any], int, str] | None = None
    has_compared: bool = False
    fresh: bool = False
    members: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_sent: Mapping[str, int] = field(default_factory=dict)
    streams: Mapping[torch.device, Any] = field(default_factory=dict)


def exchange(offer: Offer, membership: Membership) -> Outcome:
    """Meet, decide, reduce and vote: only if every rank has the result does any rank use it. Never raises."""
    meeting: Meeting | None = None
    has_begun = False  # until then an error is the same on every rank
    with ExitStack() as streams:
        for stream in offer.streams.values():
            streams.enter_context(torch.cuda.stream(stream))
        try:
            clock = _Clock(membership)
            meeting = membership.meet(offer.hello.as_json())
            hellos = [merge([Hello.from_json(row) for row in rows]) for rows in meeting.hellos]
            verdict = decide(hellos, offer.rules)
            compare(offer, meeting, verdict)
            has_begun = True
            clock.lap("comparing", "agreement", meeting)
            base = catch_up(offer, meeting, verdict)
            values, lost = reduce(offer, meeting, verdict)
            for stream in offer.streams.values():
                stream.synchronize()
            clock.lap("exchanging", "parameters", meeting)
            if verdict.action == "average" or any(verdict.behind):
                meeting.commit()
            clock.lap("comparing", "agreement", meeting)
        except BaseException as error:
            return _failed(offer, meeting, error, has_begun)
    outcome = _outcome(offer, meeting, hellos, verdict, base, values, lost)
    return replace(outcome, seconds=clock.seconds, bytes_sent=clock.bytes)


class _Clock:
    """Seconds and bytes of the stages of an exchange."""

    def __init__(self, membership: Membership) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}
        self._time, peers = time.perf_counter(), membership.peers
        self._sent = 0 if peers is None or peers.is_closed else peers.bytes_sent

    def lap(self, stage: str, kind: str, meeting: Meeting) -> None:
        now, sent = time.perf_counter(), meeting.peers.bytes_sent
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._time
        self.bytes[kind] = self.bytes.get(kind, 0) + max(0, sent - self._sent)
        self._time, self._sent = now, sent


def compare(offer: Offer, meeting: Meeting, verdict: Verdict) -> None:
    """Raise on every rank if replicas offer different things, or have anchors that are not the same."""
    if verdict.different_items:
        name_difference(offer.items, meeting.peers)
    outer = offer.fragment.outer
    if outer is not None and verdict.compare_anchors and verdict.action != "skip":
        check_same_values([Item(name, outer.anchors[name]) for name in offer.names], meeting.peers)
        outer.unchecked.difference_update(offer.names)


def catch_up(offer: Offer, meeting: Meeting, verdict: Verdict) -> tuple[dict[str, Any], int, str] | None:
    """Send anchors and outer state to replicas that are behind. Usually nobody is."""
    fragment, peers = offer.fragment, meeting.peers
    if fragment.outer is None or not any(verdict.behind):
        return None
    part = fragment.outer.part_of(offer.names) if peers.rank == verdict.source else None
    sent = broadcast_tree(peers, [part, fragment.version, fragment.lineage] if part else None, verdict.source)
    return tuple(sent) if verdict.behind[meeting.me] else None


@torch.no_grad()
def reduce(offer: Offer, meeting: Meeting, verdict: Verdict) -> tuple[Values | None, Tensor | None]:
    """The mean of what replicas offer, and what encoding it has lost."""
    peers, fragment = meeting.peers, offer.fragment
    if verdict.action != "average" or peers.size == 1:
        return offer.values, None
    values = offer.values
    if values is None:
        # The only copy: until the vote, the parameters stay as they are.
        dense = offer.items if offer.codes is None else [item for item in offer.items if item.name not in offer.names]
        values = Values(dense, are_differences=fragment.level.kept > 0)
        values.copy(dense)
    # What will be added to values that have moved on meanwhile is kept as a difference.
    differences = [
        values.are_differences
        and flat.late
        and not _is_final(offer, verdict, meeting.me)
        and not (flat.how == MEAN and fragment.outer is not None)
        for flat in values.flats
    ]
    ordered = offer.codes is not None  # as codes are: the round has the same bits over any backend
    fragment.reduction.run(values.flats, peers, verdict, differences=differences, ordered=ordered)
    return values, _reduce_codes(offer, peers, verdict, meeting.me) if offer.codes is not None else None


def _reduce_codes(offer: Offer, peers: Peers, verdict: Verdict, me: int) -> Tensor | None:
    r"""Replace differences by their decoded sum, the same on every rank to the bit.

    Every rank sends :math:`C(w_i (a - x_i) + \lambda e_i)`, where :math:`C` encodes, :math:`w_i` is its share and
    :math:`e_i` what encoding has lost so far (error feedback, with decay :math:`\lambda`). A rank of weight 0 keeps its
    :math:`e_i`, except that of the part of the sum that it owns, which it adds to that part.

    Returns:
        What encoding has lost now, if there is error feedback.
    """
    fragment, codes, share = offer.fragment, offer.codes, verdict.share(me)
    assert codes is not None
    assert fragment.coded_mean is not None
    flat, decay = codes.flat, fragment.level.decay
    lost = torch.zeros_like(flat) if decay is not None else None
    old = fragment.residual_for(codes.sizes, flat.device) if decay is not None else None
    if share:
        flat.mul_(share)
        if decay is not None and old is not None:
            flat.add_(old, alpha=decay)
    elif lost is not None and old is not None:
        lost.copy_(old)
    size = max(ALIGN, fragment.reduction.bucket_bytes // 16 // ALIGN * ALIGN)
    for start in range(0, flat.numel(), size):
        piece = flat[start : start + size]
        residual = None if lost is None else lost[start : start + size]
        fragment.coded_mean.reduce(piece, peers, share, residual=residual, out=piece)
    return lost


def _is_final(offer: Offer, verdict: Verdict, me: int) -> bool:
    return offer.final or verdict.left_out[me] or (bool(verdict.behind) and verdict.behind[me])


def _outcome(
    offer: Offer,
    meeting: Meeting,
    hellos: Sequence[Hello],
    verdict: Verdict,
    base: tuple[dict[str, Any], int, str] | None,
    values: Values | None,
    lost: Tensor | None,
) -> Outcome:
    codes = offer.codes
    return Outcome(
        status={"average": "averaged", "rest": "rest", "skip": "skipped"}[verdict.action],  # type: ignore[arg-type]
        step=offer.step,
        notes=verdict.notes,
        differences=verdict.differences,
        final=_is_final(offer, verdict, meeting.me),
        final_below=offer.rules.now or verdict.all_done,
        alone=meeting.peers.size == 1,
        all_done=verdict.all_done,
        most_steps=verdict.most_steps,
        left_out=verdict.left_out[meeting.me],
        average_state=verdict.average_state,
        meeting=meeting if offer.values is None else None,
        verdict=verdict,
        outer=verdict.outer,
        names=offer.names,
        values=values,
        gradients=None if codes is None else codes.views,
        residual=None if codes is None or lost is None else (codes.sizes, lost),
        base=base,
        has_compared=verdict.compare_anchors and verdict.action != "skip",
        fresh=verdict.fresh,
        members=tuple(hello.rank for hello in hellos),
        weights=verdict.weights,
        streams=offer.streams,
    )


def _failed(offer: Offer, meeting: Meeting | None, error: BaseException, has_begun: bool) -> Outcome:
    """A round that is used nowhere. The others, who may be in the middle of it, fail instead of waiting."""
    if meeting is not None and has_begun and not isinstance(error, NotFinite):
        is_sharded = meeting.everyone is not meeting.peers
        if is_sharded or not isinstance(error, ExchangeError):  # which has closed its connection
            meeting.close()
    traceback.clear_frames(error.__traceback__)  # they hold collectives, and those the connection
    return Outcome(
        status="failed", step=offer.step, error=error, final=offer.final, names=offer.names, streams=offer.streams
    )
