r"""One exchange of one track, from taking the values to applying the result.

A round goes through the same stages whether it blocks or not: ranks *agree* on what they are about to exchange, the
values are *exchanged*, and ranks *vote*: only if every rank has the result does any rank use it. Until then nothing has
changed, or what has changed is restored. A round with a delay works on a copy, in the background:

.. math:: x_i(t+k) \leftarrow x_i(t+k) + \bigl(\bar x(t) - x_i(t)\bigr)

without an outer optimizer, which keeps the updates of the :math:`k` steps in between, and with one

.. math:: a \leftarrow \mathrm{outer}\bigl(a,\; a - \bar x(t)\bigr), \qquad
   x_i(t+k) \leftarrow \alpha\, x_i(t+k) + (1 - \alpha)\, a .
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from offbeat.sync.agreement import Shares, vote
from offbeat.sync.items import local_part
from offbeat.sync.meeting import meet, not_finite
from offbeat.wire.base import NotFinite
from offbeat.wire.peers import ExchangeError, Peers

if TYPE_CHECKING:
    from offbeat.sync.outer import Outer
    from offbeat.sync.track import Track

__all__ = ["InPlace", "Round"]


class Round:
    """One exchange.

    Args:
        track: what is exchanged, and with whom.
        step: the step after which it began.
        done: whether this rank has run out of data.
        now: whether all ranks wait for it.

    Attributes:
        shares: what ranks agreed on; None before.
        final: whether this rank does not train until the round is over, so that the result replaces its parameters.
        error: why it failed, if it did.
        skipped: whether ranks agreed to change nothing.
        repaired: whether some ranks took over the anchors of others, and nothing else was done.
        reported: whether somebody has asked for the result.
        idle: whether no rank has made a step since the last round: parameters go to the anchor, and that stays.
        restored: whether the result is from a checkpoint, and may be of more ranks than there are now.
        eager: whether this replica has taken its part of the outer step already.
        exchanged: whether there were others to exchange with.
        numbers: the options with which the outer optimizer makes its step, the same on every rank.
        is_copied: whether the exchange works on a copy.
    """

    is_copied = False

    def __init__(self, track: Track, step: int, *, done: bool = False, now: bool = False) -> None:
        self.track, self.step, self.done, self.final = track, step, done, done or now
        self._now = now
        self.items, self.state = track.items(), track.state_items()
        self.shares: Shares | None = None
        self.error: BaseException | None = None
        self.skipped = False
        self.reported = False
        self.restored = self.eager = self.exchanged = self.repaired = False
        self.idle = self.left_out = False
        self.notes: list[str] = []
        self.digests = track.contents.digests(self.items, self.state)
        self.keys = track.contents.found_keys()
        self.meeting = track.next_meeting(step, now=now)
        self.weight = track.weight(done=done)
        self.moved, self.rounds, self.names = track.moved, track.rounds, track.names()
        self.numbers = [] if track.outer is None else track.outer.numbers(self.names)
        self.on_board = track.seen
        self.forgotten: list[tuple[Track, float]] = []

    def take(self) -> None:
        """Copy what is needed, on the thread that trains."""

    def exchange(self, adjust: Callable[[Shares], Shares] = lambda shares: shares) -> None:
        """Agree, exchange and vote. May run in a thread; never raises, but sets :attr:`error`.

        Args:
            adjust: changes the weights that ranks have agreed on, the same way on every rank.
        """
        peers = self.track.peers
        agreed = False
        try:
            self.shares = adjust(meet(self, peers))
            agreed = True
            self.idle = self.track.outer is not None and not any(self.shares.moved)
            if not self.skipped and not self.idle and not self.shares.nobody and peers.size > 1:
                self._exchange(self.shares, peers)
                self.exchanged = True
        except ExchangeError as error:
            self.error = error
            traceback.clear_frames(error.__traceback__)
            self._give_up()
        except NotFinite as error:
            self.error = error  # on every rank
        except BaseException as error:
            self.error = error
            if agreed:  # the other ranks are in the middle of it: let them fail too instead of waiting
                traceback.clear_frames(error.__traceback__)  # they hold collectives, and those the connection
                peers.close()
                self._give_up()

    def _give_up(self) -> None:
        """Let ranks that have not come yet, and those with other shards, fail too instead of waiting."""
        self.track.peers.give_up(self.meeting)
        if self.track.shards is not None:
            self.track.shards.close()
            self.track.shards.give_up(self.meeting)

    def _vote(self) -> None:
        """Return only if every rank, of every shard, has got this far."""
        vote(self.track.peers if self.track.shards is None else self.track.shards)

    def land(self, params: dict[str, Tensor]) -> bool:
        """Apply the result to the parameters, by name. Returns whether anything was exchanged; raises if it failed."""
        changed = False
        try:
            changed = self._apply_result(params)
        finally:
            if self.eager and not changed:
                assert self.track.eager is not None
                self.track.eager.undo(params, self.names)
        return changed

    def step_eagerly(self, params: dict[str, Tensor]) -> None:
        """Take this replica's part of the outer step, after :meth:`take` and before the exchange."""
        assert self.track.eager is not None
        self.track.eager.step(params, self.names)
        self.eager = True

    def _move(self, params: dict[str, Tensor], names: list[str], move: Callable[[Outer], None]) -> None:
        """Let the outer optimizer move its anchors, and parameters follow."""
        outer, eager = self.track.outer, self.track.eager if self.eager else None
        assert outer is not None
        if eager is None or self.final:
            with outer.using(self.names, self.numbers):
                move(outer)
            self.track.set_params(params, names, kept=self._kept, kept_below=self._kept_below)
            if eager is not None:  # this replica was left out, and nothing of it is kept
                eager.forget(names, momentum=True)
            return
        eager.before_landing(params, names)
        with outer.using(self.names, self.numbers):
            move(outer)
        eager.land(params, names)

    def _apply_result(self, params: dict[str, Tensor]) -> bool:
        self.reported = True
        for note in self.notes:  # here, because a warning may be turned into an error, which other ranks would not see
            warnings.warn(note, stacklevel=6)
        if self.error is not None:
            raise self.error
        assert self.shares is not None
        if self.idle and not self.skipped:
            if self.final:
                self.track.set_params(params, self.names, kept=0.0, kept_below=0.0)
            return False
        if self.skipped or self.shares.nobody:
            return False
        if self.track.peers.size > 1 or self.restored or not self.is_copied:
            self._land(params)
        elif self.track.outer is not None:  # the mean over one rank is its own parameters, of then or of now
            (self._land if self.track.level.delay else self._land_alone)(params)
        return True

    def _exchange(self, shares: Shares, peers: Peers) -> None:
        raise NotImplementedError

    def _land(self, params: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """For a checkpoint: what :meth:`land` will use."""
        raise NotImplementedError

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`values`: the exchange is over, but its result has not been applied."""
        raise NotImplementedError

    def _land_alone(self, params: dict[str, Tensor]) -> None:
        """The mean over one rank is its own parameters."""
        parts = [local_part(params[name]) for name in self.names]
        limit = self.track.exchange.bucket_bytes
        self._move(params, self.names, lambda outer: outer.move_to(self.names, parts, limit))

    @property
    def all_done(self) -> bool:
        """Whether all ranks have run out of data."""
        return self.shares is not None and self.shares.all_done

    @property
    def _kept(self) -> float:
        """How much of the local parameters stays."""
        return 0.0 if self.final else self.track.level.kept

    @property
    def _kept_below(self) -> float:
        """How much of the anchors of lower levels stays: the same on every rank, also if only some ranks are done."""
        return 0.0 if self._now or self.all_done else self.track.level.kept

    def not_finite(self) -> list[str]:
        """The names of what this round exchanges that has NaN or infinity among its elements."""
        return not_finite([(item.name, local_part(item.tensor)) for item in self.items], self.track.contents.masks)


class InPlace(Round):
    """A round that blocks and changes the parameters where they are, in bounded memory."""

    def not_finite(self) -> list[str]:
        """See :class:`Round`. Averaging would spread what is in optimizer state as well."""
        state = [(item.name, local_part(item.tensor)) for item in self.state]
        return [*super().not_finite(), *not_finite(state)]

    def _exchange(self, shares: Shares, peers: Peers) -> None:
        if not shares.same_state:
            warnings.warn(
                "optimizer state was not averaged this time, because not all ranks have the same state; a GradScaler "
                "may have skipped the first steps of some ranks",
                stacklevel=2,
            )
        items = [*self.items, *(self.state if shares.same_state else [])]
        self.track.exchange.average(items, peers, shares, self._vote)

    def _land(self, params: dict[str, Tensor]) -> None:
        if self.track.outer is not None:
            self._land_alone(params)  # the parameters are the mean now
        else:
            self.track.lower_anchors_follow(params)
