"""``Elastic``: replicas that come and go. Who takes part in a round is whoever the lighthouse lists.

The quorum is the hello: each replica hands its hello to the lighthouse when it asks, and gets everybody's back. If all
still hold the same connection it is used again; else they connect under a name made of fresh random numbers, in the
store of the first of them. So neither a restarted lighthouse nor a request that timed out can mix up two connections.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.wire.connect import Alone
from offbeat.wire.lighthouse import Lighthouse, Member, Quorum, TorchftLighthouse
from offbeat.wire.limit import ENDING, ExchangeError
from offbeat.wire.membership import Meeting
from offbeat.wire.peers import GroupPeers, Peers, Traffic
from offbeat.wire.transfer import StateServer, fetch, own_host

__all__ = ["Elastic", "ElasticMembership"]

#: The longest hello that is read.
LONGEST = 1 << 20
#: How long the lighthouse may take to list a replica that waits for the next round of the others.
SECONDS_TO_JOIN = 3600.0
#: Before the lighthouse has answered for the first time.
NEVER = 1 << 60
#: How long a replica that has not made a step yet counts as alive.
SECONDS_OF_FIRST_STEP = 600.0


@dataclass(frozen=True)
class Elastic:
    """Replicas that come and go, for ``group=`` of :class:`offbeat.LocalSGD`, :class:`offbeat.DiLoCo` and the like.

    Each replica is a program of its own, with one rank. They find each other through a lighthouse (``offbeat
    lighthouse``), and a replica that is started later, or again, gets everything from one that trains.

    Args:
        address: ``host:port`` of the lighthouse.
        replica: a name for this replica, in errors and reports; by default its host and process.
        replicas: what ``optimizer.replicas`` says throughout the run; by default the number in the last round.
        min_replicas: how many must be there for a round. With fewer, a round waits for ``patience`` and then fails.
        patience: how many seconds a round waits for the lighthouse and for enough replicas.
        carry: objects with ``state_dict()`` and ``load_state_dict()``, such as a scheduler, whose state a replica that
            joins takes over, by name.

    Example:
        >>> import offbeat
        >>> group = offbeat.Elastic("lighthouse:29510", replica="site-a", min_replicas=2)
        >>> group.min_replicas
        2

    Limits: replicas of several ranks are refused. With an overlapped inner optimizer a newcomer takes over parameters
    that are one step ahead of the clock, because they move in backward. What crosses the network is neither encrypted
    nor authenticated.
    """

    address: str
    replica: str | None = None
    replicas: int | None = None
    min_replicas: int = 1
    patience: float = 60.0
    carry: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        host, _, port = str(self.address).rpartition("://")[2].rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"address must be 'host:port' of a lighthouse, but got {self.address!r}")
        for name in ("replicas", "min_replicas"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a number of replicas, at least 1, but got {value!r}")
        if isinstance(self.patience, bool) or not self.patience > 0:
            raise ValueError(f"patience must be a positive number of seconds, but got {self.patience!r}")
        for name, carried in (self.carry or {}).items():
            if not hasattr(carried, "state_dict") or not hasattr(carried, "load_state_dict"):
                raise TypeError(f"carry[{name!r}] has no state_dict() and load_state_dict(): {carried!r}")


class ElasticMembership:
    """This replica among those that the lighthouse lists. See :class:`~offbeat.wire.membership.Membership`.

    Args:
        options: how to find the others.
        run: a name for what is trained, such as a digest of its parameters' names and shapes; others are refused.
        deadline: how many seconds a collective may take.
        traffic: counts what is sent.
        lighthouse: a lighthouse of another kind, for tests.

    Attributes:
        newest_round: the newest round of the others, after this replica has missed it.
        quorum: the last quorum.
        founders: how many replicas have begun together, if this one did not join others that train.
        others_have_been: whether there were replicas before these founders, which are gone.
    """

    #: A failed round is warned of, and training goes on: the next round is with whoever is there then.
    tolerates_failures = True

    def __init__(
        self,
        options: Elastic,
        run: str,
        *,
        deadline: float | None,
        traffic: Traffic,
        lighthouse: Lighthouse | None = None,
    ) -> None:
        self._options, self._run, self._traffic = options, run, traffic
        self._timeout = timedelta(seconds=deadline if deadline is not None else 60.0)
        self._lighthouse = TorchftLighthouse(options.address) if lighthouse is None else lighthouse
        host = own_host(options.address)
        label = options.replica or host
        self.name = f"{label}:{uuid.uuid4().hex[:12]}"
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)  # type: ignore[attr-defined]
        self._store_address = f"{host}:{self._store.port}"
        self.server = StateServer(host, run)
        self._peers: Peers | None = None
        self._held = ""
        self._members: tuple[str, ...] = ()
        self.newest_round: list[int] | None = None
        self.quorum: Quorum | None = None
        self.founders, self.others_have_been = 0, False
        self._first = NEVER
        self._pulse = _Pulse(self._lighthouse, self.name, self._timeout.total_seconds())

    @property
    def rank(self) -> int:
        """The place of this replica among the members of the last quorum."""
        names = [member.name for member in self.quorum.members] if self.quorum is not None else []
        return names.index(self.name) if self.name in names else 0

    @property
    def size(self) -> int:
        """At least 2: who takes part is known only when a round begins."""
        return max(2, 0 if self._peers is None else self._peers.size)

    @property
    def peers(self) -> Peers | None:
        """The standing connection."""
        return self._peers

    def stepped(self) -> None:
        """Note that training goes on; without it the heartbeat stops after a while."""
        self._pulse.stepped()

    def join(self) -> Any:
        """Ask the others, before the first step. Returns the state of one that trains, or None if nobody does yet."""
        end = time.monotonic() + self._options.patience
        while True:
            quorum = self._ask({"joining": True}, SECONDS_TO_JOIN, end)
            training = [member for member in quorum.members if not member.says.get("joining")]
            if training:
                state = self._fetch(training)
                self._pulse.begin()
                return state
            self.founders = len(quorum.members)
            if self.founders >= self._options.min_replicas:
                # A lighthouse that has just been started gives its first quorum the number 1.
                first = min(int(member.says["first"]) for member in quorum.members)
                self.others_have_been = min(first, quorum.number) > 1
                self._pulse.begin()
                return None
            if time.monotonic() > end:
                raise ExchangeError(
                    f"only {self.founders} of at least {self._options.min_replicas} replicas came within "
                    f"{self._options.patience:g} s; start the others, or lower min_replicas"
                )
            time.sleep(0.2)

    def _fetch(self, training: list[Member]) -> Any:
        member, *others = training
        try:
            return fetch(str(member.says.get("server", "")), self._run)
        except ExchangeError:  # it may have gone meanwhile
            if not others:
                raise
            return self._fetch(others)

    def meet(self, hello: Mapping[str, Any]) -> Meeting:
        """See :class:`~offbeat.wire.membership.Membership`."""
        end = time.monotonic() + self._options.patience
        held = "" if self._peers is None or self._peers.is_closed else self._held
        nonce = uuid.uuid4().hex
        self._pulse.asks(True)
        try:
            while True:
                says = {"hello": dict(hello), "nonce": nonce, "held": held}
                quorum = self._ask(says, SECONDS_TO_JOIN, end)
                members = self._members_at_this_round(quorum, list(hello["round"]))
                if len(members) >= self._options.min_replicas:
                    return self._meeting(members)
                if time.monotonic() > end:
                    raise ExchangeError(
                        f"only {len(members)} of at least {self._options.min_replicas} replicas came to this round"
                    )
                time.sleep(0.2)
        finally:
            self._pulse.asks(False)

    def _members_at_this_round(self, quorum: Quorum, round_: list[int]) -> list[Member]:
        """The members of a quorum that ask for the newest round; raises if this replica asks for an older one."""
        training = [member for member in quorum.members if not member.says.get("joining")]
        rounds = {member.name: list(member.says["hello"]["round"]) for member in training}
        newest = max(rounds.values())
        if round_ < newest:
            self.newest_round = newest
            raise ExchangeError(
                f"this round was missed: the other replicas are at the one after step {newest[0]} already. What this "
                "replica has learned goes into its next round"
            )
        return [member for member in training if rounds[member.name] == newest]

    def _ask(self, says: Mapping[str, Any], seconds: float, end: float) -> Quorum:
        """Ask the lighthouse until it answers or patience ends."""
        says = {**says, "run": self._run, "server": self.server.address, "first": self._first}
        while True:
            try:
                # As a string: what it may hold is then exactly what JSON may.
                quorum = self._lighthouse.ask(self.name, self._store_address, {"offbeat": json.dumps(says)}, seconds)
                break
            except ExchangeError:
                if time.monotonic() > end or ENDING.is_set():
                    raise
                time.sleep(0.5)
        self.quorum = Quorum(quorum.number, tuple(self._read(member) for member in quorum.members))
        self._first = min(self._first, quorum.number)
        return self.quorum

    def _read(self, member: Member) -> Member:
        text = member.says.get("offbeat", "")
        if not isinstance(text, str) or len(text) > LONGEST:
            raise ExchangeError(f"the replica {member.name!r} did not say anything that offbeat understands")
        try:
            says = json.loads(text)
        except ValueError as error:
            raise ExchangeError(f"the replica {member.name!r} did not send JSON: {error}") from error
        if not isinstance(says, dict) or says.get("run") != self._run:
            run = says.get("run") if isinstance(says, dict) else None
            raise ExchangeError(
                f"the replica {member.name!r} trains something else (run {run!r}, here {self._run!r}): another model, "
                "or other options; give each run a lighthouse of its own"
            )
        return Member(member.name, member.store, says)

    def _meeting(self, members: list[Member]) -> Meeting:
        names = tuple(member.name for member in members)
        held = {str(member.says["held"]) for member in members}
        if self._peers is None or held != {self._held} or not self._held or names != self._members:
            self._connect(members)
        assert self._peers is not None
        hellos = tuple((member.says["hello"],) for member in members)
        return Meeting(hellos, self._peers.rank, self._peers, self._peers)

    def _connect(self, members: list[Member]) -> None:
        """Connect under a name made of fresh random numbers, in the store of the first member."""
        self.close_connection()
        names = [member.name for member in members]
        text = "/".join(str(member.says["nonce"]) for member in members)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        me = names.index(self.name)
        if len(members) == 1:
            group: Any = Alone()
        else:
            host, _, port = members[0].store.rpartition(":")
            try:
                store = dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)  # type: ignore[attr-defined]
                group = dist.ProcessGroupGloo(PrefixStore(name, store), me, len(members), self._timeout)
                group.barrier().wait()
            except (RuntimeError, ValueError) as error:
                raise ExchangeError(f"the replicas {', '.join(names)} could not connect: {error}") from error
        self._peers = GroupPeers(
            group, list(range(len(members))), timeout=self._timeout, owned=True, traffic=self._traffic, me=me
        )
        self._held, self._members = name, tuple(names)

    def close_connection(self) -> None:
        """Close the connection; the next round makes a new one."""
        if self._peers is not None:
            self._peers.close()
        self._peers, self._held = None, ""

    def close(self) -> None:
        """Leave: no more heartbeats, and nobody is handed the state."""
        self._pulse.stop()
        self.server.close()
        self.close_connection()


class _Pulse:
    """Heartbeats, as long as training goes on.

    Asking the lighthouse counts as a heartbeat. Beside that they stop when no step has returned for a while, so that
    the others do not wait for a process that hangs.
    """

    def __init__(self, lighthouse: Lighthouse, name: str, deadline: float) -> None:
        self._lighthouse, self._name, self._deadline = lighthouse, name, deadline
        self._steps: deque[float] = deque(maxlen=101)
        self._last, self._asks, self._takes_part = time.monotonic(), False, False
        self._over = threading.Event()
        threading.Thread(target=self._run, name="offbeat-heartbeat", daemon=True).start()

    def begin(self) -> None:
        self._takes_part = True
        self._last = time.monotonic()

    def stepped(self) -> None:
        now = time.monotonic()
        self._steps.append(now - self._last)
        self._last = now

    def asks(self, is_asking: bool) -> None:
        self._asks = is_asking
        self._last = time.monotonic()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(1.0) and not ENDING.is_set():
            # The first step may compile for long.
            usual = 10 * statistics.median(self._steps) if self._steps else SECONDS_OF_FIRST_STEP
            is_alive = self._asks or time.monotonic() - self._last < max(self._deadline, usual)
            if self._takes_part and is_alive:
                self._lighthouse.beat(self._name)


class AloneInside:
    """The ranks of a replica of one rank, which needs no process group. See :class:`~offbeat.wire.peers.Peers`."""

    def __init__(self, traffic: Traffic) -> None:
        self._peers = GroupPeers(Alone(), [0], owned=True, traffic=traffic, me=0)
        self.group: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peers, name)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")
