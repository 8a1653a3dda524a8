"""A track: everything that lasts about one fragment of the parameters at one level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.sync.agreement import Shares
from offbeat.sync.coded import Coded
from offbeat.sync.contents import Contents
from offbeat.sync.copies import OnCopy
from offbeat.sync.eager import Eager
from offbeat.sync.exchange import Exchange
from offbeat.sync.items import Item, local_part
from offbeat.sync.level import Level
from offbeat.sync.outer import Outer
from offbeat.sync.rounds import InPlace, Round
from offbeat.sync.snapshot import Snapshot
from offbeat.wire.codec import make_codec
from offbeat.wire.peers import Peers

__all__ = ["Track"]


class Track:
    """One fragment at one level.

    Args:
        level: the options of the level.
        part: which fragment this is.
        peers: the ranks that exchange it.
        contents: what there is to exchange.
        exchange: averages dense tensors.
        outer: the anchors and the outer optimizer of the level, if it has one.
        eager: the eager steps of the level, if it takes them.
        below: those of lower levels, whose anchors follow what this level does to the parameters.
        place: which level this is, from the lowest.
        weighted: whether ranks are weighed by :attr:`seen`.
        shards: all ranks of all replicas, if replicas are sharded: they decide together.
        copies: where copies for rounds in the background are kept; None is where the parameters are.

    Attributes:
        seen: the amount of data since the last round.
        moved: whether this rank has made a step since the last round.
        skipped: whether the last round was skipped, so that replicas still differ.
        rounds: how many rounds have been completed.
        flight: the round in the background, if there is one.
        residual: what encoding has lost so far.
    """

    def __init__(
        self,
        level: Level,
        part: int,
        peers: Peers,
        contents: Contents,
        exchange: Exchange,
        outer: Outer | None,
        below: Sequence[Outer],
        *,
        eager: Eager | None = None,
        place: int = 0,
        weighted: bool,
        copies: torch.device | None,
        shards: Peers | None = None,
    ) -> None:
        self.place, self.shards = place, shards
        self.level, self.part, self.peers, self.contents = level, part, peers, contents
        self.exchange, self.outer, self.eager, self._below = exchange, outer, eager, below
        self._weighted = weighted
        self.snapshot = Snapshot(copies)
        self.codec = make_codec(level.codec)
        self.seen, self.moved, self.skipped, self.rounds = 0.0, False, False, 0
        self.flight: Round | None = None
        self.residual: Tensor | None = None
        self.residual_of: list[tuple[str, int]] = []
        self.era = 0
        self._meeting: tuple[Any, ...] = ()
        self._meetings = 0
        self._cut: tuple[list[str], list[str]] = ([], [])

    def names(self) -> list[str]:
        """The parameters of this fragment."""
        params = self.contents.params()
        if self.level.parts == 1 and isinstance(self.level.fragments, (int, tuple)):
            return list(params)
        if list(params) != self._cut[0]:
            sizes = {name: p.numel() for name, p in params.items()}
            self._cut = (list(params), self.level.cut(sizes, self.contents.frozen())[self.part])
        return self._cut[1]

    def items(self) -> list[Item]:
        """The parameters of this fragment and, with the first one, the buffers."""
        params = self.contents.params()
        buffers = self.contents.buffers() if self.part == 0 else []
        return [Item(name, params[name]) for name in self.names()] + buffers

    def state_items(self) -> list[Item]:
        """Optimizer state to average."""
        return [] if self.level.delay else self.contents.state_items()

    def weight(self, *, done: bool) -> float:
        """This rank's weight in the next round."""
        if done and not self.moved:
            return 0.0
        return self.seen if self._weighted else 1.0

    def next_meeting(self, step: int, *, now: bool) -> str:
        """A name for the next round, the same on every rank, and never used before.

        A rank whose round has failed may have made fewer at this step than others; at the next step names agree again.
        Another era begins where steps come again.
        """
        meeting = (self.era, step, now)
        self._meetings = self._meetings + 1 if meeting == self._meeting else 1
        self._meeting = meeting
        return "-".join(str(int(part)) for part in (self.place, self.part, *meeting, self._meetings))

    @property
    def works_on_copy(self) -> bool:
        """Whether rounds work on a copy, and may land later."""
        # In place the local parameters are gone, and nothing of them could be kept.
        return self.codec is not None or self.level.delay > 0 or self.level.kept > 0

    def make_round(self, step: int, *, done: bool = False, now: bool = False) -> Round:
        """The next round.

        Args:
            done: whether this rank has run out of data.
            now: whether all ranks wait for it, whatever the level's delay is.
        """
        if self.codec is not None:
            return Coded(self, step, done=done, now=now)
        in_place = now or not self.works_on_copy
        return (InPlace if in_place else OnCopy)(self, step, done=done, now=now)

    @torch.no_grad()
    def set_params(self, params: dict[str, Tensor], names: Sequence[str], *, kept: float, kept_below: float) -> None:
        """Move parameters, and the anchors of lower levels, to this level's anchors.

        Args:
            kept: how much of the parameters' present value stays.
            kept_below: the same for the anchors of lower levels.
        """
        assert self.outer is not None
        for name in names:
            anchor = self.outer.anchors[name]
            below = [low.anchors[name] for low in self._below if name in low.anchors]
            for target, part in [(local_part(params[name]), kept), *((one, kept_below) for one in below)]:
                value = anchor.to(device=target.device, dtype=target.dtype)
                if part:
                    target.lerp_(value, 1 - part)
                else:
                    target.copy_(value)

    @torch.no_grad()
    def lower_anchors_follow(self, params: dict[str, Tensor]) -> None:
        """After a mean that has replaced the parameters: so are the anchors of lower levels."""
        for low in self._below:
            for name in self.names():
                if name in low.anchors:
                    low.anchors[name].copy_(local_part(params[name]))

    def residual_for(self, sizes: list[tuple[str, int]]) -> Tensor | None:
        """What encoding has lost so far, for these parameters and sizes; zeros for those that are new."""
        if self.residual is None or sizes == self.residual_of:
            return self.residual
        parts = dict(zip(self.residual_of, torch.split(self.residual, [n for _, n in self.residual_of]), strict=True))
        return torch.cat([parts[one] if one in parts else self.residual.new_zeros(one[1]) for one in sizes])

    def state_dict(self) -> dict[str, Any]:
        """Counters, the residual, and the result of a round that has not been applied yet."""
        flight: dict[str, Any] | None = None
        one = self.flight
        if one is not None:
            flight = {"step": one.step, "on_board": one.on_board, "final": one.final, "eager": one.eager}
            flight.update(exchanged=one.exchanged, numbers=one.numbers, left_out=one.left_out, notes=list(one.notes))
            flight["forgotten"] = [(track.place, track.part, amount) for track, amount in one.forgotten]
            if one.error is None and one.shares is not None and not one.skipped:
                flight.update(one.values())
            else:
                flight["failed"] = True  # what it had taken is given back when it would have landed
                if one.error is not None:
                    flight["notes"].append(
                        f"a round that was begun after step {one.step} had failed when this checkpoint was saved: "
                        f"{one.error}"
                    )
        residual = None if self.residual is None else self.residual.clone()
        return {
            "seen": self.seen,
            "moved": self.moved,
            "skipped": self.skipped,
            "rounds": self.rounds,
            "residual": residual,
            "residual_of": list(self.residual_of),
            "flight": flight,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.seen, self.moved, self.rounds = float(state["seen"]), bool(state["moved"]), int(state["rounds"])
        self.skipped = bool(state.get("skipped", False))
        self.residual = None if state["residual"] is None else state["residual"].clone()
        self.residual_of = [(str(name), int(size)) for name, size in state["residual_of"]]
        self.flight = None
        if state["flight"] is not None:
            self.flight = self.make_round(state["flight"]["step"])
            self.flight.on_board, self.flight.final = state["flight"]["on_board"], state["flight"]["final"]
            self.flight.eager = bool(state["flight"].get("eager", False))
            self.flight.left_out = bool(state["flight"].get("left_out", False))
            self.flight.notes = list(state["flight"].get("notes", []))
            self.flight.numbers = state["flight"].get("numbers", self.flight.numbers)
            if state["flight"].get("failed"):
                self.flight.shares, self.flight.skipped = Shares(1.0, None), True
            else:
                self.flight.restore(state["flight"])
                self.flight.exchanged = bool(state["flight"].get("exchanged", True))
