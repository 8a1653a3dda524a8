"""What training with fewer synchronisations costs: DDP against LocalSGD at equal samples.

    python -m benchmarks.convergence [--save]
    python -m benchmarks.convergence --quick   # a few steps, one seed: does it run?

Real processes over gloo, one thread each, every rank counted as a node of its own. ``--save`` writes convergence.md,
.json and .png to benchmarks/results.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import offbeat
from benchmarks.convergence_data import Samples, batches, digits, sources
from benchmarks.convergence_models import ByteGPT, ConvNet
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"

#: Settings of LocalSGD beside ``warmup``; None: DDP alone.
ARMS: dict[str, dict[str, int] | None] = {
    "DDP": None,
    "LocalSGD(8)": {"every": 8},
    "LocalSGD(32)": {"every": 32},
    "LocalSGD(8), delay 4": {"every": 8, "delay": 4},
}
#: Of the steps: synchronised ones at the start of LocalSGD; ones in which the learning rate rises.
SYNCHRONISED, RISE = 0.2, 0.1
EVALUATIONS = 10

HOW = f"""\
With the same seed all arms begin with the same parameters and see the same samples, in the same order and on the same
ranks; each rank has a part of the samples for itself. Settings are the same for all arms, with learning rates that are
best for DDP. LocalSGD is DDP for the first {SYNCHRONISED:.0%} of the steps; "(8)" and "(32)" are the steps from one
average of the parameters to the next. Losses are means over all held-out targets, in nats, after the last step and, for
LocalSGD, `finish()`."""


@dataclass(frozen=True)
class Task:
    """What is trained, on what, with what. ``batch`` is a rank's."""

    title: str
    samples: Callable[[], Samples]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    settings: str
    batch: int
    steps: int
    quick_steps: int


#: Learning rates are DDP's best by held-out loss, found without LocalSGD and with other seeds: for AdamW among 0.5, 1,
#: 1.5 and 2e-3 with half the steps (one seed; 3 and 6e-3 were worse than 1.5e-3 in 280 steps of 12 samples), for SGD
#: among 0.05, 0.1, 0.2, 0.4, 0.8 and 1.6 (two to four seeds; the last three are within the noise of each other).
TASKS = {
    "gpt": Task(
        "A GPT of 0.88 M parameters over bytes",
        sources,
        ByteGPT,
        lambda params: offbeat.AdamW(params, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1),
        "AdamW, lr 1.5e-3, betas 0.9 and 0.95, weight decay 0.1",
        batch=8,
        steps=640,
        quick_steps=10,
    ),
    "digits": Task(
        "A convolutional net with BatchNorm",
        digits,
        ConvNet,
        lambda params: offbeat.SGD(params, lr=0.8, momentum=0.9, weight_decay=5e-4),
        "SGD, lr 0.8, momentum 0.9, weight decay 5e-4",
        batch=32,
        steps=400,
        quick_steps=20,
    ),
}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss over all targets, and the share of them guessed right."""
    logits = model(x).flatten(0, -2)
    return nn.functional.cross_entropy(logits, y.flatten()), (logits.argmax(-1) == y.flatten()).float().mean()


@torch.no_grad()
def judge(model: nn.Module, samples: Samples) -> tuple[float, float]:
    """Loss and accuracy on what was held out."""
    loss, right = loss_of(model.eval(), samples.held_out_x, samples.held_out_y)
    return loss.item(), right.item()


@torch.no_grad()
def averaged(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """A copy with the mean of all ranks' parameters and buffers; the model itself stays as it is."""
    average = copy.deepcopy(model)
    for tensor in (*average.parameters(), *average.buffers()):
        if tensor.is_floating_point():
            dist.all_reduce(tensor, group=group)
            tensor /= dist.get_world_size(group)
    return average


def collectives() -> int:
    """How many collective operations the default group has begun: DDP's are there, a delayed average's are not."""
    return dist.group.WORLD._get_sequence_number_for_group()


