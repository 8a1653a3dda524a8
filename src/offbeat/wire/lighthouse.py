"""What offbeat uses of torchft: its lighthouse, through ``torchft.coordination`` alone. No other file knows torchft.

The lighthouse lists the replicas that ask at about the same time, and hands each of them what the others have said.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from offbeat.wire.peers import ExchangeError

__all__ = ["Lighthouse", "Member", "Quorum", "TorchftLighthouse", "serve"]

_MISSING = "needs the lighthouse of torchft, which is not installed: pip install 'torchft>=0.2'"


@dataclass(frozen=True)
class Member:
    """A replica that has asked.

    Attributes:
        name: its name and a number that is new at each start.
        store: the address of its store.
        says: what it has said.
    """

    name: str
    store: str
    says: Mapping[str, Any]


@dataclass(frozen=True)
class Quorum:
    """The replicas that have asked together.

    Attributes:
        number: grows whenever who takes part has changed; 1 is the first one of this lighthouse.
        members: in an order that all of them see.
    """

    number: int
    members: tuple[Member, ...]


class Lighthouse(Protocol):
    """Lists replicas."""

    def ask(self, name: str, store: str, says: Mapping[str, Any], seconds: float) -> Quorum:
        """Wait until the lighthouse lists this replica with others; raises :class:`ExchangeError` if it does not."""

    def beat(self, name: str) -> None:
        """Say that this replica is alive. Never raises."""


class TorchftLighthouse:
    """A client of torchft's lighthouse server.

    Args:
        address: ``host:port`` of the server.
    """

    def __init__(self, address: str) -> None:
        self._address = address if "://" in address else f"http://{address}"
        self._api = _coordination("group=offbeat.Elastic(...)")
        self._client: Any = None

    def ask(self, name: str, store: str, says: Mapping[str, Any], seconds: float) -> Quorum:
        """See :class:`Lighthouse`."""
        try:
            quorum = self._connected().quorum(
                replica_id=name,
                timeout=timedelta(seconds=seconds),
                address="",
                store_address=store,
                step=0,
                world_size=1,
                shrink_only=False,
                data=dict(says),
            )
        except Exception as error:  # torchft raises several kinds, and the server may have been restarted
            self._client = None
            raise ExchangeError(f"the lighthouse at {self._address} did not list this replica: {error}") from error
        members = sorted(quorum.participants, key=lambda member: str(member.replica_id))
        return Quorum(
            int(quorum.quorum_id),
            tuple(Member(str(m.replica_id), str(m.store_address), dict(m.data or {})) for m in members),
        )

    def beat(self, name: str) -> None:
        """See :class:`Lighthouse`."""
        with suppress(Exception):
            self._connected().heartbeat(name, timeout=timedelta(seconds=2))

    def _connected(self) -> Any:
        if self._client is None:
            self._client = self._api.LighthouseClient(self._address, connect_timeout=timedelta(seconds=5))
        return self._client


def serve(bind: str, *, min_replicas: int, join_seconds: float, heartbeat_seconds: float) -> Any:
    """Start a lighthouse server in this process, and return it. It runs until ``shutdown()``.

    Args:
        bind: the address to listen on, ``host:port``.
        min_replicas: how many replicas must ask before any is listed.
        join_seconds: how long those that have asked wait for others that are alive.
        heartbeat_seconds: after how long without a heartbeat a replica counts as gone.
    """
    return _coordination("offbeat lighthouse").LighthouseServer(
        bind=bind,
        min_replicas=min_replicas,
        join_timeout_ms=int(join_seconds * 1000),
        heartbeat_timeout_ms=int(heartbeat_seconds * 1000),
    )


def _coordination(who: str) -> Any:
    try:
        return importlib.import_module("torchft.coordination")
    except ImportError as error:
        raise ImportError(f"{who} {_MISSING} ({error})") from error
