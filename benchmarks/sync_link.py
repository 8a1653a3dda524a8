"""Averaging replicas over a slow link: what it costs a step.

    python -m benchmarks.sync link

Two ranks, one thread each, in network namespaces joined at 1 Gbit/s. Arms take turns in the same processes, in rounds
of some periods each; the order changes from round to round.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import offbeat
from benchmarks.link import run_on_both, sent_bytes
from benchmarks.overlap_link import ENVIRONMENT

__all__ = ["ARMS", "EVERY", "MODELS", "link"]

EVERY = 8
#: Layers, width, rows of a batch.
MODELS = {"8.4 M": (16, 724, 64), "50 M": (12, 2048, 64)}
ARMS = ("never", "torch blocking", "offbeat blocking", "offbeat in the background")


class Arm:
    """One way to train, with a model of its own."""

    def __init__(self, name: str, layers: int, width: int, rows: int) -> None:
        torch.manual_seed(0)
        body = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.Tanh())]
        self.model = nn.Sequential(*body)
        self.x = torch.randn(rows, width)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9, fused=True)
        self.wrap(name)

    def wrap(self, name: str, **options: Any) -> None:
        """Have replicas averaged as the arm does it."""
        if name == "torch blocking":
            self.optimizer = PostLocalSGDOptimizer(self.optimizer, PeriodicModelAverager(EVERY))
        elif name != "never":
            delay = EVERY - 1 if name.endswith("background") else 0
            self.optimizer = offbeat.LocalSGD(self.optimizer, self.model, EVERY, subgroup=None, delay=delay, **options)

    def step(self) -> float:
        start = time.perf_counter()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    @property
    def counted(self) -> int:
        """Bytes the library says it has sent."""
        return getattr(self.optimizer, "bytes_sent", 0) if isinstance(self.optimizer, offbeat.LocalSGD) else 0


def worker(
    rank: int, address: str, interface: str, layers: int, width: int, rows: int, rounds: int, periods: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29512", rank=rank, world_size=2)
    arms = {name: Arm(name, layers, width, rows) for name in ARMS}
    for arm in arms.values():
        for _ in range(EVERY):
            arm.step()
    times: dict[str, list[list[float]]] = {name: [] for name in ARMS}
    sent: dict[str, list[int]] = {name: [0, 0] for name in ARMS}
    for turn in range(rounds):
        for name in ARMS[turn % len(ARMS) :] + ARMS[: turn % len(ARMS)]:
            arm = arms[name]
            dist.barrier()
            before, counted = sent_bytes(interface), arm.counted
            # Every arm begins a round with the step that averages, so that what it launches has landed at its end.
            times[name].append([1e3 * arm.step() for _ in range(EVERY * periods)])
            sent[name][0] += sent_bytes(interface) - before
            sent[name][1] += arm.counted - counted
    if rank == 0:
        print(json.dumps({name: _summary(times[name], sent[name], periods) for name in ARMS}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _summary(rounds: list[list[float]], sent: list[int], periods: int) -> dict[str, float]:
    steps = [step for one in rounds for step in one]
    means = [statistics.mean(one) for one in rounds]
    return {
        "mean": statistics.median(means),
        "median": statistics.median(steps),
        # The slowest step of a round, the median over rounds: one hiccup of a shared machine is not the library's.
        "worst": statistics.median(max(one) for one in rounds),
        "slowest": max(steps),
        "steps": len(steps),
        # The best round, too: what the machine does when nobody else uses it.
        "fastest_mean": min(means),
        "interface_mb": sent[0] / len(steps) / 1e6,
        "counted_mb": sent[1] / len(steps) / 1e6,
    }


def link(rate: str = "1gbit", rounds: int = 8, launches: int = 3) -> dict[str, Any]:
    """Milliseconds a step and bytes of each arm, for each model: one result for each launch of the processes.

    Where tensors happen to lie in memory changes times by some per cent for as long as a process lives, so that one
    launch proves little.
    """
    return {
        name: [_launch(rate, numbers, rounds, periods=3 if name == "8.4 M" else 1) for _ in range(launches)]
        for name, numbers in MODELS.items()
    }


def _launch(rate: str, model: tuple[int, int, int], rounds: int, periods: int) -> dict[str, Any]:
    numbers = [str(number) for number in (*model, rounds, periods)]
    found: dict[str, Any] = run_on_both(
        "benchmarks.sync_link", lambda host: [host.interface, *numbers], rate, {**ENVIRONMENT, "LOCAL_WORLD_SIZE": "1"}
    )
    return found


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:9]))
