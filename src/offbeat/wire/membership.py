"""``Membership``: who takes part in the rounds of a level, and how they meet and vote.

A hello is what a rank says before a round: a JSON object. This room reads one entry of it, ``round``: a list of numbers
that puts rounds in order, so that ranks that meet again after a failure can tell who is behind.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from offbeat.wire.connect import Connector
from offbeat.wire.peers import ExchangeError, Peers, gather, vote

__all__ = ["Meeting", "Membership", "StaticMembership"]

Hello = Mapping[str, Any]

#: How long ranks wait for one that has closed the connection before a round, before that round fails.
SECONDS_AT_ONCE = 5.0


@dataclass(frozen=True)
class Meeting:
    """Ranks that are about to exchange something.

    Attributes:
        hellos: for each replica those of its ranks; all ranks see the same.
        me: the place of this rank's replica among them.
        peers: the ranks of all replicas that hold the same shards as this one, one of each replica, in that order.
        everyone: the ranks of all replicas: those that vote.
    """

    hellos: tuple[tuple[Hello, ...], ...]
    me: int
    peers: Peers
    everyone: Peers

    def commit(self) -> None:
        """Return only if every rank of every replica has got this far; raises :class:`ExchangeError` otherwise."""
        vote(self.everyone)

    def gather(self, value: Any) -> list[Any]:
        """Collect a JSON value from every replica's rank with the same shards."""
        return gather(self.peers, value)

    def close(self) -> None:
        """Let the others' collectives of this round fail instead of waiting for this rank."""
        self.peers.close()
        self.everyone.close()


class Membership(Protocol):
    """Who takes part in the rounds of a level.

    Attributes:
        tolerates_failures: whether a round that fails is warned of only, because the next one is with whoever is left.
    """

    tolerates_failures: bool

    @property
    def rank(self) -> int:
        """Who this rank is in errors and hellos."""

    @property
    def size(self) -> int:
        """The number of replicas, as far as this rank knows."""

    @property
    def peers(self) -> Peers | None:
        """The standing connection, if there is one."""

    def meet(self, hello: Hello) -> Meeting:
        """Exchange hellos with everybody who takes part; connect first if need be.

        Raises:
            ExchangeError: not all came in time, or the others are at a later round.
        """

    def close(self) -> None:
        """Close the connections."""


class StaticMembership:
    """Ranks that are fixed for the run, of a process group or of a simulation.

    Args:
        connector: connects them. Its first set of ranks is everyone; a second one, for sharded replicas, the ranks that
            hold the same shards as this one.
    """

    tolerates_failures = False

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._connections = connector.connect()
        self._is_new = False

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.peers.ranks[self.peers.rank]

    @property
    def size(self) -> int:
        """The number of replicas."""
        return self.peers.size

    @property
    def peers(self) -> Peers:
        """The ranks that hold the same shards as this one, one of each replica."""
        return self._connections[-1]

    def meet(self, hello: Hello) -> Meeting:
        """See :class:`Membership`.

        After a failure ranks may meet at different rounds. Whoever is behind has missed that round; the others wait for
        it at theirs.
        """
        if self._connector.renews and any(peers.is_closed for peers in self._connections):
            self._connect_again()
        while True:
            rows = self._gather({"replica": self.peers.rank, "hello": dict(hello)})
            rounds = [list(row["hello"]["round"]) for row in rows]
            if not self._is_new or rounds.count(rounds[0]) == len(rounds):
                break
            if list(hello["round"]) < max(rounds):
                raise ExchangeError(
                    "this round was missed: the other ranks had connected again at a later one. Nothing of it was used "
                    "here"
                )
        self._is_new = False
        everyone, peers = self._connections[0], self._connections[-1]
        hellos = tuple(tuple(row["hello"] for row in rows if row["replica"] == i) for i in range(peers.size))
        return Meeting(hellos, peers.rank, peers, everyone)

    def _gather(self, envelope: Mapping[str, Any]) -> list[Any]:
        """What every rank says.

        If another rank has closed the connection since the last round, that shows here, before anything of this round
        has been exchanged. So ranks connect again at once: those that average gradients with that rank would otherwise
        go on, and wait for it while it waits for them. A rank that does not come in time is not waited for once more.
        """
        start = time.monotonic()
        try:
            return gather(self._connections[0], envelope)
        except ExchangeError:
            if not self._connector.renews or time.monotonic() - start > 0.5 * self._connector.seconds:
                raise
        self._connect_again(SECONDS_AT_ONCE)
        return gather(self._connections[0], envelope)

    def _connect_again(self, patience: float | None = None) -> None:
        self.close()
        self._connections = self._connector.connect(patience)
        self._is_new = True

    def close(self) -> None:
        """Close the connections."""
        for peers in self._connections:
            peers.close()
