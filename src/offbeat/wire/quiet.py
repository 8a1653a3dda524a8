"""Lets background threads interrupt training less often.

Over a slow link data arrives in small pieces, and for each of them gloo's thread would preempt the training thread.
With Linux's SCHED_BATCH policy it does not preempt other threads, and handles more data when it runs. Its share of CPU
time stays the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["make_thread_quiet", "quiet_new_threads"]


def make_thread_quiet(thread: int = 0) -> None:
    """Give this thread, or the thread with this id, the policy SCHED_BATCH, if the system has it."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def quiet_new_threads(*names: str) -> Iterator[None]:
    """Call :func:`make_thread_quiet` for threads started in this block whose names contain one of ``names``."""
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
