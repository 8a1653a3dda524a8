"""Limits the time of what has no time limit of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["ENDING", "ExchangeError", "wait_for_threads", "within"]

#: Set when the program ends. Nobody waits for other ranks to connect again then.
ENDING = threading.Event()
#: How often it is looked whether the program ends.
SECONDS_BETWEEN = 0.1

_threads: set[threading.Thread] = set()

Result = TypeVar("Result")


class ExchangeError(RuntimeError):
    """A collective failed or took longer than it may. The connection is closed; a later exchange makes a new one."""


def within(seconds: float, function: Callable[[], Result], what: str, *, at_end: bool = False) -> Result:
    """Call a function in a thread. Raises :class:`ExchangeError` if it does not return in time; it may go on then.

    Args:
        seconds: the time limit.
        what: what has failed then, for the error.
        at_end: whether to call it, and wait for it, at the end of the program too. Otherwise it raises at once then.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            _threads.discard(thread)

    thread = threading.Thread(target=run, name="offbeat-store", daemon=True)
    if at_end or not ENDING.is_set():
        _threads.add(thread)
        thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and (at_end or not ENDING.is_set()) and (left := end - time.monotonic()) > 0:
        thread.join(min(left, SECONDS_BETWEEN))
    if errors:
        raise errors[0]
    if ENDING.is_set() and not (at_end and results):
        raise ExchangeError(f"{what}: the program ends")
    if not results:
        raise ExchangeError(
            f"{what}: the store of the process group did not answer within {seconds:g} s; the process that holds it, "
            "usually rank 0, may have stopped"
        )
    return results[0]


def wait_for_threads(end: float) -> None:
    """At the end of the program: wait until no thread that :func:`within` has started is in a function any more.

    Python ends a daemon thread that comes back from C++ when the program is over, which aborts the process.

    Args:
        end: until when, by the monotonic clock.
    """
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))
