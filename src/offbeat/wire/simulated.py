"""Many replicas in one process: each runs the production code in a thread, over a network that is simulated.

Sums are taken in rank order, so results do not depend on timing. Every transfer also takes simulated time, by the
bandwidth and the latency of a link that each rank has to all others.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from offbeat.wire.peers import ExchangeError, Work

__all__ = ["SimulatedPeers", "Simulation"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Simulation:
    """A network of ``size`` ranks in this process.

    Args:
        size: the number of ranks.
        bandwidth: of each rank's link, in bytes a second; None is unlimited.
        latency: of each collective, in seconds.
        timeout: how long, in real seconds, a rank waits for the others.

    Attributes:
        seconds: by rank, how long its link has been busy, in simulated seconds.
        bytes_sent: by rank, how many bytes it has sent.

    Example:
        >>> import torch
        >>> from offbeat.wire.simulated import Simulation
        >>> def replica(rank, peers):
        ...     mine = torch.tensor([float(rank)])
        ...     peers.all_reduce(mine).wait()
        ...     return mine.item()
        >>> Simulation(3).run(replica)
        [3.0, 3.0, 3.0]
    """

    def __init__(
        self, size: int, *, bandwidth: float | None = None, latency: float = 0.0, timeout: float = 60.0
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"a simulation needs at least 1 rank, but got {size!r}")
        if bandwidth is not None and not bandwidth > 0:
            raise ValueError(f"bandwidth must be a positive number of bytes a second, or None, but got {bandwidth!r}")
        if not latency >= 0:
            raise ValueError(f"latency must be a number of seconds that is not negative, but got {latency!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, but got {timeout!r}")
        self.size, self.bandwidth, self.latency, self.timeout = size, bandwidth, latency, timeout
        self.seconds = [0.0] * size
        self.bytes_sent = [0] * size
        self._posted: dict[Any, dict[int, Any]] = {}
        self._taken: dict[Any, int] = {}
        self._arrival = threading.Condition()
        self._failed = False
        self._runs = itertools.count()

    def run(
        self,
        function: Callable[Concatenate[int, SimulatedPeers, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Result]:
        """Call ``function(rank, peers, *args, **kwargs)`` on every rank, each in a thread of its own.

        Args:
            function: gets the rank and its :class:`SimulatedPeers`, which can be passed as the ``group`` of
                :class:`offbeat.Replica`.
            args: further arguments, the same for every rank.
            kwargs: further arguments by name.

        Returns:
            What the function has returned, by rank.

        Raises:
            BaseException: the first error of any rank.
        """
        results: list[Any] = [None] * self.size  # Result, once all have returned
        errors: list[BaseException] = []
        # What a run before this one has left behind, because it failed or went on in the background, is not for this.
        name = str(next(self._runs))
        self._failed = False

        def main(rank: int) -> None:
            try:
                results[rank] = function(rank, SimulatedPeers(self, rank, range(self.size), name), *args, **kwargs)
            except BaseException as error:
                errors.append(error)
                with self._arrival:
                    self._failed = True
                    self._arrival.notify_all()

        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def post(self, key: Any, rank: int, value: Any, sent: int) -> None:
        """Hand in one rank's part of a collective. Called by :class:`SimulatedPeers`.

        Args:
            key: which collective it is; the same on every rank.
            rank: whose part it is.
            value: the part.
            sent: how many bytes this rank sends for it.
        """
        with self._arrival:
            self._posted.setdefault(key, {})[rank] = value
            self.bytes_sent[rank] += sent
            self.seconds[rank] += self.latency + (sent / self.bandwidth if self.bandwidth else 0.0)
            self._arrival.notify_all()

    def collect(self, key: Any, ranks: Sequence[int]) -> list[Any]:
        """Wait for the parts of all ranks. Called by :class:`SimulatedPeers`.

        Args:
            key: which collective it is.
            ranks: the ranks that take part.

        Returns:
            The parts, in the order of ``ranks``.
        """
        with self._arrival:
            there = self._arrival.wait_for(
                lambda: self._failed or len(self._posted.get(key, ())) == len(ranks), self.timeout
            )
            if self._failed or not there:
                why = "another rank failed" if self._failed else f"not all ranks came within {self.timeout} s"
                raise ExchangeError(f"a simulated collective between ranks {list(ranks)} failed: {why}")
            parts = [self._posted[key][rank] for rank in ranks]
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == len(ranks):
                del self._posted[key], self._taken[key]
            return parts


class SimulatedPeers:
    """Some ranks of a :class:`Simulation`, as one of them sees them. See :class:`offbeat.wire.peers.Peers`."""

    def __init__(self, simulation: Simulation, me: int, ranks: Sequence[int], name: str = "") -> None:
        self.simulation = simulation
        self.ranks = list(ranks)
        self.rank, self.size = self.ranks.index(me), len(self.ranks)
        self.group: Any = None
        self._me, self._name = me, name
        self._turns, self._splits = itertools.count(), itertools.count()

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def can_exchange(self, device: torch.device) -> bool:
        """Whether tensors on this device can be exchanged; all can."""
        return True

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        """Replace the tensor by the sum (or ``"max"``, ``"min"``) over all peers, taken in rank order."""
        two: Any = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]

        def finish(parts: list[Any]) -> None:
            total = parts[0].clone()
            for part in parts[1:]:
                two(total, part, out=total)
            tensor.copy_(total)

        return self._post(tensor.clone(), finish, 2 * (self.size - 1) * tensor.nbytes // self.size)

    def all_gather(self, out: Tensor, mine: Tensor) -> Work:
        """Collect the flat tensors of all peers in ``out``, one after the other."""
        return self._post(mine.clone(), lambda parts: torch.cat(parts, out=out), (self.size - 1) * mine.nbytes)

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: list[int], in_splits: list[int]) -> Work:
        """Send the parts of a flat tensor to the peers, and receive theirs. Splits are numbers of elements."""
        pieces = list(torch.split(mine.clone(), in_splits))
        sent = mine.nbytes - pieces[self.rank].nbytes
        return self._post(pieces, lambda parts: torch.cat([part[self.rank] for part in parts], out=out), sent)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Replace the tensor by that of the peer at position ``root``."""
        sent = (self.size - 1) * tensor.nbytes if self.rank == root else 0
        return self._post(tensor.clone(), lambda parts: tensor.copy_(parts[root]), sent)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Collect an object from every peer. Blocks."""
        found: list[Any] = []
        self._post(mine, found.extend, 0).wait()
        return found

    def split(self, ranks: Sequence[int], timeout: timedelta | None = None) -> SimulatedPeers:
        """Peers of some of these ranks only; all peers call this together."""
        name = f"{self._name}/{next(self._splits)}.{min(ranks)}"
        return SimulatedPeers(self.simulation, self._me, ranks, name)

    def renew_if_lost(self, meeting: str) -> None:
        """Nothing to connect."""

    def give_up(self, meeting: str) -> None:
        """Nobody comes late."""

    def close(self) -> None:
        """Nothing to close."""

    def _post(self, value: Any, finish: Callable[[list[Any]], Any], sent: int) -> Work:
        key = (self._name, tuple(self.ranks), next(self._turns))
        self.simulation.post(key, self._me, _Part(value), sent)
        return _Arrival(lambda: finish([part.take() for part in self.simulation.collect(key, self.ranks)]))


class _Part:
    """What a rank hands in. On a GPU other ranks' streams wait until its own has written it: ranks exchange in the
    background on streams of their own, which have no order."""

    def __init__(self, value: Any) -> None:
        self._value = value
        tensors = value if isinstance(value, list) else [value]
        self._on_gpu = [t for t in tensors if isinstance(t, Tensor) and t.is_cuda]
        self._written = [torch.cuda.current_stream(t.device).record_event() for t in self._on_gpu[:1]]

    def take(self) -> Any:
        """The value, for work on the current stream."""
        for written in self._written:
            torch.cuda.current_stream(self._on_gpu[0].device).wait_event(written)
        for t in self._on_gpu:
            t.record_stream(torch.cuda.current_stream(t.device))  # its memory is not used again before that work
        return self._value


class _Arrival:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
