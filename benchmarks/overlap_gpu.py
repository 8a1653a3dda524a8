"""Stepping in backward on a GPU: memory of each variant in a process of its own, times of all taking turns in one.

    python -m benchmarks.overlap gpu

The step is bound by the host, and hosts are shared: times of separate processes differ more than variants do.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

import offbeat
from benchmarks.gpt import GPT, LARGE

__all__ = ["VARIANTS", "measure", "take_turns"]

VARIANTS = {
    "torch fused AdamW after backward": "torch-after",
    "torch in backward (private)": "torch-in-backward",
    "offbeat AdamW after backward": "offbeat-after",
    "offbeat AdamW, overlap": "offbeat-overlap",
    "torch fused AdamW, offbeat.overlap": "torch-overlap",
    "offbeat AdamW, overlap, clip previous": "offbeat-overlap-previous",
}
OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


def measure(variant: str, steps: int, bucket_mb: float, cache: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Milliseconds a step (median), and the peak of allocated memory in GiB."""
    once, gradients = loop(variant, bucket_mb, cache, sizes)
    first = once()
    for _ in range(4):
        once()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = once()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "variant": variant,
        "ms": round(statistics.median(times), 2),
        "fastest_ms": round(min(times), 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "gradients_gib": round(gradients / 2**30, 2),
        "first_loss": first.item(),
        "last_loss": loss.item(),
    }


def loop(variant: str, bucket_mb: float, cache: str, sizes: dict[str, int]) -> tuple[Any, int]:
    """A function that trains one step and returns the loss, and the bytes of all gradients."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    with device:
        model = GPT(**sizes)
    step = arrange(variant, model, bucket_mb)
    tokens = torch.randint(sizes["vocabulary"], (1, sizes["length"] + 1), device=device)

    def once() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=cache != "none"):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        step()
        return loss

    return once, sum(p.nbytes for p in model.parameters())


def take_turns(rounds: int, steps: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Milliseconds a step of all variants (but the slowest) in one process, a few steps each in turn."""
    variants = [variant for variant in VARIANTS.values() if variant != "torch-in-backward"]
    loops = {variant: loop(variant, 0, "none", sizes)[0] for variant in variants}
    for once in loops.values():
        for _ in range(4):
            once()
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    ratios: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(rounds):
        shift = turn % len(variants)
        medians = {}
        for variant in variants[shift:] + variants[:shift]:
            mine = []
            for _ in range(steps):
                torch.cuda.synchronize()
                start = time.perf_counter()
                loops[variant]()
                torch.cuda.synchronize()
                mine.append(1e3 * (time.perf_counter() - start))
            times[variant] += mine
            medians[variant] = statistics.median(mine)
        for variant in variants:
            ratios[variant].append(medians[variant] / medians["torch-after"])
    return {
        variant: {
            "ms": statistics.median(times[variant]),
            "fastest_ms": min(times[variant]),
            "ratio": statistics.median(ratios[variant]),
            "ratios": [round(ratio, 3) for ratio in sorted(ratios[variant])],
        }
        for variant in variants
    }


def arrange(variant: str, model: torch.nn.Module, bucket_mb: float) -> Any:
    """What the loop does after backward."""
    if variant == "torch-in-backward":
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {**OPTIONS, "fused": True})
        return lambda: None
    library: Any = torch.optim if variant.startswith("torch") else offbeat
    optimizer = library.AdamW(model.parameters(), fused=True, **OPTIONS)
    if "overlap" in variant:
        clip = {"clip_norm": 1.0, "clip": "previous"} if variant.endswith("previous") else {}
        offbeat.overlap(optimizer, model, bucket_cap_mb=bucket_mb or None, **clip)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    if sys.argv[1] == "turns":
        print(json.dumps(take_turns(int(sys.argv[2]), int(sys.argv[3]), dict(LARGE))))
    else:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], dict(LARGE))))
