"""``Board``: the fragments of a replica and its rounds in flight, which begin and land in one order on every rank."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offbeat.errors import raise_together
from offbeat.replicas.background import Background, Pending
from offbeat.replicas.contents import Contents, Item, local_part
from offbeat.replicas.fragment import Fragment
from offbeat.replicas.landing import land
from offbeat.replicas.offer import make_offer
from offbeat.replicas.reports import Reports
from offbeat.replicas.round import Offer, Outcome, exchange
from offbeat.replicas.values import Values
from offbeat.wire.peers import ExchangeError

__all__ = ["Board", "Flight", "attempt"]


@dataclass
class Flight:
    """A round in flight.

    Attributes:
        pending: its outcome, when it is there.
        taken: the fragments whose weights the round has taken, and these weights: given back if it changes nothing.
        exposed: how many seconds training has waited for it.
    """

    pending: Pending
    taken: list[tuple[Fragment, float]] = field(default_factory=list)
    exposed: float = 0.0


def attempt(problems: list[BaseException], do: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call a function, and add its error to the problems: other ranks may not see it, and go on to the next round."""
    try:
        do(*args, **options)
    except Exception as error:
        problems.append(error)


class Board:
    """The fragments of all levels, lowest first.

    Args:
        contents: the tensors of the optimizer and its module.
        fragments: for each level its fragments.
        weighted: weigh replicas by the amounts given to :meth:`see`, instead of equally.

    Attributes:
        count: the number of rounds begun.
        failed_in_a_row: the number of rounds that have failed since the last one that has not.
        flights: the rounds in flight, by level and fragment.
        reports: what rounds did.
    """

    def __init__(self, contents: Contents, fragments: Sequence[Sequence[Fragment]], *, weighted: bool) -> None:
        self.contents, self.fragments, self.weighted = contents, [list(level) for level in fragments], weighted
        self.flights: dict[tuple[int, int], Flight] = {}
        self.background = Background()
        self.count = self.failed_in_a_row = 0
        self.reports = Reports()
        self._warned: set[str] = set()

    def __iter__(self) -> Iterator[Fragment]:
        return (fragment for level in self.fragments for fragment in level)

    @property
    def top(self) -> list[Fragment]:
        """The fragments of the highest level, which reaches all replicas."""
        return self.fragments[-1]

    def flight_of(self, fragment: Fragment) -> Flight | None:
        """The round of this fragment that is in flight, if there is one."""
        return self.flights.get((fragment.place, fragment.number))

    @property
    def top_is_open(self) -> bool:
        """Whether replicas may differ: a step has been made since the last top-level round, or that is not complete."""
        return any(f.moved or f.skipped or self.flight_of(f) is not None for f in self.top)

    def see(self, amount: float) -> None:
        """Add to the amount of data this rank has trained on."""
        for fragment in self:
            fragment.seen += float(amount)

    def move(self) -> None:
        """Record that this rank has made a step."""
        for fragment in self:
            fragment.moved = True

    def after_step(self, step: int, due: Sequence[tuple[int, int]]) -> None:
        """Land rounds whose time has come, and begin those that are due.

        Args:
            step: the step that has just been made.
            due: levels and fragments, as the schedule has them.
        """
        problems: list[BaseException] = []
        attempt(problems, self.land_due, step, due)
        for place, number in due:
            fragment = self.fragments[place][number]
            attempt(problems, self._launch if fragment.level.delay else self.run, fragment, step)
        raise_together(problems)

    def land_due(self, step: int, due: Sequence[tuple[int, int]], *, at_the_end: bool = False) -> None:
        """Land rounds whose time has come after this step, and those that are in the way of what is due.

        Args:
            step: the step that has just been made.
            due: levels and fragments, as the schedule has them.
            at_the_end: whether this rank has no data left; see :meth:`land_below`.
        """
        problems: list[BaseException] = []
        for fragment in self:
            flight = self.flight_of(fragment)
            if flight is None:
                continue
            if step - flight.pending.step >= fragment.level.delay or self._is_in_the_way(fragment, due):
                attempt(problems, self._land, fragment, mixing=_mixing_of_last(fragment) if at_the_end else None)
        raise_together(problems)

    def _is_in_the_way(self, fragment: Fragment, due: Sequence[tuple[int, int]]) -> bool:
        """Whether a round in flight must land before one of these begins."""
        for place, number in due:
            other = self.fragments[place][number]
            plain = fragment.outer is None and other.outer is None
            above = fragment.place < place or (plain and fragment.place != place)
            if other is fragment or (above and fragment.overlaps(other)):
                return True
        return False

    def _launch(self, fragment: Fragment, step: int, *, done: bool = False, may_be_last: bool = False) -> None:
        """Begin a round in the background."""
        has_others = fragment.membership.size > 1
        if not has_others and fragment.outer is None:
            self.run(fragment, step)  # there is nobody to wait for, and nothing that comes late
            return
        start = time.perf_counter()
        offer = make_offer(fragment, step, weight=self._weight(fragment, done), done=done, may_be_last=may_be_last)
        if has_others:
            pending = self.background.start(offer)
            self.count += 1
        else:
            pending = Pending(step, exchange(offer, fragment.membership))  # as late as with other replicas
        taken = self._take_weights(fragment)
        self.flights[fragment.place, fragment.number] = Flight(pending, taken, time.perf_counter() - start)

    def run(
        self,
        fragment: Fragment,
        step: int,
        *,
        done: bool = False,
        now: bool = False,
        may_be_last: bool = False,
        steps_made: int = 0,
    ) -> Outcome:
        """Exchange and land a round now.

        Args:
            fragment: what is exchanged.
            step: the step after which that is.
            done: whether this rank has no data left.
            now: whether all replicas wait for the round and must be equal after it.
            may_be_last: whether it is the last round if no replica has data left.
            steps_made: how many steps this rank has made, if it has no data left.
        """
        problems: list[BaseException] = []
        self.land_below(fragment, problems, at_the_end=now or (done and may_be_last))
        weight, start = self._weight(fragment, done), time.perf_counter()
        offer = make_offer(
            fragment, step, weight=weight, done=done, now=now, may_be_last=may_be_last, steps=steps_made, waits=True
        )
        outcome = self._exchange_now(offer)
        attempt(problems, self._finish_round, fragment, outcome, None, exposed=time.perf_counter() - start)
        raise_together(problems)
        return outcome

    def take_part(
        self, fragment: Fragment, step: int, *, may_be_last: bool, steps_made: int, problems: list[BaseException]
    ) -> Outcome | None:
        """Take part in a round of the others, on a rank that has no data left.

        Args:
            fragment: what is exchanged.
            step: the step of the others after which that is.
            may_be_last: whether this is the last round if no replica has data left.
            steps_made: how many steps this rank has made.
            problems: errors of rounds that had to land before are added to this list.

        Returns:
            The outcome, if the round was the last one of this level; None if the others go on.
        """
        at_the_end = may_be_last
        self.land_below(fragment, problems, at_the_end=at_the_end)
        offer = make_offer(
            fragment,
            step,
            weight=self._weight(fragment, done=True),
            done=True,
            may_be_last=may_be_last,
            steps=steps_made,
            waits=not fragment.level.delay,
        )
        outcome = self._exchange_now(offer)
        if fragment.level.delay and outcome.error is None and outcome.status != "skipped" and not outcome.all_done:
            # The others land it later, and change anchors of lower levels before and after that.
            taken = self._take_weights(fragment)
            self.flights[fragment.place, fragment.number] = Flight(Pending(step, outcome), taken)
            self.count += 1
        else:
            self._finish_round(fragment, outcome, None)
        return outcome if outcome.all_done else None

    def _exchange_now(self, offer: Offer) -> Outcome:
        """Exchange on the training thread, after rounds in the background that use the same connection."""
        for (place, number), flight in self.flights.items():
            if self.fragments[place][number].membership is offer.fragment.membership:
                flight.pending.wait()
        return exchange(offer, offer.fragment.membership)

    def land_below(self, fragment: Fragment, problems: list[BaseException], *, at_the_end: bool = False) -> None:
        """Land what is in flight of this fragment, and at lower levels of the same parameters.

        Errors are added to ``problems``: other ranks may not see them, and go on to this fragment's round.

        Args:
            fragment: whose round is about to begin.
            problems: the list of errors.
            at_the_end: whether replicas are equal after that round. What nobody has trained on since is then landed
                without mixing, which would leave a part of it out.
        """
        for other in self._up_to(fragment):
            if self.flight_of(other) is not None and (other is fragment or other.overlaps(fragment)):
                attempt(problems, self._land, other, mixing=_mixing_of_last(other) if at_the_end else None)

    def land_all(self, *, at_the_end: bool = False) -> None:
        """Wait for all rounds in flight and apply them."""
        problems: list[BaseException] = []
        for fragment in self:
            if self.flight_of(fragment) is not None:
                attempt(problems, self._land, fragment, mixing=_mixing_of_last(fragment) if at_the_end else None)
        raise_together(problems)

    def _land(self, fragment: Fragment, *, mixing: float | None = None) -> None:
        """Wait for the round in flight, after those at lower levels of the same parameters, and apply it.

        Raises if one of them failed; the others have landed all the same.
        """
        problems: list[BaseException] = []
        for other in self._up_to(fragment):
            if other.place < fragment.place and self.flight_of(other) is not None and other.overlaps(fragment):
                attempt(problems, self._land, other, mixing=mixing)
        flight, start = self.flights[fragment.place, fragment.number], time.perf_counter()
        outcome = flight.pending.wait()  # who interrupts this has the round still in flight
        del self.flights[fragment.place, fragment.number]
        flight.pending.is_seen = True
        exposed = flight.exposed + time.perf_counter() - start
        attempt(problems, self._finish_round, fragment, outcome, flight, mixing=mixing, exposed=exposed)
        raise_together(problems)

    def _finish_round(
        self,
        fragment: Fragment,
        outcome: Outcome,
        flight: Flight | None,
        *,
        mixing: float | None = None,
        exposed: float = 0.0,
    ) -> None:
        """Apply an outcome, count it, report it, and raise its error if it has failed."""
        before, start = self.reports.anchors_before(fragment), time.perf_counter()
        try:
            self._apply(fragment, outcome, flight, mixing)
        finally:
            applying = time.perf_counter() - start
            seconds = {"exposed": exposed + applying, "applying": applying}
            self.reports.add(fragment, outcome, seconds, before)

    def _apply(self, fragment: Fragment, outcome: Outcome, flight: Flight | None, mixing: float | None) -> None:
        for note in outcome.notes:
            warnings.warn(note, stacklevel=7)
        for name, where in outcome.differences:
            if name not in self._warned:
                self._warned.add(name)
                words = f"{name} is not the same on every rank: {where}; replicas train with different options"
                warnings.warn(words, stacklevel=7)
        try:
            if outcome.error is not None:
                raise outcome.error
            lower = [other for other in self if other.place < fragment.place]
            land(outcome, fragment, lower, mixing=fragment.level.kept if mixing is None else mixing)
        except BaseException as error:
            self._give_back(fragment, flight)
            if not (fragment.membership.tolerates_failures and isinstance(error, ExchangeError)):
                raise
            self.failed_in_a_row += 1
            warnings.warn(f"a round failed, and training goes on: {error}", stacklevel=7)
            return
        self.failed_in_a_row = 0
        if fragment.outer is not None and outcome.has_compared:
            fragment.outer.unchecked.difference_update(outcome.names)
        fragment.skipped = outcome.status == "skipped"
        if outcome.status == "averaged":
            self.count += flight is None and not outcome.alone
            self._complete(fragment, outcome)
            if flight is None:
                self._take_weights(fragment)
                self._average_state(fragment, outcome)
        elif flight is not None:
            self._give_back(fragment, flight)

    def _complete(self, fragment: Fragment, outcome: Outcome) -> None:
        """Count a landing: it has moved the anchors of lower levels too."""
        for other in self._up_to(fragment):
            if other is fragment or (other.outer is not None and fragment.overlaps(other)):
                other.landed(outcome.step, fragment.place, fragment.number)
        fragment.is_new = False
        if outcome.residual is not None:
            fragment.residual_of, fragment.residual = outcome.residual
        if outcome.left_out:
            self.contents.mend_state()
        self.contents.reset_state()

    @torch.no_grad()
    def _average_state(self, fragment: Fragment, outcome: Outcome) -> None:
        """Average optimizer state, bucket by bucket, each voted on: what is averaged in part is still valid."""
        meeting = outcome.meeting
        if fragment.level.delay or meeting is None or outcome.verdict is None or outcome.alone:
            return
        if not outcome.average_state:
            warnings.warn(
                "optimizer state was not averaged this time, because not all ranks have the same state; a GradScaler "
                "may have skipped the first steps of some ranks",
                stacklevel=8,
            )
            return
        items = self.contents.state_items()
        try:
            for bucket in _buckets_of(items, fragment.reduction.bucket_bytes):
                values = Values(bucket)
                values.copy(bucket)
                fragment.reduction.run(values.flats, meeting.peers, outcome.verdict)
                meeting.commit()
                for item in bucket:
                    local_part(item.tensor).copy_(values[item.name])
        except ExchangeError as error:
            warnings.warn(
                "optimizer state was averaged in part or not at all, because the connection broke after the "
                f"parameters had been averaged: {error}",
                stacklevel=8,
            )

    def _up_to(self, fragment: Fragment) -> list[Fragment]:
        """The fragments of this one's level and of lower levels, lowest first."""
        return [other for other in self if other.place <= fragment.place]

    def _weight(self, fragment: Fragment, done: bool) -> float:
        if fragment.is_new or (done and not fragment.moved):
            return 0.0
        return fragment.seen if self.weighted else 1.0

    def _take_weights(self, fragment: Fragment) -> list[tuple[Fragment, float]]:
        """Start counting anew, which includes lower levels that have the same parameters."""
        self.contents.mark_trained()
        taken = []
        for other in self._up_to(fragment):
            if other is fragment or fragment.covers(other):
                taken.append((other, other.seen))
                other.seen, other.moved = 0.0, False
        return taken

    def _give_back(self, fragment: Fragment, flight: Flight | None) -> None:
        """Put back the weights of a round that has changed nothing, for the next one."""
        if flight is None:
            return  # a round that training has waited for takes them when it has succeeded
        for other, amount in flight.taken:
            other.seen += amount
        for other in self:
            other.moved = True

    def abandon(self) -> None:
        """Drop rounds in flight."""
        for flight in self.flights.values():
            outcome = flight.pending.wait()
            flight.pending.is_seen = True
            if outcome.error is not None:
                warnings.warn(f"a round in the background failed: {outcome.error}", stacklevel=4)
        self.flights = {}

    def close(self) -> None:
        """Close the connections, after the rounds in flight."""
        memberships = list({id(fragment.membership): fragment.membership for fragment in self}.values())

        def close() -> None:
            for membership in memberships:
                membership.close()

        self.background.close(close)


def _mixing_of_last(fragment: Fragment) -> float | None:
    """No mixing for a plain mean that this replica has not trained on since: the rest of it would be left out for ever.

    None is the level's own. With an outer optimizer parameters take the anchor at the end anyway.
    """
    return 0.0 if fragment.outer is None and not fragment.moved else None


def _buckets_of(items: Sequence[Item], limit: int) -> Iterator[list[Item]]:
    """Runs of items of about ``limit`` bytes at most."""
    bucket: list[Item] = []
    for item in items:
        if bucket and sum(other.tensor.nbytes for other in bucket) + item.tensor.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(item)
    if bucket:
        yield bucket
