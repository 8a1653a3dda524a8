"""The ranks that exchange something with each other, and the few collectives that averaging needs.

:class:`Peers` is what :mod:`offbeat.sync` talks to. Here it is made from a process group of ``torch.distributed``;
:mod:`offbeat.wire.simulated` has one for many replicas in one process.
"""

from __future__ import annotations

import functools
import io
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, PrefixStore  # type: ignore[attr-defined]

from offbeat import _torch
from offbeat.wire.limit import ENDING, ExchangeError, within
from offbeat.wire.quiet import quiet_new_threads

__all__ = ["ExchangeError", "GroupPeers", "Peers", "Work", "connect", "is_gloo"]

#: How long ranks wait for each other to connect again: twice as long as for a collective, but within these limits.
SHORTEST, LONGEST = timedelta(seconds=30), timedelta(minutes=5)
#: How often it is looked whether all are there.
SECONDS_BETWEEN = 0.02
#: How long a request to the store may take, beyond what ranks wait for each other.
SECONDS_BEYOND = 5.0


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until it is done; a second call returns at once. Raises :class:`ExchangeError` if it failed."""


class Peers(Protocol):
    """Some ranks, in a fixed order, and collectives between them.

    Collectives return at once. All ranks must call them in the same order.

    Attributes:
        rank: the position of this process among the peers.
        size: how many there are.
        ranks: their global ranks.
        device: a device whose tensors can be exchanged, preferably the CPU.
        group: the process group, if there is one.
        bytes_sent: the bytes that this rank has handed to its collectives for others: for an all-reduce of :math:`n`
            ranks :math:`2 (n-1)/n` times the tensor, as in a ring; for an all-gather, and on the root of a broadcast,
            :math:`n-1` times; for an all-to-all what goes to others.
    """

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def ranks(self) -> list[int]: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def group(self) -> Any: ...  # noqa: D102
    @property
    def bytes_sent(self) -> int: ...  # noqa: D102

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        """Replace the tensor by the sum (or ``"max"``, ``"min"``) over all peers."""

    def all_gather(self, out: Tensor, mine: Tensor) -> Work:
        """Collect the flat tensors of all peers in ``out``, one after the other."""

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: list[int], in_splits: list[int]) -> Work:
        """Send the parts of a flat tensor to the peers, and receive theirs. Splits are numbers of elements."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Replace the tensor by that of the peer at position ``root``."""

    def gather_objects(self, mine: Any) -> list[Any]:
        """Collect a picklable object from every peer. Blocks."""

    def split(self, ranks: Sequence[int], timeout: timedelta | None = None) -> Peers:
        """Peers of some of these (global) ranks only. All peers call this together, each for its own part.

        Args:
            timeout: how long their collectives may take; None is as long as here.
        """

    def renew_if_lost(self, meeting: str) -> None:
        """Connect again if the connection was closed after an :class:`ExchangeError`.

        Args:
            meeting: a name on which all peers agree and which has not been used before.
        """

    def give_up(self, meeting: str) -> None:
        """Tell peers that are still to come that this one does not wait for them under this name any more."""

    def can_exchange(self, device: torch.device) -> bool:
        """Whether tensors on this device can be exchanged without copying them to :attr:`device`."""

    def close(self) -> None:
        """Close the connection: other peers' collectives fail instead of waiting for this one."""


