"""Starts the demo's processes, listens to them, gives them turns, and leaves none behind, however it ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import cast

import torch.multiprocessing as mp

from offbeat.cli.train import COLLECTIVE_TIMEOUT, Job, RankResult
from offbeat.cli.worker import Broken, Progress, Ready, work

__all__ = ["WorkersFailed", "launch"]

#: Silence from all ranks for this long means that they hang. Longer than they wait for each other, because the
#: error one of them reports then says more than "nothing was heard".
SILENCE_SECONDS = COLLECTIVE_TIMEOUT.total_seconds() + 30
#: How long a rank may take to leave, and how long to listen for what else broke after the first failure.
EXIT_SECONDS = 5.0
AFTERMATH_SECONDS = 1.0


class WorkersFailed(RuntimeError):
    """One or more ranks did not finish; the message says which and why, ``details`` is what they wrote."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass
class _Member:
    """A rank of an arm, seen from the process that started it. ``ready``: it waits for its arm's turn."""

    job: Job
    rank: int
    process: BaseProcess
    pipe: Connection
    ready: bool = False
    turns: int = 0
    result: RankResult | None = None
    failure: Broken | None = None


def launch(jobs: list[Job], on_step: Callable[[str, int, float], None]) -> dict[str, list[RankResult]]:
    """Run each arm's job in processes of its own, and return what the ranks found, by arm and in order of rank.

    All arms are alive at once but only one computes: they take turns of a few steps, so that a machine that becomes
    busier or slower does so for all of them.

    Args:
        jobs: one an arm.
        on_step: called here, in this process, with the arm, the steps its rank 0 has done, and the loss.

    Raises:
        WorkersFailed: when a rank fails, dies, or nothing is heard of any for too long.
    """
    members: list[_Member] = []
    try:
        _start(jobs, members)
        _listen(members, on_step)
    finally:
        _stop(members)
    found: dict[str, list[RankResult]] = {job.arm: [] for job in jobs}
    for member in members:
        assert member.result is not None
        found[member.job.arm].append(member.result)
    return found


def _start(jobs: list[Job], members: list[_Member]) -> None:
    context = mp.get_context("spawn")
    with _interrupts_ignored():
        for job in jobs:
            for rank in range(job.ranks):
                # A pipe a rank and not one queue for all: a rank that dies in the middle of a message then closes
                # its own pipe, and can neither block the others nor this process.
                ours, theirs = context.Pipe()
                process = context.Process(target=work, args=(rank, job, theirs), daemon=True)
                process.start()
                members.append(_Member(job, rank, process, ours))
                theirs.close()  # the last open end is the rank's: its death ends our waiting


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started meanwhile ignore Ctrl-C: the terminal sends it to all, and only one should answer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _listen(members: list[_Member], on_step: Callable[[str, int, float], None]) -> None:
    listening = {member.pipe: member for member in members}
    failed: list[_Member] = []
    deadline = monotonic() + SILENCE_SECONDS
    while listening and (remaining := deadline - monotonic()) > 0:
        for pipe in wait(list(listening), timeout=remaining):
            member = listening[cast(Connection, pipe)]
            if not _hear(member, on_step):
                del listening[member.pipe]
            if member.failure is None:
                deadline = deadline if failed else monotonic() + SILENCE_SECONDS
            elif member not in failed:
                # The first failure: what else happens is heard, but no longer waited for.
                deadline = deadline if failed else monotonic() + AFTERMATH_SECONDS
                failed.append(member)
        if not failed:
            _give_turn(list(listening.values()))
    if failed:
        raise _in_words(failed)
    if listening:
        silent = ", ".join(f"rank {m.rank} of {m.job.arm}" for m in listening.values())
        raise WorkersFailed(f"nothing was heard from {silent} for {SILENCE_SECONDS:.0f} s")


def _in_words(failed: list[_Member]) -> WorkersFailed:
    # A rank that died without a word is the cause: the others only missed it. Else the first to speak is.
    silent = [m for m in failed if m.failure and m.failure.error.startswith("died")]
    cause = (silent or failed)[0]
    assert cause.failure is not None
    others = len(failed) - 1
    then = f" (and {others} other{'s' * (others > 1)} after it)" if others else ""
    return WorkersFailed(f"rank {cause.rank} of {cause.job.arm} {cause.failure.error}{then}", cause.failure.trace)


def _hear(member: _Member, on_step: Callable[[str, int, float], None]) -> bool:
    """Take one message. False when it was the last."""
    try:
        message = member.pipe.recv()
    except (EOFError, OSError):
        member.process.join(EXIT_SECONDS)
        if member.failure is None and (member.result is None or member.process.exitcode):
            log = _tail(member.job.directory / f"rank{member.rank}.log")
            member.failure = Broken(f"died ({_exit_in_words(member.process.exitcode)})", log)
        return False
    if isinstance(message, Progress):
        on_step(member.job.arm, message.step, message.loss)
    elif isinstance(message, Ready):
        member.ready = True
    elif isinstance(message, RankResult):
        member.result = message
    else:
        member.failure = message
    return True


def _give_turn(members: list[_Member]) -> None:
    """Once everybody waits, let the arm go on that has waited longest."""
    if not members or not all(member.ready for member in members):
        return
    turns = {member.job.arm: member.turns for member in members}
    arm = min(turns, key=lambda arm: turns[arm])
    for member in members:
        if member.job.arm == arm:
            member.ready = False
            member.turns += 1
            with contextlib.suppress(OSError):  # it died while it waited: its pipe says so next
                member.pipe.send(None)


def _exit_in_words(code: int | None) -> str:
    if code is None:
        return "its connection closed, but it still runs"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _tail(path: Path, lines: int = 20) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return ""


def _stop(members: list[_Member]) -> None:
    for end in (BaseProcess.terminate, BaseProcess.kill):
        for member in members:
            if member.process.is_alive():
                end(member.process)
        for member in members:
            member.process.join(EXIT_SECONDS)
    for member in members:
        member.pipe.close()
