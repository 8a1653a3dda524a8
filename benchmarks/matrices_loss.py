"""What a small byte-level GPT learns with AdamW, and with Muon for its matrices and AdamW for the rest.

    python -m benchmarks.matrices_loss [--steps 200] [--seeds 0 1] [--save]

The same samples for every arm; overlapped and not. ``--save`` writes benchmarks/results/matrices-loss.md and .json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import offbeat
from benchmarks.convergence_data import Samples, batches, sources
from benchmarks.convergence_models import ByteGPT
from benchmarks.convergence_train import judge, loss_of
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"
BATCH = 16
RISE = 0.1
ADAMW: dict[str, Any] = {"lr": 1.5e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def adamw(model: torch.nn.Module) -> Any:
    return offbeat.AdamW(model.parameters(), **ADAMW)


def muon(model: torch.nn.Module, module: Any = offbeat) -> Any:
    split = offbeat.split_parameters(model)
    first = module.Muon(split.matrices, lr=0.02, weight_decay=0.1)
    return offbeat.Chain([first, offbeat.AdamW(split.rest, **ADAMW)])


ARMS: dict[str, tuple[Any, bool]] = {
    "AdamW": (adamw, False),
    "Muon and AdamW": (muon, False),
    "Muon and AdamW, overlapped": (muon, True),
    "torch.optim.Muon and AdamW": (lambda model: muon(model, torch.optim), False),
}


def train(arm: str, samples: Samples, seed: int, steps: int) -> float:
    """The held-out loss at the end."""
    make, overlapped = ARMS[arm]
    torch.manual_seed(seed)
    model = ByteGPT()
    optimizer = make(model)
    handle = offbeat.overlap(optimizer, model) if overlapped else None
    rise = max(1, round(RISE * steps))
    schedule = LambdaLR(
        optimizer,
        lambda step: min((step + 1) / rise, 0.5 + 0.5 * math.cos(math.pi * max(0, step - rise) / (steps - rise))),
    )
    source = batches(samples, 0, 1, BATCH, seed)
    for _ in range(steps):
        loss_of(model, *next(source))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if handle is not None:
        handle.remove()
    return judge(model, samples)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    samples = sources()
    results: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in given.seeds:
        for arm in ARMS:
            results[arm].append(train(arm, samples, seed, given.steps))
            print(arm, seed, results[arm][-1], flush=True)
    machine = describe_machine("python -m benchmarks.matrices_loss " + " ".join(sys.argv[1:])) | {"date": given.date}
    lines = ["# What a small GPT learns with Muon", "", "Written by `python -m benchmarks.matrices_loss --save`.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += [f"- {given.steps} steps of {BATCH} windows, seeds {given.seeds}", ""]
    lines += ["| optimizer | held-out loss, mean over seeds | seed by seed |", "|---|---|---|"]
    for arm, found in results.items():
        lines.append(f"| {arm} | {statistics.mean(found):.4f} | {', '.join(f'{loss:.4f}' for loss in found)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.save:
        (RESULTS / "matrices-loss.md").write_text(text)
        (RESULTS / "matrices-loss.json").write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
