"""How well ``offbeat.plan`` predicts the time of a step over a slow link.

    python -m benchmarks.plan_link [--step cpu] [--turns 3] [--save]

Two hosts in network namespaces joined by a rate-limited link (root and iproute2), one rank each, each pinned to a core
of its own. For each link speed and model size the machine is probed as ``offbeat bench`` does, and never by running a
strategy: latency and rate of an all-reduce, a training step alone, a replica's own work for a round, a round of no
bytes. Then every strategy runs for some periods. Its measured time is compared with what the probes predict, with the
step alone as it was measured beside it: steps alone and strategies take turns, so that other load on the machine slows
down both.

With ``--step wait`` (the default) a layer waits, in forward and twice as long in backward, as a host does for an
accelerator; gradients, the optimizer and rounds are real. With ``--step cpu`` layers are matrix products, so that
training and sending share a core; that needs a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.link import run_on_both
from benchmarks.machine import describe_machine
from benchmarks.overlap_link import ENVIRONMENT
from offbeat.cli.bench_probe import Plan, Trainer, probe
from offbeat.plan import Settings
from offbeat.plan.cost import estimate_settings
from offbeat.plan.link import slowest

RESULTS = Path(__file__).parent / "results"
RATES = ("1gbit", "400mbit", "150mbit")
#: Layers, width, rows of a batch.
MODELS = {"2.1 M": (8, 512, 128), "4.2 M": (16, 512, 64), "8.4 M": (8, 1024, 64)}
#: Seconds of a step that waits.
WAIT = 0.06
STRATEGIES = (
    Settings("ddp"),
    Settings("local_sgd", 8),
    Settings("slowmo", 12),
    Settings("diloco", 16),
    Settings("diloco", 16, codec="int8"),
    Settings("diloco", 16, 1, 8),
    Settings("diloco", 16, 4, 2, "int8"),
    Settings("diloco", 16, 4, 4, "int4"),
)
WHAT = {"wait": "wait as for an accelerator", "cpu": "use the processor"}
PROBE = Plan(sizes=(1 << 12, 1 << 20, 1 << 23), seconds=3.0, every=16)
#: Steps alone before and after each strategy.
ALONE = 8
#: The goal: the error of every prediction, and their median.
EACH, MEDIAN = 0.15, 0.07


class Wait(torch.autograd.Function):
    """Does nothing, for some time: in backward for twice as long as in forward. The gradient of the weight is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, torch.zeros_like(ctx.saved_tensors[0]), None


class Layer(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.randn(width, width) / width), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Wait.apply(x, self.weight, self.seconds)


def make_model(step: str, layers: int, width: int, rows: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if step == "wait":
        body: list[nn.Module] = [Layer(width, WAIT / 3 / layers) for _ in range(layers)]
    else:
        body = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.Tanh())]
    x = torch.randn(rows, width, requires_grad=True)

    def loss(module: nn.Module) -> Tensor:
        return module(x).square().mean()

    return nn.Sequential(*body), loss


