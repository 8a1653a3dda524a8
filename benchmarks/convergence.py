"""What training with fewer synchronisations costs: LocalSGD, SlowMo and DiLoCo against DDP at equal tokens.

    python -m benchmarks.convergence [--save]
    python -m benchmarks.convergence --tasks gpt-long [--save]   # eight times as long
    python -m benchmarks.convergence --tasks gpt-codecs gpt-codecs-long [--save]   # codecs, and as long
    python -m benchmarks.convergence --device cuda [--save]   # a GPT of 10 M parameters, and four times as long
    python -m benchmarks.convergence --quick   # a few steps, one seed: does it run?

Replicas are threads of one process with the production code, over `offbeat.Simulation`. ``--save`` writes
convergence.md, .json and .png to benchmarks/results (convergence-long.md for the long runs, convergence-codecs.md for
codecs, convergence-cuda.md for a GPU), and again after every seed; the .json after every arm. Seeds can run in
processes of their own, with ``--seeds`` and ``--out``, and be put together with ``--merge``.

On a GPU arms and seeds are divided among 6 processes, those that say most first; ``--jobs N`` sets their number, there
or on the CPU. Together they keep an H200 busy if they share it through CUDA's MPS (``nvidia-cuda-mps-control -d``
before, and ``CUDA_MPS_PIPE_DIRECTORY`` set): 63 runs took 18 minutes, about 350 steps of a replica a second. Forward
and backward are in bfloat16 there. ``--seconds S`` ends after S seconds: nothing starts that is unlikely to end in
time, and what is not over is given up. The same command with ``--resume`` does the rest, after reading what there is
in the .json, for machines that are there for a limited time:

    python -m benchmarks.convergence --device cuda --seconds 540 --out DIR
    python -m benchmarks.convergence --device cuda --seconds 540 --out DIR --resume

Both options save. Arms that not all seeds have run are left out of the table and the plot, and named above the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import offbeat
from benchmarks.convergence_data import Samples, digits, sources
from benchmarks.convergence_jobs import Clock, Job, Outcome, in_processes
from benchmarks.convergence_models import ByteGPT, ConvNet
from benchmarks.convergence_report import pages, plot
from benchmarks.convergence_train import Arm, Task, train
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"

local = functools.partial(functools.partial, offbeat.LocalSGD)
diloco = functools.partial(functools.partial, offbeat.DiLoCo)
plain_outer = functools.partial(offbeat.SGD, lr=1.0)

ARMS = {
    "DDP": Arm(),
    "DDP, lr / √2": Arm(rate=1 / math.sqrt(2)),
    "DDP, lr × √2": Arm(rate=math.sqrt(2)),
    "one replica alone, half the batch": Arm(alone=True),
    "one replica alone, a quarter of the batch": Arm(alone=True),
    "LocalSGD(1)": Arm(local(every=1)),
    "LocalSGD(8)": Arm(local(every=8), like="LocalSGD(1)"),
    "LocalSGD(8), lr × √replicas": Arm(local(every=8), local_rate=math.sqrt, like="DDP, lr × √2"),
    "LocalSGD(8), delay 7": Arm(local(every=8, delay=7), delay=7, like="LocalSGD(8)"),
    "DiLoCo(8), outer SGD 1.0, delay 7, mixing 0.5": Arm(
        diloco(every=8, outer=plain_outer, delay=7, mixing=0.5), delay=7, like="LocalSGD(8), delay 7"
    ),
    "SlowMo(8)": Arm(functools.partial(offbeat.SlowMo, every=8), like="LocalSGD(8)"),
    "DiLoCo(32)": Arm(diloco(every=32), like="LocalSGD(8)"),
    "DiLoCo(32), lr × √replicas": Arm(diloco(every=32), local_rate=math.sqrt, like="DiLoCo(32)"),
    "DiLoCo(32), outer lr 0.8, momentum 0.6": Arm(
        diloco(every=32, outer_lr=0.8, outer_momentum=0.6), like="DiLoCo(32)"
    ),
    "DiLoCo(128)": Arm(diloco(every=128), like="DiLoCo(32)"),
    "DiLoCo(128), outer lr 0.8, momentum 0.6": Arm(
        diloco(every=128, outer_lr=0.8, outer_momentum=0.6), like="DiLoCo(128)"
    ),
    "streaming DiLoCo(32), 4 fragments, delay 4": Arm(
        diloco(every=32, fragments=4, delay=4), delay=4, like="DiLoCo(32)"
    ),
    "streaming DiLoCo(32), outer lr 0.8, momentum 0.6": Arm(
        diloco(every=32, outer_lr=0.8, outer_momentum=0.6, fragments=4, delay=4), delay=4,
        like="streaming DiLoCo(32), 4 fragments, delay 4",
    ),
    "streaming DiLoCo(64), 4 fragments, delay 15, int4, error feedback": Arm(
        diloco(every=64, fragments=4, delay=15, codec="int4", error_feedback=1.0), delay=15,
        like="streaming DiLoCo(32), 4 fragments, delay 4",
    ),
    "DiLoCo(32), bf16": Arm(diloco(every=32, codec="bf16"), like="DiLoCo(32)"),
    "DiLoCo(32), int8": Arm(diloco(every=32, codec="int8"), like="DiLoCo(32)"),
    "DiLoCo(32), int4": Arm(diloco(every=32, codec="int4"), like="DiLoCo(32)"),
    "DiLoCo(32), int4, error feedback": Arm(
        diloco(every=32, codec="int4", error_feedback=1.0), like="DiLoCo(32)"
    ),
    "DiLoCo(32), outer lr 0.8, momentum 0.6, int8": Arm(
        diloco(every=32, outer_lr=0.8, outer_momentum=0.6, codec="int8"), like="DiLoCo(32), outer lr 0.8, momentum 0.6"
    ),
    "DiLoCo(32), outer lr 0.8, momentum 0.6, int4": Arm(
        diloco(every=32, outer_lr=0.8, outer_momentum=0.6, codec="int4"), like="DiLoCo(32), outer lr 0.8, momentum 0.6"
    ),
    "streaming DiLoCo(32), 4 fragments, delay 4, int8": Arm(
        diloco(every=32, fragments=4, delay=4, codec="int8"), delay=4,
        like="streaming DiLoCo(32), 4 fragments, delay 4",
    ),
    "streaming DiLoCo(32), 4 fragments, delay 4, int4, error feedback": Arm(
        diloco(every=32, fragments=4, delay=4, codec="int4", error_feedback=1.0), delay=4,
        like="streaming DiLoCo(32), 4 fragments, delay 4",
    ),
    "DiLoCo(32), int2, error feedback": Arm(
        diloco(every=32, codec="int2", error_feedback=1.0), like="DiLoCo(32)"
    ),
    "DiLoCo(32), outer SGD 1.0": Arm(diloco(every=32, outer=plain_outer), like="DiLoCo(32)"),
    "DiLoCo(32), outer SGD 1.0, TopK(0.03), error feedback": Arm(
        diloco(every=32, outer=plain_outer, codec=offbeat.TopK(0.03), error_feedback=0.95),
        like="DiLoCo(32), outer SGD 1.0",
    ),
}  # fmt: skip

#: Codecs with the settings to start from, beside the same without a codec.
CODED = [
    "DiLoCo(32), int4, error feedback",
    "DiLoCo(32), outer lr 0.8, momentum 0.6, int8",
    "DiLoCo(32), outer lr 0.8, momentum 0.6, int4",
    "streaming DiLoCo(32), 4 fragments, delay 4, int8",
    "streaming DiLoCo(32), 4 fragments, delay 4, int4, error feedback",
]
#: With another seed (100) DDP's held-out loss was 1.998 at a learning rate of 4e-3, 1.905 at 8e-3 and 1.879 at 1.6e-2.
#: The outer settings 0.8 and 0.6 are the best of six for DiLoCo(32) with that seed, at 8e-3.
GPT = Task(
    "2 replicas: a GPT of 0.04 M parameters over bytes",
    functools.partial(sources, length=64, held_out=256),
    functools.partial(ByteGPT, layers=2, width=32, heads=2, length=64),
    lambda params: offbeat.AdamW(params, lr=1.2e-2, betas=(0.9, 0.95), weight_decay=0.1),
    "AdamW, lr 1.2e-2, betas 0.9 and 0.95, weight decay 0.1",
    arms=[name for name in ARMS if "a quarter" not in name and name not in CODED],
    replicas=2,
    batch=16,
    tokens=64,
    steps=832,
    synchronised=64,
    evaluate=32,
)
#: Eight times as long, DDP's held-out loss with seed 100 was 1.679 at a learning rate of 1e-3, 1.613 at 2e-3, 1.610 at
#: 3e-3, 1.613 at 4e-3, 1.632 at 8e-3, 1.627 at 1.2e-2 and 1.627 at 1.6e-2.
LONG = [
    "DDP",
    "one replica alone, half the batch",
    "LocalSGD(1)",
    "LocalSGD(8)",
    "DiLoCo(32)",
    "DiLoCo(32), outer lr 0.8, momentum 0.6",
    "streaming DiLoCo(32), 4 fragments, delay 4",
    "streaming DiLoCo(64), 4 fragments, delay 15, int4, error feedback",
    "DiLoCo(32), int4",
]
FEWER = ["DDP", "LocalSGD(1)", "LocalSGD(8)", "DiLoCo(32)", "DiLoCo(32), int4"]
LARGE = [
    "DDP",
    "one replica alone, a quarter of the batch",
    "LocalSGD(1)",
    "LocalSGD(8)",
    "SlowMo(8)",
    "DiLoCo(32)",
    "DiLoCo(32), outer lr 0.8, momentum 0.6",
    "DiLoCo(128)",
    "streaming DiLoCo(32), 4 fragments, delay 4",
    "DiLoCo(32), bf16",
    "DiLoCo(32), int8",
    "DiLoCo(32), int4",
    "DiLoCo(32), int2, error feedback",
    "DiLoCo(32), outer SGD 1.0",
    "DiLoCo(32), outer SGD 1.0, TopK(0.03), error feedback",
]
#: What several processes run first, with all seeds: a run that is cut off should have these.
FIRST = [
    "DDP",
    "LocalSGD(8)",
    "DiLoCo(32)",
    "streaming DiLoCo(32), 4 fragments, delay 4",
    "DiLoCo(32), int4",
]
TASKS = {
    "gpt": GPT,
    "digits": Task(
        "2 replicas: a convolutional net with BatchNorm",
        digits,
        ConvNet,
        lambda params: offbeat.SGD(params, lr=0.4, momentum=0.9, weight_decay=5e-4),
        "SGD, lr 0.4, momentum 0.9, weight decay 5e-4",
        arms=["DDP", "LocalSGD(1)", "LocalSGD(8)", "LocalSGD(8), delay 7", "DiLoCo(32)"],
        replicas=2,
        batch=32,
        tokens=1,
        steps=400,
        synchronised=80,
        evaluate=20,
        unit="samples",
    ),
    "gpt4": dataclasses.replace(
        GPT, title="4 replicas: the same GPT, the same batch in all", replicas=4, batch=8, arms=FEWER
    ),
    "gpt-long": dataclasses.replace(
        GPT,
        title="2 replicas: a GPT of 0.04 M parameters over bytes, eight times as long",
        optimizer=lambda params: offbeat.AdamW(params, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
        settings="AdamW, lr 3e-3, betas 0.9 and 0.95, weight decay 0.1",
        arms=LONG,
        steps=8 * GPT.steps,
        synchronised=4 * GPT.synchronised,
        evaluate=8 * GPT.evaluate,
    ),
    "gpt10m": Task(
        "4 replicas: a GPT of 10 M parameters over bytes",
        functools.partial(sources, length=256, held_out=128),
        functools.partial(ByteGPT, layers=8, width=320, heads=5, length=256),
        lambda params: offbeat.AdamW(params, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1),
        "AdamW, lr 2e-3, betas 0.9 and 0.95, weight decay 0.1",
        arms=LARGE,
        replicas=4,
        batch=16,
        tokens=256,
        steps=832,
        synchronised=64,
        evaluate=32,
    ),
}
TASKS["gpt10m-long"] = dataclasses.replace(
    TASKS["gpt10m"],
    title="4 replicas: the same GPT of 10 M parameters, four times as long",
    arms=[*FIRST, "DiLoCo(32), outer lr 0.8, momentum 0.6"],
    steps=4 * 832,
    synchronised=4 * 64,
    evaluate=4 * 32,
)
BESIDE = ["DDP", "DiLoCo(32)", "DiLoCo(32), outer lr 0.8, momentum 0.6", "streaming DiLoCo(32), 4 fragments, delay 4"]
for name, like in {"gpt-codecs": "gpt", "gpt-codecs-long": "gpt-long"}.items():
    TASKS[name] = dataclasses.replace(
        TASKS[like], title=f"{TASKS[like].title}: codecs", arms=[*BESIDE, "DiLoCo(32), int4", *CODED]
    )
ON_GPU = ["gpt10m", "gpt10m-long"]
#: Tasks that have a file of their own, by its ending. The long ones take an hour.
OWN_FILES = {"-long": ["gpt-long"], "-codecs": ["gpt-codecs", "gpt-codecs-long"]}
ON_CPU = ["gpt", "digits", "gpt4"]


#: Processes on a GPU. One fills a fraction of a large one; an H200 was as busy with 6 as with 12.
JOBS_ON_GPU = 6
#: Steps of the run in which the steps of one replica are timed.
TIMED_STEPS = 100


@functools.cache
def samples_of(name: str, quick: bool, device: str) -> Samples:
    """The data of a task."""
    samples = TASKS[name].samples().to(device)
    if quick:
        samples = samples._replace(held_out_x=samples.held_out_x[:32], held_out_y=samples.held_out_y[:32])
    return samples


def prepare(tasks: Sequence[str], quick: bool, device: str) -> None:
    """Settings of a process, and the data."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    for name in tasks:
        samples_of(name, quick, device)


