"""Start the demo's processes, show their progress, and stop all of them however the demo ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing as mp

from offbeat.cli.train import COLLECTIVE_TIMEOUT, Job, RankResult, train

__all__ = ["WorkersFailed", "launch"]

#: Without progress for this long the demo fails. Ranks wait less long for each other, and their error says more.
SILENCE_SECONDS = COLLECTIVE_TIMEOUT.total_seconds() + 30


class WorkersFailed(RuntimeError):
    """Some ranks did not finish. Its arguments are a message, and the last lines of their logs."""


def launch(job: Job, on_step: Callable[[str, int, float], None]) -> list[dict[str, RankResult]]:
    """Run :func:`train` in ``job.ranks`` processes.

    Args:
        job: what to train.
        on_step: called in this process with the arm, the number of steps that rank 0 has done, and its loss.

    Returns:
        What :func:`train` returned on each rank.

    Raises:
        WorkersFailed: if a rank raises, dies, or does nothing for too long.
    """
    context = mp.get_context("spawn")
    progress, reports = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_work, args=(rank, job, reports if rank == 0 else None), daemon=True)
        for rank in range(job.ranks)
    ]
    try:
        # A terminal sends Ctrl-C to every process. The workers inherit that they ignore it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for process in processes:
            process.start()
        signal.signal(signal.SIGINT, before)
        reports.close()
        _watch(processes, progress, job, on_step)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return [torch.load(job.directory / f"rank{rank}.pt", weights_only=False) for rank in range(job.ranks)]


def _watch(
    processes: Sequence[BaseProcess], progress: Connection, job: Job, on_step: Callable[[str, int, float], None]
) -> None:
    """Wait until every process has exited with code 0."""
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    listening = [progress]
    while running:
        ready = wait([*listening, *running], timeout=SILENCE_SECONDS)
        if not ready:
            ranks = list(running.values())
            raise WorkersFailed(f"no progress for {SILENCE_SECONDS:.0f} s; still running: {ranks}", _logs(job, ranks))
        if progress in ready:  # before anything else, so that no message of a rank that has exited is lost
            report = _receive(progress)
            if report is None:
                listening.clear()
            else:
                on_step(*report)
            continue
        ended = [running.pop(sentinel) for sentinel in running.keys() & set(ready)]
        for rank in ended:
            processes[rank].join()
        if failed := {rank: code for rank in ended if (code := processes[rank].exitcode)}:
            # Exit code 1 is a Python exception, which may be due to another rank that died.
            rank = min(failed, key=lambda rank: failed[rank] == 1)
            raise WorkersFailed(f"rank {rank} died (exit code {failed[rank]})", _logs(job, failed))


def _receive(progress: Connection) -> Any:
    try:
        return progress.recv()
    except (EOFError, OSError):  # rank 0 has exited
        return None


def _work(rank: int, job: Job, reports: Connection | None) -> None:
    """What each process runs. It leaves by ``os._exit``: an orderly exit could wait for ranks that are gone."""
    # Warnings would disturb the progress display.
    log = os.open(job.directory / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # The host's name may not resolve, or lead through a firewall.
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    code = 1
    try:
        results = train(rank, job, lambda *report: reports.send(report) if reports else None)
        torch.save(results, job.directory / f"rank{rank}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _logs(job: Job, ranks: Iterable[int]) -> str:
    """The last lines that these ranks have written."""
    paths = {rank: job.directory / f"rank{rank}.log" for rank in ranks}
    logs = {rank: path.read_text(errors="replace").splitlines() for rank, path in paths.items() if path.exists()}
    return "\n".join(f"rank {rank}: {line}" for rank, lines in logs.items() for line in lines[-20:])
