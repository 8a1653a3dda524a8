"""Timelines of training over a slow link, drawn from what happened: computing, stepping, and bytes on the network.

    python -m benchmarks.timeline

Two ranks in network namespaces, joined at 1 Gbit/s. Rank 0 notes when forward, backward and the steps of buckets begin
and end; a process of its own reads the interface's counter of bytes. Writes ``docs/images/timeline-*.svg``. Needs root,
iproute2 and matplotlib.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from benchmarks.link import run_on_both
from benchmarks.overlap_link import ENVIRONMENT

IMAGES = Path(__file__).parent.parent / "docs" / "images"
LAYERS, WIDTH, BATCH = 12, 512, 128
FIGURES = {
    "overlap": ("DDP, then step()", "DDP, overlap()"),
    "rounds": ("DDP, then step()", "LocalSGD(every=4)", "LocalSGD(every=4, delay=3)"),
}
STEPS = {"overlap": 2, "rounds": 9}
WARMUP = 6
BINS = 200

events: list[tuple[str, float, float]] = []


class Timed(offbeat.AdamW):
    """An optimizer of which we know when it steps."""


@offbeat.register_overlapped(Timed)
class TimedBuckets(offbeat.OverlappedOptimizer):
    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        begin = time.monotonic()
        self.optimizer.step_params(params, grads)
        events.append(("step", begin, time.monotonic()))


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    body = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*body), bucket_cap_mb=1)
    optimizer: torch.optim.Optimizer = Timed(model.parameters(), lr=1e-4)
    if "overlap" in name:
        offbeat.overlap(optimizer, model)
    if "LocalSGD" in name:
        delay = 3 if "delay" in name else 0
        optimizer = offbeat.LocalSGD(optimizer, model, every=4, delay=delay, subgroup=None)
    return model, optimizer


def record(name: str, steps: int) -> list[tuple[str, float, float]]:
    """Train, and note what happens when."""
    model, optimizer = make(name)
    x = torch.randn(BATCH, WIDTH)
    last = [0.0]
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: last.__setitem__(0, time.monotonic()))
    for step in range(WARMUP + steps):
        if step == WARMUP:
            dist.barrier()
            events.clear()
        begin = time.monotonic()
        loss = model(x).square().mean()
        middle = time.monotonic()
        loss.backward()
        end = time.monotonic()
        events.append(("forward", begin, middle))
        # The gradients of DDP and overlap come with their buckets; autograd itself is done when the first layer is.
        events.append(("backward", middle, end if "LocalSGD" in name else last[0] or end))
        begin = time.monotonic()
        optimizer.step()
        events.append(("step", begin, time.monotonic()))
        optimizer.zero_grad()
    if isinstance(optimizer, offbeat.LocalSGD):
        optimizer.finish()
    return sorted(events, key=lambda event: event[1])


#: In a process of its own, and without torch, so that it starts at once: times and bytes sent, until it is stopped.
WATCH = """
import json, select, sys, time
name = sys.argv[1] + ":"
def sent():
    with open("/proc/net/dev") as file:
        return next(int(line.split()[9]) for line in file if line.split()[0] == name)
rows = []
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.004)[0]:
    rows.append((time.monotonic(), sent()))
print(json.dumps(rows))
"""


def worker(rank: int, address: str, interface: str, figure: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29513", rank=rank, world_size=2)
    result: dict[str, Any] = {}
    for name in FIGURES[figure]:
        command = [sys.executable, "-c", WATCH, interface]
        watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert watcher.stdout is not None
        watcher.stdout.readline()  # it has started
        dist.barrier()
        found = list(record(name, STEPS[figure]))
        events.clear()
        sent = json.loads(watcher.communicate("stop")[0])
        result[name] = {"events": found, "sent": sent}
        dist.barrier()
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def rates(sent: list[tuple[float, int]], zero: float, width: float) -> list[tuple[float, float]]:
    """Bytes a second on the link, in bins of ``width`` milliseconds; between two readings it is taken as even."""

    def total(t: float) -> float:
        at = min(max(bisect(sent, (t, 0)), 1), len(sent) - 1)
        (t0, bytes0), (t1, bytes1) = sent[at - 1], sent[at]
        return bytes0 + (bytes1 - bytes0) * min(max((t - t0) / (t1 - t0), 0.0), 1.0)

    edges = [zero + i * width / 1e3 for i in range(BINS + 1)]
    found = [(1e3 * (t - zero), 1e3 * (total(u) - total(t)) / width) for t, u in pairwise(edges)]
    return [*found, (BINS * width, 0.0)]


def draw(figure: str, result: dict[str, Any]) -> Path:
    """One panel an arm, with the same axis of time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "offbeat", "font.size": 9})
    from matplotlib import pyplot

    lanes = {"forward": 3.0, "backward": 2.0, "step": 1.0}
    colours = {"forward": "#90a4ae", "backward": "#5c6bc0", "step": "#ef6c00", "network": "#26a69a"}
    plot, axes = pyplot.subplots(len(result), 1, sharex=True, figsize=(9, 1.75 * len(result) + 0.5))
    for axis, (name, arm) in zip(axes, result.items(), strict=True):
        zero = min(begin for _, begin, _ in arm["events"])
        for what, begin, end in arm["events"]:
            axis.broken_barh(
                [(1e3 * (begin - zero), max(1e3 * (end - begin), 0.4))], (lanes[what] + 0.1, 0.8), color=colours[what]
            )
        last = 1e3 * (max(end for _, _, end in arm["events"]) - zero)
        kept = rates([(t, n) for t, n in arm["sent"]], zero, last / BINS)
        heights = [0.1 + 0.8 * min(rate / 125e6, 1.0) for _, rate in kept]
        axis.fill_between([t for t, _ in kept], 0.1, heights, color=colours["network"], step="post", linewidth=0)
        axis.set_yticks([0.5, 1.5, 2.5, 3.5], ["network", "step", "backward", "forward"])
        axis.set_ylim(0, 4)
        axis.set_title(name, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.axvline(last, color="#b0bec5", linewidth=1)
        axis.text(last, 4.05, f"{last:.0f} ms", ha="right", va="bottom", fontsize=8)
    axes[-1].set_xlabel("milliseconds")
    plot.tight_layout()
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / f"timeline-{figure}.svg"
    plot.savefig(path, metadata={"Date": None})
    return path


def main() -> None:
    for figure in FIGURES:
        result = run_on_both(
            "benchmarks.timeline", lambda host, figure=figure: [host.interface, figure], "1gbit", ENVIRONMENT
        )
        print(draw(figure, result))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        worker(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4])
