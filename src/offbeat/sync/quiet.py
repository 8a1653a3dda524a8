"""Threads that send in the background should not interrupt training more often than they must.

Data trickles in over a slow link, and for every bit of it gloo's thread would push the training thread off its core and
its data out of the caches. As a batch thread (Linux) it waits for its turn and finds more to do when it has it. It gets
its fair share of time as before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["make_thread_quiet", "quiet_new_threads"]


def make_thread_quiet(thread: int = 0) -> None:
    """Make this thread, or one by its number, a batch thread where the system has them."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def quiet_new_threads(*names: str) -> Iterator[None]:
    """Make threads with such a part in their names, that begin in this block, batch threads."""
    before = _threads()
    yield
    for number in _threads() - before:
        with suppress(OSError), open(f"/proc/self/task/{number}/comm") as file:
            found = file.read()
            if any(name in found for name in names):
                make_thread_quiet(number)


def _threads() -> set[int]:
    with suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()
