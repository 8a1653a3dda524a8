"""Time, host time and memory of an optimizer step, side by side with torch's tiers in one run.

    python benchmarks/step.py [--device cuda] [--rules AdamW SGD] [--rounds 15] [--save]

Arms take turns, step by step, so that a slow moment of the machine falls on all of them; each figure is a median.
``--save`` writes benchmarks/results/step-cpu.md and .json, for a GPU step-cuda.md, .json and .png.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import offbeat
from machine import describe_machine
from shapes import SETS, shapes_of

HYPER: dict[str, dict[str, Any]] = {"SGD": {"lr": 1e-3, "momentum": 0.9}, "ASGD": {"lr": 1e-3}}
NATIVE_FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
RULES = ["AdamW", "SGD", "Adam", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Lion"]
RESULTS = Path(__file__).parent / "results"


def arms_of(rule: str) -> list[str]:
    if rule == "Lion":
        return ["offbeat loop", "offbeat"]
    fused = ["torch fused"] if rule in NATIVE_FUSED else []
    return ["torch loop", "torch foreach", *fused, "offbeat"]


def build(rule: str, arm: str, shapes: list[tuple[int, ...]]) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator) * 1e-3
    options = dict(HYPER.get(rule, {}))
    library, _, tier = arm.partition(" ")
    options |= {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "": {}}[tier]
    cls = getattr(torch.optim if library == "torch" else offbeat, rule)
    return params, cls(params, **options)


def fresh_gradients(params: list[torch.Tensor]) -> None:
    """New gradient tensors at new addresses, as after ``zero_grad(set_to_none=True)`` and a backward pass."""
    for p in params:
        p.grad = p.grad.clone()


def time_arms(
    arms: dict[str, tuple[list[torch.Tensor], torch.optim.Optimizer]], rounds: int, fresh: bool
) -> dict[str, float]:
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _, optimizer in arms.values():
        for _ in range(3):
            optimizer.step()
    for _ in range(rounds):
        for arm, (params, optimizer) in arms.items():
            for _ in range(3):
                if fresh:
                    fresh_gradients(params)
                start = time.perf_counter()
                optimizer.step()
                times[arm].append((time.perf_counter() - start) * 1e3)
    return {arm: statistics.median(values) for arm, values in times.items()}


def compare(rule: str, name: str, rounds: int) -> dict[str, Any]:
    shapes = shapes_of(name)
    arms = {arm: build(rule, arm, shapes) for arm in arms_of(rule)}
    result: dict[str, Any] = {"rule": rule, "set": name}
    for fresh in (False, True):
        result["fresh gradients" if fresh else "same gradients"] = time_arms(arms, rounds, fresh)
    return result


def host_time(rule: str, arm: str) -> dict[str, float]:
    """Microseconds a tensor that a step costs besides its arithmetic: the slope over tensors of one element."""
    points = {}
    for count in (500, 1000, 2000, 4000):
        params, optimizer = build(rule, arm, [(1,)] * count)
        points[count] = time_arms({arm: (params, optimizer)}, 15, fresh=False)[arm] * 1e3
    slope = (points[4000] - points[500]) / 3500
    return {"us a tensor": slope, **{f"us for {count}": value for count, value in points.items()}}


def in_turns(rule: str, arm: str, rounds: int) -> float:
    """Milliseconds a step where a quarter of 800 tensors has a gradient, others at every step, as with experts."""
    params, optimizer = build(rule, arm, [(1024,)] * 800)
    gradients = [p.grad for p in params]
    times = []
    for step in range(8 + 4 * rounds):
        for i, (p, g) in enumerate(zip(params, gradients, strict=True)):
            p.grad = g if (i + step) % 4 == 0 else None
        start = time.perf_counter()
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[8:])


def peak_memory(rule: str, arm: str, name: str) -> float:
    """MB a step needs above what lies there before and after it, in a process of its own."""
    command = [sys.executable, __file__, "--measure-memory", rule, arm, name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_memory(rule: str, arm: str, name: str) -> None:
    def status(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1e3

    _, optimizer = build(rule, arm, shapes_of(name))
    for _ in range(2):
        optimizer.step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark so far
    before = status("VmRSS")
    optimizer.step()
    print(max(0.0, status("VmHWM") - before))


def copy_bandwidth(elements: int = 64 << 20) -> float:
    """GB/s read and written by a large copy: what a step cannot beat."""
    a, b = torch.zeros(elements), torch.ones(elements)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        a.copy_(b)
        times.append(time.perf_counter() - start)
    return 8 * elements / statistics.median(times) / 1e9


def table(rows: list[dict[str, Any]], which: str) -> list[str]:
    lines = [
        "| rule | parameters | torch loop | torch foreach | torch fused | offbeat | torch's fastest / offbeat |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = row[which]
        fastest = min((v for arm, v in times.items() if arm.startswith("torch")), default=None)
        cells = [f"{times[arm]:.2f}" if arm in times else "-" for arm in ("torch loop", "torch foreach", "torch fused")]
        ratio = f"**{fastest / times['offbeat']:.2f}**" if fastest else "-"
        lines.append(f"| {row['rule']} | {row['set']} | {' | '.join(cells)} | {times['offbeat']:.2f} | {ratio} |")
    return lines


def report(results: dict[str, Any]) -> str:
    lines = ["# Optimizer step on the CPU", "", "Written by `benchmarks/step.py --save`.", ""]
    lines += [f"- {key}: {value}" for key, value in results["machine"].items()]
    lines += [f"- copy bandwidth: {results['copy GB/s']:.1f} GB/s read and written", ""]
    for which in ("same gradients", "fresh gradients"):
        note = "the same tensors at every step" if which == "same gradients" else "new tensors at every step"
        lines += [f"## Milliseconds a step, gradients in {note}", "", *table(results["steps"], which), ""]
    lines += ["## Host time", "", "Slope over 500 to 4,000 tensors of one element, microseconds a tensor.", ""]
    lines += ["| rule | torch fused | offbeat |", "|---|---|---|"]
    for rule, by_arm in results["host"].items():
        lines.append(
            f"| {rule} | {by_arm['torch fused']['us a tensor']:.2f} | {by_arm['offbeat']['us a tensor']:.2f} |"
        )
    lines += ["", "## Gradients that come in turns", ""]
    lines += [
        "A quarter of 800 tensors of 1,024, others at every step, as in a mixture of experts. Milliseconds a step.",
        "",
    ]
    lines += ["| rule | torch foreach | torch fused | offbeat |", "|---|---|---|---|"]
    for rule, by in results["turns"].items():
        lines.append(f"| {rule} | {by['torch foreach']:.2f} | {by['torch fused']:.2f} | {by['offbeat']:.2f} |")
    lines += ["", "## Memory a step needs beside parameters, gradients and state, MB (highest resident size)", ""]
    lines += [
        "| rule | parameters | torch loop | torch foreach | torch fused | offbeat | offbeat foreach | offbeat loop |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in results["memory"]:
        arms = ("torch loop", "torch foreach", "torch fused", "offbeat", "offbeat foreach", "offbeat loop")
        cells = [f"{row['MB'][arm]:.0f}" if arm in row["MB"] else "-" for arm in arms]
        lines.append(f"| {row['rule']} | {row['set']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def on_cuda(options: argparse.Namespace) -> None:
    from step_cuda import cuda_report, measure_cuda, merged, plot

    def keep(results: dict[str, Any]) -> None:
        if options.save:
            (options.results / "step-cuda.json").write_text(json.dumps(results, indent=1) + "\n")

    if options.merge:
        runs = [json.loads(path.read_text()) for path in options.merge]
        results = {**merged(runs), "runs": len(runs)}
        keep(results)
    else:
        words = sys.argv[1:]
        if "--results" in words:  # where it was written does not matter
            at = words.index("--results")
            words = words[:at] + words[at + 2 :]
        results = measure_cuda("python benchmarks/step.py " + " ".join(words), options.rules, options.rounds, keep)
    text = cuda_report(results)
    print("\n" + text)
    if options.save:
        (options.results / "step-cuda.md").write_text(text)
        try:
            plot(results, options.results / "step-cuda.png")
        except ImportError:
            print("no plot: matplotlib is not installed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder --save writes to")
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--merge", nargs="+", type=Path, help="for cuda: do not measure, take medians of these .json")
    parser.add_argument("--measure-memory", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_memory:
        measure_memory(*options.measure_memory)
        return
    if options.device == "cuda":
        on_cuda(options)
        return

    def show(label: str, value: Callable[[], Any]) -> Any:
        found = value()
        print(f"{label}: {found}", flush=True)
        return found

    results: dict[str, Any] = {"machine": describe_machine("python benchmarks/step.py " + " ".join(sys.argv[1:]))}
    results["copy GB/s"] = show("copy GB/s", copy_bandwidth)
    results["steps"] = []
    for rule in options.rules:
        # Rules torch has no fused form of take it hundreds of milliseconds on the large sets: fewer rounds do.
        sets = options.sets if rule in ("AdamW", "SGD") else [name for name in options.sets if name != "GPT-2"]
        for name in sets:
            rounds = options.rounds if rule in ("AdamW", "SGD") else max(3, options.rounds // 3)
            results["steps"].append(show(f"{rule}, {name}", lambda r=rule, n=name, k=rounds: compare(r, n, k)))
    results["host"] = {
        rule: show(f"host {rule}", lambda r=rule: {arm: host_time(r, arm) for arm in ("torch fused", "offbeat")})
        for rule in ("AdamW", "SGD")
    }
    results["turns"] = {
        rule: show(
            f"turns {rule}",
            lambda r=rule: {arm: in_turns(r, arm, options.rounds) for arm in arms_of(r) if arm != "torch loop"},
        )
        for rule in ("AdamW", "SGD")
    }
    results["memory"] = []
    for rule in ("AdamW", "SGD", "RMSprop"):
        arms = [*arms_of(rule), "offbeat foreach", "offbeat loop"]
        measured = {arm: peak_memory(rule, arm, "GPT-2") for arm in arms}
        results["memory"].append(
            show(f"memory {rule}", lambda r=rule, m=measured: {"rule": r, "set": "GPT-2", "MB": m})
        )
    text = report(results)
    print("\n" + text)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "step-cpu.md").write_text(text)
        (RESULTS / "step-cpu.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
