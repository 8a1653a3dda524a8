"""What training with fewer synchronisations costs: LocalSGD, SlowMo and DiLoCo against DDP at equal tokens.

    python -m benchmarks.convergence [--save]
    python -m benchmarks.convergence --tasks gpt-long [--save]   # eight times as long
    python -m benchmarks.convergence --tasks gpt-codecs gpt-codecs-long [--save]   # codecs, and as long
    python -m benchmarks.convergence --device cuda [--save]   # a GPT of 10 M parameters, and four times as long
    python -m benchmarks.convergence --device cuda --compiled --tasks recipes [--save]   # see convergence_recipes
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
import functools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import convergence_recipes_report, convergence_report
from benchmarks.convergence_data import Samples
from benchmarks.convergence_jobs import Clock, Job, Outcome, in_processes
from benchmarks.convergence_recipes import RECIPE_TASKS
from benchmarks.convergence_tasks import ARMS, FIRST, ON_CPU, ON_GPU, OWN_FILES, TASKS
from benchmarks.convergence_train import Arm, Task, train
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"

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


def work(job: Job, quick: bool, device: str, times: int, compiled: bool) -> dict[str, Any]:
    """Do one run."""
    task, samples = TASKS[job.task], samples_of(job.task, quick, device)
    steps = steps_of(task, quick, times)
    if job.by_itself:
        return train(task, Arm(alone=True), samples, job.seed, min(steps, TIMED_STEPS), timed=True, compiled=compiled)
    return train(task, ARMS[job.arm], samples, job.seed, steps, compiled=compiled)


def steps_of(task: Task, quick: bool, times: int) -> int:
    return 10 if quick else times * task.steps


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, help="gpt10m and gpt10m-long on a GPU, the others on the CPU"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="0 1 2 unless told; 0 with --quick")
    parser.add_argument("--compiled", action="store_true", help="forward and backward by torch.compile")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="only these arms of the tasks")
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
    if ending(options.tasks) is None:
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
    kind = ending(options.tasks)
    path = options.out / f"convergence{'-cuda' if options.device == 'cuda' and not kind else kind}"
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
    shown = showing(result)
    print("\n" + (shown[0].pages(shown[1]) if shown else "no table yet: it needs DDP with every seed"))
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
            f"in all arms forward and backward in bfloat16 (autocast{', torch.compile' * options.compiled}), "
            "products of evaluations in TF32, "
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
            "arms": {
                arm: {"delay": ARMS[arm].delay, "like": ARMS[arm].like}
                for arm in task.arms
                if not options.arms or arm in options.arms
            },
            "timed": task.timed,
            "whole": task.whole,
            "runs": {str(seed): {} for seed in task.seeds or options.seeds},
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
            first = [] if name in RECIPE_TASKS else FIRST  # recipes are listed by importance
            arms = sorted(task["arms"], key=lambda arm, first=first: first.index(arm) if arm in first else len(first))
            jobs.sort(key=lambda job: arms.index(job.arm))
        jobs = [job for job in jobs if job.arm not in task["runs"][str(job.seed)]]
        if jobs and task["device"] == "cuda" and task.get("timed", True) and "local_step" not in task:
            timed.append(Job(name, "a local step", jobs[0].seed, by_itself=True))
        found += jobs
    return timed + found  # the others would wait for what runs by itself


def outcomes(jobs: Sequence[Job], options: argparse.Namespace, clock: Clock) -> Iterator[Outcome]:
    """Do the jobs, in this process if there is no reason for others."""
    begin = functools.partial(prepare, options.tasks, options.quick, options.device)
    do = functools.partial(
        work, quick=options.quick, device=options.device, times=options.times, compiled=options.compiled
    )
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
            mine = first["tasks"].setdefault(name, task)
            mine["arms"], runs = mine["arms"] | task["arms"], mine["runs"]
            for seed, found in task["runs"].items():
                runs[seed] = runs.get(seed, {}) | found
        commands = [*first["machine"].get("merged with", "").split("; "), other["machine"]["command"]]
        first["machine"]["merged with"] = "; ".join(filter(None, commands))
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


def showing(result: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """The module that reports such results, and what it reports; None before there is enough."""
    if any(name in RECIPE_TASKS for name in result["tasks"]):
        return convergence_recipes_report, result
    shown = complete(result)
    return (convergence_report, shown) if shown["tasks"] else None


def write(result: dict[str, Any], path: Path) -> None:
    """The numbers, the table and the plot."""
    keep(result, path)
    found = showing(result)
    if found is None:
        print("no table yet: it needs DDP with every seed", flush=True)
        return
    report, shown = found
    path.with_suffix(".md").write_text(report.pages(shown, path.with_suffix(".png").name).rstrip() + "\n")
    try:
        report.plot(shown, path.with_suffix(".png"))
    except ModuleNotFoundError as error:  # not every machine with a GPU has matplotlib
        print(f"no plot: {error}; --again makes it, on a machine that has matplotlib", flush=True)


if __name__ == "__main__":
    main()
