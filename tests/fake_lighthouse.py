"""A lighthouse in this process that forms quorums as torchft does: of all that are alive, or of most in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from offbeat.wire.lighthouse import Member, Quorum
from offbeat.wire.peers import ExchangeError

__all__ = ["FakeLighthouse"]


class FakeLighthouse:
    """Lists replicas of this process.

    Args:
        join: how many seconds those that have asked wait for others that are alive.
        gone: after how many seconds without a heartbeat a replica counts as gone.
    """

    def __init__(self, join: float = 1.0, gone: float = 3.0) -> None:
        self.join, self.gone = join, gone
        self.is_down = False
        self._changed = threading.Condition()
        self._asking: dict[str, tuple[float, Member]] = {}
        self._beats: dict[str, float] = {}
        self._answers: dict[str, Quorum] = {}
        self._last: tuple[str, ...] = ()
        self._number = 0

    def __call__(self, address: str) -> FakeLighthouse:
        """Take the place of the class that connects to a lighthouse."""
        return self

    def beat(self, name: str) -> None:
        with self._changed:
            self._beats[name] = time.monotonic()

    def ask(self, name: str, store: str, says: Mapping[str, Any], seconds: float) -> Quorum:
        if self.is_down:
            raise ExchangeError("the lighthouse is down")
        end = time.monotonic() + seconds
        with self._changed:
            self._asking[name] = (time.monotonic(), Member(name, store, dict(says)))
            while name not in self._answers:
                self._beats[name] = time.monotonic()
                self._form()
                if name in self._answers:
                    break
                if self.is_down or time.monotonic() > end:
                    self._asking.pop(name, None)
                    raise ExchangeError("the lighthouse did not answer")
                self._changed.wait(0.05)
            return self._answers.pop(name)

    def _form(self) -> None:
        now = time.monotonic()
        alive = {name for name, at in self._beats.items() if now - at < self.gone}
        asking = {name for name in self._asking if name in alive}
        if not asking or 2 * len(asking) <= len(alive):
            return
        if asking != alive and now - min(self._asking[name][0] for name in asking) < self.join:
            return
        names = tuple(sorted(asking))
        self._number += names != self._last
        self._last = names
        quorum = Quorum(self._number, tuple(self._asking.pop(name)[1] for name in names))
        self._answers.update(dict.fromkeys(names, quorum))
        self._changed.notify_all()
