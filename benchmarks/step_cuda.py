"""A step on a GPU: wall clock, host and device time, bytes over the card's copy bandwidth, memory, compile time.

Three clocks for each arm, all medians:

- wall: from an idle device to an idle device, as a user's loop would see one step by itself;
- host: until ``step()`` returns;
- device: between two events with the queue filled beforehand, so that the host is never waited for.

Arms take turns. The bytes of a step are those it cannot do without: the parameter and every state tensor read and
written, the gradient read.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import offbeat
from machine import describe_machine
from shapes import CUDA_SETS, shapes_of

__all__ = ["STATES", "cuda_report", "measure_cuda", "plot"]

HYPER: dict[str, dict[str, Any]] = {"SGD": {"lr": 1e-3, "momentum": 0.9}, "ASGD": {"lr": 1e-3}}
#: State tensors a rule keeps for each parameter, with the hyperparameters above.
STATES = {
    "AdamW": 2, "SGD": 1, "Adam": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "Adadelta": 2, "RMSprop": 1,
    "Rprop": 2, "ASGD": 1, "Lion": 1,
}  # fmt: skip
FUSED_IN_TORCH = ("SGD", "Adam", "AdamW")
DEVICE = "cuda"


def bytes_moved(rule: str, elements: int, itemsize: int = 4) -> int:
    return elements * itemsize * (3 + 2 * STATES[rule])


def arms_of(rule: str, name: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """By name: a class and its options."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    theirs = getattr(torch.optim, rule, None)
    if theirs is not None and name != "1.3 B":
        found["torch foreach"] = (theirs, {"foreach": True})
    if rule in FUSED_IN_TORCH:
        found["torch fused"] = (theirs, {"fused": True})
    found["offbeat"] = (getattr(offbeat, rule), {})
    if rule in ("AdamW", "SGD"):
        found["offbeat fused=True"] = (getattr(offbeat, rule), {"fused": True})
    optimi = _optimi()
    if optimi is not None and rule in ("AdamW", "Lion"):
        found["optimi"] = (getattr(optimi, rule), {"lr": 1e-3})
    return found


def _optimi() -> Any:
    try:
        import optimi
    except ImportError:
        return None
    return optimi


