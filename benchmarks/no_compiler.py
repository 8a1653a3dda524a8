"""Steps on a machine without a C compiler, beside torch.optim's default and torch's fused operators.

    python -m benchmarks.no_compiler [--rules AdamW RMSprop ...] [--repeat 15] [--threads 1] [--save]

The compiler is hidden and the kernel cache is empty. Another arm has kernels: those of a cache that was filled
beforehand, with the compiler. torch's default is measured in every process,
in turns with ours, and a ratio is that of medians of processor time, which other programs on the machine disturb less
than the wall clock. ``--save`` writes benchmarks/results/no-compiler.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import offbeat
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"
#: The number of layers, their width and the dtype.
SETS = {
    "20 x Linear(256)": (20, 256, torch.float32),
    "200 x Linear(16)": (200, 16, torch.float32),
    "4 x Linear(1024)": (4, 1024, torch.float32),
    "1 x Linear(4)": (1, 4, torch.float32),
    "1 x Linear(4), bfloat16": (1, 4, torch.bfloat16),
    "200 x Linear(16), bfloat16": (200, 16, torch.bfloat16),
    "4 x Linear(1024), bfloat16": (4, 1024, torch.bfloat16),
}
OPTIONS = {"SGD": {"lr": 0.1, "momentum": 0.9}}
RULES = ["AdamW", "SGD", "Adagrad", "Adamax", "NAdam", "RAdam", "Adadelta", "RMSprop", "Rprop", "ASGD"]
FUSED = ("AdamW", "SGD", "Adagrad")
HIDDEN = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}


def arms(rule: str, *, kernels: bool) -> dict[str, Any]:
    """What is compared: the name of an arm, and what makes its optimizer."""
    options = OPTIONS.get(rule, {"lr": 1e-3})
    found = {
        "torch default": lambda params: getattr(torch.optim, rule)(params, **options),
        "offbeat": lambda params: getattr(offbeat, rule)(params, **options),
    }
    if rule in FUSED and not kernels:
        found["torch fused"] = lambda params: getattr(torch.optim, rule)(params, **options, fused=True)
    return found


def measure(rule: str, size: tuple[int, int, torch.dtype], repeat: int, *, kernels: bool) -> dict[str, Any]:
    """Milliseconds of processor time for each arm, and the tier that ran ours."""
    optimizers = {}
    for name, make in arms(rule, kernels=kernels).items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(size[1], size[1]) for _ in range(size[0]))).to(size[2])
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizers[name] = make(list(model.parameters()))
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    repeat *= 20 if size[1] < 8 else 1  # the shortest steps are measured more often
    for number in range(3 + repeat):
        for name, optimizer in optimizers.items():
            start = time.process_time()
            optimizer.step()
            if number >= 3:
                times[name].append(1e3 * (time.process_time() - start))
    found: dict[str, Any] = {name: statistics.median(some) for name, some in times.items()}
    ours = next(one for one in optimizers.values() if isinstance(one, offbeat.optim.base.RuleOptimizer))
    return {**found, "tier": ours.tiers()[0].tier}


def accuracy(rule: str, dtype: torch.dtype, steps: int = 50) -> dict[str, Any]:
    """How far half precision ends from torch.optim in float64, as a share of the way, and what is not finite.

    A matrix of 128 x 128, at first of 0.02 on average, with gradients of 1e-3 on average, and of 0 in one of 16 rows,
    as of units that are dead.
    """
    generator = torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(128, 128, generator=generator)).to(dtype)
    gradients = [1e-3 * torch.randn(128, 128, generator=generator) for _ in range(steps)]
    for g in gradients:
        g[::16] = 0.0
    options = OPTIONS.get(rule, {"lr": 1e-3})
    makers = {"float64": torch.optim, "torch default": torch.optim, "offbeat": offbeat}
    ends = {}
    for name, library in makers.items():
        p = start.to(torch.float64 if name == "float64" else dtype, copy=True).requires_grad_()
        optimizer = getattr(library, rule)([p], **options)
        for g in gradients:
            p.grad = g.to(dtype).to(p.dtype)
            optimizer.step()
        ends[name] = p.detach().double()
    way = (ends["float64"] - start.double()).abs().mean()
    return {
        name: [
            ((end - ends["float64"])[end.isfinite()].abs().mean() / way).item(),
            int((~end.isfinite()).sum()) / end.numel(),
        ]
        for name, end in ends.items()
        if name != "float64"
    }


def in_process(given: argparse.Namespace, environment: dict[str, str], *flags: str) -> dict[str, Any]:
    """The same in a process of its own, with other environment variables."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.no_compiler", "--part", "--rules", *given.rules]
    command += ["--repeat", str(given.repeat), "--threads", str(given.threads), *flags]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