class GroupPeers:
    """The ranks of a process group.

    Args:
        group: the process group, or a backend that is not registered with ``torch.distributed``.
        ranks: its global ranks.
        name: what its connections are called in the store that ranks meet in; None if they cannot be made anew.
        timeout: how long a collective may take.
        quiet: whether the threads of new connections should not preempt training.

    Attributes:
        bytes_sent: the bytes that this rank has handed to its collectives for others; see :class:`Peers`.
    """

    def __init__(
        self,
        group: Any,
        ranks: Sequence[int],
        *,
        name: str | None = None,
        timeout: timedelta | None = None,
        quiet: bool = False,
    ) -> None:
        self.group = group
        self.ranks = list(ranks)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self._name, self._deadline, self._quiet = name, timeout, quiet
        self._splits = itertools.count()
        self.bytes_sent = 0

    @property
    def device(self) -> torch.device:
        """A device whose tensors can be exchanged, preferably the CPU."""
        kinds = _torch.device_types(self.group) if self._name is None else ["cpu"]
        if not kinds or "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds[0], torch.accelerator.current_device_index())

    def can_exchange(self, device: torch.device) -> bool:
        """Whether tensors on this device can be exchanged."""
        kinds = _torch.device_types(self.group) if self._name is None else ["cpu", "cuda"]
        return not kinds or device.type in kinds

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        """Replace the tensor by the sum (or ``"max"``, ``"min"``) over all peers."""
        options = self._timed(dist.AllreduceOptions())
        options.reduceOp = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        sent = 2 * (self.size - 1) * tensor.nbytes // self.size
        return self._start(lambda group: group.allreduce([tensor], options), sent)

    def all_gather(self, out: Tensor, mine: Tensor) -> Work:
        """Collect the flat tensors of all peers in ``out``, one after the other."""
        parts = list(out.view(self.size, -1).unbind())
        options = self._timed(AllgatherOptions())
        return self._start(lambda group: group.allgather([parts], [mine], options), (self.size - 1) * mine.nbytes)

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: list[int], in_splits: list[int]) -> Work:
        """Send the parts of a flat tensor to the peers, and receive theirs. Splits are numbers of elements."""
        options = self._timed(dist.AllToAllOptions())
        sent = (mine.numel() - in_splits[self.rank]) * mine.itemsize
        return self._start(lambda group: group.alltoall_base(out, mine, out_splits, in_splits, options), sent)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Replace the tensor by that of the peer at position ``root``."""
        options = self._timed(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = root, 0
        sent = (self.size - 1) * tensor.nbytes if self.rank == root else 0
        return self._start(lambda group: group.broadcast([tensor], options), sent)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Collect a picklable object from every peer. Blocks."""
        return _gather_objects(self, mine)

    def split(self, ranks: Sequence[int], timeout: timedelta | None = None) -> GroupPeers:
        """Peers of some of these ranks only; all peers call this together."""
        turn, timeout = next(self._splits), self._deadline if timeout is None else timeout
        if self._name is None:
            from offbeat.wire.groups import new_group

            return GroupPeers(new_group(ranks, self.group), ranks, timeout=timeout)
        return _connected(list(ranks), f"{self._name}/{turn}.{min(ranks)}", timeout, self._quiet)

    def renew_if_lost(self, meeting: str) -> None:
        """Connect again if the connection was closed, under a name that all peers agree on."""
        if self.group is not None:
            return
        assert self._name is not None
        name = f"{self._name}/{meeting}"

        # A store answers as late as its host does, and a request to it has no time limit of its own.
        seconds, what = self._patience.total_seconds() + SECONDS_BEYOND, f"ranks {self.ranks} could not connect again"
        within(seconds, lambda: self._wait_for_all(name), what)
        connect_again = functools.partial(_rendezvous, self.ranks, name, self._patience, self._quiet)
        self.group = within(seconds, connect_again, what)

    def _wait_for_all(self, name: str) -> None:
        """Wait until all peers are here, or one of them has given up."""
        store = PrefixStore(name, _torch.default_store())
        store.add("here", 1)
        end = time.monotonic() + self._patience.total_seconds()
        while True:
            given_up, all_here = store.check(["given up"]), store.add("here", 0) >= self.size
            if given_up or (not all_here and time.monotonic() > end):
                why = "another rank has given up" if given_up else "a rank did not come in time"
                raise ExchangeError(f"ranks {self.ranks} could not connect again: {why}")
            if all_here or ENDING.is_set():
                return
            time.sleep(SECONDS_BETWEEN)

    def give_up(self, meeting: str) -> None:
        """Tell peers that are still to come not to wait."""
        if self._name is not None and self.size > 1:
            name = f"{self._name}/{meeting}"
            with suppress(RuntimeError):
                within(
                    SECONDS_BEYOND,
                    lambda: PrefixStore(name, _torch.default_store()).set("given up", "1"),
                    "other ranks were not told",
                    at_end=True,
                )

    @property
    def _patience(self) -> timedelta:
        if self._deadline is None:
            return LONGEST
        return min(max(2 * self._deadline, SHORTEST), LONGEST)

    def close(self) -> None:
        """Close a connection of our own."""
        if self._name is not None:
            self.group = None  # gloo closes its sockets when the last reference is gone

    def _timed(self, options: Any) -> Any:
        if self._deadline is not None:
            options.timeout = self._deadline
        return options

    def _start(self, begin: Callable[[Any], Any], sent: int) -> Work:
        group = self.group
        if group is None:
            raise ExchangeError("the connection was closed after an exchange that failed")
        try:
            work = _Pending(self, begin(group))
        except RuntimeError as error:
            self.close()
            raise ExchangeError(f"a collective between ranks {self.ranks} could not be started: {error}") from error
        self.bytes_sent += sent
        return work


