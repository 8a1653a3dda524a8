"""Worker processes for the convergence benchmark: each has an interpreter, and so a lock, of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["Clock", "Job", "Outcome", "in_processes"]


class Job(NamedTuple):
    """One run: an arm of a task with a seed.

    Attributes:
        by_itself: nothing else runs meanwhile, because its time is measured.
    """

    task: str
    arm: str
    seed: int
    by_itself: bool = False


class Outcome(NamedTuple):
    """What a run has returned, or the traceback of its error."""

    job: Job
    found: Any
    error: str = ""


class Clock:
    """Says whether there is time for one more run.

    Args:
        seconds: how long all of it may take; None is without end.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._start, self._seconds = time.perf_counter(), seconds
        self.longest = 0.0

    def left(self) -> float | None:
        """Seconds, or None without end."""
        return None if self._seconds is None else max(0.0, self._seconds - (time.perf_counter() - self._start))

    def note(self, seconds: float) -> None:
        """Take note of how long a run has taken."""
        self.longest = max(self.longest, seconds)

    def has_time(self) -> bool:
        """Whether a run that takes as long as the longest so far would end in time."""
        left = self.left()
        return left is None or left > self.longest


class Worker:
    """A process that does one job after the other."""

    def __init__(self, prepare: Callable[[], None], work: Callable[[Job], Any]) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.job: Job | None = None
        self._process = context.Process(target=_serve, args=(theirs, prepare, work), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the connection

    def start(self, job: Job) -> None:
        self.job = job
        with contextlib.suppress(OSError):  # the process is gone, which finish() says
            self.connection.send(job)

    def finish(self) -> Outcome:
        """The outcome of the job; called when there is something to receive."""
        job, self.job = self.job, None
        assert job is not None
        try:
            found, error = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            found, error = None, f"the process ended with exit code {self._process.exitcode}"
        return Outcome(job, found, error)

    def kill(self) -> None:
        self._process.kill()
        self.connection.close()

    def join(self) -> None:
        """Wait for the end of a killed process, but not for long."""
        self._process.join(5.0)


def in_processes(
    jobs: Sequence[Job], workers: int, prepare: Callable[[], None], work: Callable[[Job], Any], clock: Clock
) -> Iterator[Outcome]:
    """Do the jobs in worker processes, begun in this order, and give each outcome when it is there.

    No job begins when the clock has no time for it, and what still runs when time is up is killed.

    Args:
        prepare: called once in each process, before its first job.
        work: does a job. Like ``prepare`` it is pickled.
    """
    waiting = deque(jobs)
    crew = [Worker(prepare, work) for _ in range(min(workers, len(waiting)))]
    try:
        while True:
            _hand_out(waiting, crew, clock)
            busy = {one.connection: one for one in crew if one.job is not None}
            ready = multiprocessing.connection.wait(busy, clock.left()) if busy else []
            if not ready:
                return
            for one in (busy[connection] for connection in busy if connection in ready):
                outcome = one.finish()
                if outcome.error:  # which may have made the GPU unusable for this process
                    one.kill()
                    crew.remove(one)
                    if waiting and clock.has_time():
                        crew.append(Worker(prepare, work))
                yield outcome
    finally:
        for one in crew:
            one.kill()
        for one in crew:  # all are ending now: each frees its GPU memory
            one.join()


def _hand_out(waiting: deque[Job], crew: Sequence[Worker], clock: Clock) -> None:
    """Start jobs on idle workers."""
    for one in crew:
        running = [other.job for other in crew if other.job is not None]
        if not waiting or not clock.has_time() or any(job.by_itself for job in running):
            return
        if running and waiting[0].by_itself:
            return
        if one.job is None:
            one.start(waiting.popleft())


def _serve(connection: Any, prepare: Callable[[], None], work: Callable[[Job], Any]) -> None:
    """A worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that has started this one will kill it
    prepare()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            answer = work(job), ""
        except Exception:
            answer = None, traceback.format_exc()
        connection.send(answer)
