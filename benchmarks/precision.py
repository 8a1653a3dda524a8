"""Whether a model learns as well in fewer bits: a small byte-level GPT, AdamW, the same samples for every arm.

    python -m benchmarks.precision [--steps 200] [--seeds 0 1 2] [--save]

One process, no replicas. ``--save`` writes benchmarks/results/precision.md and .json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
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

#: dtype of the parameters, and how numbers are kept.
ARMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "float32, state in bfloat16": (torch.float32, {"state_dtype": torch.bfloat16}),
    "float32, state in 8 bits": (torch.float32, {"state_dtype": "8bit"}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16, stochastic": (torch.bfloat16, {"rounding": "stochastic", "state_dtype": torch.bfloat16}),
    "bfloat16, kahan": (torch.bfloat16, {"rounding": "kahan", "state_dtype": torch.float32}),
    "bfloat16, stochastic, state in 8 bits": (torch.bfloat16, {"rounding": "stochastic", "state_dtype": "8bit"}),
}


def train(arm: str, samples: Samples, seed: int, steps: int) -> float:
    """The held-out loss at the end."""
    dtype, options = ARMS[arm]
    torch.manual_seed(seed)
    model = ByteGPT().to(dtype)
    optimizer = offbeat.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1, **options)
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
    return judge(model.float(), samples)[0]


def report(results: dict[str, Any]) -> str:
    lines = ["# Learning in fewer bits", "", "Written by `python -m benchmarks.precision --save`.", ""]
    lines += [f"- {key}: {value}" for key, value in results["machine"].items()]
    lines += [f"- {results['words']}; {results['steps']} steps of {BATCH} windows, seeds {results['seeds']}", ""]
    lines += ["| parameters and state | held-out loss | against float32, seed by seed |", "|---|---|---|"]
    whole = results["losses"]["float32"]
    for arm, losses in results["losses"].items():
        gaps = ", ".join(f"{100 * (a / b - 1):+.2f} %" for a, b in zip(losses, whole, strict=True))
        lines.append(f"| {arm} | {statistics.mean(losses):.4f} | {gaps if arm != 'float32' else '-'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    samples = sources()
    results: dict[str, Any] = {
        "machine": describe_machine("python -m benchmarks.precision " + " ".join(sys.argv[1:])),
        "words": samples.words,
        "steps": options.steps,
        "seeds": options.seeds,
        "losses": {},
    }
    for arm in options.arms:
        results["losses"][arm] = [train(arm, samples, seed, options.steps) for seed in options.seeds]
        print(arm, results["losses"][arm], flush=True)
    text = report(results)
    print("\n" + text)
    if options.save:
        (RESULTS / "precision.md").write_text(text)
        (RESULTS / "precision.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
