"""The network inside a simulation: where ranks, which are threads, leave their parts of collectives for each other.

Everything happens under one lock, so that either all ranks get the result of a collective or none that has not got it
yet: a rank that gives up breaks the connection before another can bring the part that was missing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from offbeat.wire.peers import ExchangeError

if TYPE_CHECKING:
    from offbeat.wire.simulated import Simulation

__all__ = ["Connection", "Network"]

#: The name of a connection and its ranks.
Connection = tuple[str, tuple[int, ...]]


class Network:
    """Connections between the ranks of a simulation.

    Attributes:
        failed: whether a rank has failed, so that nobody waits for it.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._of = simulation
        self.failed = False
        self._posted: dict[tuple[Connection, int], dict[int, Any]] = {}
        self._taken: dict[tuple[Connection, int], int] = {}
        self._broken: set[Connection] = set()
        self._waiting: dict[Connection, set[int]] = {}
        self._meetings: dict[Connection, int] = {}
        self._arrival = threading.Condition()

    def fail(self) -> None:
        """Let all ranks fail."""
        with self._arrival:
            self.failed = True
            self._arrival.notify_all()

    def post(self, connection: Connection, turn: int, rank: int, value: Any, sent: int) -> None:
        """Hand in one rank's part of a collective.

        Args:
            connection: what it goes over.
            turn: the number of the collective on this connection, the same on every rank.
            rank: whose part it is.
            value: the part.
            sent: how many bytes this rank sends for it.
        """
        with self._arrival:
            if connection in self._broken:
                raise _failure(connection, "another rank has closed the connection")
            self._posted.setdefault((connection, turn), {})[rank] = value
            self._of.bytes_sent[rank] += sent
            self._of.seconds[rank] += self._of.latency + (sent / self._of.bandwidth if self._of.bandwidth else 0.0)
            self._arrival.notify_all()

    def collect(self, connection: Connection, turn: int) -> list[Any]:
        """Wait for the parts of all ranks.

        Args:
            connection: what the collective goes over.
            turn: its number.

        Returns:
            The parts, in the order of the connection's ranks.
        """
        key, ranks = (connection, turn), connection[1]
        with self._arrival:
            self._arrival.wait_for(
                lambda: self.failed or connection in self._broken or len(self._posted.get(key, ())) == len(ranks),
                self._of.timeout,
            )
            if self.failed:
                raise _failure(connection, "another rank failed")
            if len(self._posted.get(key, ())) < len(ranks):
                if connection in self._broken:
                    raise _failure(connection, "another rank has closed the connection")
                self.break_off(connection)  # before a rank that comes late can find all parts there, and go on
                raise _failure(connection, f"not all ranks came within {self._of.timeout} s")
            parts = [self._posted[key][rank] for rank in ranks]
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == len(ranks):
                del self._posted[key], self._taken[key]
            return parts

    def break_off(self, connection: Connection) -> None:
        """Let collectives that are not complete fail on every rank."""
        with self._arrival:
            self._broken.add(connection)
            for key in [key for key in self._posted if key[0] == connection]:
                if len(self._posted[key]) < len(connection[1]):
                    del self._posted[key]
            self._arrival.notify_all()

    def meet(self, connection: Connection, rank: int, seconds: float) -> str:
        """Wait until all ranks want to connect. Returns the name of their new connection.

        Args:
            connection: what the ranks call it, and who they are.
            rank: who asks.
            seconds: how long to wait.
        """
        with self._arrival:
            waiting = self._waiting.setdefault(connection, set())
            turn = self._meetings.get(connection, 0)
            waiting.add(rank)
            if len(waiting) == len(connection[1]):
                self._meetings[connection] = turn + 1
                waiting.clear()
                self._arrival.notify_all()
            self._arrival.wait_for(lambda: self.failed or self._meetings.get(connection, 0) > turn, seconds)
            if self._meetings.get(connection, 0) == turn:
                waiting.discard(rank)
                why = "another rank failed" if self.failed else "a rank did not come in time"
                raise ExchangeError(f"ranks {list(connection[1])} could not connect again: {why}")
            return f"{connection[0]}#{turn}"

    def arrive(self, connection: Connection, rank: int, seconds: float) -> bool:
        """Whether all ranks call this under the same name within some seconds of each other."""
        with self._arrival:
            here = self._waiting.setdefault(connection, set())
            here.add(rank)
            self._arrival.notify_all()
            return self._arrival.wait_for(lambda: len(here) == len(connection[1]), seconds)


def _failure(connection: Connection, why: str) -> ExchangeError:
    return ExchangeError(f"a simulated collective between ranks {list(connection[1])} failed: {why}")
