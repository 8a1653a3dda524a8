"""Averages replicas: immediately or in the background, at several levels, with weights."""

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
        groups: the process group of each level.
        within: the ranks that are averaged; all of them construct this together.
        delay: the number of steps after which an average is applied; 0 is immediately.
        weighted: weigh ranks by the amounts given to :meth:`see`, instead of equally.

    Attributes:
        count: the number of averages begun.
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
        # Collectives of a background thread need process groups of their own.
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
        """The number of bytes this rank has sent."""
        return self._exchange.bytes_sent

    def see(self, amount: float) -> None:
        """Add to the amount of data this rank has trained on."""
        if not self._weighted:
            raise ValueError(
                "seen() needs weighted=True, but all ranks have the same weight; pass weighted=True to LocalSGD"
            )
        if not amount >= 0:
            raise ValueError(f"seen() takes a non-negative number, but got {amount!r}")
        self._seen = [value + float(amount) for value in self._seen]

    def move(self) -> None:
        """Record that this rank has made a step."""
        self._moved = [True] * len(self._moved)

    def after_step(self, step: int, level: int | None) -> None:
        """Apply a delayed average that is due, and begin the average at this level.

        Args:
            step: the step that has just been made.
            level: the level to average at after this step, or None.
        """
        problem: Exception | None = None
        if self._flight is not None and (level is not None or step - self._launched >= self._delay):
            try:
                self.land()
            except Exception as error:  # other ranks may not see it, and begin the next average
                problem = error
        if level is not None:
            if self._delay:
                self._launch(step, level)
            else:
                self.now(step, level)
        if problem is not None:
            raise problem

    def now(self, step: int, level: int) -> None:
        """Average immediately."""
        self.land()
        items, state = self._contents.items(), self._contents.state_items()
        shares = self._reach(items, state, step, level)()
        self._change(items, state, level, shares)

    def take_part(self, step: int, level: int, *, may_be_last: bool) -> bool:
        """Take part in an average of the other ranks, on a rank that has no data left.

        Args:
            may_be_last: whether this is the last average if no rank has data left.

        Returns:
            Whether no rank of the level has data left.
        """
        self.land()
        items, state = self._contents.items(), self._contents.state_items()
        shares = self._reach(items, state, step, level, done=True)()
        last = shares.all_done and may_be_last
        if shares.nobody and last:
            # No rank has a weight. Ranks that have trained since the last average get one; if there are none, all ranks
            # do, because applying a delayed average may have rounded differently on each rank.
            weights = [float(moved) for moved in shares.moved] if any(shares.moved) else [1.0] * len(shares.moved)
            me = dist.get_rank(self._groups[level])
            shares = Shares.of(weights, me, all_done=True, same_state=shares.same_state, moved=shares.moved)
        if not shares.nobody:
            # Ranks that still train may do this in the background; the buckets must be the same.
            self._change(items, state, level, shares, as_flight=bool(self._delay) and not last)
        return shares.all_done

    def land(self) -> None:
        """Apply the average in flight, if there is one. If it failed, nothing is applied and its error is raised."""
        flight = self._flight
        if flight is None:
            return
        items = {item.name: item for item in self._contents.items()}
        try:
            flight.wait()
        except BaseException:
            if flight.is_over:  # not if an interrupt ended the wait
                self._flight = None
                self._remember_again()
            raise
        self._flight = None
        flight.land(items)
        self._contents.reset_state()

    def abandon(self) -> None:
        """Wait for the average in flight, and drop it."""
        if self._flight is not None:
            try:
                self._flight.wait()
            except Exception as error:
                warnings.warn(f"the average in flight failed and is dropped: {error}", stacklevel=4)
            self._flight = None

    def _launch(self, step: int, level: int) -> None:
        group = self._groups[level]
        items = self._contents.items()
        reach = self._reach(items, [], step, level)
        if dist.get_world_size(group) > 1:
            self._flight = Flight(items, self._snapshot, self._exchange, group, reach)
            self._launched = step
            # Added to the next average if this one fails.
            self._on_board = [value if at <= level else 0.0 for at, value in enumerate(self._seen)]
            self.count += 1
        else:
            reach()
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
                        "optimizer state was not averaged this time, because not all ranks have the same state; a "
                        "GradScaler may have skipped the first steps of some ranks",
                        stacklevel=5,
                    )
                self._exchange.average([*items, *(state if shares.same_state else [])], group, shares)
            self.count += 1
        self._contents.reset_state()
        self._forget(level)

    def _reach(
        self, items: list[Item], state: list[Item], step: int, level: int, *, done: bool = False
    ) -> Callable[[], Shares]:
        """Returns the function that compares ranks before an average. It reads nothing that training changes."""
        group, digests = self._groups[level], self._contents.digests(items, state)
        weight, moved = self._seen[level] if self._weighted else 1.0, self._moved[level]
        found_keys = self._contents.found_keys()
        if done and not moved:
            weight = 0.0

        def reach() -> Shares:
            if dist.get_world_size(group) == 1:
                found_keys.check(found_keys.columns, group)
                return Shares(1.0, 1, True, weight == 0.0, done, True, (moved,))
            columns = found_keys.columns
            shares = agree(group, step, digests, weight, lambda: items, done=done, moved=moved, state_keys=columns)
            found_keys.check(shares.state_keys, group)
            if shares.nobody and not shares.all_done:
                raise ValueError(
                    "no rank has a weight; with weighted=True call optimizer.seen(number of samples) before "
                    "optimizer.step()"
                )
            return shares

        return reach

    def _forget(self, level: int) -> None:
        """Start counting anew after an average at this level, which includes the lower levels."""
        self._contents.mark_averaged()
        for lower in range(level + 1):
            self._seen[lower], self._moved[lower] = 0.0, False

    def _remember_again(self) -> None:
        """Put back the amounts of an average that has failed, for the next one."""
        self._seen = [now + value for now, value in zip(self._seen, self._on_board, strict=True)]
        self._moved = [True] * len(self._moved)

    def latest(self, step: int, level: int) -> int:
        """The largest number of steps that any rank of a level has made."""
        group = self._groups[level]
        number = torch.tensor([step], dtype=torch.int64, device=meeting_device(group))
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
        return int(number)

    def state_dict(self) -> dict[str, Any]:
        """The weights, and the average in flight, which is waited for but not applied."""
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
                    f"the checkpoint has an average in flight for {name!r} of shape {tuple(value.shape)}, but this "
                    f"model has {found}; nothing was changed. Load the checkpoint into the model it was saved from"
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
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
    """A list from a checkpoint, if it has one value per level."""
    return list(values) if values is not None and len(values) == length else [default] * length
