"""Start worker processes, listen to them, and stop them however this ends.

A worker writes messages to stdout, JSON objects of one line each: ``{"ready": true}`` first, ``{"result": ...}`` last.
When all are ready, each gets the line ``go`` on stdin; when stdin ends it has lost its parent and must exit. When all
results are here the workers are killed, so that nobody waits for them to shut down.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

__all__ = ["WorkersFailed", "run_workers"]

#: How long the failure of one worker waits for those of the others, which may be its cause.
SECONDS_FOR_OTHERS = 1.0
#: How many lines of a worker's stderr are kept.
LINES = 30


class WorkersFailed(RuntimeError):
    """A worker failed or got stuck. ``log`` has the last lines that workers wrote to stderr."""

    def __init__(self, message: str, workers: Sequence[_Worker]) -> None:
        super().__init__(message)
        self.log = "\n".join(f"process {worker.number}: {line}" for worker in workers for line in worker.log)


class _Worker:
    def __init__(self, number: int, command: Sequence[str], inbox: SimpleQueue[tuple[_Worker, Any]]) -> None:
        self.number, self.doing, self.ready, self.done, self.result = number, "starting", False, False, None
        self.log: deque[str] = deque(maxlen=LINES)
        pipe = subprocess.PIPE
        # In a session of its own: Ctrl-C is for the parent, which stops the workers.
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        )
        for target in (self._read_messages, self._read_log):
            threading.Thread(target=target, args=(inbox,), daemon=True).start()

    def _read_messages(self, inbox: SimpleQueue[tuple[_Worker, Any]]) -> None:
        with suppress(ValueError):  # what is not a message ends the worker
            for line in self.process.stdout or ():
                inbox.put((self, json.loads(line)))
        inbox.put((self, None))

    def _read_log(self, _: Any) -> None:
        self.log.extend(line.rstrip() for line in self.process.stderr or ())

    def begin(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone, which its stdout tells
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "wrote something that is not a message"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def run_workers(
    commands: Sequence[Sequence[str]],
    hear: Callable[[int, dict[str, Any]], None],
    *,
    join: Callable[[list[int]], None] = lambda pids: None,
    patience: float,
    seconds: float,
) -> list[Any]:
    """Run a process for each command, and return their results.

    Args:
        hear: called with the number of a worker and each message that is not its first or last; ``doing`` in it says
            what the worker is doing.
        join: called with the process ids when all workers are ready.
        patience: how many seconds all workers may be silent.
        seconds: how many seconds everything may take.

    Raises:
        WorkersFailed: if a worker ends without a result, or time is up.
    """
    inbox: SimpleQueue[tuple[_Worker, Any]] = SimpleQueue()
    workers: list[_Worker] = []
    end = time.monotonic() + seconds
    try:
        workers.extend(_Worker(number, command, inbox) for number, command in enumerate(commands))
        while not all(worker.done for worker in workers):
            left = end - time.monotonic()
            try:
                worker, message = inbox.get(timeout=max(0.0, min(patience, left)))
            except Empty:
                _stuck(
                    workers, f"no progress for {patience:.0f} s" if left > patience else f"not done in {seconds:.0f} s"
                )
            if message is None:
                if not worker.done:
                    _failed(worker, workers, inbox)
            elif "result" in message:
                worker.done, worker.result = True, message["result"]
            elif "ready" in message:
                worker.ready = True
                if all(worker.ready for worker in workers):
                    join([worker.process.pid for worker in workers])
                    for worker in workers:
                        worker.begin()
            else:
                worker.doing = message["doing"]
                hear(worker.number, message)
        return [worker.result for worker in workers]
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.wait()


def _stuck(workers: list[_Worker], problem: str) -> NoReturn:
    waiting = [worker for worker in workers if not worker.done]
    if sys.platform != "win32":  # workers that can still answer write down where they are
        for worker in waiting:
            worker.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
    raise WorkersFailed(f"{problem}; {', '.join(f'process {w.number}: {w.doing}' for w in waiting)}", waiting)


def _failed(worker: _Worker, workers: list[_Worker], inbox: SimpleQueue[tuple[_Worker, Any]]) -> NoReturn:
    failed, end = [worker], time.monotonic() + SECONDS_FOR_OTHERS
    with suppress(Empty):
        while len(failed) < len(workers):
            other, message = inbox.get(timeout=max(0.0, end - time.monotonic()))
            failed += [other] if message is None else []
    ends = {worker: worker.how_it_ended() for worker in failed}
    # Exit code 1 is a Python exception, which may be due to another worker that is gone.
    first = min(failed, key=lambda worker: ends[worker].endswith("exit code 1"))
    raise WorkersFailed(f"process {first.number} {ends[first]} while: {first.doing}", failed)
