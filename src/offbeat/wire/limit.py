"""Limits the time of what has no time limit of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["ENDING", "ExchangeError", "within"]

#: Set when the program ends. Nobody waits for other ranks to connect again then.
ENDING = threading.Event()
#: How often it is looked whether the program ends.
SECONDS_BETWEEN = 0.1

Result = TypeVar("Result")


class ExchangeError(RuntimeError):
    """A collective failed or took longer than it may. The connection is closed; a later exchange makes a new one."""


def within(seconds: float, function: Callable[[], Result], what: str) -> Result:
    """Call a function in a thread. Raises :class:`ExchangeError` if it does not return in time; it may go on then.

    At the end of the program it raises at once.

    Args:
        seconds: the time limit.
        what: what has failed then, for the error.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="offbeat-store", daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and not ENDING.is_set() and (left := end - time.monotonic()) > 0:
        thread.join(min(left, SECONDS_BETWEEN))
    if errors:
        raise errors[0]
    if not results and ENDING.is_set():
        raise ExchangeError(f"{what}: the program ends")
    if not results:
        raise ExchangeError(
            f"{what}: the store of the process group did not answer within {seconds:g} s; the process that holds it, "
            "usually rank 0, may have stopped"
        )
    return results[0]
