"""One process of the demo: its surroundings, and what it tells the process that started it."""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path

from offbeat.cli.train import Job, train

__all__ = ["Broken", "Progress", "Ready", "work"]


@dataclass(frozen=True)
class Ready:
    """The rank waits for its turn; any message sent to it gives it one."""


@dataclass(frozen=True)
class Progress:
    """So many steps are done, and the loss of the last one; from rank 0 only."""

    step: int
    loss: float


@dataclass(frozen=True)
class Broken:
    """The rank cannot go on: why in one line, and at length."""

    error: str
    trace: str


def work(rank: int, job: Job, pipe: Connection) -> None:
    """What a spawned process runs: :func:`train`, with the parent at the other end of ``pipe``."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _write_to(job.directory / f"rank{rank}.log")
    _stay_on_this_machine()

    def report(step: int, loss: float) -> None:
        if rank == 0:
            pipe.send(Progress(step, loss))

    def turn() -> None:
        pipe.send(Ready())
        pipe.recv()

    try:
        pipe.send(train(rank, job, report, turn))
    except BaseException as error:
        said = (str(error).splitlines() or [""])[0]
        pipe.send(Broken(f"failed with {type(error).__name__}: {said}", traceback.format_exc()))
        os._exit(1)  # an orderly exit could wait for ranks that are no longer there


def _die_with_parent() -> None:
    """Even a parent that was killed leaves nobody behind."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write_to(log: Path) -> None:
    """Warnings would tear the live display; after a crash the log is where its last words are."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _stay_on_this_machine() -> None:
    """Let gloo use the loopback device: the host's name may lead nowhere, or through a firewall."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    for name in ("lo", "lo0"):
        if name in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