#: Where our kernels come from: the key of a process's results and the heading of a column.
SOURCES = {"none": "offbeat without kernels", "cache": "filled cache"}


def report(machine: dict[str, str], results: dict[str, Any]) -> str:
    lines = ["# Steps without a C compiler", "", "Written by `python -m benchmarks.no_compiler --save`.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += [
        "",
        "Milliseconds of processor time a step; in parentheses, as a multiple of torch's default in the same process.",
        "The column of torch's default is that of the process without kernels.",
        "",
        "| kernels | smallest multiple | largest multiple |",
        "|---|---|---|",
    ]
    for source, heading in SOURCES.items():
        ratios = [
            (found["offbeat"] / found["torch default"], f"{rule}, {size}")
            for size, rules in results[source].items()
            for rule, found in rules.items()
        ]
        least, most = min(ratios), max(ratios)
        lines.append(f"| {heading} | {least[0]:.2f} ({least[1]}) | {most[0]:.2f} ({most[1]}) |")
    for size in SETS:
        lines += [
            "",
            f"## {size}",
            "",
            f"| rule | torch default | torch fused | {' | tier | '.join(SOURCES.values())} | tier |",
        ]
        lines.append("|---" * 7 + "|")
        for rule, found in results["none"][size].items():
            base = found["torch default"]
            fused = (
                f"{found['torch fused']:.3g} ({found['torch fused'] / base:.2f})" if "torch fused" in found else "none"
            )
            cells = [rule, f"{base:.3g}", fused]
            for source in SOURCES:
                mine = results[source][size][rule]
                cells += [f"{mine['offbeat']:.3g} ({mine['offbeat'] / mine['torch default']:.2f})", mine["tier"]]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *half_precision(results["accuracy"]), ""])


def half_precision(found: dict[str, Any]) -> list[str]:
    """The table of :func:`accuracy`."""
    lines = [
        "",
        "## What half precision costs",
        "",
        "torch.optim's default rounds every operation to half precision. offbeat without kernels computes in float32,",
        "as torch's fused operators do, and converts the tensors for it. After 50 steps: the mean distance from",
        "torch.optim in float64, as a share of the way that parameters went, and the share of elements that are NaN or",
        "infinite.",
        "",
        "| rule | dtype | torch default | offbeat without kernels |",
        "|---|---|---|---|",
    ]
    for rule, dtypes in found.items():
        for dtype, one in dtypes.items():
            cells = [
                f"{off:.3g}" + (f", {lost:.0%} not finite" if lost else "")
                for off, lost in (one["torch default"], one["offbeat"])
            ]
            lines.append(f"| {rule} | {dtype} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kernels", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--accuracy", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.accuracy:
        halves = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        print(json.dumps({rule: {name: accuracy(rule, one) for name, one in halves.items()} for rule in given.rules}))
        return
    if given.part:
        if given.kernels:
            from offbeat.engine.cpu.reader import wait_for_reader

            measure("SGD", (1, 4, torch.float32), 1, kernels=True)
            wait_for_reader(600)
        found = {
            name: {rule: measure(rule, size, given.repeat, kernels=given.kernels) for rule in given.rules}
            for name, size in SETS.items()
        }
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as filled:
        results = {"none": in_process(given, {**HIDDEN, "OFFBEAT_CACHE_DIR": empty})}
        results["accuracy"] = in_process(given, {**HIDDEN, "OFFBEAT_CACHE_DIR": empty}, "--accuracy")
        in_process(given, {"OFFBEAT_CACHE_DIR": filled}, "--kernels")
        results["cache"] = in_process(given, {**HIDDEN, "OFFBEAT_CACHE_DIR": filled}, "--kernels")
    machine = describe_machine("python -m benchmarks.no_compiler " + " ".join(sys.argv[1:]))
    machine |= {"date": time.strftime("%Y-%m-%d"), "load average": f"{os.getloadavg()[0]:.1f}"}
    text = report(machine, results)
    print(text)
    if given.save:
        (RESULTS / "no-compiler.md").write_text(text)
        (RESULTS / "no-compiler.json").write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
