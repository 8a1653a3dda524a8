"""Many replicas in one process: each runs the production code in a thread, over a network that is simulated.

Sums are taken in rank order, so results do not depend on timing. Every transfer also takes simulated time, by the
bandwidth and the latency of a link that each rank has to all others. A collective that fails closes the connection, as
with real processes, and a later exchange makes a new one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from offbeat.wire.connect import Connector
from offbeat.wire.network import Connection, Network
from offbeat.wire.peers import ExchangeError, Peers, Traffic, Work

__all__ = ["SimulatedConnector", "SimulatedPeers", "Simulation"]

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

    Ranks that call different collectives at the same time get an error, each of them.
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
        self.network = Network(self)  # for SimulatedPeers
        self._runs = itertools.count()

    @overload
    def run(
        self,
        function: Callable[Concatenate[int, SimulatedPeers, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Result]: ...

    @overload
    def run(
        self, function: Callable[..., Result], *args: Any, make: Callable[[], Any], seed: int = 0, **kwargs: Any
    ) -> list[Result]: ...

    def run(  # type: ignore[misc]  # the function may have an argument of the same name as one of ours
        self,
        function: Callable[..., Result],
        *args: Any,
        make: Callable[[], Any] | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> list[Result]:
        """Call ``function(rank, peers, *args, **kwargs)`` on every rank, each in a thread of its own.

        The threads share torch's random generator, so that ``torch.manual_seed(0); model = Net()`` inside ``function``
        can give ranks different models. Let ``make`` make them instead: it is called once for each rank, one after the
        other and each time with the same ``seed``, before the threads start. What it returns is the next argument:
        ``function(rank, peers, made, *args, **kwargs)``.

        Args:
            function: gets the rank and its :class:`SimulatedPeers`, which can be passed as the ``group`` of
                :class:`offbeat.Replica`.
            args: further arguments, the same for every rank.
            make: makes what each rank has of its own, such as a model.
            seed: torch's random generator is set to it before each call of ``make``. Afterwards the generator is as it
                was before.
            kwargs: further arguments by name.

        Returns:
            What the function has returned, by rank.

        Raises:
            BaseException: the first error of any rank.

        Example:
            >>> import torch, offbeat
            >>> def weight(rank, peers, model):
            ...     return model.weight.item()
            >>> a, b = offbeat.Simulation(2).run(weight, make=lambda: torch.nn.Linear(1, 1), seed=3)
            >>> a == b
            True
        """
        results: list[Any] = [None] * self.size  # Result, once all have returned
        errors: list[BaseException] = []
        # What a run before this one has left behind, because it failed or went on in the background, is not for this.
        name = str(next(self._runs))
        self.network.failed = False
        own: list[tuple[Any, ...]] = [()] * self.size
        if make is not None:
            with torch.random.fork_rng():
                for rank in range(self.size):
                    torch.manual_seed(seed)
                    own[rank] = (make(),)

        def main(rank: int) -> None:
            try:
                peers: Any = SimulatedPeers(self, rank, range(self.size), name)
                results[rank] = function(rank, peers, *own[rank], *args, **kwargs)
            except BaseException as error:
                errors.append(error)
                self.network.fail()

        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class SimulatedConnector(Connector):
    """Connects ranks of a simulation; see :class:`offbeat.wire.connect.GroupConnector` for the arguments."""

    def __init__(
        self, simulation: Simulation, me: int, sets: Sequence[Sequence[int]], name: str, traffic: Traffic | None = None
    ) -> None:
        self._simulation, self._me, self._name, self._traffic = simulation, me, name, traffic
        self._sets = [list(ranks) for ranks in sets]
        self.seconds = simulation.timeout

    def connect(self, patience: float | None = None) -> list[Peers]:
        """See :class:`Connector`."""
        usual = 2 * self._simulation.timeout
        seconds = usual if patience is None else min(patience, usual)
        name = self._simulation.network.meet((self._name, tuple(self._sets[0])), self._me, seconds)
        return [SimulatedPeers(self._simulation, self._me, ranks, name, self._traffic) for ranks in self._sets]


class SimulatedPeers:
    """Some ranks of a :class:`Simulation`, as one of them sees them. See :class:`offbeat.wire.peers.Peers`.

    Args:
        simulation: the network.
        me: this rank.
        ranks: all of these ranks, in order.
        name: that of the connection.
        traffic: also counts what is sent here.
        turns: counts collectives; peers that share a connection share it.
    """

    def __init__(
        self,
        simulation: Simulation,
        me: int,
        ranks: Sequence[int],
        name: str = "",
        traffic: Traffic | None = None,
        turns: Iterator[int] | None = None,
    ) -> None:
        self.simulation, self.ranks, self.name = simulation, list(ranks), name
        self.rank, self.size = self.ranks.index(me), len(self.ranks)
        self.group: Any = None
        self.bytes_sent = 0
        self.is_closed = False
        self._me, self._traffic = me, traffic
        self.turns = itertools.count() if turns is None else turns
        self._connection: Connection = (name, tuple(self.ranks))

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

        sent = 2 * (self.size - 1) * tensor.nbytes // self.size
        return self._post(("all_reduce", op, tensor.dtype, tensor.numel()), tensor.clone(), finish, sent)

    def all_gather(self, out: Tensor, mine: Tensor) -> Work:
        """Collect the flat tensors of all peers in ``out``, one after the other."""
        what = ("all_gather", mine.dtype, mine.numel())
        return self._post(what, mine.clone(), lambda parts: torch.cat(parts, out=out), (self.size - 1) * mine.nbytes)

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: list[int], in_splits: list[int]) -> Work:
        """Send the parts of a flat tensor to the peers, and receive theirs. Splits are numbers of elements."""
        pieces = list(torch.split(mine.clone(), in_splits))
        sent = mine.nbytes - pieces[self.rank].nbytes

        def finish(parts: list[Any]) -> None:
            torch.cat([part[self.rank] for part in parts], out=out)

        return self._post(("all_to_all", mine.dtype), pieces, finish, sent, (list(in_splits), list(out_splits)))

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Replace the tensor by that of the peer at position ``root``."""
        sent = (self.size - 1) * tensor.nbytes if self.rank == root else 0
        what = ("broadcast", f"from rank {self.ranks[root]}", tensor.dtype, tensor.numel())
        return self._post(what, tensor.clone(), lambda parts: tensor.copy_(parts[root]), sent)

    def close(self) -> None:
        """Close this rank's connection: collectives of the others fail instead of waiting for it."""
        self.is_closed = True
        self.simulation.network.break_off(self._connection)

    def _post(
        self,
        what: tuple[Any, ...],
        value: Any,
        finish: Callable[[list[Any]], Any],
        sent: int,
        splits: tuple[list[int], list[int]] | None = None,
    ) -> Work:
        if self.size == 1:
            return _Arrival(lambda: finish([value]))
        if self.is_closed:
            raise ExchangeError("the connection was closed after an exchange that failed")
        turn = next(self.turns)

        def wait() -> None:
            try:
                parts = self.simulation.network.collect(self._connection, turn)
                _check_same([part.what for part in parts], [part.splits for part in parts], self.ranks)
            except ExchangeError:
                self.close()
                raise
            finish([part.take() for part in parts])

        try:
            self.simulation.network.post(self._connection, turn, self._me, _Part(what, value, splits), sent)
        except ExchangeError:
            self.close()
            raise
        self.bytes_sent += sent
        if self._traffic is not None:
            self._traffic.sent += sent
        return _Arrival(wait)


def _check_same(calls: list[tuple[Any, ...]], splits: list[Any], ranks: Sequence[int]) -> None:
    """Raise on every rank unless all have called the same collective."""
    if all(call == calls[0] for call in calls):
        if splits[0] is None or list(zip(*(sizes for sizes, _ in splits), strict=True)) == [
            tuple(sizes) for _, sizes in splits
        ]:
            return
        calls = [(*call, "sends", sent, "expects", got) for call, (sent, got) in zip(calls, splits, strict=True)]
    where = "; ".join(f"rank {r}: {' '.join(map(str, call))}" for r, call in zip(ranks, calls, strict=True))
    raise ExchangeError(
        f"ranks have called collectives that do not fit together ({where}); call the same ones with tensors of the "
        "same dtype and size, in the same order, on every rank"
    )


class _Part:
    """What a rank hands in, and which collective it has called.

    On a GPU other ranks' streams wait until its own has written it: ranks exchange in the background on streams of
    their own, which have no order.
    """

    def __init__(self, what: tuple[Any, ...], value: Any, splits: tuple[list[int], list[int]] | None) -> None:
        self.what, self.splits, self._value = what, splits, value
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