def work(job: Job, quick: bool, device: str, times: int) -> dict[str, Any]:
    """Do one run."""
    task, samples = TASKS[job.task], samples_of(job.task, quick, device)
    steps = steps_of(task, quick, times)
    if job.by_itself:
        return train(task, Arm(alone=True), samples, job.seed, min(steps, TIMED_STEPS), timed=True)
    return train(task, ARMS[job.arm], samples, job.seed, steps)


def steps_of(task: Task, quick: bool, times: int) -> int:
    return 10 if quick else times * task.steps


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, help="gpt10m and gpt10m-long on a GPU, the others on the CPU"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="0 1 2 unless told; 0 with --quick")
    parser.add_argument("--times", type=int, default=1, help="as many times the steps")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the .json is read from and all is written to")
    parser.add_argument("--jobs", type=int, help=f"processes; 1 on the CPU and {JOBS_ON_GPU} on a GPU unless told")
    parser.add_argument("--seconds", type=float, help="give up what is not over after so long; implies --save")
    parser.add_argument("--resume", action="store_true", help="run what the .json does not have; implies --save")
    parser.add_argument("--add", nargs="+", choices=ARMS, default=[], help="run only these, and add them to the .json")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="JSON", help="put results of several seeds together")
    parser.add_argument("--again", action="store_true", help="write table and plot again, from the saved .json")
    options = parser.parse_args(arguments)
    if not options.tasks:
        options.tasks = ON_GPU if options.device == "cuda" else ["gpt"] if options.add else ON_CPU
    if options.device == "cpu" and ending(options.tasks) is None:
        parser.error(f"{', '.join(options.tasks)} do not go into one file; run them one after the other")
    options.seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    options.jobs = options.jobs or (1 if options.device == "cpu" else JOBS_ON_GPU)
    options.save = options.save or options.resume or options.seconds is not None
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    return options