def clocks(step: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Milliseconds by wall, host and device clock."""
    found: dict[str, list[float]] = {"wall": [], "host": [], "device": []}
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        found["host"].append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        found["wall"].append((time.perf_counter() - start) * 1e3)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(10_000_000)  # some milliseconds, for the host to run ahead
        before.record()
        step()
        after.record()
        torch.cuda.synchronize()
        found["device"].append(before.elapsed_time(after))
    return found


def compare(rule: str, name: str, rounds: int) -> dict[str, Any]:
    shapes = shapes_of(name)
    params = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    elements = sum(p.numel() for p in params)
    arms = {
        arm: cls(params, **{**HYPER.get(rule, {}), **options}) for arm, (cls, options) in arms_of(rule, name).items()
    }
    readings: dict[str, dict[str, list[float]]] = {arm: {"wall": [], "host": [], "device": []} for arm in arms}
    for optimizer in arms.values():
        for _ in range(3):
            optimizer.step()
    for _ in range(rounds):
        for arm, optimizer in arms.items():
            optimizer.step()  # the arm before has left other addresses in the caches
            for clock, values in clocks(optimizer.step, 3).items():
                readings[arm][clock] += values
    times = {arm: {clock: statistics.median(values) for clock, values in by.items()} for arm, by in readings.items()}
    memory = {arm: _peak(optimizer.step) for arm, optimizer in arms.items()}
    return {
        "rule": rule, "set": name, "tensors": len(shapes), "elements": elements,
        "bytes": bytes_moved(rule, elements), "ms": times, "peak MB": memory,
    }  # fmt: skip


#: AdamW with less to move: dtype of parameters and gradients, options, bytes an element.
COMPACT: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
    "float32": (torch.float32, {}, 28),
    "float32, 8-bit state": (torch.float32, {"state_dtype": "8bit"}, 16 + 16 / 256),
    "bfloat16": (torch.bfloat16, {}, 14),
    "bfloat16, float32 state": (torch.bfloat16, {"state_dtype": torch.float32}, 22),
    "bfloat16, stochastic": (torch.bfloat16, {"rounding": "stochastic", "state_dtype": torch.bfloat16}, 14),
    "bfloat16, kahan": (torch.bfloat16, {"rounding": "kahan"}, 18),
    "bfloat16, 8-bit state": (torch.bfloat16, {"state_dtype": "8bit"}, 10 + 16 / 256),
    "bfloat16, stochastic, 8-bit state": (
        torch.bfloat16, {"rounding": "stochastic", "state_dtype": "8bit"}, 10 + 16 / 256,
    ),
}  # fmt: skip


def compact(name: str, rounds: int) -> dict[str, Any]:
    """Steps of AdamW with parameters and state in fewer bits."""
    found: dict[str, Any] = {}
    for arm, (dtype, options, size) in COMPACT.items():
        params = [torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes_of(name)]
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        optimizer = offbeat.AdamW(params, **options)
        for _ in range(3):
            optimizer.step()
        times = {clock: statistics.median(values) for clock, values in clocks(optimizer.step, 3 * rounds).items()}
        elements = sum(p.numel() for p in params)
        state = sum(t.nbytes for entry in optimizer.state.values() for k, t in entry.items() if k != "step")
        found[arm] = {"ms": times, "bytes": size * elements, "state bytes an element": state / elements}
        del params, optimizer
        torch.cuda.empty_cache()
    return found


def _peak(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def copy_bandwidth() -> float:
    """GB/s read and written by a large copy."""
    a = torch.randn(1 << 29, device=DEVICE)
    b = torch.randn_like(a)
    device = clocks(lambda: a.copy_(b), 15)["device"]
    return 2 * a.nbytes / statistics.median(device) / 1e6


def many_tensors(rule: str, wrap: Callable[[torch.Tensor], torch.Tensor] | None = None) -> dict[str, float]:
    """Host microseconds a tensor of 256 elements, gradients unchanged; ``wrap`` makes distributed tensors of them."""
    found = {}
    count = 10_000
    values = [torch.randn(256, device=DEVICE) for _ in range(count)]
    grads = [torch.randn(256, device=DEVICE) for _ in range(count)]
    if wrap is not None:
        values, grads = [wrap(v) for v in values], [wrap(g) for g in grads]
    arms = {"torch fused": {"fused": True}, "offbeat": {}, "offbeat fused=True": {"fused": True}}
    if wrap is not None and rule == "SGD":
        del arms["torch fused"]  # torch has no such operator for distributed tensors
    for arm, options in arms.items():
        params = [v.detach().clone().requires_grad_() for v in values]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        library = torch.optim if arm.startswith("torch") else offbeat
        optimizer = getattr(library, rule)(params, **{**HYPER.get(rule, {}), **options})
        for _ in range(3):
            optimizer.step()
        found[arm] = statistics.median(clocks(optimizer.step, 9)["host"]) * 1e3 / count
    return found


def distributed_tensors(rule: str) -> dict[str, float]:
    """The same with an FSDP2 model's kind of parameters, on a mesh of one rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.FileStore(f"{folder}/store", 1))
        try:
            mesh = init_device_mesh("cuda", (1,))
            return many_tensors(rule, lambda t: DTensor.from_local(t, mesh, [Shard(0)]))
        finally:
            dist.destroy_process_group()


def first_calls(rules: list[str], folder: str) -> list[float]:
    """Seconds of each rule's first step in a new process, with kernels cached in a folder."""
    code = (
        "import time, torch, offbeat\n"
        "p = torch.randn(4096, device='cuda', requires_grad=True); p.grad = torch.randn_like(p)\n"
        "offbeat.AdamW([p], betas=(0.5, 0.5), amsgrad=True).step(); torch.cuda.synchronize()  # Triton itself\n"
        f"for rule, hyper in {[(rule, HYPER.get(rule, {})) for rule in rules]!r}:\n"
        "    optimizer = getattr(offbeat, rule)([p], **hyper)\n"
        "    start = time.perf_counter(); optimizer.step(); torch.cuda.synchronize()\n"
        "    print(time.perf_counter() - start)\n"
    )
    environment = {**os.environ, "TRITON_CACHE_DIR": folder}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    return [float(line) for line in answer.stdout.split()]


def measure_cuda(command: str, rules: list[str], rounds: int, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Everything, as the report wants it; what is there already is handed to ``keep`` again and again."""
    results: dict[str, Any] = {"machine": describe_machine(command), "copy GB/s": copy_bandwidth(), "steps": []}
    print("copy GB/s", results["copy GB/s"], flush=True)
    for rule in rules:
        for name in CUDA_SETS if rule in ("AdamW", "SGD") else ("GPT-2",):
            row = compare(rule, name, rounds)
            results["steps"].append(row)
            print(rule, name, row["ms"], flush=True)
            torch.cuda.empty_cache()
    keep(results)
    results["compact"] = compact("1.3 B", rounds)
    print(results["compact"], flush=True)
    keep(results)
    with tempfile.TemporaryDirectory() as folder:
        results["first call"] = dict(
            zip(rules, zip(*(first_calls(rules, folder) for _ in range(2)), strict=True), strict=True)
        )
    print(results["first call"], flush=True)
    keep(results)
    results["host"] = {}
    for rule in ("AdamW", "SGD"):
        results["host"][rule] = {"plain": many_tensors(rule), "distributed": distributed_tensors(rule)}
        print(rule, results["host"][rule], flush=True)
    keep(results)
    return results


def merged(runs: list[Any]) -> Any:
    """The same results with the median of every number; ratios keep their spread."""
    first = runs[0]
    if isinstance(first, dict):
        result = {key: merged([run[key] for run in runs]) for key in first}
        if "torch fused" in result.get("ms", {}):
            result["ratios"] = sorted(_ratio(run["ms"]) for run in runs)
        return result
    if isinstance(first, (list, tuple)):
        return [merged(list(items)) for items in zip(*runs, strict=True)]
    return statistics.median(runs) if isinstance(first, float) else first


def _ratio(ms: dict[str, dict[str, float]]) -> float:
    return ms["torch fused"]["wall"] / ms["offbeat"]["wall"]


def cuda_report(results: dict[str, Any]) -> str:
    copy = results["copy GB/s"]
    lines = ["# Optimizer step on a GPU", "", "Written by `benchmarks/step.py --device cuda --save`.", ""]
    lines += [f"- {key}: {value}" for key, value in results["machine"].items()]
    lines += [f"- copy bandwidth: {copy:.0f} GB/s read and written", ""]
    lines += ["## Milliseconds a step, float32", ""]
    lines += [
        "Wall clock (host, device). Share: the bytes a step must move over its device time, of the copy bandwidth.",
        "At most: torch's wall clock over the time a copy of as many bytes takes, with no host at all.",
    ]
    if "runs" in results:
        lines += [f"Every figure is the median of {results['runs']} runs, put together with `--merge`; behind a ratio"]
        lines += ["its range."]
    lines += [""]
    lines += [
        "| rule | parameters | torch foreach | torch fused | offbeat | share | torch fused / offbeat (wall) | at most |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in results["steps"]:
        times = row["ms"]

        def cell(arm: str, times: dict[str, dict[str, float]] = times) -> str:
            if arm not in times:
                return "-"
            t = times[arm]
            return f"{t['wall']:.3f} ({t['host']:.3f}, {t['device']:.3f})"

        share = row["bytes"] / times["offbeat"]["device"] / 1e6 / copy
        fused = times.get("torch fused")
        ratio, most = "-", "-"
        if fused:
            spread = f" ({row['ratios'][0]:.2f} to {row['ratios'][-1]:.2f})" if "ratios" in row else ""
            ratio = f"**{statistics.median(row.get('ratios', [_ratio(times)])):.2f}**{spread}"
            most = f"{fused['wall'] * 1e6 * copy / row['bytes']:.2f}"
        lines.append(
            f"| {row['rule']} | {row['set']} | {cell('torch foreach')} | {cell('torch fused')} | {cell('offbeat')} | "
            f"{100 * share:.1f} % | {ratio} | {most} |"
        )
    more = [(row, arm) for row in results["steps"] for arm in row["ms"] if arm in ("offbeat fused=True", "optimi")]
    lines += ["", "## Other arms", "", "`fused=True` keeps counters on the device, as torch's does.", ""]
    lines += ["| rule | parameters | arm | wall | host | device |", "|---|---|---|---|---|---|"]
    for row, arm in more:
        t = row["ms"][arm]
        lines.append(
            f"| {row['rule']} | {row['set']} | {arm} | {t['wall']:.3f} | {t['host']:.3f} | {t['device']:.3f} |"
        )
    lines += ["", "## AdamW with less to move, 1.3 B parameters", ""]
    lines += ["| parameters and state | wall ms | device ms | share | float32 / this (wall) | state bytes an element |"]
    lines += ["|---|---|---|---|---|---|"]
    whole = results["compact"]["float32"]["ms"]["wall"]
    for arm, row in results["compact"].items():
        t = row["ms"]
        lines.append(
            f"| {arm} | {t['wall']:.2f} | {t['device']:.2f} | {100 * row['bytes'] / t['device'] / 1e6 / copy:.0f} % | "
            f"{whole / t['wall']:.2f} | {row['state bytes an element']:.2f} |"
        )
    lines += ["", "## Host time, 10,000 tensors of 256 elements, microseconds a tensor", ""]
    lines += ["| rule | tensors | torch fused | offbeat | offbeat fused=True |", "|---|---|---|---|---|"]
    for rule, kinds in results["host"].items():
        for kind, by in kinds.items():
            arms = ("torch fused", "offbeat", "offbeat fused=True")
            cells = [f"{by[arm]:.2f}" if arm in by else "-" for arm in arms]
            lines.append(f"| {rule} | {kind} | {' | '.join(cells)} |")
    lines += ["", "## Memory a step needs beside parameters, gradients and state, MB", ""]
    lines += ["| rule | parameters | torch foreach | torch fused | offbeat |", "|---|---|---|---|---|"]
    for row in results["steps"]:
        peaks = row["peak MB"]
        cells = [f"{peaks[arm]:.1f}" if arm in peaks else "-" for arm in ("torch foreach", "torch fused", "offbeat")]
        lines.append(f"| {row['rule']} | {row['set']} | {' | '.join(cells)} |")
    lines += ["", "## First step of each rule in a process, seconds", ""]
    lines += ["| rule | compiled | from the cache |", "|---|---|---|"]
    lines += [f"| {rule} | {a:.2f} | {b:.2f} |" for rule, (a, b) in results["first call"].items()]
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Bandwidth against model size, for the rules measured at several sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    styles = {"torch fused": ("tab:orange", "--"), "offbeat": ("tab:blue", "-")}
    for rule, marker in (("AdamW", "o"), ("SGD", "s")):
        rows = [row for row in results["steps"] if row["rule"] == rule]
        for arm, (colour, line) in styles.items():
            for clock, alpha in (("device", 1.0), ("wall", 0.45)):
                sizes = [row["elements"] / 1e6 for row in rows]
                rates = [row["bytes"] / row["ms"][arm][clock] / 1e9 for row in rows]
                axes.plot(
                    sizes, rates, line, marker=marker, color=colour, alpha=alpha, label=f"{rule}, {arm}, {clock} time"
                )
    axes.axhline(results["copy GB/s"] / 1e3, color="black", linewidth=0.8)
    axes.annotate("copy", (sizes[0], results["copy GB/s"] / 1e3), textcoords="offset points", xytext=(0, 4), fontsize=8)
    axes.set_xscale("log")
    axes.set_ylim(0, results["copy GB/s"] / 1e3 * 1.1)
    axes.set_xlabel("parameters, millions")
    axes.set_ylabel("TB/s moved by one float32 step")
    axes.set_title(results["machine"].get("gpu", ""))
    axes.legend(fontsize=7, ncols=2, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=140)
