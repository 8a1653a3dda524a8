"""Steps of the rules that need whole matrices, beside torch.optim's, on the hidden matrices of small GPTs.

    python -m benchmarks.matrices [--device cpu] [--sets "4 x 64" ...] [--only offbeat] [--repeat 15] [--save]

The arms take turns in one process. Times are medians: of the wall clock and, on the CPU, of the processor time of all
threads, which other programs on the machine disturb less. ``--save`` writes benchmarks/results/matrices-DEVICE.md and
.json.
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

import offbeat
from benchmarks.machine import describe_machine

#: Seconds that an arm's turn takes at least.
SECONDS_A_TURN = 5e-3

RESULTS = Path(__file__).parent / "results"

#: Layers and width.
SETS = {
    "4 x 64": (4, 64),
    "12 x 64": (12, 64),
    "6 x 256": (6, 256),
    "12 x 384": (12, 384),
    "4 x 768": (4, 768),
    "GPT-2": (12, 768),
    "1.3 B": (24, 2048),
}
CPU_SETS = ["4 x 64", "12 x 64", "6 x 256", "12 x 384", "4 x 768"]

#: Shapes that are not a GPT's, by name.
ODD: dict[str, list[tuple[int, ...]]] = {
    "1 of 16 x 16": [(16, 16)],
    "1 of 64 x 64": [(64, 64)],
    "1 of 512 x 512": [(512, 512)],
    "1 of 1000 x 1000": [(1000, 1000)],
    "100 of 32 x 32": [(32, 32)] * 100,
    "200 of 64 x 64": [(64, 64)] * 200,
    "50 of 32 x 8": [(32, 8)] * 50,
    "8 of 1024 x 64": [(1024, 64)] * 8,
    "8 of 64 x 1024": [(64, 1024)] * 8,
    "8 of 127 x 129": [(127, 129)] * 8,
    "1 of 200 x 100": [(200, 100)],
    "1 of 1 x 4096": [(1, 4096)],
    "20 of 20 shapes": [(24 + 8 * i, 200 - 8 * i) for i in range(20)],
}
#: Sets in other dtypes, for Muon: the shapes, the dtype of parameters, and options that torch.optim.Muon does not have.
DTYPES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    f"{name}, {words}": (name, dtype, options)
    for name in ("1 of 16 x 16", "1 of 64 x 64", "20 of 20 shapes")
    for words, dtype, options in (
        ("float64", torch.float64, {}),
        ("bfloat16", torch.bfloat16, {}),
        ("ns_dtype float32", torch.float32, {"ns_dtype": torch.float32}),
    )
}
#: Stacks of matrices in one parameter. torch.optim.Muon takes them as so many parameters.
EXPERTS = {"8 experts of 128 x 256": (8, 128, 256), "64 experts of 64 x 64": (64, 64, 64)}


def shapes_of(layers: int, width: int) -> list[tuple[int, int]]:
    """Attention and feed-forward, as GPT-2 has them."""
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers


def make(
    optimizer: Any, shapes: Any, device: str, dtype: torch.dtype = torch.float32, options: dict[str, Any] | None = None
) -> Any:
    torch.manual_seed(0)
    params = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return optimizer(params, **(options or {}))


def measure(arms: dict[str, Any], repeat: int, device: str) -> dict[str, dict[str, float]]:
    wall: dict[str, list[float]] = {name: [] for name in arms}
    busy: dict[str, list[float]] = {name: [] for name in arms}
    extra: dict[str, float] = {}
    for optimizer in arms.values():
        for _ in range(3):
            optimizer.step()
    start = time.perf_counter()
    next(iter(arms.values())).step()
    # A turn is several steps if a step is short: the clock of the processor is coarse.
    steps = 1 if device == "cuda" else max(1, int(SECONDS_A_TURN / (time.perf_counter() - start)))
    for _ in range(repeat):
        for name, optimizer in arms.items():
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                optimizer.step()
            host = time.perf_counter() - start
            if device == "cuda":
                torch.cuda.synchronize()
                extra[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
            wall[name].append(1e3 * (time.perf_counter() - start) / steps)
            busy[name].append(1e3 * (host if device == "cuda" else time.process_time() - used) / steps)
    found: dict[str, dict[str, float]] = {}
    for name in arms:
        found[name] = {"wall_ms": statistics.median(wall[name]), "busy_ms": statistics.median(busy[name])}
        if name in extra:
            found[name]["extra_gib"] = extra[name]
    return found


def report(machine: dict[str, str], results: dict[str, Any], device: str) -> str:
    on_gpu = device == "cuda"
    second, compared = ("host", "wall") if on_gpu else ("processor", "busy")
    lines = ["# Steps of rules that need whole matrices", "", "Written by `python -m benchmarks.matrices --save`.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += [
        "- float32 parameters if not said otherwise; hidden matrices of a GPT (layers x width), and other shapes; "
        "medians, arms taking turns",
        "- torch.optim.Muon always iterates in bfloat16; with ns_dtype float32 offbeat.Muon computes more precisely",
        "",
        f"| rule | matrices | torch.optim, wall ms ({second} ms) | offbeat, wall ms ({second} ms) "
        f"| ratio of {'wall' if on_gpu else second} ms |" + (" memory of a step, GiB: torch.optim, offbeat |" * on_gpu),
        "|---|---|---|---|---|" + "---|" * on_gpu,
    ]
    for rule, by_set in results.items():
        for name, found in by_set.items():
            theirs, ours = found["torch.optim"], found["offbeat"]
            cells = [f"{_figures(one['wall_ms'])} ({_figures(one['busy_ms'])})" for one in (theirs, ours)]
            ratio = theirs[f"{compared}_ms"] / ours[f"{compared}_ms"]
            line = f"| {rule} | {name} | {cells[0]} | {cells[1]} | {ratio:.2f} |"
            lines.append(line + (f" {theirs['extra_gib']:.2f}, {ours['extra_gib']:.2f} |" if on_gpu else ""))
    return "\n".join(lines) + "\n"


def _figures(ms: float) -> str:
    return f"{ms:.3f}" if ms < 1 else f"{ms:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sets", nargs="+", choices=[*SETS, *ODD, *DTYPES, *EXPERTS])
    parser.add_argument("--rules", nargs="+", default=["Muon", "Adafactor"], choices=["Muon", "Adafactor"])
    parser.add_argument("--only", choices=["torch.optim", "offbeat"], help="steps of one library, one after the other")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    sets = given.sets or ([*CPU_SETS, *ODD, *DTYPES, *EXPERTS] if given.device == "cpu" else ["GPT-2", "1.3 B"])
    results: dict[str, Any] = {}
    for rule in given.rules:
        for name in sets:
            if name in DTYPES and rule != "Muon":
                continue
            shapes_name, dtype, options = DTYPES.get(name, (name, torch.float32, {}))
            if name in EXPERTS:
                ours: Any = [EXPERTS[name]]
                theirs: Any = [EXPERTS[name][1:]] * EXPERTS[name][0]
            else:
                ours = theirs = ODD[shapes_name] if shapes_name in ODD else shapes_of(*SETS[name])
            arms = {
                "torch.optim": make(getattr(torch.optim, rule), theirs, given.device, dtype),
                "offbeat": make(getattr(offbeat, rule), ours, given.device, dtype, options),
            }
            if given.only:
                arms = {given.only: arms[given.only]}
            found = measure(arms, given.repeat, given.device)
            results.setdefault(rule, {})[name] = found
            print(rule, name, {k: {a: round(b, 3) for a, b in v.items()} for k, v in found.items()}, flush=True)
    if given.only:
        return
    machine = describe_machine("python -m benchmarks.matrices " + " ".join(sys.argv[1:])) | {"date": given.date}
    text = report(machine, results, given.device)
    print(text)
    if given.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"matrices-{given.device}.md").write_text(text)
        (RESULTS / f"matrices-{given.device}.json").write_text(
            json.dumps({"machine": machine, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
