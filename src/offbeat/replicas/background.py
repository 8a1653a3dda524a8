"""Exchanges rounds in a background thread, one after the other.

Rounds are begun in the order of the schedule, which is the same on every rank. One thread that takes them in that order
makes sure that collectives are, too.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from offbeat.replicas.round import Offer, Outcome, exchange
from offbeat.wire.limit import ENDING, wait_for_threads
from offbeat.wire.quiet import make_thread_quiet

__all__ = ["Background", "Pending"]

#: How long the exit of the program waits for rounds that are under way.
SECONDS_AT_EXIT = 10.0

_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()
#: Threads that run, and their queues. Python ends a daemon thread that comes back from C++ when the program is over,
#: which aborts the process; so none may be in C++ then.
_threads: dict[threading.Thread, Any] = {}


class Pending:
    """The outcome of a round in the background, when it is there.

    Attributes:
        is_seen: whether somebody has asked for the outcome.
    """

    def __init__(self, step: int, outcome: Outcome | None = None) -> None:
        self.step, self.is_seen = step, False
        self._outcome, self._arrived = outcome, threading.Event()
        if outcome is not None:
            self._arrived.set()

    def wait(self) -> Outcome:
        """Block until the exchange is over, one way or the other."""
        self._arrived.wait()
        assert self._outcome is not None
        return self._outcome

    def arrive(self, outcome: Outcome) -> None:
        """Hand in the outcome."""
        self._outcome = outcome
        self._arrived.set()

    def warn_if_unseen(self, end: float) -> None:
        """At the end of the program: say that a round has failed that nobody will ask for any more."""
        self._arrived.wait(max(0.0, end - time.monotonic()))
        if self._outcome is not None and self._outcome.error is not None and not self.is_seen:
            self.is_seen = True
            warnings.warn(
                f"the last round in the background, begun after step {self.step}, failed: {self._outcome.error}; call "
                "finish() to see such an error where it can be handled",
                stacklevel=3,
            )


class Background:
    """A thread that exchanges offers in the order in which they are handed in."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: weakref.WeakSet[Pending] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        _backgrounds.add(self)

    def start(self, offer: Offer) -> Pending:
        """Exchange an offer in the background."""
        pending = Pending(offer.step)
        self._pending.add(pending)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=_work, args=(self._queue,), name="offbeat-rounds", daemon=True)
            _threads[self._thread] = self._queue
            self._thread.start()
            weakref.finalize(self, self._queue.put, None).atexit = False
        self._queue.put((offer, pending))
        return pending

    def close(self, last: Callable[[], None]) -> None:
        """Call a function after the last round, and stop."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(last)
        else:
            last()

    def stop(self, end: float) -> None:
        """At the end of the program: wait a little, and warn of what nobody will ask for any more.

        Args:
            end: until when, by the monotonic clock.
        """
        for pending in list(self._pending):
            pending.warn_if_unseen(end)


def _work(offers: Any) -> None:
    make_thread_quiet()
    try:
        _work_through(offers)
    finally:
        _threads.pop(threading.current_thread(), None)


def _work_through(offers: Any) -> None:
    while True:
        entry = offers.get()
        if entry is None:
            return
        if callable(entry):
            entry()
            return
        offer, pending = entry
        pending.arrive(exchange(offer, offer.fragment.membership))
        del entry, offer, pending  # keep nothing alive while waiting


@atexit.register
def _stop_all() -> None:
    ENDING.set()
    end = time.monotonic() + SECONDS_AT_EXIT
    for background in list(_backgrounds):
        background.stop(end)
    for thread, offers in list(_threads.items()):
        offers.put(None)
        thread.join(max(0.0, end - time.monotonic()))
    wait_for_threads(end)
