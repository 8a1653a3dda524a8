"""``Peers``: one connected set of ranks, and the few collectives that offbeat needs between them.

:class:`GroupPeers` works over a process group of ``torch.distributed`` or over a gloo connection of its own;
:mod:`offbeat.wire.simulated` has peers that are threads of one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from offbeat import _torch
from offbeat.wire.limit import ExchangeError

__all__ = ["ExchangeError", "GroupPeers", "Peers", "Traffic", "Work", "gather", "vote"]

#: Bytes of a message of :func:`gather` that travel in one collective. Longer ones take a second collective.
SHORT = 2048
#: The longest message of :func:`gather`: far more than any of ours, and little enough to be held in memory.
LONGEST = 64 << 20


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until it is done; a second call returns at once. Raises :class:`ExchangeError` if it failed."""


class Traffic:
    """Counts the bytes that a rank has handed to collectives for others.

    For an all-reduce of :math:`n` ranks that is :math:`2 (n-1)/n` times the tensor, as in a ring; for an all-gather,
    and on the root of a broadcast, :math:`n-1` times; for an all-to-all what goes to others.
    """

    def __init__(self, sent: int = 0) -> None:
        self.sent = sent


class Peers(Protocol):
    """Some ranks in a fixed order. All of them call the same collectives in the same order; collectives return at once.

    Attributes:
        rank: the position of this process among the peers.
        size: the number of peers.
        ranks: their global ranks.
        device: a device whose tensors can be exchanged, preferably the CPU.
        bytes_sent: the bytes sent over this connection; see :class:`Traffic`.
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
    def bytes_sent(self) -> int: ...  # noqa: D102
    @property
    def is_closed(self) -> bool: ...  # noqa: D102

    def can_exchange(self, device: torch.device) -> bool:
        """Whether tensors on this device can be exchanged without copying them to :attr:`device`."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        """Replace the tensor by the sum (or ``"max"``, ``"min"``) over all peers."""

    def all_gather(self, out: Tensor, mine: Tensor) -> Work:
        """Collect the flat tensors of all peers in ``out``, one after the other."""

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: list[int], in_splits: list[int]) -> Work:
        """Send the parts of a flat tensor to the peers, and receive theirs. Splits are numbers of elements."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Replace the tensor by that of the peer at position ``root``."""

    def close(self) -> None:
        """Close the connection: other peers' collectives fail instead of waiting for this one."""


class GroupPeers:
    """The ranks of a process group.

    Args:
        group: a process group, or a backend that is not registered with ``torch.distributed``.
        ranks: its global ranks.
        timeout: how long a collective may take; None is the group's own.
        owned: whether ``group`` is a gloo connection that :meth:`close` may close.
        traffic: also counts what is sent here.
        me: this process among ``ranks``; by default its global rank.
    """

    def __init__(
        self,
        group: Any,
        ranks: Sequence[int],
        *,
        timeout: timedelta | None = None,
        owned: bool = False,
        traffic: Traffic | None = None,
        me: int | None = None,
    ) -> None:
        self.group, self.ranks = group, list(ranks)
        self.rank, self.size = self.ranks.index(dist.get_rank() if me is None else me), len(self.ranks)
        self.bytes_sent = 0
        self._timeout, self._owned, self._traffic = timeout, owned, traffic

    @property
    def device(self) -> torch.device:
        """A device whose tensors can be exchanged, preferably the CPU."""
        kinds = ["cpu"] if self._owned else _torch.device_types(self.group)
        if not kinds or "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds[0], torch.accelerator.current_device_index())

    @property
    def is_closed(self) -> bool:
        """Whether the connection has been closed."""
        return self.group is None

    def can_exchange(self, device: torch.device) -> bool:
        """Whether tensors on this device can be exchanged."""
        kinds = ["cpu"] if self._owned else _torch.device_types(self.group)
        return not kinds or device.type in kinds

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        """Replace the tensor by the sum (or ``"max"``, ``"min"``) over all peers."""
        options = self._timed(dist.AllreduceOptions())
        options.reduceOp = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        sent = 2 * (self.size - 1) * tensor.nbytes // self.size
        return self._begin(lambda group: group.allreduce([tensor], options), sent)

    def all_gather(self, out: Tensor, mine: Tensor) -> Work:
        """Collect the flat tensors of all peers in ``out``, one after the other."""
        parts = list(out.view(self.size, -1).unbind())
        options = self._timed(AllgatherOptions())
        return self._begin(lambda group: group.allgather([parts], [mine], options), (self.size - 1) * mine.nbytes)

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: list[int], in_splits: list[int]) -> Work:
        """Send the parts of a flat tensor to the peers, and receive theirs. Splits are numbers of elements."""
        options = self._timed(dist.AllToAllOptions())
        sent = (mine.numel() - in_splits[self.rank]) * mine.itemsize
        return self._begin(lambda group: group.alltoall_base(out, mine, out_splits, in_splits, options), sent)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Replace the tensor by that of the peer at position ``root``."""
        options = self._timed(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = root, 0
        sent = (self.size - 1) * tensor.nbytes if self.rank == root else 0
        return self._begin(lambda group: group.broadcast([tensor], options), sent)

    def close(self) -> None:
        """Close a connection of our own; gloo closes its sockets when the last reference is gone."""
        if self._owned:
            self.group = None

    def _timed(self, options: Any) -> Any:
        if self._timeout is not None:
            options.timeout = self._timeout
        return options

    def _begin(self, begin: Callable[[Any], Any], sent: int) -> Work:
        group = self.group
        if group is None:
            raise ExchangeError("the connection was closed after an exchange that failed")
        try:
            work = _Pending(self, begin(group))
        except RuntimeError as error:
            self.close()
            raise ExchangeError(f"a collective between ranks {self.ranks} could not be started: {error}") from error
        self.bytes_sent += sent
        if self._traffic is not None:
            self._traffic.sent += sent
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


def gather(peers: Peers, value: Any) -> list[Any]:
    """Collect a JSON value (numbers, strings, lists, dictionaries) from every peer. Blocks.

    A short message takes one collective. What arrives is parsed as JSON and as nothing else.
    """
    if peers.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)
    if len(data) > LONGEST:
        raise ValueError(f"a message of {len(data)} bytes is longer than ranks send each other ({LONGEST} bytes)")
    rows = _gather_padded(peers, data, SHORT)
    longest = max(length for length, _ in rows)
    if longest > SHORT:
        if longest > LONGEST:
            raise ExchangeError(f"a rank announced a message of {longest} bytes, more than the {LONGEST} allowed")
        rows = _gather_padded(peers, data, longest)
    try:
        return [json.loads(bytes(row[:length].tolist())) for length, row in rows]
    except ValueError as error:
        raise ExchangeError(f"a rank sent something that is not JSON: {error}") from error


def _gather_padded(peers: Peers, data: Tensor, room: int) -> list[tuple[int, Tensor]]:
    """The length and the first ``room`` bytes of every peer's message."""
    message = torch.zeros(8 + room, dtype=torch.uint8)
    message[:8] = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
    part = data[:room]
    message[8 : 8 + len(part)] = part
    out = torch.empty(peers.size * (8 + room), dtype=torch.uint8, device=peers.device)
    peers.all_gather(out, message.to(peers.device)).wait()
    rows = out.cpu().view(peers.size, -1)
    return [(int(row[:8].clone().view(torch.int64)), row[8:]) for row in rows]


def vote(peers: Peers) -> None:
    """Return only if every peer has got this far."""
    if peers.size > 1:
        flag = torch.ones(1, dtype=torch.int64, device=peers.device)
        peers.all_reduce(flag, "min").wait()
