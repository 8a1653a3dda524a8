"""Local SGD in one table: what a setting costs in quality and what a step takes on a slow link, for the same settings.

    python -m benchmarks.local_sgd [--save]    # about 11 minutes on two quiet cores; root and iproute2

Loss: the small GPT of ``benchmarks.convergence`` over simulated replicas, held-out loss at equal tokens. Time: 8.4 M
parameters, two ranks that are pinned to a core each, in network namespaces joined at 1 Gbit/s. ``--save`` writes
benchmarks/results/local-sgd.md and .json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from benchmarks import convergence, sync_link
from benchmarks.convergence_train import Arm, train
from benchmarks.link import run_on_both, sent_bytes
from benchmarks.machine import describe_machine
from benchmarks.overlap_link import ENVIRONMENT

RESULTS = Path(__file__).parent / "results"
#: Steps of a turn: whole periods of every arm, so that what it launches lands in its own turn.
TURN = 32


@dataclass(frozen=True)
class Setting:
    """One way to train, with the same options for loss and for time.

    Attributes:
        kind: the name of a class of offbeat; None is DDP, and "" one that never communicates.
        options: those of the class.
    """

    kind: str | None
    options: dict[str, Any]

    def __str__(self) -> str:
        if not self.kind:
            return "DDP" if self.kind is None else "never (loss: one replica alone)"
        return f"`{self.kind}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})`"

    @property
    def arm(self) -> Arm:
        """For the loss."""
        if not self.kind:
            return Arm(alone=self.kind == "")
        delay = self.options.get("delay", 0)
        return Arm(functools.partial(getattr(offbeat, self.kind), **self.options), delay=delay)

    def wrap(self, opt: Any, model: Any, every: int) -> Any:
        """For the time."""
        if not self.kind:
            return opt
        # Rounds of all arms begin with the first step of a turn.
        more: dict[str, Any] = {"level": {"phase": 1}} if self.kind == "DiLoCo" else {}
        return getattr(offbeat, self.kind)(opt, model, subgroup=None, **self.options, **more)


def settings() -> dict[str, Setting]:
    """The rows of the table."""
    local = [
        Setting("LocalSGD", options)
        for options in (
            {"every": 8},
            {"every": 8, "delay": 2},
            {"every": 8, "delay": 4},
            {"every": 8, "delay": 7},
            {"every": 8, "delay": 7, "mixing": 0.5},
            {"every": 16, "delay": 7, "mixing": 0.5},
        )
    ]
    diloco = [
        Setting("DiLoCo", {"every": 32, **options})
        for options in (
            {},
            {"delay": 8, "codec": "int8"},
            {"delay": 8, "codec": "int4"},
            {"fragments": 4, "delay": 4, "codec": "int8"},
        )
    ]
    return {str(one): one for one in (Setting(None, {}), *local, *diloco, Setting("", {}))}


def losses(seeds: list[int], steps: int) -> dict[str, list[float]]:
    """The held-out loss of every row, by seed."""
    task = convergence.TASKS["gpt"]
    samples = task.samples()
    found: dict[str, list[float]] = {name: [] for name in settings()}
    for seed in seeds:
        for name, one in settings().items():
            result = train(task, one.arm, samples, seed, steps)
            found[name].append(result["curve"][-1]["loss"])
            print(f"seed {seed}, {name}: {found[name][-1]:.4f}, {result['wall']} s", flush=True)
    return found


def worker(rank: int, address: str, interface: str, rounds: int) -> None:
    """One rank of the timed part."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29513", rank=rank, world_size=2)
    size = sync_link.MODELS["8.4 M"]
    arms = {
        name: sync_link.Arm(one.wrap if one.kind is not None else None, TURN, *size) for name, one in settings().items()
    }
    turns = {name: TURN if one.kind is not None else 4 for name, one in settings().items()}
    for name, arm in arms.items():
        for _ in range(turns[name]):
            arm.step()
        arm.time_codecs()
    times: dict[str, list[list[float]]] = {name: [] for name in arms}
    sent = {name: [0, 0] for name in arms}
    names = list(arms)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            before = sent_bytes(interface)
            times[name].append([1e3 * arms[name].step() for _ in range(turns[name])])
            sent[name][0] += sent_bytes(interface) - before
    if rank == 0:
        print(json.dumps({name: sync_link.summary(times[name], sent[name], arms[name].coding) for name in arms}))
    dist.barrier()
    dist.destroy_process_group()


def speeds(launches: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds a step and bytes of every row, for each launch of the processes."""
    environment = {**ENVIRONMENT, "LOCAL_WORLD_SIZE": "1"}
    words = ("worker", str(rounds))
    return [
        run_on_both("benchmarks.local_sgd", lambda host: [host.interface, *words], "1gbit", environment)
        for _ in range(launches)
    ]


def report(found: dict[str, Any]) -> list[str]:
    """The table."""
    lines = [
        f"Loss: a GPT of 0.04 M parameters over bytes, 2 replicas, {found['steps']} steps, held-out loss at equal "
        f"tokens, medians of {len(found['seeds'])} seeds (range). Time: 8.4 M parameters, 2 ranks, 1 Gbit/s, medians "
        f"of {len(found['speeds'])} launches.",
        "",
        "| setting | loss, against DDP | ms a step | steps a second, of never | worst step, of the mean | MB a step |",
        "|---|---|---|---|---|---|",
    ]
    never = next(name for name, one in settings().items() if one.kind == "")
    for name in settings():
        change = sorted(100 * (a / b - 1) for a, b in zip(found["losses"][name], found["losses"]["DDP"], strict=True))
        rows = [launch[name] for launch in found["speeds"]]
        rate = statistics.median(launch[never]["mean"] / launch[name]["mean"] for launch in found["speeds"])
        lines.append(
            f"| {name} | {statistics.median(change):+.1f} % ({change[0]:+.1f} to {change[-1]:+.1f}) | "
            f"{statistics.median(row['mean'] for row in rows):.1f} | {rate:.2f} | "
            f"{statistics.median(row['worst'] / row['mean'] for row in rows):.1f} | {rows[0]['interface_mb']:.3f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=convergence.TASKS["gpt"].steps)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine(" ".join(["python -m benchmarks.local_sgd", *sys.argv[1:]]))
    found = {
        "steps": options.steps,
        "seeds": options.seeds,
        "speeds": speeds(options.launches, options.rounds),
        "losses": losses(options.seeds, options.steps),
    }
    text = "\n".join(
        ["# Local SGD: loss and speed", "", *(f"- {k}: {v}" for k, v in machine.items()), "", *report(found)]
    )
    print("\n" + text)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "local-sgd.md").write_text(text.rstrip() + "\n")
        (RESULTS / "local-sgd.json").write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n")


if __name__ == "__main__":
    if "worker" in sys.argv:
        worker(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[5]))
    else:
        main()
