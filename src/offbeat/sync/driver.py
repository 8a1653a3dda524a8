"""Moves rounds along: in a background thread, one after the other, or at once.

Rounds are begun in the order of the calendar, which is the same on every rank. One thread that takes them in that order
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

from offbeat.sync.rounds import Round
from offbeat.wire.limit import ENDING, wait_for_threads
from offbeat.wire.quiet import make_thread_quiet

__all__ = ["Driver"]

#: How long the exit of the program waits for rounds that are under way.
SECONDS_AT_EXIT = 10.0

_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
#: Threads that run, and their queues. Python ends a daemon thread that comes back from C++ when the program is over,
#: which aborts the process; so none may be in C++ then.
_threads: dict[threading.Thread, Any] = {}


class Driver:
    """Exchanges rounds in the order in which they are handed in."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._under_way: dict[int, tuple[Round, threading.Event]] = {}
        self._thread: threading.Thread | None = None
        _drivers.add(self)

    def start(self, one: Round) -> None:
        """Exchange a round in the background."""
        over = threading.Event()
        self._under_way[id(one)] = (one, over)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=_work, args=(self._queue,), name="offbeat-sync", daemon=True)
            _threads[self._thread] = self._queue
            self._thread.start()
            weakref.finalize(self, self._queue.put, None).atexit = False
        self._queue.put((one, over))

    def wait(self, one: Round) -> None:
        """Wait until the exchange of a round is over, one way or the other."""
        _, over = self._under_way.get(id(one), (None, None))
        if over is not None:
            over.wait()
            self._under_way.pop(id(one), None)

    def run(self, one: Round, **how: Any) -> None:
        """Exchange a round now, after those in the background that use the same connection.

        The ranks of sharded replicas have one more connection, for all levels.
        """
        for other, over in list(self._under_way.values()):
            if other.track.peers is one.track.peers or one.track.shards is not None:
                over.wait()
        one.exchange(**how)

    def close(self, last: Callable[[], None]) -> None:
        """Call a function after the last round, and stop."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(last)
        else:
            last()

    def stop(self, end: float) -> None:
        """At the end of the program: wait a little, and say what nobody will ask for any more.

        Args:
            end: until when, by the monotonic clock.
        """
        for one, over in list(self._under_way.values()):
            over.wait(max(0.0, end - time.monotonic()))
            if one.error is not None and not one.reported:
                one.reported = True
                warnings.warn(
                    f"the last round in the background, begun after step {one.step}, failed: {one.error}; call "
                    "finish() to see such an error where it can be handled",
                    stacklevel=2,
                )


def _work(rounds: Any) -> None:
    make_thread_quiet()
    try:
        _work_through(rounds)
    finally:
        _threads.pop(threading.current_thread(), None)


def _work_through(rounds: Any) -> None:
    while True:
        found = rounds.get()
        if found is None:
            return
        if callable(found):
            found()
            return
        one, over = found
        try:
            one.exchange()
        finally:
            over.set()
        del one, over, found  # keep nothing alive while waiting


@atexit.register
def _stop_all() -> None:
    ENDING.set()
    end = time.monotonic() + SECONDS_AT_EXIT
    for driver in list(_drivers):
        driver.stop(end)
    for thread, rounds in list(_threads.items()):
        rounds.put(None)
        thread.join(max(0.0, end - time.monotonic()))
    wait_for_threads(end)
