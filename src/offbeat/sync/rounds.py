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
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.sync.agreement import Shares, agree, check_same_values
from offbeat.sync.buckets import Bucket
from offbeat.sync.items import MEAN, Item, local_part
from offbeat.wire.base import NotFinite
from offbeat.wire.peers import ExchangeError, Peers

if TYPE_CHECKING:
    from offbeat.sync.track import Track

__all__ = ["InPlace", "OnCopy", "Round", "not_finite", "vote"]


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
        reported: whether somebody has asked for the result.
        idle: whether no rank has made a step since the last round: parameters go to the anchor, and that stays.
        restored: whether the result is from a checkpoint, and may be of more ranks than there are now.
        eager: whether this replica has taken its part of the outer step already.
        exchanged: whether there were others to exchange with.
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
        self.restored = self.eager = self.exchanged = False
        self.idle = self.left_out = False
        self.notes: list[str] = []
        self._digests = track.contents.digests(self.items, self.state)
        self._keys = track.contents.found_keys()
        self._meeting = track.next_meeting(step)
        self._weight = track.weight(done=done)
        self._moved, self._rounds, self._names = track.moved, track.rounds, track.names()
        self.on_board = track.seen
        self.forgotten: list[tuple[Track, float]] = []
        self._streams: dict[torch.device, Any] = {}

    def take(self) -> None:
        """Copy what is needed, on the thread that trains."""

    def exchange(self, adjust: Callable[[Shares], Shares] = lambda shares: shares) -> None:
        """Agree, exchange and vote. May run in a thread; never raises, but sets :attr:`error`.

        Args:
            adjust: changes the weights that ranks have agreed on, the same way on every rank.
        """
        with ExitStack() as streams:
            for stream in self._streams.values():
                streams.enter_context(torch.cuda.stream(stream))
            self._go_through(adjust)

    def _go_through(self, adjust: Callable[[Shares], Shares]) -> None:
        peers = self.track.peers
        agreed = False
        try:
            self.shares = adjust(self._agree(peers))
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
        self.track.peers.give_up(self._meeting)
        if self.track.shards is not None:
            self.track.shards.close()
            self.track.shards.give_up(self._meeting)

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
                self.track.eager.undo(params, self._names)
        return changed

    def step_eagerly(self, params: dict[str, Tensor]) -> None:
        """Take this replica's part of the outer step, after :meth:`take` and before the exchange."""
        assert self.track.eager is not None
        self.track.eager.step(params, self._names)
        self.eager = True

    def _move(self, params: dict[str, Tensor], names: list[str], move: Callable[[], None]) -> None:
        """Let the outer optimizer move its anchors, and parameters follow."""
        eager = self.track.eager if self.eager else None
        if eager is None or self.final:
            move()
            self.track.set_params(params, names, kept=self._kept, kept_below=self._kept_below)
            if eager is not None:  # this replica was left out, and nothing of it is kept
                eager.forget(names, momentum=True)
            return
        eager.before_landing(params, names)
        move()
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
                self.track.set_params(params, self._names, kept=0.0, kept_below=0.0)
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

    def _copy(self, items: Sequence[Item]) -> None:
        """Copy items, in the order of the streams of their devices."""
        snapshot = self.track.snapshot
        snapshot.take(items)
        for device in {local_part(item.tensor).device for item in items}:
            if device.type == "cuda":
                taken = torch.cuda.current_stream(device).record_event()
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._streams[device].wait_event(taken)
                if snapshot.device is not None:
                    taken.synchronize()

    @torch.no_grad()
    def _reduce_copy(self, shares: Shares, peers: Peers) -> None:
        """Replace the copy by its mean or, where that will be added, by its difference from the copy."""
        track = self.track
        buckets: list[Bucket] = []
        as_difference: dict[int, bool] = {}
        for how, late, flat in track.snapshot.flats:
            is_param = how == MEAN and late
            device = flat.device if peers.can_exchange(flat.device) else peers.device
            for bucket in track.exchange.cut_for_background(Item("a copy", flat, how), device):
                as_difference[id(bucket)] = late and not self.final and not (is_param and track.outer is not None)
                buckets.append(bucket)

        def commit(bucket: Bucket, reduced: Tensor, last: bool) -> None:
            (piece,) = bucket.pieces
            reduced = reduced.to(piece.device)
            if as_difference[id(bucket)]:
                torch.sub(reduced, piece, out=piece)
            else:
                piece.copy_(reduced)

        track.exchange.reduce(buckets, peers, shares, commit)
        for stream in self._streams.values():
            stream.synchronize()

    @torch.no_grad()
    def _land_copy(self, items: Sequence[Item]) -> None:
        """Add or assign the result to these items; those that no longer exist are left out."""
        if not self.exchanged:  # with nobody, so that the copy is what these items were, and not what they became
            return
        self._settle()
        here = {item.name: item for item in self.track.items()}
        views = dict(zip([item.name for item in self._copied()], self.track.snapshot.views, strict=True))
        together: dict[float, list[tuple[Tensor, Tensor]]] = {}
        kept = self._kept if self.track.outer is None else 0.0  # an outer optimizer's mixing is of parameters
        share = 1 - kept if kept else 1
        for item in items:
            if item.name not in here:
                continue
            part, view = local_part(here[item.name].tensor), views[item.name]
            if not item.late or self.final:
                part.copy_(view, non_blocking=True)
                continue
            alpha = share if part.is_floating_point() or part.is_complex() else 1  # whole numbers are counters
            if part.device == view.device:
                together.setdefault(alpha, []).append((part, view))
            else:  # one after the other, so that a copy in CPU memory is not brought back as a whole
                part.add_(view.to(part.device, non_blocking=True), alpha=alpha)
        for alpha, pairs in together.items():
            _torch.foreach_add_([p for p, _ in pairs], [v for _, v in pairs], alpha=alpha)

    def _copied(self) -> list[Item]:
        """The items of the copy, in order."""
        return self.items

    def _settle(self) -> None:
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _copy_values(self, items: Sequence[Item]) -> dict[str, Tensor]:
        self._settle()
        return {item.name: view.clone() for item, view in zip(items, self.track.snapshot.views, strict=True)}

    @torch.no_grad()
    def _restore_copy(self, items: Sequence[Item], values: dict[str, Tensor]) -> None:
        self.track.snapshot.shape_like(items)
        for item, view in zip(items, self.track.snapshot.views, strict=True):
            view.copy_(values[item.name])
        self.shares, self.restored = Shares(1.0, None), True

    def _land_alone(self, params: dict[str, Tensor]) -> None:
        """The mean over one rank is its own parameters."""
        parts = [local_part(params[name]) for name in self._names]
        assert self.track.outer is not None
        self.track.outer.move_to(self._names, parts, self.track.exchange.bucket_bytes)
        self.track.set_params(params, self._names, kept=self._kept, kept_below=self._kept_below)

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

    def _agree(self, peers: Peers) -> Shares:
        level = self.track.level
        bad = self._not_finite()
        sound = self._all_shards_are_finite(not bad)
        outer = self.track.outer
        new = outer is not None and not outer.unchecked.isdisjoint(self._names)
        if peers.size == 1:
            self._keys.check(self._keys.columns, peers)
            nobody = self._weight == 0.0 or (level.nonfinite == "leave_out" and not sound)
            fine = sound or self._weight == 0.0
            found = Shares(1.0, 1, True, nobody, self.done, True, (self._moved,), (), (), (fine,), (sound,))
        else:
            peers.renew_if_lost(self._meeting)
            found = agree(
                peers,
                self.step,
                self._digests,
                self._weight,
                lambda: self.items,
                done=self.done,
                moved=self._moved,
                state_keys=self._keys.columns,
                rounds=self._rounds,
                finite=sound,
                unchecked=new,
                leave_out=level.nonfinite == "leave_out",
            )
            self._keys.check(found.state_keys, peers)
        if not all(found.finite):
            self._handle_not_finite(found, bad if self._weight else [], peers)
        if not sound and self._weight == 0.0:  # it counts for nothing, and nothing of it is to be kept
            self.left_out = self.final = True
        if found.nobody and not found.all_done and not self.skipped and not self.final:
            raise ValueError(
                "no rank has a weight; with weighted=True call optimizer.seen(number of samples) before "
                "optimizer.step()"
            )
        if outer is not None and peers.size > 1 and not self.skipped:
            if len(set(found.rounds)) > 1:
                self._repair(found, peers)
            elif found.unchecked:
                check_same_values(outer.items(self._names), peers)
                outer.unchecked.difference_update(self._names)
        return found

    def _all_shards_are_finite(self, mine: bool) -> bool:
        """Whether this replica is finite, whichever ranks its shards are on."""
        shards = self.track.shards
        if shards is None:
            return mine
        shards.renew_if_lost(self._meeting)
        rows = torch.empty(2 * shards.size, dtype=torch.int64, device=shards.device)
        # Of all replicas; a rank's place among its peers says to which one it belongs.
        place = self.track.peers.rank
        shards.all_gather(rows, torch.tensor([place, int(mine)], dtype=torch.int64, device=shards.device)).wait()
        return all(bool(ok) for replica, ok in rows.view(-1, 2).tolist() if replica == place)

    def _not_finite(self) -> list[str]:
        return not_finite([(item.name, local_part(item.tensor)) for item in self.items], self.track.contents.masks)

    def _handle_not_finite(self, found: Shares, bad: list[str], peers: Peers) -> None:
        lists = peers.gather_objects(bad[:4]) if peers.size > 1 else [bad[:4]]
        there = [(rank, names) for rank, names in zip(peers.ranks, lists, strict=True) if names]
        where = "; ".join(f"on rank {rank}: {', '.join(names)}" for rank, names in there) or "in other shards"
        policy = self.track.level.nonfinite
        if policy == "raise" or found.nobody:
            raise NotFinite(
                f"some parameters are NaN or infinite ({where}), and averaging would spread that to every replica; "
                "nothing was changed. Lower the learning rate, clip gradients, or choose nonfinite='leave_out' or "
                "'skip'"
            )
        words = "this round was skipped" if policy == "skip" else "those ranks did not count in this round"
        self.notes.append(f"some parameters are NaN or infinite ({where}); {words}")
        self.skipped = policy == "skip"
        # What this replica has is not to be kept.
        self.left_out = policy == "leave_out" and not found.finite[peers.rank]
        self.final = self.final or self.left_out

    def _repair(self, found: Shares, peers: Peers) -> None:
        """Some ranks have completed a round that others have not: all take over the anchors of those who have.

        That can happen only if a connection breaks in the middle of a vote. No outer step is taken this time.
        """
        outer, most = self.track.outer, max(found.rounds)
        assert outer is not None
        root = found.rounds.index(most)
        lists = peers.gather_objects([(name, tuple(t.shape)) for name, t in outer.tensors(self._names)])
        if any(one != lists[root] for one in lists) and not hasattr(outer.optimizer, "init_state"):
            raise RuntimeError(
                f"the state of the outer optimizer ({type(outer.optimizer).__name__}) cannot be taken over from "
                "another rank, which has completed one more round; use one of offbeat's optimizers as outer="
            )
        outer.make_state(self._names, lists[root])
        for _, t in outer.tensors(self._names):
            moved = t.to(peers.device, copy=True).contiguous()
            peers.broadcast(moved, root).wait()
            t.copy_(moved)
        self.track.rounds = most
        self.skipped = True
        behind = [rank for rank, count in zip(peers.ranks, found.rounds, strict=True) if count < most]
        self.notes.append(
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


def vote(peers: Peers) -> None:
    """Return only if every rank has got this far."""
    flag = torch.ones(1, dtype=torch.int64, device=peers.device)
    peers.all_reduce(flag, "min").wait()


class InPlace(Round):
    """A round that blocks and changes the parameters where they are, in bounded memory."""

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


class OnCopy(Round):
    """A round that works on a copy of the parameters, usually in the background."""

    is_copied = True

    def take(self) -> None:
        """Copy the parameters."""
        self._copy(self.items)

    def _not_finite(self) -> list[str]:
        views = self.track.snapshot.views
        tensors = [(item.name, view) for item, view in zip(self.items, views, strict=True)]
        return not_finite(tensors, self.track.contents.masks)

    def _exchange(self, shares: Shares, peers: Peers) -> None:
        self._reduce_copy(shares, peers)
        self._vote()

    @torch.no_grad()
    def _land(self, params: dict[str, Tensor]) -> None:
        track = self.track
        outer = track.outer
        self._land_copy([item for item in self.items if outer is None or item.name not in params])
        if outer is not None:
            views = dict(zip([item.name for item in self.items], track.snapshot.views, strict=True))
            names = [name for name in self._names if name in params and name in views]
            means, limit = [views[name] for name in names], track.exchange.bucket_bytes
            self._move(params, names, lambda: outer.move_to(names, means, limit))

    def values(self) -> dict[str, Any]:
        """For a checkpoint: what :meth:`land` will use."""
        return {"values": self._copy_values(self.items)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`values`: the exchange is over, but its result has not been applied."""
        self.items = [item for item in self.items if item.name in state["values"]]
        self._restore_copy(self.items, state["values"])