def ending(tasks: Sequence[str]) -> str | None:
    """Of the name of the file that these tasks go into; None if they do not go into one."""
    found = {next((end for end, names in OWN_FILES.items() if task in names), "") for task in tasks}
    return found.pop() if len(found) == 1 else None


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_from(arguments)
    torch.set_num_threads(1)
    path = options.out / f"convergence{'-cuda' if options.device == 'cuda' else ending(options.tasks)}"
    if options.again:
        write(json.loads(path.with_suffix(".json").read_text()), path)
    elif options.merge:
        write(merged(options.merge), path)
    elif options.add:
        add(options.add, options.tasks, path)
    else:
        compare(options, path)


def compare(options: argparse.Namespace, path: Path) -> None:
    """Run all arms with all seeds, and report."""
    clock = Clock(options.seconds)
    result = empty(options)
    if options.resume:
        result = resumed(result, path)
    jobs = jobs_for(result, by_importance=options.jobs > 1)
    failed = []
    for job, found, error in outcomes(jobs, options, clock):
        if error:
            failed.append(job)
            print(f"{job.task}, seed {job.seed}, {job.arm} failed: {error}", flush=True)
            continue
        enter(result, job, found)
        if not job.by_itself:
            clock.note(found["wall"])
        if options.save:
            keep(result, path)
            task = result["tasks"][job.task]
            if len(task["runs"][str(job.seed)]) == len(task["arms"]):
                write(result, path)
    left = jobs_for(result, by_importance=options.jobs > 1)
    if options.save and left:
        write(result, path)
    print("\n" + pages(complete(result)))
    if left:
        names = "".join(f"\n  {job.task}, seed {job.seed}, {job.arm}" for job in left)
        print(f"not finished; the same command with --resume goes on:{names}", flush=True)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed, see above")


