"""Steps on a machine without a C compiler, beside torch.optim's default and torch's fused operators.

    python -m benchmarks.no_compiler [--rules AdamW RMSprop ...] [--repeat 15] [--threads 1] [--save]

The compiler is hidden and the kernel cache is empty. The last arm has a cache that was filled beforehand, with the
compiler. Arms take turns in one process each, and the ratio is that of medians of processor time, which other programs
on the machine disturb less than the wall clock. ``--save`` writes benchmarks/results/no-compiler.md and .json.
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
    "200 x Linear(16), bfloat16": (200, 16, torch.bfloat16),
    "4 x Linear(1024), bfloat16": (4, 1024, torch.bfloat16),
}
OPTIONS = {"SGD": {"lr": 0.1, "momentum": 0.9}}
RULES = ["AdamW", "SGD", "Adagrad", "Adamax", "NAdam", "RAdam", "Adadelta", "RMSprop", "Rprop", "ASGD"]
FUSED = ("AdamW", "SGD", "Adagrad")
HIDDEN = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}


def arms(rule: str, *, cached: bool) -> dict[str, Any]:
    """What is compared: the name of an arm, and what makes its optimizer."""
    options = OPTIONS.get(rule, {"lr": 1e-3})
    if cached:
        return {"offbeat, filled cache": lambda params: getattr(offbeat, rule)(params, **options)}
    found = {
        "torch default": lambda params: getattr(torch.optim, rule)(params, **options),
        "offbeat": lambda params: getattr(offbeat, rule)(params, **options),
    }
    if rule in FUSED:
        found["torch fused"] = lambda params: getattr(torch.optim, rule)(params, **options, fused=True)
    return found


def measure(rule: str, size: tuple[int, int, torch.dtype], repeat: int, *, cached: bool) -> dict[str, Any]:
    """Milliseconds of processor time for each arm, and the tier that ran ours."""
    optimizers = {}
    for name, make in arms(rule, cached=cached).items():
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


def in_process(given: argparse.Namespace, environment: dict[str, str], *flags: str) -> dict[str, Any]:
    """The same in a process of its own, with other environment variables."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.no_compiler", "--part", "--rules", *given.rules]
    command += ["--repeat", str(given.repeat), "--threads", str(given.threads), *flags]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(machine: dict[str, str], results: dict[str, Any]) -> str:
    lines = ["# Steps without a C compiler", "", "Written by `python -m benchmarks.no_compiler --save`.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += ["", "Milliseconds of processor time a step; in parentheses, as a multiple of torch's default.", ""]
    for size in SETS:
        lines += [f"## {size}", "", "| rule | torch default | torch fused | offbeat | its tier | filled cache |"]
        lines.append("|---|---|---|---|---|---|")
        for rule, found in results[size].items():
            base = found["torch default"]
            cells = [
                f"{found[arm]:.3g} ({found[arm] / base:.2f})" if arm in found else "none"
                for arm in ("torch fused", "offbeat", "offbeat, filled cache")
            ]
            lines.append(f"| {rule} | {base:.3g} | {cells[0]} | {cells[1]} | {found['tier']} | {cells[2]} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cached", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.part:
        if given.cached:
            from offbeat.engine.reader import wait_for_reader

            measure("SGD", (1, 4, torch.float32), 1, cached=True)
            wait_for_reader(600)
        found = {
            name: {rule: measure(rule, size, given.repeat, cached=given.cached) for rule in given.rules}
            for name, size in SETS.items()
        }
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as filled:
        hidden = in_process(given, {**HIDDEN, "OFFBEAT_CACHE_DIR": empty})
        in_process(given, {"OFFBEAT_CACHE_DIR": filled}, "--cached")
        cached = in_process(given, {**HIDDEN, "OFFBEAT_CACHE_DIR": filled}, "--cached")
    for size, rules in hidden.items():
        for rule, found in rules.items():
            found["offbeat, filled cache"] = cached[size][rule]["offbeat, filled cache"]
    machine = describe_machine("python -m benchmarks.no_compiler " + " ".join(sys.argv[1:]))
    machine |= {"date": time.strftime("%Y-%m-%d"), "load average": f"{os.getloadavg()[0]:.1f}"}
    text = report(machine, hidden)
    print(text)
    if given.save:
        (RESULTS / "no-compiler.md").write_text(text)
        (RESULTS / "no-compiler.json").write_text(json.dumps({"machine": machine, "results": hidden}, indent=1) + "\n")


if __name__ == "__main__":
    main()