class _Pending:
    """A collective of a process group."""

    def __init__(self, peers: GroupPeers, work: Any) -> None:
        self._peers, self._work = peers, work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._peers.close()
            raise ExchangeError(
                f"an exchange between ranks {self._peers.ranks} failed or took longer than its deadline or the timeout "
                "of the process group: a rank may have stopped, or have made fewer steps. Nothing of it was used here; "
                f"with gloo the next exchange connects again. ({error})"
            ) from error


def is_gloo(group: Any) -> bool:
    """Whether a process group has no other backend than gloo."""
    return {part.split(":")[-1] for part in dist.get_backend_config(group).split(",")} == {"gloo"}


def connect(
    group: Any, *, token: str, timeout: timedelta | None = None, quiet: bool = False, background: bool = False
) -> GroupPeers:
    """Peers with a connection of their own, so that their collectives do not mix with those of the program.

    All ranks of the group call this together. With gloo the connection can be made anew after a failure; with other
    backends it is a process group of ``torch.distributed``.

    Args:
        token: a name that all ranks of the group agree on and that has not been used before.
        timeout: how long a collective may take; None is the group's own.
        background: whether a thread will use it. Then it is gloo's whatever the group's backend is: a second
            communicator of NCCL, used in no fixed order beside that of DDP, can block both for ever.
    """
    ranks = list(dist.get_process_group_ranks(group))
    timeout = _torch.timeout_of(group) if timeout is None else timeout
    if (background or is_gloo(group)) and _torch.has_store():
        return _connected(ranks, f"offbeat/{token}/{min(ranks)}", timeout, quiet)
    from offbeat.wire.groups import twin

    return GroupPeers(twin(group, group, "gloo" if background else None), ranks, timeout=timeout)


def _connected(ranks: list[int], name: str, timeout: timedelta | None, quiet: bool) -> GroupPeers:
    group = _rendezvous(ranks, name, timeout, quiet)
    return GroupPeers(group, ranks, name=name, timeout=timeout, quiet=quiet)


def _rendezvous(ranks: list[int], name: str, patience: timedelta | None, quiet: bool) -> Any:
    """A gloo connection between these ranks, which meet under this name in the store of the default group."""
    if len(ranks) == 1:
        return _Alone()
    store = PrefixStore(name, _torch.default_store())
    longest = patience if patience is not None else timedelta(minutes=30)
    try:
        with quiet_new_threads(*(("gloo",) if quiet else ())):
            group: Any = dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), longest)
        # A rank that is connected to all others does not know that they are. If it closed its connections now, theirs
        # would fail.
        group.barrier().wait()
    except RuntimeError as error:
        raise ExchangeError(f"ranks {ranks} could not connect: {error}") from error
    return group


class _Alone:
    """The connection of a rank with itself: there is nothing to exchange."""

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        outputs[0][0].copy_(inputs[0])
        return self

    def alltoall_base(self, out: Tensor, mine: Tensor, out_splits: Any, in_splits: Any, options: Any) -> Any:
        out.copy_(mine)
        return self

    def wait(self) -> None:
        pass


def _gather_objects(peers: Peers, mine: Any) -> list[Any]:
    """As :func:`torch.distributed.all_gather_object`, with the collectives of any peers."""
    buffer = io.BytesIO()
    torch.save(mine, buffer)
    data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(peers.device)
    sizes = torch.empty(peers.size, dtype=torch.int64, device=peers.device)
    peers.all_gather(sizes, torch.tensor([len(data)], device=peers.device)).wait()
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=peers.device)
    padded[: len(data)] = data
    out = torch.empty(peers.size * longest, dtype=torch.uint8, device=peers.device)
    peers.all_gather(out, padded).wait()
    rows = out.view(peers.size, longest).cpu()
    return [
        torch.load(io.BytesIO(bytes(row[:size].tolist())), weights_only=False)
        for row, size in zip(rows, sizes.tolist(), strict=True)
    ]
