"""DDP over a slow link on the CPU: how much of the optimizer's time the network hides.

    python -m benchmarks.overlap link

Two ranks, one thread each, in network namespaces joined at 1 Gbit/s. Four arms take turns in the same processes: DDP
without any optimizer, with torch's fused AdamW after backward, with offbeat's after backward, and overlapped. Hidden
is what is left of the optimizer's own time (offbeat's ``step()``, after backward) when the difference between the
overlapped arm and the one without optimizer is taken off.
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

import offbeat
from benchmarks.link import run_on_both

__all__ = ["MODELS", "link"]

#: Layers, width, DDP's bucket_cap_mb.
MODELS = {
    "8.4 M, buckets of 4 MB": (16, 724, 4),
    "50 M, DDP's default buckets": (12, 2048, 25),
    "50 M, a bucket a layer": (12, 2048, 12),
}
ARMS = ("no optimizer", "torch fused after", "offbeat after", "offbeat overlap")

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Otherwise the allocator gives memory back and asks for it again, which makes times bimodal.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


def arm(name: str, layers: int, width: int, cap: float) -> Any:
    """A function that trains one step and returns seconds: of the step, and of ``optimizer.step()`` in it."""
    torch.manual_seed(0)
    body = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.Tanh())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*body), bucket_cap_mb=cap)
    library: Any = torch.optim if name.startswith("torch") else offbeat
    optimizer = library.AdamW(model.parameters(), lr=1e-4, fused=True)
    if name.endswith("overlap"):
        offbeat.overlap(optimizer, model)
    x = torch.randn(16, width)

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        model(x).square().mean().backward()
        middle = time.perf_counter()
        if name != "no optimizer":
            optimizer.step()
        end = time.perf_counter()
        optimizer.zero_grad()
        return time.perf_counter() - start, end - middle

    return step


def worker(rank: int, address: str, layers: int, width: int, cap: float, rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29511", rank=rank, world_size=2)
    arms = {name: arm(name, layers, width, cap) for name in ARMS}
    for step in arms.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    own: dict[str, list[float]] = {name: [] for name in ARMS}
    for turn in range(rounds):
        order = ARMS[turn % len(ARMS) :] + ARMS[: turn % len(ARMS)]
        for name in order:
            dist.barrier()
            for _ in range(steps):
                whole, update = arms[name]()
                times[name].append(1e3 * whole)
                own[name].append(1e3 * update)
    if rank == 0:
        result = {
            name: {"ms": statistics.median(times[name]), "step_ms": statistics.median(own[name])} for name in ARMS
        }
        result["steps"] = {"each": rounds * steps}
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def link(rate: str = "1gbit", rounds: int = 6, steps: int = 3) -> dict[str, Any]:
    """Median milliseconds of each arm, for each model."""
    results = {}
    for name, (layers, width, cap) in MODELS.items():
        numbers = [str(number) for number in (layers, width, cap, rounds, steps)]
        measured = run_on_both("benchmarks.overlap_link", lambda host, words=numbers: words, rate, ENVIRONMENT)
        alone = measured["offbeat after"]["step_ms"]
        exposed = measured["offbeat overlap"]["ms"] - measured["no optimizer"]["ms"]
        measured["hidden"] = 1 - exposed / alone
        results[name] = measured
    return results


if __name__ == "__main__":
    worker(
        int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), *map(int, sys.argv[6:8])
    )
