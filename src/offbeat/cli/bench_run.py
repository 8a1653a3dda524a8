"""What the processes of ``offbeat bench`` do: probe, then run every strategy briefly."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offbeat.cli import link as connections
from offbeat.cli.bench_probe import Loss, Plan, Say, Trainer, probe
from offbeat.plan.cost import estimate_settings
from offbeat.plan.link import slowest
from offbeat.plan.result import BenchResult
from offbeat.plan.settings import Settings

__all__ = ["bench"]


def strategies(every: int, tensors: int) -> list[Settings]:
    """What is run, with a model of so many parameter tensors: fragments are made of whole ones."""
    some = min(4, every, tensors)
    return [
        Settings("ddp"),
        Settings("local_sgd", every),
        Settings("diloco", every),
        Settings("diloco", every, codec="int8"),
        Settings("diloco", every, some, min(1, every), "int4"),
    ]


def bench(model: nn.Module, loss: Loss, plan: Plan, say: Say) -> BenchResult:
    """Measure everything. All ranks of the default process group call this together.

    Args:
        model: what to train; every rank has the same.
        loss: a function of it.
        plan: how much to measure.
        say: is told what is being measured.
    """
    result = probe(model, loss, plan, say)
    if result.bandwidth is None:
        return result
    alone = Trainer(model, loss, None)
    alone.seconds(2)
    growth = _memory_growth(lambda: Trainer(model, loss, None).seconds(2))
    rows = []
    for settings in strategies(plan.every, len(list(model.parameters()))):
        say(settings.name)
        rows.append(_run(lambda one=settings: Trainer(model, loss, one), alone, settings, result, plan, growth))  # type: ignore[misc]
    return replace(result, strategies=rows)


def _run(
    make: Callable[[], Trainer], alone: Trainer, settings: Settings, result: BenchResult, plan: Plan, growth: int | None
) -> dict[str, Any]:
    """Run a strategy for some whole periods, between steps of a trainer that never communicates."""
    trainers: list[Trainer] = []

    def begin() -> None:
        trainers.append(make())
        # So that the steps that are timed end with a landing, and no round goes on beyond them.
        trainers[0].seconds(max(2, settings.period + settings.delay))

    memory = _memory_growth(begin)
    trainer = trainers[0]
    expected = estimate_settings(settings, result.setting())
    count = max(1, min(8, round(plan.seconds / (expected.step_seconds * settings.period)))) * settings.period
    before = alone.seconds(max(2, count // 4))
    dist.barrier()
    sent, begun = connections.sent_bytes(), time.perf_counter()
    trainer.seconds(count)
    seconds, after = slowest(time.perf_counter() - begun) / count, connections.sent_bytes()
    nearby = slowest(statistics.median([*before, *alone.seconds(max(2, count // 4))]))
    trainer.close()
    expected = estimate_settings(settings, result.setting(step_seconds=nearby))
    counted = None if sent is None or after is None or torch.cuda.is_available() else after - sent
    return {
        "name": settings.name,
        **settings.as_dict(),
        "step_seconds": seconds,
        "compute_seconds": nearby,
        "utilisation": min(1.0, nearby / seconds),
        "bytes_per_step": expected.bytes_per_step if counted is None else counted / count,
        "extra_memory": None if memory is None or growth is None else max(0, memory - growth),
        "predicted_step_seconds": expected.step_seconds,
        "predicted_extra_memory": expected.extra_memory,
    }


def _memory_growth(work: Callable[[], object]) -> int | None:
    """Bytes by which the most memory in use exceeds what was in use before; None where the system does not say."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps for itself would not count as growth
    with suppress(OSError, StopIteration):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        work()
        return _status("VmHWM") - before
    work()
    return None


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
