"""Two ranks share one GPU through gloo: the streams of an overlapped DDP model, looked at for races.

    python -m benchmarks.overlap race

Each round trains with and without overlap from the same start on the same data and compares every bit of parameters and
state. A race would show as a difference in some rounds.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import offbeat

__all__ = ["race"]


def _train(rank: int, overlapped: bool, clip: str | None, view: bool, seed: int, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers).cuda(), bucket_cap_mb=8, gradient_as_bucket_view=view
    )
    optimizer = offbeat.AdamW(model.parameters(), lr=1e-3, fused=True)
    if overlapped:
        options: dict[str, Any] = {"clip_norm": 0.05, "clip": clip} if clip else {}
        offbeat.overlap(optimizer, model, **options)
    for step in range(steps):
        x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(2 * step + rank)).cuda()
        model(x).square().mean().backward()
        if clip and not overlapped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    state = [t for entry in optimizer.state.values() for t in entry.values() if t.dim()]
    return [t.detach().clone() for t in (*model.parameters(), *state)]


def _main(rank: int, store: str, rounds: int, steps: int, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.cuda.set_device(0)
    different = []
    for seed in range(rounds):
        clip, view = (None, "exact")[seed % 2], seed % 4 < 2
        pairs = zip(*(_train(rank, flag, clip, view, seed, steps) for flag in (True, False)), strict=True)
        # State is filed in the order of first updates, so parameters are compared in order and state as a set.
        ours, theirs = map(list, zip(*pairs, strict=True))
        sums = [sorted((t.double().sum().item(), t.double().norm().item()) for t in side) for side in (ours, theirs)]
        same = all(torch.equal(a, b) for a, b in zip(ours[:16], theirs[:16], strict=True)) and sums[0] == sums[1]
        if not same:
            different.append(seed)
    results.put((rank, different))
    dist.barrier()
    dist.destroy_process_group()


def race(rounds: int = 20, steps: int = 20) -> dict[str, Any]:
    """How many rounds gave different bits, on either rank."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_main, args=(rank, f"{folder}/store", rounds, steps, results)) for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        answers = dict(results.get(timeout=500) for _ in workers)
        for worker in workers:
            worker.join(60)
    return {"rounds": rounds, "steps": steps, "rounds_that_differ": {str(k): v for k, v in answers.items()}}


if __name__ == "__main__":
    print(race())
