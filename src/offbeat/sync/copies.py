"""Rounds that work on a copy of what they exchange, so that training can go on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.sync.agreement import Shares
from offbeat.sync.buckets import Bucket
from offbeat.sync.items import MEAN, Item, local_part
from offbeat.sync.meeting import not_finite
from offbeat.sync.rounds import Round
from offbeat.wire.peers import Peers

if TYPE_CHECKING:
    from offbeat.sync.track import Track

__all__ = ["CopyRound", "OnCopy"]


class CopyRound(Round):
    """A round that copies items, reduces the copy, and adds or assigns the result to the items."""

    is_copied = True

    def __init__(self, track: Track, step: int, *, done: bool = False, now: bool = False) -> None:
        super().__init__(track, step, done=done, now=now)
        self._streams: dict[torch.device, Any] = {}

    def exchange(self, adjust: Callable[[Shares], Shares] = lambda shares: shares) -> None:
        """See :class:`Round`."""
        with ExitStack() as streams:
            for stream in self._streams.values():
                streams.enter_context(torch.cuda.stream(stream))
            super().exchange(adjust)

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
    def _reduce_copy(self, shares: Shares, peers: Peers, *, ordered: bool = False) -> None:
        """Replace the copy by its mean or, where that will be added, by its difference from the copy.

        Args:
            ordered: sum in rank order, also if the level does not.
        """
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

        track.exchange.reduce(buckets, peers, shares, commit, ordered=ordered)
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


class OnCopy(CopyRound):
    """A round that works on a copy of the parameters, usually in the background."""

    def take(self) -> None:
        """Copy the parameters."""
        self._copy(self.items)

    def not_finite(self) -> list[str]:
        """See :class:`Round`."""
        views = self.track.snapshot.views
        tensors = [(item.name, view) for item, view in zip(self.items, views, strict=True)]
        return not_finite(tensors, self.track.contents.masks)

    def _exchange(self, shares: Shares, peers: Peers) -> None:
        self._reduce_copy(shares, peers)
        self._vote()

    @torch.no_grad()
    def _land(self, params: dict[str, Tensor]) -> None:
        track = self.track
        self._land_copy([item for item in self.items if track.outer is None or item.name not in params])
        if track.outer is not None:
            views = dict(zip([item.name for item in self.items], track.snapshot.views, strict=True))
            names = [name for name in self.names if name in params and name in views]
            means, limit = [views[name] for name in names], track.exchange.bucket_bytes
            self._move(params, names, lambda outer: outer.move_to(names, means, limit))

    def values(self) -> dict[str, Any]:
        """For a checkpoint: what :meth:`land` will use."""
        return {"values": self._copy_values(self.items)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`values`: the exchange is over, but its result has not been applied."""
        self.items = [item for item in self.items if item.name in state["values"]]
        self.names = [name for name in self.names if name in state["values"]]  # without those unfrozen since
        self._restore_copy(self.items, state["values"])