def worker(rank: int, address: str, step: str, turns: int, layers: int, width: int, rows: int) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # threads that are started later are pinned too
    meeting = f"tcp://{address}:29513"
    dist.init_process_group("gloo", init_method=meeting, timeout=timedelta(minutes=5), world_size=2, rank=rank)
    model, loss = make_model(step, layers, width, rows)
    result = probe(model, loss, PROBE, lambda text: None)
    alone = Trainer(model, loss, None)
    alone.seconds(3)
    trainers = {settings: Trainer(model, loss, settings) for settings in STRATEGIES}
    for settings, trainer in trainers.items():
        # So that each turn ends with a landing: no round goes on while another strategy is timed.
        trainer.seconds(max(2, settings.period + settings.delay))
    found: dict[str, list[dict[str, float]]] = {settings.name: [] for settings in STRATEGIES}
    for turn in range(turns):
        order = STRATEGIES[turn % len(STRATEGIES) :] + STRATEGIES[: turn % len(STRATEGIES)]
        for settings in order:
            before = alone.seconds(ALONE)
            dist.barrier()
            steps, begun = max(4, settings.period), time.perf_counter()
            trainers[settings].seconds(steps)
            measured = slowest(time.perf_counter() - begun) / steps
            nearby = slowest(statistics.median([*before, *alone.seconds(ALONE)]))
            predicted = estimate_settings(settings, result.setting(step_seconds=nearby)).step_seconds
            found[settings.name].append({"measured": measured, "alone": nearby, "predicted": predicted})
    for trainer in trainers.values():
        trainer.close()
    if rank == 0:
        probes = {"bandwidth": result.bandwidth, "latency": result.latency, "machine": result.machine.as_dict()}
        print(json.dumps({"params": result.params, "probes": probes, "turns": found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def errors(result: dict[str, Any]) -> list[tuple[str, str, float, float, float, float]]:
    """Size and speed, strategy, and medians over turns: alone, measured, predicted, in ms, and the error."""
    rows = []
    for title, launch in result.items():
        for name, turns in launch["turns"].items():
            ratios = [turn["predicted"] / turn["measured"] - 1 for turn in turns]
            ms = [1e3 * statistics.median(turn[key] for turn in turns) for key in ("alone", "measured", "predicted")]
            rows.append((title, name, *ms, statistics.median(ratios)))
    return rows


def report(result: dict[str, Any]) -> list[str]:
    rows = errors(result)
    sizes = sorted(abs(row[5]) for row in rows)
    over = [row for row in rows if abs(row[5]) > EACH]
    lines = [
        f"{len(rows)} combinations. Of the predictions the median is {100 * statistics.median(sizes):.1f} % off, the "
        f"worst {100 * sizes[-1]:.1f} %; {len(over)} are more than {100 * EACH:.0f} % off. The goal is "
        f"{100 * MEDIAN:.0f} % and {100 * EACH:.0f} %.",
        "",
        "| model, link | strategy | ms a step alone | measured | predicted | error |",
        "|---|---|---|---|---|---|",
    ]
    for title, name, alone, measured, predicted, error in rows:
        mark = "**" if abs(error) > EACH else ""
        lines.append(
            f"| {title} | {name} | {alone:.1f} | {measured:.1f} | {predicted:.1f} | {mark}{100 * error:+.1f} %{mark} |"
        )
    lines += ["", "| model, link | Mbit/s | ms a collective | ms a round of no bytes | ns of training a byte sent |"]
    lines.append("|---|---|---|---|---|")
    for title, launch in result.items():
        probes, machine = launch["probes"], launch["probes"]["machine"]
        lines.append(
            f"| {title} | {8e-6 * probes['bandwidth']:.1f} | {1e3 * probes['latency']:.2f} | "
            f"{1e3 * machine['round']:.2f} | {1e9 * machine['busy']:.2f} |"
        )
    lines += [
        "",
        "The second table has what the probes found; strategies were not run to find it. An error is the median over "
        "turns of predicted / measured - 1, where each turn's prediction starts from the steps alone beside it.",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=("wait", "cpu"), default="wait")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--models", nargs="+", default=["4.2 M", "8.4 M"], choices=list(MODELS))
    parser.add_argument("--note", help="what else the result should say, such as other load on the machine")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    machine = describe_machine("python -m benchmarks.plan_link " + " ".join(sys.argv[1:]))
    machine["load"] = f"{os.getloadavg()[0]:.1f} processes wanted a core when it began"
    if options.note:
        machine["note"] = options.note
    result = {}
    for name in options.models:
        for rate in options.rates:
            words = [options.step, *map(str, (options.turns, *MODELS[name]))]
            environment = {**ENVIRONMENT, "LOCAL_WORLD_SIZE": "1"}
            title = f"{name}, {rate}"
            result[title] = run_on_both("benchmarks.plan_link", lambda host, words=words: words, rate, environment)
            print(title, "done", file=sys.stderr, flush=True)
    heading = [f"- {key}: {value}" for key, value in machine.items()]
    text = "\n".join(
        [f"# Predictions over slow links, steps that {WHAT[options.step]}", "", *heading, "", *report(result)]
    )
    print(text)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"plan-link-{options.step}.md").write_text(text + "\n")
        (RESULTS / f"plan-link-{options.step}.json").write_text(
            json.dumps({"machine": machine, "result": result}, indent=1) + "\n"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        worker(int(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:]))
    else:
        main()