def train(task: Task, arm: str, samples: Samples, seed: int, steps: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Train one arm on this rank, with all others; ``group`` is for evaluation only."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.model())
    optimizer = task.optimizer(model.parameters())
    settings = ARMS[arm]
    if settings is not None:
        optimizer = offbeat.LocalSGD(optimizer, model, warmup=round(SYNCHRONISED * steps), **settings)
    rise = max(1, round(RISE * steps))

    def rate(step: int) -> float:
        """Linearly up, then down along a cosine."""
        return min((step + 1) / rise, 0.5 + 0.5 * math.cos(math.pi * max(0, step - rise) / (steps - rise)))

    schedule = LambdaLR(optimizer, rate)
    source = batches(samples, rank, ranks, task.batch, seed)
    curve, exchanges, seconds = [], 0, 0.0
    for step in range(1, steps + 1):
        start, before = time.perf_counter(), collectives()
        loss_of(model, *next(source))[0].backward()
        exchanges += collectives() > before
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == steps and settings is not None:
            optimizer.finish()
        seconds += time.perf_counter() - start
        if step % (steps // EVALUATIONS) == 0:
            # At the end as it is on rank 0, whose buffers are DDP's; finish() has made all ranks equal.
            judged = model.module if step == steps else averaged(model.module, group)
            loss, right = judge(judged, samples) if rank == 0 else (math.nan, math.nan)
            curve.append({"samples": step * task.batch * ranks, "loss": loss, "accuracy": right})
    averages = 0 if settings is None else optimizer.syncs
    return {"curve": curve, "gradients": exchanges, "averages": averages, "seconds": round(seconds, 1)}


def work(rank: int, ranks: int, name: str, seed: int, quick: bool, directory: str) -> None:
    """One rank: all arms, one after another. Rank 0 writes down what was found."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # as if each rank were alone on its machine
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    group = dist.new_group()
    task = TASKS[name]
    samples = task.samples()
    steps = task.quick_steps if quick else task.steps
    if quick:
        samples = samples._replace(held_out_x=samples.held_out_x[:32], held_out_y=samples.held_out_y[:32])
    results: dict[str, Any] = {"data": samples.words, "arms": {}}
    for arm in ARMS:
        results["arms"][arm] = found = train(task, arm, samples, seed, steps, group)
        if rank == 0:
            end = found["curve"][-1]
            print(f"{name}, seed {seed}, {arm}: loss {end['loss']:.4f}, {found['seconds']} s", flush=True)
    if rank == 0:
        (Path(directory) / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def compare(name: str, seeds: list[int], ranks: int, quick: bool) -> dict[str, Any]:
    """All arms of a task for each seed, and how far each ended from DDP with the same seed."""
    task, runs = TASKS[name], {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(work, args=(ranks, name, seed, quick, directory), nprocs=ranks)
            runs[seed] = json.loads((Path(directory) / "results.json").read_text())
    arms = {}
    for arm in ARMS:
        found = [runs[seed]["arms"][arm] for seed in seeds]
        ends = [run["curve"][-1] for run in found]
        base = [runs[seed]["arms"]["DDP"]["curve"][-1]["loss"] for seed in seeds]
        arms[arm] = {
            "loss": [end["loss"] for end in ends],
            "accuracy": [end["accuracy"] for end in ends],
            "gap": [end["loss"] / ddp - 1 for end, ddp in zip(ends, base, strict=True)],
            "gradients": [run["gradients"] for run in found],
            "averages": [run["averages"] for run in found],
            "seconds": [run["seconds"] for run in found],
            "curves": [run["curve"] for run in found],
        }
    return {
        "title": task.title,
        "data": runs[seeds[0]]["data"],
        "settings": task.settings,
        "batch": task.batch,
        "ranks": ranks,
        "steps": task.quick_steps if quick else task.steps,
        "seeds": seeds,
        "arms": arms,
    }


def gap_in_words(gaps: list[float]) -> str:
    return f"{statistics.mean(gaps):+.1%} ({min(gaps):+.1%} to {max(gaps):+.1%})"


def report(result: dict[str, Any]) -> list[str]:
    """A task's section: what was trained, and a table of how it ended."""
    seeds = result["seeds"]
    size = f"{result['steps']} steps of {result['ranks']} x {result['batch']} samples"
    lines = [
        f"## {result['title']}",
        "",
        f"{result['data']}. {result['settings']}, {size}.",
        "",
        f"| | held-out loss, mean | {' | '.join(f'seed {seed}' for seed in seeds)} | against DDP, mean (least to most) "
        "| held-out accuracy, mean (each seed) | synchronisations (of gradients + of parameters) |",
        "|---" * (len(seeds) + 5) + "|",
    ]
    for arm, row in result["arms"].items():
        losses = [f"{loss:.4f}" for loss in (statistics.mean(row["loss"]), *row["loss"])]
        gap = gap_in_words(row["gap"]) if ARMS[arm] else "-"
        accuracy = f"{statistics.mean(row['accuracy']):.2%} ({', '.join(f'{a:.2%}' for a in row['accuracy'])})"
        pairs = sorted(set(zip(row["gradients"], row["averages"], strict=True)))
        counts = " or ".join(f"{sum(pair)} ({pair[0]} + {pair[1]})" for pair in pairs)
        lines.append(f"| {arm} | {' | '.join(losses)} | {gap} | {accuracy} | {counts} |")
    return [*lines, ""]


def plot(results: dict[str, Any], path: Path) -> None:
    """A panel a task: the mean over seeds as a line, the least and the most as a band.

    It begins where the arms part: until the end of LocalSGD's warm-up all of them are DDP.
    """
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    figure, panels = pyplot.subplots(1, len(results), figsize=(6.5 * len(results), 4.8), squeeze=False)
    looks = [("black", "-", "o"), ("#0072b2", "--", "s"), ("#d55e00", "-.", "^"), ("#009e73", ":", "D")]
    for axes, result in zip(panels[0], results.values(), strict=True):
        first = round(SYNCHRONISED * EVALUATIONS) - 1
        for (arm, row), (colour, line, mark) in zip(result["arms"].items(), looks, strict=True):
            points = list(zip(*row["curves"], strict=True))[first:]
            samples = [point[0]["samples"] / 1000 for point in points]
            losses = [[end["loss"] for end in point] for point in points]
            label = f"{arm}: {gap_in_words(row['gap'])}" if ARMS[arm] else arm
            look = {"color": colour, "linestyle": line, "marker": mark, "markersize": 5, "markerfacecolor": "none"}
            axes.plot(samples, [statistics.mean(loss) for loss in losses], label=label, **look)
            axes.fill_between(samples, list(map(min, losses)), list(map(max, losses)), color=colour, alpha=0.1, lw=0)
        bottom, top = axes.get_ylim()
        if top > 3 * bottom > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_locator(NullLocator())
        axes.set(title=result["title"], xlabel="thousands of samples, all ranks", ylabel="held-out loss")
        axes.grid(alpha=0.3)
        title = "at the end, against DDP: mean (least to most of the seeds)"
        axes.legend(title=title, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, help="0 1 2 unless told; 0 with --quick")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    machine = describe_machine(" ".join(["python -m benchmarks.convergence", *sys.argv[1:]]))
    machine["threads"] = "1 a rank"
    results = {name: compare(name, seeds, options.ranks, options.quick) for name in options.tasks}
    heading = ["# DDP against LocalSGD at equal samples", ""]
    heading += [*(f"- {key}: {value}" for key, value in machine.items()), ""]
    body = [line for result in results.values() for line in report(result)]
    text = "\n".join([*heading, HOW, "", "![Held-out loss against samples](convergence.png)", "", *body])
    print("\n" + text)
    if options.save:
        options.out.mkdir(exist_ok=True, parents=True)
        (options.out / "convergence.md").write_text(text.rstrip() + "\n")
        (options.out / "convergence.json").write_text(
            json.dumps({"machine": machine, "result": results}, indent=1) + "\n"
        )
        plot(results, options.out / "convergence.png")


if __name__ == "__main__":
    main()
