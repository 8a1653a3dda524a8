"""How replicas are averaged: at once or in the background, level by level, with weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from offbeat.sync.agreement import Shares, agree
from offbeat.sync.background import Flight, Snapshot
from offbeat.sync.contents import Contents
from offbeat.sync.exchange import Exchange
from offbeat.sync.groups import meeting_device, twin
from offbeat.sync.items import Item, local_part

__all__ = ["Averaging"]


class Averaging:
    """Averages :class:`~offbeat.sync.contents.Contents` over the groups of several levels.

    Args:
        groups: one for each level.
        within: all ranks that are averaged, which call this together.
        delay: after how many steps an average lands; 0 is at once.
        weighted: ranks count by what they have :meth:`see`-n.

    Attributes:
        count: how many averages have been begun.
    """

    def __init__(
        self,
        contents: Contents,
        groups: Sequence[Any],
        within: Any,
        exchange: Exchange,
        *,
        delay: int = 0,
        weighted: bool = False,
        snapshot: torch.device | None = None,
    ) -> None:
        self._contents = contents
        self._exchange = exchange
        self._delay = delay
        self._weighted = weighted
        # A thread's collectives need groups that nobody else uses.
        self._groups = [twin(group, within) if delay else group for group in groups]
        self._snapshot = Snapshot(snapshot)
        self._flight: Flight | None = None
        self._launched = 0
        self._on_board = [0.0] * len(groups)
        self._seen = [0.0] * len(groups)
        self._moved = [False] * len(groups)
        self.count = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent."""
        return self._exchange.bytes_sent

    def see(self, amount: float) -> None:
        """This rank has trained on so much more."""
        if not self._weighted:
            raise ValueError("seen() is for weighted=True, and here all ranks weigh the same")
        if not amount >= 0:
            raise ValueError(f"seen() takes a number that is not negative, but got {amount!r}")
        self._seen = [value + float(amount) for value in self._seen]

    def move(self) -> None:
        """This rank has made a step."""
        self._moved = [True] * len(self._moved)

    def after_step(self, step: int, level: int | None) -> None:
        """Land what is due to land, and average at this level.

        Args:
            step: the step that has just been made.
            level: which is due after it; None for none.
        """
        problem: Exception | None = None
        if self._flight is not None and (level is not None or step - self._launched >= self._delay):
            try:
                self.land()
            except Exception as error:  # the other ranks may not know, and will want to begin the next one
                problem = error
        if level is not None:
            if self._delay:
                self._launch(step, level)
            else:
                self.now(step, level)
        if problem is not None:
            raise problem

    def now(self, step: int, level: int) -> None:
        """Average at once."""
        self.land()
        items, state = self._contents.items(), self._contents.state_items()
        shares = self._reach(items, state, step, level)()
        self._change(items, state, level, shares)

    def take_part(self, step: int, level: int, *, may_be_last: bool) -> bool:
        """As a rank without data: do what the others' average at this level needs, and let it decide.

        Args:
            may_be_last: whether there is nothing more to do when all ranks are done.

        Returns:
            Whether all ranks of the level are done.
        """
        self.land()
        items, state = self._contents.items(), self._contents.state_items()
        shares = self._reach(items, state, step, level, done=True)()
        last = shares.all_done and may_be_last
        if shares.nobody and last:
            # Nobody has a weight, but whoever has trained since counts; else all hold the last average, which landing
            # may have rounded on each rank in its own way.
            weights = [float(moved) for moved in shares.moved] if any(shares.moved) else [1.0] * len(shares.moved)
            me = dist.get_rank(self._groups[level])
            shares = Shares.of(weights, me, all_done=True, same_state=shares.same_state, moved=shares.moved)
        if not shares.nobody:
            # Ranks that still train may do this in the background, through the same buckets.
            self._change(items, state, level, shares, as_flight=bool(self._delay) and not last)
        return shares.all_done

    def land(self) -> None:
        """Apply the average that is under way, if any. If it failed nothing is applied, and its error is raised."""
        flight = self._flight
        if flight is None:
            return
        items = {item.name: item for item in self._contents.items()}
        try:
            flight.wait()
        except BaseException:
            if flight.is_over:  # and not, say, the program interrupted while it waited
                self._flight = None
                self._remember_again()
            raise
        self._flight = None
        flight.land(items)
        self._contents.reset_state()

    def abandon(self) -> None:
        """Let the average that is under way end, and forget it."""
        if self._flight is not None:
            try:
                self._flight.wait()
            except Exception as error:
                warnings.warn(f"the average that was under way failed, and is dropped: {error}", stacklevel=4)
            self._flight = None

    def _launch(self, step: int, level: int) -> None:
        group = self._groups[level]
        if dist.get_world_size(group) > 1:
            items = self._contents.items()
            reach = self._reach(items, [], step, level)
            self._flight = Flight(items, self._snapshot, self._exchange, group, reach)
            self._launched = step
            # Should it fail, ranks have seen this after all.
            self._on_board = [value if at <= level else 0.0 for at, value in enumerate(self._seen)]
            self.count += 1
        else:
            self._contents.reset_state()
        self._forget(level)

    def _change(
        self, items: list[Item], state: list[Item], level: int, shares: Shares, *, as_flight: bool = False
    ) -> None:
        group = self._groups[level]
        if dist.get_world_size(group) > 1:
            if as_flight:
                Flight(items, self._snapshot, self._exchange, group, lambda: shares).land(
                    {item.name: item for item in items}
                )
            else:
                if not shares.same_state:
                    warnings.warn(
                        "optimizer state was not averaged this time: ranks do not have the same, perhaps because a "
                        "GradScaler has skipped the first steps of one of them",
                        stacklevel=5,
                    )
                self._exchange.average([*items, *(state if shares.same_state else [])], group, shares)
            self.count += 1
        self._contents.reset_state()
        self._forget(level)

    def _reach(
        self, items: list[Item], state: list[Item], step: int, level: int, *, done: bool = False
    ) -> Callable[[], Shares]:
        """What compares ranks before an average; run in a thread it looks at nothing that training changes."""
        group, digests = self._groups[level], self._contents.digests(items, state)
        weight, moved = self._seen[level] if self._weighted else 1.0, self._moved[level]
        if done and not moved:
            weight = 0.0

        def reach() -> Shares:
            if dist.get_world_size(group) == 1:
                return Shares(1.0, 1, True, weight == 0.0, done, True, (moved,))
            shares = agree(group, step, digests, weight, lambda: items, done=done, moved=moved)
            if shares.nobody and not shares.all_done:
                raise ValueError(
                    "no rank has a weight: weighted=True averages by what ranks have seen; "
                    "call optimizer.seen(number of samples) before optimizer.step()"
                )
            return shares

        return reach

    def _forget(self, level: int) -> None:
        """What ranks have seen is in the average; a higher level does for the lower ones too."""
        self._contents.mark_averaged()
        for lower in range(level + 1):
            self._seen[lower], self._moved[lower] = 0.0, False

    def _remember_again(self) -> None:
        """What was on board of an average that has failed counts in the next."""
        self._seen = [now + value for now, value in zip(self._seen, self._on_board, strict=True)]
        self._moved = [True] * len(self._moved)

    def latest(self, step: int, level: int) -> int:
        """The largest of the steps that ranks of a level have made."""
        group = self._groups[level]
        number = torch.tensor([step], dtype=torch.int64, device=meeting_device(group))
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
        return int(number)

    def state_dict(self) -> dict[str, Any]:
        """Weights, and the average that is under way: waited for, and not applied."""
        flight = None
        if self._flight is not None:
            values = dict(zip(self._flight.names, self._flight.values(), strict=True))
            flight = {"launched": self._launched, "values": values}
        return {"seen": list(self._seen), "moved": list(self._moved), "flight": flight}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise if this cannot be loaded."""
        flight = state.get("flight")
        here = {item.name: local_part(item.tensor).shape for item in self._contents.items()}
        for name, value in flight["values"].items() if flight is not None else ():
            if here.get(name) != value.shape:
                found = tuple(here[name]) if name in here else "no such tensor"
                raise ValueError(
                    f"the checkpoint has an average under way for {name!r} of shape {tuple(value.shape)}, and here is "
                    f"{found}; nothing was changed. Load it into the model it was saved from"
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.abandon()
        levels = len(self._groups)
        self._seen = _fitting(state.get("seen"), levels, 0.0)
        self._moved = _fitting(state.get("moved"), levels, True)
        flight = state.get("flight")
        if flight is not None:
            values = flight["values"]
            items = {item.name: item for item in self._contents.items()}
            self._launched, self._on_board = flight["launched"], [0.0] * levels
            self._flight = Flight.reduced(
                [items[name] for name in values], [values[name] for name in values], self._snapshot
            )


def _fitting(values: Any, length: int, default: Any) -> list[Any]:
    """A list from a checkpoint, if it is for as many levels as there are."""
    return list(values) if values is not None and len(values) == length else [default] * length
