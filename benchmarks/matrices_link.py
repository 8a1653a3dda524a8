"""Muon and AdamW over a slow link: how much of the exchange and of the arithmetic backward hides.

    python -m benchmarks.matrices_link [--rate 1gbit] [--layers 16] [--width 512] [--save]

Two ranks in network namespaces joined by a link of that rate, one thread each; needs root and iproute2. All arms take
turns in the same processes. Two measure floors: backward without any communication, and backward with gradients reduced
to owners and no step. Two more have `ns_steps=0`: they exchange everything and compute nothing. With

- R: gradients reduced to owners, no step;
- E, E': the exchange of updates too (and AdamW), after backward and overlapped;
- A, A': the arithmetic too, after backward and overlapped;

backward hides 1 - (E' - R) / (E - R) of the exchange of updates, and 1 - ((A' - E') / (A - E)) of the arithmetic.
``--save`` writes benchmarks/results/matrices-link.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.link import run_on_both, sent_bytes
from benchmarks.machine import describe_machine
from benchmarks.overlap_link import ENVIRONMENT

RESULTS = Path(__file__).parent / "results"

#: How gradients are reduced, the Newton-Schulz steps, and when the optimizer steps.
ARMS: dict[str, tuple[str, int, str]] = {
    "backward alone": ("alone", 5, "never"),
    "all-reduce, no step": ("all", 5, "never"),
    "to owners, no step (R)": ("owners", 5, "never"),
    "every rank does all, after backward": ("all", 5, "after"),
    "every rank does all, overlapped": ("all", 5, "overlapped"),
    "shared, after backward": ("shared", 5, "after"),
    "shared, overlapped": ("shared", 5, "overlapped"),
    "to owners, exchange only, after backward (E)": ("owners", 0, "after"),
    "to owners, exchange only, overlapped (E')": ("owners", 0, "overlapped"),
    "to owners, after backward (A)": ("owners", 5, "after"),
    "to owners, overlapped (A')": ("owners", 5, "overlapped"),
}


def arm(name: str, layers: int, width: int, tokens: int) -> Any:
    """A function that trains one step."""
    reduced, iterations, when = ARMS[name]
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh())]
    model = nn.Sequential(*parts)
    module: Any = model if reduced == "alone" else nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    muon = offbeat.Muon(matrices, lr=1e-4, ns_steps=iterations)
    rest = offbeat.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-4)
    optimizer = offbeat.Chain([muon, rest])
    if reduced == "owners":
        offbeat.reduce_to_owners(optimizer, module)
    elif reduced == "shared":
        optimizer.share_matrices()
    if when == "overlapped":
        offbeat.overlap(optimizer, module)
    x = torch.randn(tokens, width)

    def step() -> None:
        module(x).square().mean().backward()
        if when != "never":
            optimizer.step()
        optimizer.zero_grad()

    return step


def worker(rank: int, address: str, layers: int, width: int, tokens: int, rounds: int, interface: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29513", rank=rank, world_size=2)
    arms = {name: arm(name, layers, width, tokens) for name in ARMS}
    for step in arms.values():
        for _ in range(2):
            step()
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    busy: dict[str, list[float]] = {name: [] for name in ARMS}
    sent: dict[str, list[float]] = {name: [] for name in ARMS}
    names = list(ARMS)
    for turn in range(rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            dist.barrier()
            for _ in range(2):
                before, used, start = sent_bytes(interface), time.process_time(), time.perf_counter()
                arms[name]()
                times[name].append(1e3 * (time.perf_counter() - start))
                busy[name].append(1e3 * (time.process_time() - used))
                sent[name].append((sent_bytes(interface) - before) / 1e6)
    if rank == 0:
        measured = {"ms": times, "busy_ms": busy, "mb": sent}
        found = {name: {key: statistics.median(one[name]) for key, one in measured.items()} for name in names}
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def hidden(found: dict[str, Any]) -> dict[str, float]:
    """The shares that backward hides."""
    ms = {name.rpartition("(")[2].rstrip(")"): one["ms"] for name, one in found.items()}
    r, e, e2, a, a2 = (ms[letter] for letter in ("R", "E", "E'", "A", "A'"))
    return {
        "exchange_ms": e - r,
        "arithmetic_ms": a - e,
        "hidden_exchange": 1 - (e2 - r) / (e - r),
        "hidden_arithmetic": 1 - (a2 - e2) / (a - e),
        "hidden_together": 1 - (a2 - r) / (a - r),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    numbers = [str(n) for n in (given.layers, given.width, given.tokens, given.rounds)]
    found = run_on_both("benchmarks.matrices_link", lambda host: [*numbers, host.interface], given.rate, ENVIRONMENT)
    shares = hidden(found)
    machine = describe_machine("python -m benchmarks.matrices_link " + " ".join(sys.argv[1:])) | {"date": given.date}
    machine["threads"] = "1 a rank"
    lines = ["# Muon over a slow link", "", "Written by `python -m benchmarks.matrices_link --save`.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += [
        f"- two ranks in network namespaces, {given.rate}; {given.layers} layers of width {given.width} "
        f"({given.layers * given.width**2 / 1e6:.1f} M float32 parameters in matrices), {given.tokens} tokens a rank",
        f"- medians of {2 * given.rounds} steps, arms taking turns; MB that a rank sends, as the kernel counts them",
        "",
        "| gradients and work | wall ms a step | processor ms a step | MB a step |",
        "|---|---|---|---|",
        *(f"| {name} | {one['ms']:.0f} | {one['busy_ms']:.0f} | {one['mb']:.1f} |" for name, one in found.items()),
        "",
        f"To owners, after backward: the exchange of updates (with AdamW) takes {shares['exchange_ms']:.0f} ms and the "
        f"arithmetic {shares['arithmetic_ms']:.0f} ms. Overlapped, backward hides {shares['hidden_exchange']:.0%} of "
        f"the exchange, {shares['hidden_arithmetic']:.0%} of the arithmetic, {shares['hidden_together']:.0%} of both.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.save:
        (RESULTS / "matrices-link.md").write_text(text)
        content = {"machine": machine, "results": found, "shares": shares}
        (RESULTS / "matrices-link.json").write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        worker(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:7]), sys.argv[7])
    else:
        main()
