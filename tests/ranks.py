"""Runs a function in several real processes joined by gloo. A hang is a failure: everything has a time limit."""

from __future__ import annotations

import io
import os
import tempfile
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["rank_context", "run_ranks"]

SECONDS = 60


def _main(
    environment: dict[str, str], rank: int, world: int, store: str, results: Any, function: Any, args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
        )
        # As bytes: a tensor in a queue is a file descriptor of a process that may be gone when it is read.
        answer = io.BytesIO()
        torch.save(function(rank, world, *args), answer)
        results.put((rank, None, answer.getvalue()))
        dist.barrier()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def rank_context() -> Any:
    """How processes of a test are started: forked from one that has imported torch and done nothing else.

    Importing it takes longer than most tests.
    """
    if "TRITON_INTERPRET" in os.environ:  # Triton decides whether it interprets when it is imported
        return mp.get_context("spawn")
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "offbeat"])
    return context


def run_ranks(function: Any, world: int, *args: Any, seconds: float = SECONDS) -> list[Any]:
    """What ``function(rank, world, *args)`` returned on each rank. Raises if one failed or took too long."""
    context = rank_context()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers = [
            context.Process(
                target=_main, args=(dict(os.environ), rank, world, store, results, function, args), daemon=True
            )
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        try:
            answers = {}
            for _ in workers:
                rank, problem, value = results.get(timeout=seconds)
                if problem:
                    raise AssertionError(f"rank {rank} failed:\n{problem}")
                answers[rank] = torch.load(io.BytesIO(value), weights_only=False)
            for worker in workers:
                worker.join(timeout=SECONDS)
            return [answers[rank] for rank in range(world)]
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                    worker.join()
