"""Connections of our own between ranks of a process group, which can be made again after a failure.

Ranks meet in the store of the default process group. Whoever wants to connect writes a fresh random number there and
reads everybody's. Once all have confirmed the same numbers, they connect under a name made of them. So a name is never
used twice, and nothing needs to be agreed on beforehand: not how many attempts there were, nor which round failed.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from offbeat import _torch
from offbeat.wire.groups import new_group
from offbeat.wire.limit import ENDING, ExchangeError, within
from offbeat.wire.peers import GroupPeers, Peers, Traffic
from offbeat.wire.quiet import quiet_new_threads

__all__ = ["Connector", "GroupConnector", "is_gloo"]

#: How long ranks wait for each other to connect again: twice as long as for a collective, but within these limits.
SHORTEST, LONGEST = timedelta(seconds=30), timedelta(minutes=5)
#: The pause between two looks at the store.
SECONDS_BETWEEN = 0.02
#: How long a request to the store may take, beyond the time that ranks wait for each other.
SECONDS_BEYOND = 5.0


class Connector:
    """Makes connections between fixed sets of ranks: of a process group, or of a simulation."""

    #: Whether a connection that was lost can be made again.
    renews = True
    #: How long a collective may take, in seconds.
    seconds = float("inf")

    def connect(self, patience: float | None = None) -> list[Peers]:
        """Connect, together with all other ranks. Returns the peers of each set, in order.

        Args:
            patience: how many seconds to wait for the other ranks, if that is less than usual.

        Raises:
            ExchangeError: not all ranks came in time.
        """
        raise NotImplementedError


class GroupConnector(Connector):
    """Connects ranks of a process group.

    Args:
        group: the process group whose ranks connect.
        sets: sets of global ranks that this rank is in, the largest first: all others are subsets of it.
        name: what these connections are called; the same on all ranks of the first set, and of no other connector.
        timeout: how long a collective may take; None is the group's own.
        quiet: whether the threads of the connections should not preempt training.
        background: whether a thread uses them. Then they are gloo's, whatever the group's backend is: a second
            communicator of NCCL, used in no fixed order beside DDP's, can block both for ever.
    """

    def __init__(
        self,
        group: Any,
        sets: Sequence[Sequence[int]],
        name: str,
        *,
        timeout: timedelta | None,
        quiet: bool,
        background: bool,
        traffic: Traffic | None = None,
    ) -> None:
        self._group, self._sets, self._name = group, [list(ranks) for ranks in sets], name
        self._timeout = _torch.timeout_of(group) if timeout is None else timeout
        self._quiet, self._background, self._traffic = quiet, background, traffic
        self.renews = (background or is_gloo(group)) and _torch.has_store()
        self.seconds = float("inf") if self._timeout is None else self._timeout.total_seconds()

    def connect(self, patience: float | None = None) -> list[Peers]:
        """See :class:`Connector`."""
        if not self.renews:
            backend = "gloo" if self._background else None
            with quiet_new_threads("gloo"):
                groups = [new_group(ranks, self._group, backend) for ranks in self._sets]
            return [self._peers(group, ranks, owned=False) for group, ranks in zip(groups, self._sets, strict=True)]
        ranks = self._sets[0]
        if len(ranks) == 1:
            return [self._peers(Alone(), [rank], owned=True) for (rank,) in self._sets]
        # A store answers as late as its host does, and a request to it has no time limit of its own.
        patience = min(self._patience.total_seconds(), float("inf") if patience is None else patience)
        seconds, problem = self._patience.total_seconds() + SECONDS_BEYOND, f"ranks {ranks} could not connect"
        name = within(patience + SECONDS_BEYOND, lambda: self._meet(patience), problem)
        return within(seconds, lambda: [self._open(name, some) for some in self._sets], problem)

    def _open(self, name: str, ranks: list[int]) -> Peers:
        if len(ranks) == 1:
            return self._peers(Alone(), ranks, owned=True)
        store = PrefixStore(f"{name}/{len(ranks)}.{min(ranks)}", _torch.default_store())
        try:
            with quiet_new_threads(*(("gloo",) if self._quiet else ())):
                gloo: Any = dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), self._patience)
            # A rank that is connected to all others does not know that they are. If it closed its connections now,
            # theirs would fail.
            gloo.barrier().wait()
        except RuntimeError as error:
            raise ExchangeError(f"ranks {ranks} could not connect: {error}") from error
        return self._peers(gloo, ranks, owned=True)

    def _peers(self, group: Any, ranks: list[int], *, owned: bool) -> Peers:
        return GroupPeers(group, ranks, timeout=self._timeout, owned=owned, traffic=self._traffic)

    def _meet(self, patience: float) -> str:
        """Wait until all ranks want to connect. Returns the name of the new connection."""
        store, me, ranks = PrefixStore(self._name, _torch.default_store()), dist.get_rank(), self._sets[0]
        mine = uuid.uuid4().hex
        store.set(f"at {me}", mine)
        end = time.monotonic() + patience
        confirmed = ""
        while not ENDING.is_set():
            keys = [f"at {rank}" for rank in ranks]
            numbers = [store.get(key).decode() if store.check([key]) else "" for key in keys]
            if all(numbers):
                name = hashlib.sha256("/".join(numbers).encode()).hexdigest()[:32]
                if store.add(f"confirmed {name}", int(name != confirmed)) == len(ranks):
                    return f"{self._name}/{name}"
                confirmed = name
            if time.monotonic() > end:
                with suppress(RuntimeError):
                    store.set(f"at {me}", "")  # whoever comes now waits for the next attempt
                missing = [rank for rank, number in zip(ranks, numbers, strict=True) if not number]
                who = f"ranks {missing} did not come in time" if missing else "a rank did not come in time"
                raise ExchangeError(f"ranks {ranks} could not connect again: {who}")
            time.sleep(SECONDS_BETWEEN)
        raise ExchangeError(f"ranks {ranks} could not connect again: the program ends")

    @property
    def _patience(self) -> timedelta:
        return LONGEST if self._timeout is None else min(max(2 * self._timeout, SHORTEST), LONGEST)


def is_gloo(group: Any) -> bool:
    """Whether a process group has no other backend than gloo."""
    return {part.split(":")[-1] for part in dist.get_backend_config(group).split(",")} == {"gloo"}


class Alone:
    """The connection of a rank with itself: there is nothing to exchange."""

    def allreduce(self, tensors: Any, options: Any) -> Any:
        """Leave the tensors as they are."""
        return self

    def broadcast(self, tensors: Any, options: Any) -> Any:
        """Leave the tensors as they are."""
        return self

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        """Copy the one part."""
        outputs[0][0].copy_(inputs[0])
        return self

    def alltoall_base(self, out: Any, mine: Any, out_splits: Any, in_splits: Any, options: Any) -> Any:
        """Copy the one part."""
        out.copy_(mine)
        return self

    def wait(self) -> None:
        """Return at once."""