def empty(options: argparse.Namespace) -> dict[str, Any]:
    """What will be run and where, without any numbers."""
    words = sys.argv[1:]
    if "--out" in words:  # where the files were is of no use to others
        at = words.index("--out")
        words[at : at + 2] = []
    machine = describe_machine(" ".join(["python -m benchmarks.convergence", *words]))
    machine |= {"threads": "1 a replica", "date": time.strftime("%Y-%m-%d")}
    if options.device == "cuda":
        machine["precision"] = (
            "in all arms forward and backward in bfloat16 (autocast), products of evaluations in TF32, "
            "all else in float32"
        )
    if options.jobs > 1:
        machine["processes"] = f"{options.jobs}, each with one arm and one seed at a time"
        if options.device == "cuda" and "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
            machine["processes"] += "; they share the GPU through CUDA's MPS"
    tasks = {}
    for name in options.tasks:
        task, steps = TASKS[name], steps_of(TASKS[name], options.quick, options.times)
        tasks[name] = {
            "data": samples_of(name, options.quick, "cpu").words,
            **{key: getattr(task, key) for key in ("title", "settings", "replicas", "batch", "unit")},
            "tokens": task.tokens,
            "device": options.device,
            "steps": steps,
            "synchronised": min(task.synchronised, steps // 2),
            "arms": {arm: {"delay": ARMS[arm].delay, "like": ARMS[arm].like} for arm in task.arms},
            "runs": {str(seed): {} for seed in options.seeds},
        }
    return {"machine": machine, "tasks": tasks}


def resumed(new: dict[str, Any], path: Path) -> dict[str, Any]:
    """The saved result, if it is of the same comparison."""
    file = path.with_suffix(".json")
    if not file.exists():
        raise SystemExit(f"--resume: there is no {file} to go on with; begin without --resume")
    old: dict[str, Any] = json.loads(file.read_text())
    mine, theirs = settings(new), settings(old)
    other = [
        f"{key}: {theirs.get(key)}, now {mine.get(key)}" for key in mine | theirs if mine.get(key) != theirs.get(key)
    ]
    if other:
        words = "\n  ".join(other)
        raise SystemExit(f"--resume: {file} is of another comparison; begin without --resume\n  {words}")
    old["machine"]["resumed"] = new["machine"]["date"]
    return old


def settings(result: dict[str, Any]) -> dict[str, Any]:
    """What must be the same in all runs that are compared. Another CPU may go on."""
    found = {key: result["machine"].get(key) for key in ("gpu", "torch", "offbeat")}
    for name, task in result["tasks"].items():
        found |= {f"{name}, {key}": value for key, value in task.items() if key not in ("runs", "local_step")}
        found[f"{name}, seeds"] = sorted(task["runs"])
    return found


def jobs_for(result: dict[str, Any], *, by_importance: bool) -> list[Job]:
    """The runs that a result does not have.

    Args:
        by_importance: the arms that say most first, each with all seeds; otherwise one seed after the other.
    """
    timed, found = [], []
    for name, task in result["tasks"].items():
        jobs = [Job(name, arm, int(seed)) for seed in task["runs"] for arm in task["arms"]]
        if by_importance:
            arms = sorted(task["arms"], key=lambda arm: FIRST.index(arm) if arm in FIRST else len(FIRST))
            jobs.sort(key=lambda job: arms.index(job.arm))
        jobs = [job for job in jobs if job.arm not in task["runs"][str(job.seed)]]
        if jobs and task["device"] == "cuda" and "local_step" not in task:
            timed.append(Job(name, "a local step", jobs[0].seed, by_itself=True))
        found += jobs
    return timed + found  # the others would wait for what runs by itself


def outcomes(jobs: Sequence[Job], options: argparse.Namespace, clock: Clock) -> Iterator[Outcome]:
    """Do the jobs, in this process if there is no reason for others."""
    begin = functools.partial(prepare, options.tasks, options.quick, options.device)
    do = functools.partial(work, quick=options.quick, device=options.device, times=options.times)
    if options.jobs > 1 or options.seconds is not None:
        yield from in_processes(jobs, options.jobs, begin, do, clock)
        return
    begin()
    for job in jobs:
        yield Outcome(job, do(job))


def enter(result: dict[str, Any], job: Job, found: dict[str, Any]) -> None:
    """Add the numbers of one run."""
    task = result["tasks"][job.task]
    if job.by_itself:
        task["local_step"] = found["seconds"]
        print(f"{job.task}: a local step takes {1e3 * found['seconds']:.1f} ms", flush=True)
        return
    task["runs"][str(job.seed)][job.arm] = found
    end, after = found["curve"][-1]["loss"], found["finished"][0]
    print(f"{job.task}, seed {job.seed}, {job.arm}: {end:.4f}, finished {after:.4f}, {found['wall']} s", flush=True)


def add(arms: list[str], tasks: list[str], path: Path) -> None:
    """Run further arms with the saved seeds, and save them beside the others if DDP ends where it ended then."""
    result = json.loads(path.with_suffix(".json").read_text())
    for name in tasks:
        one, task = result["tasks"][name], TASKS[name]
        samples = task.samples()
        for seed, runs in one["runs"].items():
            for arm in ["DDP", *arms]:
                found = train(task, ARMS[arm], samples, int(seed), one["steps"])
                if arm == "DDP" and list(found["finished"]) != runs["DDP"]["finished"]:
                    raise SystemExit(
                        f"seed {seed}: DDP ends at {found['finished']}, and did at {runs['DDP']['finished']}"
                    )
                runs.setdefault(arm, found)
                print(f"{name}, seed {seed}, {arm}: {found['curve'][-1]['loss']:.4f}", flush=True)
        one["arms"] |= {arm: {"delay": ARMS[arm].delay, "like": ARMS[arm].like} for arm in arms}
    before = [result["machine"]["added"]] if "added" in result["machine"] else []
    result["machine"]["added"] = "; ".join([*before, f"{', '.join(arms)} (--add), {time.strftime('%Y-%m-%d')}"])
    write(result, path)


def merged(paths: list[Path]) -> dict[str, Any]:
    """The results of several files, each with seeds of its own."""
    first, *others = [json.loads(path.read_text()) for path in paths]
    for other in others:
        for name, task in other["tasks"].items():
            runs = first["tasks"].setdefault(name, task)["runs"]
            for seed, found in task["runs"].items():
                runs[seed] = runs.get(seed, {}) | found
    result: dict[str, Any] = first
    return result


def complete(result: dict[str, Any]) -> dict[str, Any]:
    """The same without arms that some seed has not run: a run that was cut off keeps what it has.

    Seeds without any run are left out, and tasks without DDP or the time of a step.
    """
    tasks = {}
    for name, task in result["tasks"].items():
        runs = {seed: found for seed, found in task["runs"].items() if found}
        missing = {arm: [seed for seed, found in runs.items() if arm not in found] for arm in task["arms"]}
        arms = {arm: how for arm, how in task["arms"].items() if not missing[arm]}
        if runs and "DDP" in arms and (task.get("device") != "cuda" or "local_step" in task):
            missing = {arm: seeds for arm, seeds in missing.items() if seeds}
            tasks[name] = {**task, "runs": runs, "arms": arms, "missing": missing}
    return {**result, "tasks": tasks}


def keep(result: dict[str, Any], path: Path) -> None:
    """The numbers."""
    path.parent.mkdir(exist_ok=True, parents=True)
    whole = path.with_suffix(".json.part")  # so that the .json is whole, also if this process is killed meanwhile
    whole.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    whole.replace(path.with_suffix(".json"))


def write(result: dict[str, Any], path: Path) -> None:
    """The numbers, the table and the plot."""
    keep(result, path)
    shown = complete(result)
    if not shown["tasks"]:
        print("no table yet: it needs DDP with every seed", flush=True)
        return
    path.with_suffix(".md").write_text(pages(shown, path.with_suffix(".png").name).rstrip() + "\n")
    try:
        plot(shown, path.with_suffix(".png"))
    except ModuleNotFoundError as error:  # not every machine with a GPU has matplotlib
        print(f"no plot: {error}; --again makes it, on a machine that has matplotlib", flush=True)


if __name__ == "__main__":
    main()
