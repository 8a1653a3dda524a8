"""Averaging replicas over a slow link: what it costs a step.

    python -m benchmarks.sync link

Two ranks, one thread each, in network namespaces joined at 1 Gbit/s or 100 Mbit/s. Each rank, with all its threads, is
pinned to a core of its own. Arms take turns in the same processes, in rounds of some periods each; the order changes
from round to round. One arm only moves the bytes. torchft's DiLoCo takes part where torchft is installed.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.link import run_on_both, sent_bytes
from benchmarks.overlap_link import ENVIRONMENT
from benchmarks.sync_torchft import TorchftDiLoCo, is_installed

__all__ = ["ARMS", "EVERY", "MODELS", "Arm", "link", "summary"]

EVERY = 8
#: Layers, width, rows of a batch.
MODELS = {"8.4 M": (16, 724, 64), "50 M": (12, 2048, 64)}


class BytesAlone:
    """Does nothing but send as many bytes as an average in float32, in a thread, from memory of its own."""

    def __init__(self, opt: Any, model: nn.Module, every: int) -> None:
        self.opt, self.every, self.steps = opt, every, 0
        self.flats = [torch.zeros(1 << 22) for _ in range(-(-sum(p.numel() for p in model.parameters()) // (1 << 22)))]
        self.flats[-1] = self.flats[-1][: sum(p.numel() for p in model.parameters()) % (1 << 22) or 1 << 22]
        self.group = dist.new_group()
        self.thread: threading.Thread | None = None

    def step(self) -> None:
        self.opt.step()
        if self.steps % self.every == self.every - 1 and self.thread is not None:
            self.thread.join()
        if self.steps % self.every == 0:
            self.thread = threading.Thread(target=self.send)
            self.thread.start()
        self.steps += 1

    def send(self) -> None:
        for flat in self.flats:
            dist.all_reduce(flat, group=self.group)

    def zero_grad(self) -> None:
        self.opt.zero_grad()


def local_sgd(delay: int, opt: Any, model: nn.Module, every: int, **options: Any) -> Any:
    return offbeat.LocalSGD(opt, model, every, subgroup=None, delay=delay, **options)


def diloco(opt: Any, model: nn.Module, every: int, **options: Any) -> Any:
    # Rounds begin with a period, as those of the other arms, so that what an arm sends falls into its own turn.
    return offbeat.DiLoCo(opt, model, every, subgroup=None, level={"phase": 1}, **options)


mean = functools.partial(offbeat.SGD, lr=1.0)
#: Each wraps an optimizer.
ARMS: dict[str, Callable[..., Any]] = {
    "never": lambda opt, model, every, **options: opt,
    "the bytes alone, in the background": lambda opt, model, every, **options: BytesAlone(opt, model, every),
    "torch blocking": lambda opt, model, every, **options: PostLocalSGDOptimizer(opt, PeriodicModelAverager(every)),
    "offbeat blocking": functools.partial(local_sgd, 0),
    "offbeat in the background": functools.partial(local_sgd, EVERY - 1),
    "DiLoCo, bf16, in the background": functools.partial(diloco, delay=EVERY - 1, codec="bf16", outer=mean),
    "DiLoCo, int8, in the background": functools.partial(diloco, delay=EVERY - 1, codec="int8", outer=mean),
}
#: Where torchft is installed; called with the address of rank 0 besides.
TORCHFT: dict[str, Callable[..., Any]] = {
    "torchft DiLoCo, blocking": TorchftDiLoCo,
    "torchft DiLoCo, 2 fragments, delay 3": functools.partial(TorchftDiLoCo, fragments=2, delay=3),
}
#: Over 100 Mbit/s, every 64 steps.
SLOW: dict[str, Callable[..., Any]] = {
    "never": ARMS["never"],
    "torch blocking": ARMS["torch blocking"],
    "DiLoCo, 4 fragments, delay 15, int4": functools.partial(
        diloco, fragments=4, delay=15, codec="int4", error_feedback=1.0
    ),
}


class Arm:
    """One way to train, with a model of its own."""

    def __init__(self, wrap: Callable[..., Any] | None, every: int, layers: int, width: int, rows: int) -> None:
        torch.manual_seed(0)
        body = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.Tanh())]
        self.model: nn.Module = nn.Sequential(*body)
        self.x = torch.randn(rows, width)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9, fused=True)
        if wrap is None:
            self.model = DistributedDataParallel(self.model)
        else:
            self.wrap(wrap, every)

    def wrap(self, wrap: Callable[..., Any], every: int, **options: Any) -> None:
        """Have replicas averaged as the arm does it."""
        self.optimizer = wrap(self.optimizer, self.model, every, **options)

    def step(self) -> float:
        start = time.perf_counter()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def time_codecs(self) -> None:
        """Count the processor time that encoding and decoding take."""
        self.coding = 0.0
        tracks = self.optimizer._tracks._every() if isinstance(self.optimizer, offbeat.Replica) else []
        for track in tracks:
            if track.codec is not None:
                for name in ("encode_finite", "decode_sum", "decode"):
                    setattr(track.codec, name, self._timed(getattr(track.codec, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.coding += time.thread_time() - start

        return timed

    @property
    def counted(self) -> int:
        """Bytes the library says it has sent."""
        return self.optimizer.bytes_sent if isinstance(self.optimizer, offbeat.Replica) else 0


def worker(
    rank: int, address: str, interface: str, layers: int, width: int, rows: int, rounds: int, periods: int, every: int
) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # threads that are started later are pinned too
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29512", rank=rank, world_size=2)
    wraps = dict(ARMS if every == EVERY else SLOW)
    if every == EVERY and is_installed():
        wraps.update({name: functools.partial(wrap, address=address) for name, wrap in TORCHFT.items()})
    arms = {name: Arm(wrap, every, layers, width, rows) for name, wrap in wraps.items()}
    for arm in arms.values():
        for _ in range(every):
            arm.step()
        arm.time_codecs()
    times: dict[str, list[list[float]]] = {name: [] for name in arms}
    sent: dict[str, list[int]] = {name: [0, 0] for name in arms}
    names = list(arms)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            arm = arms[name]
            dist.barrier()
            before, counted = sent_bytes(interface), arm.counted
            # Every arm begins a round at the start of a period, so that what it launches has landed at its end.
            times[name].append([1e3 * arm.step() for _ in range(every * periods)])
            sent[name][0] += sent_bytes(interface) - before
            sent[name][1] += arm.counted - counted
    found = {name: summary(times[name], sent[name], arms[name].coding) for name in arms}
    for arm in arms.values():
        if isinstance(arm.optimizer, TorchftDiLoCo):
            arm.optimizer.check(every * (1 + rounds * periods))
            arm.optimizer.close()
    if every != EVERY:  # a few steps are enough: all of them send as much
        arm = Arm(None, every, layers, width, rows)
        arm.step()
        before = sent_bytes(interface)
        steps = [[1e3 * arm.step() for _ in range(4)]]
        found["DDP"] = summary(steps, [sent_bytes(interface) - before, 0], 0.0)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torchft's threads do not end by themselves


def summary(rounds: list[list[float]], sent: list[int], coding: float) -> dict[str, float]:
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
        "coding_ms": 1e3 * coding / len(steps),
        "interface_mb": sent[0] / len(steps) / 1e6,
        "counted_mb": sent[1] / len(steps) / 1e6,
    }


def link(rounds: int = 6, launches: int = 5) -> dict[str, Any]:
    """Milliseconds a step and bytes of each arm, for each setting: one result for each launch of the processes.

    Where tensors happen to lie in memory changes times by some per cent for as long as a process lives, so that one
    launch proves little.
    """
    found: dict[str, Any] = {}
    for name, numbers in MODELS.items():
        periods = 3 if name == "8.4 M" else 1
        title = f"{name} parameters, 1 Gbit/s, every {EVERY} steps"
        found[title] = [_launch("1gbit", numbers, rounds, periods, EVERY) for _ in range(launches)]
    title = "8.4 M parameters, 100 Mbit/s, every 64 steps"
    found[title] = [_launch("100mbit", MODELS["8.4 M"], max(2, rounds // 2), 1, 64) for _ in range(launches)]
    return found


def _launch(rate: str, model: tuple[int, int, int], rounds: int, periods: int, every: int) -> dict[str, Any]:
    numbers = [str(number) for number in (*model, rounds, periods, every)]
    environment = {**ENVIRONMENT, "LOCAL_WORLD_SIZE": "1"}
    found: dict[str, Any] = run_on_both(
        "benchmarks.sync_link", lambda host: [host.interface, *numbers], rate, environment
    )
    return found


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:10]))
