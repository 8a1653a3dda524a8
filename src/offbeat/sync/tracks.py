"""All tracks of a replica: begins rounds, lands them, and keeps them in the order of the calendar."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from offbeat.sync.agreement import Shares
from offbeat.sync.anchors import Anchors
from offbeat.sync.contents import Contents
from offbeat.sync.driver import Driver
from offbeat.sync.exchange import Exchange
from offbeat.sync.level import Level
from offbeat.sync.options import check_one_number
from offbeat.sync.rounds import Round
from offbeat.sync.saved import check_saved_tracks
from offbeat.sync.track import Track
from offbeat.wire.base import NotFinite
from offbeat.wire.peers import Peers

__all__ = ["Tracks", "warn_of"]


def warn_of(problems: Iterable[Exception]) -> None:
    """Tell of rounds that failed before one that has made all replicas equal: there is nothing to be done again."""
    for error in problems:
        warnings.warn(f"a round failed before the last one, after which replicas agree: {error}", stacklevel=3)


class Tracks:
    """The levels of a replica at work.

    Args:
        levels: lowest first.
        peers: the ranks of each level.
        exchanges: what averages dense tensors at each level.
        weighted: weigh ranks by the amounts given to :meth:`see`, instead of equally.
        copies: where copies for rounds in the background are kept; None is where the parameters are.
        shards: all ranks of all replicas, if replicas are sharded.
        share: the share of one replica in a mean of all.

    Attributes:
        anchors: those of all levels.
        count: the number of rounds begun.
    """

    def __init__(
        self,
        contents: Contents,
        levels: Sequence[Level],
        peers: Sequence[Peers],
        exchanges: Sequence[Exchange],
        *,
        weighted: bool = False,
        copies: torch.device | None = None,
        shards: Peers | None = None,
        share: float = 1.0,
    ) -> None:
        self._shards = shards
        self._contents, self._levels, self._peers = contents, list(levels), list(peers)
        self._exchanges = list(exchanges)
        self._weighted = weighted
        self._driver = Driver()
        self.anchors = Anchors(contents, levels, share)
        outers, eagers = self.anchors.outers, self.anchors.eagers
        self._tracks: list[list[Track]] = []
        for i, level in enumerate(levels):
            below = [outer for outer in outers[:i] if outer is not None]
            self._tracks.append(
                [
                    Track(
                        level, part, peers[i], contents, exchanges[i], outers[i], below,
                        eager=eagers[i], place=i, weighted=weighted, copies=copies, shards=shards,
                    )
                    for part in range(level.parts)
                ]
            )  # fmt: skip
        self.count = self._era = 0

    @property
    def bytes_sent(self) -> int:
        """The number of bytes this rank has sent."""
        return sum(exchange.bytes_sent for exchange in self._exchanges)

    def _every(self) -> Iterable[Track]:
        return (track for tracks in self._tracks for track in tracks)

    def _up_to(self, track: Track) -> list[Track]:
        """The tracks of this one's level and of lower levels, lowest first."""
        return [other for other in self._every() if other.place <= track.place]

    def see(self, amount: float) -> None:
        """Add to the amount of data this rank has trained on."""
        if not self._weighted:
            raise ValueError("seen() needs weighted=True, but all ranks have the same weight; pass weighted=True")
        check_one_number("the amount given to seen()", amount)
        if not (amount >= 0 and math.isfinite(amount)):
            raise ValueError(f"seen() takes a non-negative, finite number, but got {amount!r}")
        for track in self._every():
            track.seen += float(amount)

    def move(self) -> None:
        """Record that this rank has made a step."""
        for track in self._every():
            track.moved = True

    @property
    def top_is_open(self) -> bool:
        """Whether replicas may differ: a step has been made since the last top-level round, or that is not complete."""
        return any(track.moved or track.skipped or track.flight is not None for track in self._tracks[-1])

    def stay(self) -> None:
        """Record that what this rank has learnt is in everybody's parameters, or was missed: it has no weight."""
        for track in self._every():
            track.seen, track.moved = 0.0, False

    def after_step(self, step: int, due: Sequence[tuple[int, int]]) -> None:
        """Land rounds whose time has come, and begin those that are due.

        Args:
            step: the step that has just been made.
            due: levels and fragments, as the calendar has them.
        """
        problems: list[Exception] = []
        self.attempt(problems, self.land_due, step, due)
        for level, part in due:
            track = self._tracks[level][part]
            if track.level.delay:
                self.attempt(problems, self._launch, track, step)
            else:
                self.attempt(problems, self._run, track, track.make_round(step))
        if problems:
            raise problems[0]

    def land_due(self, step: int, due: Sequence[tuple[int, int]]) -> None:
        """Land rounds whose time has come after this step, and those that are in the way of what is due."""
        problems: list[Exception] = []
        for track in list(self._every()):
            flight = track.flight
            if flight is not None and (step - flight.step >= track.level.delay or self._is_in_the_way(track, due)):
                self.attempt(problems, self._land, track)
        if problems:
            raise problems[0]

    def attempt(self, problems: list[Exception], do: Callable[..., Any], *args: Any) -> None:
        """Call a function, and add its error to the problems."""
        try:
            do(*args)
        except Exception as error:  # other ranks may not see it, and go on to the next round
            problems.append(error)

    def _is_in_the_way(self, track: Track, due: Sequence[tuple[int, int]]) -> bool:
        """Whether a round in flight must land before one of these begins."""
        for level, part in due:
            other = self._tracks[level][part]
            plain = track.outer is None and other.outer is None
            above = track.place < level or (plain and track.place != level)
            if other is track or (above and self._overlap(track, other)):
                return True
        return False

    def _overlap(self, a: Track, b: Track) -> bool:
        return a.level.parts == 1 or b.level.parts == 1 or not set(a.names()).isdisjoint(b.names())

    def _launch(self, track: Track, step: int) -> None:
        one = track.make_round(step)
        one.take()
        if track.peers.size == 1 and (track.outer is None or track.eager is not None):
            self._run(track, one)  # there is nobody to wait for, and nothing that comes late
            return
        if track.eager is not None:
            one.step_eagerly(self._contents.params())
        if track.peers.size > 1:
            self._driver.start(one)
            self.count += 1
        else:
            self._driver.run(one)  # its outer step is as late as with other replicas
        track.flight = one
        self._forget(one)

    def _run(self, track: Track, one: Round, adjust: Callable[[Shares], Shares] = lambda shares: shares) -> None:
        """Exchange and land a round now."""
        problems: list[Exception] = []
        self._land_below(track, problems)
        one.take()
        self._driver.run(one, adjust=adjust)
        self.attempt(problems, self._land_now, track, one)
        if problems:
            raise problems[0]

    def _land_now(self, track: Track, one: Round) -> None:
        changed = one.land(self._contents.params())
        track.skipped = one.skipped
        if changed:
            self.count += track.peers.size > 1
            self._completed(one)
            self._forget(one)

    def _land_below(self, track: Track, problems: list[Exception]) -> None:
        """Land what is in flight at this track, and at lower levels for the same parameters.

        Errors are added to ``problems``: other ranks may not see them, and go on to this track's round.
        """
        for other in self._up_to(track):
            if other.flight is not None and (other is track or self._overlap(other, track)):
                self.attempt(problems, self._land, other)

    def _land(self, track: Track) -> None:
        """Wait for the round in flight, after those at lower levels for the same parameters, and apply it.

        Raises if one of them failed; the others have landed all the same.
        """
        problems: list[Exception] = []
        for other in self._up_to(track):
            if other.place < track.place and other.flight is not None and self._overlap(other, track):
                self.attempt(problems, self._land, other)
        self.attempt(problems, self._land_alone, track)
        if problems:
            raise problems[0]

    def _land_alone(self, track: Track) -> None:
        one = track.flight
        assert one is not None
        self._driver.wait(one)
        track.flight = None
        try:
            changed = one.land(self._contents.params())
        except BaseException:
            self._remember_again(one)
            raise
        track.skipped = one.skipped
        if changed:
            self._completed(one)
        else:
            self._remember_again(one)

    def _completed(self, one: Round) -> None:
        # It has moved the anchors of lower levels too. If it did on some ranks only, the next round there finds that.
        for track in self._up_to(one.track):
            if track is one.track or (track.outer is not None and self._overlap(track, one.track)):
                track.rounds += 1
        if one.left_out:
            self._contents.mend_state()
        self._contents.reset_state()

    def land(self) -> None:
        """Wait for all rounds in flight and apply them; raises if one failed."""
        problems: list[Exception] = []
        for track in self._every():
            if track.flight is not None:
                self.attempt(problems, self._land, track)
        if problems:
            raise problems[0]

    def abandon(self) -> None:
        """Drop rounds in flight."""
        for track in self._every():
            if track.flight is not None:
                self._driver.wait(track.flight)
                if track.flight.error is not None and not track.flight.reported:
                    warnings.warn(f"a round in the background failed: {track.flight.error}", stacklevel=3)
                track.flight = None

    def now(self, step: int) -> None:
        """Exchange everything at the top level now."""
        late: list[Exception] = []
        problems: list[Exception] = []
        self.attempt(late, self.land)
        for track in self._tracks[-1]:
            self.attempt(problems, self._run_now, track, step)
        if problems:
            raise problems[0]
        warn_of(late)

    def _run_now(self, track: Track, step: int) -> None:
        one = track.make_round(step, now=True)
        adjust = functools.partial(self._shares, track)
        self._run(track, one, adjust)
        if one.repaired:  # and nothing else; the next one is as if nothing had happened
            self._run(track, track.make_round(step, now=True), adjust)

    def take_part(self, step: int, level: int, part: int, problems: list[Exception], *, may_be_last: bool) -> bool:
        """Take part in a round of the other ranks, on a rank that has no data left.

        Args:
            problems: errors of rounds that had to land before are added to this list.
            may_be_last: whether this is the last round if no rank has data left.

        Returns:
            Whether no rank of the level has data left.
        """
        track = self._tracks[level][part]
        self._land_below(track, problems)

        def adjust(shares: Shares) -> Shares:
            return self._shares(track, shares) if shares.all_done and may_be_last else shares

        while True:
            one = track.make_round(step, done=True)
            one.take()
            self._driver.run(one, adjust=adjust)
            if track.level.delay and one.error is None and not one.skipped and not one.all_done:
                # The others land it later, and change anchors of lower levels before and after that.
                track.flight = one
                self.count += 1
                self._forget(one)
            else:
                self._land_now(track, one)
            if not (one.repaired and one.all_done and may_be_last):
                return one.all_done

    def next_landing(self) -> int | None:
        """The first step after which a round in flight lands."""
        steps = [track.flight.step + track.level.delay for track in self._every() if track.flight is not None]
        return min(steps, default=None)

    def _shares(self, track: Track, shares: Shares) -> Shares:
        """The weights of a round that must make ranks equal, although no rank may have a weight.

        Ranks that have trained since the last round get one; if there are none, all ranks do, because applying a
        delayed average may have rounded differently on each rank. Ranks that are not finite get none.
        """
        if not shares.nobody:
            return shares
        if not any(shares.sound):
            raise NotFinite(
                "every replica has parameters that are NaN or infinite, so there is nothing to agree on; nothing was "
                "changed. Load a checkpoint from before that"
            )
        moved = [moved and sound for moved, sound in zip(shares.moved, shares.sound, strict=True)]
        weights = [float(one) for one in (moved if any(moved) else shares.sound)]
        changed = Shares.of(weights, track.peers.rank)
        return replace(shares, **{name: getattr(changed, name) for name in ("factor", "divisor", "is_first", "nobody")})

    def parts(self, level: int) -> range:
        """The fragments of a level."""
        return range(len(self._tracks[level]))

    def _forget(self, one: Round) -> None:
        """Start counting anew after a round, which includes lower levels that have the same parameters."""
        self._contents.mark_trained()
        one.forgotten = []
        for other in self._up_to(one.track):
            if other is one.track or self._covers(one.track, other):
                one.forgotten.append((other, other.seen))
                other.seen, other.moved = 0.0, False

    def _covers(self, track: Track, other: Track) -> bool:
        return other.level is not track.level and set(other.names()) <= set(track.names())

    def _remember_again(self, one: Round) -> None:
        """Put back the amounts of a round that has failed, for the next one."""
        for track, amount in one.forgotten or [(one.track, one.on_board)]:
            track.seen += amount
        for track in self._every():
            track.moved = True

    def latest(self, step: int) -> int:
        """At the end of :meth:`Replica.finish`: the largest number of steps that any rank has made.

        Steps that have been gone through come again, so that this begins another era, the same on every rank.
        """
        peers = self._peers[-1]
        numbers = torch.tensor([step, self._era], dtype=torch.int64, device=peers.device)
        peers.all_reduce(numbers, "max").wait()
        most, era = numbers.tolist()
        self._begin_era(era + 1)
        return int(most)

    def _begin_era(self, era: int) -> None:
        """From here on steps may come again: meetings must not have the names that they had."""
        self._era = era
        for track in self._every():
            track.era = era

    def state_dict(self, *, anchored: bool) -> dict[str, Any]:
        """What all tracks need to continue, with rounds in flight waited for but not applied.

        Args:
            anchored: whether anchors are in use; before that there is nothing to save of them.
        """
        for track in self._every():
            if track.flight is not None:
                self._driver.wait(track.flight)
        return {
            "syncs": self.count,
            "tracks": [[track.state_dict() for track in tracks] for tracks in self._tracks],
            **self.anchors.state_dict(anchored=anchored),
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise if this cannot be loaded."""
        check_saved_tracks(state, self._tracks, self._contents)
        if state.get("tracks") is not None:
            self.anchors.check_state_dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue from :meth:`state_dict`. Returns whether anchors were loaded, if there are any."""
        self.abandon()
        self._begin_era(self._era + 1)
        self.count = int(state.get("syncs", 0))
        saved = state.get("tracks") or []
        for track in self._every():
            track.seen, track.moved, track.skipped, track.rounds = 0.0, True, False, 0
            track.residual, track.residual_of = None, []
        complete = self.anchors.load_state_dict(state)
        if [len(tracks) for tracks in saved] != [len(tracks) for tracks in self._tracks]:
            if saved:
                warnings.warn(
                    f"the checkpoint has {[len(one) for one in saved]} fragments at its levels, but there are "
                    f"{[len(one) for one in self._tracks]} here: what ranks had seen, and what encoding had lost, is "
                    "dropped",
                    stacklevel=4,
                )
            return complete
        for tracks, some in zip(self._tracks, saved, strict=True):
            for track, values in zip(tracks, some, strict=True):
                track.load_state_dict(values)
                for place, other, amount in (values["flight"] or {}).get("forgotten", []):
                    assert track.flight is not None
                    track.flight.forgotten.append((self._tracks[place][other], float(amount)))
        return complete

    def close(self) -> None:
        """Close the connections, after the rounds in flight."""
        peers = [*self._peers, *([] if self._shards is None else [self._shards])]

        def close() -> None:
            for one in peers:
                one.close()

        self._driver.close(close)
