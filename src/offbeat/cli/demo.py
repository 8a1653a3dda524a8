"""``offbeat demo``: several processes train a small model together, with torch's optimizer and with offbeat's."""

from __future__ import annotations

import json
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import offbeat
from offbeat.cli.data import Corpus, read_corpus
from offbeat.cli.launch import WorkersFailed, launch
from offbeat.cli.report import UNTIMED_STEPS, ArmReport, arm_report, largest_difference, sentences, table
from offbeat.cli.train import ARMS, EVALUATION_WINDOWS, Job, RankResult

__all__ = ["demo"]

STEPS = 150
QUICK_STEPS = 10
#: Medians need a few timed steps.
LEAST_STEPS = UNTIMED_STEPS + 5


def _check_ranks(value: int) -> int:
    if not 2 <= value <= EVALUATION_WINDOWS:
        raise typer.BadParameter(
            f"{value} is not from 2 to {EVALUATION_WINDOWS}: the processes train together, and each evaluates a share "
            f"of {EVALUATION_WINDOWS} windows; take one process a core, for example --ranks 2"
        )
    return value


def _check_steps(value: int | None) -> int | None:
    if value is not None and value < LEAST_STEPS:
        raise typer.BadParameter(
            f"{value} is less than {LEAST_STEPS}, and the first {UNTIMED_STEPS} steps are not timed; "
            f"take --steps {LEAST_STEPS} or more"
        )
    return value


def _check_seed(value: int) -> int:
    if not 0 <= value < 2**32:
        raise typer.BadParameter(f"{value} is not from 0 to 2**32 - 1; take a number in that range, for example 0")
    return value


def _check_json(value: Path | None) -> Path | None:
    if value is not None and (value.is_dir() or not value.absolute().parent.is_dir()):
        what = "is a directory" if value.is_dir() else "is in a directory that does not exist"
        raise typer.BadParameter(f"{value} {what}, and results are written to one file; name a file in a directory")
    return value


def demo(
    *,
    ranks: Annotated[int, typer.Option(callback=_check_ranks, help="Processes that train together.")] = 2,
    steps: Annotated[
        int | None, typer.Option(callback=_check_steps, show_default=str(STEPS), help="Training steps of each arm.")
    ] = None,
    seed: Annotated[int, typer.Option(callback=_check_seed, help="Seeds the model and the order of the data.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help=f"Only {QUICK_STEPS} steps, to see that it runs.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", callback=_check_json, help="Also write the results there.")
    ] = None,
) -> None:
    """Train a small language model with several processes: torch's fastest AdamW, offbeat's, and that overlapped.

    All arms see the same text (Python's standard library), the same model and the same seeds.
    """
    if quick and steps is not None:
        raise typer.BadParameter(f"--steps {steps} and --quick ({QUICK_STEPS} steps) exclude each other; leave one out")
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    _exit_on_sigterm()
    try:
        corpus = read_corpus()
        steps = QUICK_STEPS if quick else steps or STEPS
        _introduce(console, corpus, ranks, steps)
        with TemporaryDirectory(prefix="offbeat-demo-") as directory, _display(console, steps) as show:
            found = launch(_jobs(Path(directory), ranks=ranks, steps=steps, seed=seed), show)
        _conclude(console, errors, found, corpus, {"ranks": ranks, "steps": steps, "seed": seed}, json_path)
    except WorkersFailed as failure:
        if failure.details:
            errors.print(escape(failure.details), style="dim", soft_wrap=True)
        _fail(errors, f"{failure}. All processes were stopped; run the demo again, or with other --ranks")
    except (FileNotFoundError, PermissionError) as error:
        _fail(errors, str(error))
    except KeyboardInterrupt:
        errors.print("interrupted; all processes were stopped")
        raise typer.Exit(130) from None


def _jobs(directory: Path, *, ranks: int, steps: int, seed: int) -> list[Job]:
    jobs = []
    for i, arm in enumerate(ARMS):
        own = directory / f"arm{i}"
        own.mkdir()
        jobs.append(Job(arm=arm, ranks=ranks, steps=steps, seed=seed, directory=own))
    return jobs


def _fail(errors: Console, message: str) -> NoReturn:
    errors.print(f"[bold red]The demo failed:[/] {escape(message)}")
    raise typer.Exit(1)


def _exit_on_sigterm() -> None:
    """Leave through the ``finally`` clauses: they stop the processes and give the terminal its cursor back."""

    def leave(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)


def _introduce(console: Console, corpus: Corpus, ranks: int, steps: int) -> None:
    console.print(
        f"{ranks} processes train a byte-level GPT together on {len(corpus.train) / 1e6:.1f} MB of Python's standard "
        f"library ({len(corpus.held_out) / 1e6:.1f} MB held out): {steps} steps under DistributedDataParallel, "
        "one thread each, with each optimizer in turn."
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if ranks > cores:
        console.print(f"[yellow]{ranks} processes share {cores} cores: the times will be those of a crowd.[/]")
    console.print()


@contextmanager
def _display(console: Console, steps: int) -> Iterator[Callable[[str, int, float], None]]:
    """Yields the function that shows an arm's progress."""
    width = max(map(len, ARMS))
    if not console.is_terminal:  # a log: a line now and then instead of a bar that moves

        def line(arm: str, step: int, loss: float) -> None:
            if step % max(1, steps // 5) == 0:
                console.print(f"{arm:<{width}}  step {step:>4} of {steps}  loss {loss:.3f}")

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        tasks = {arm: progress.add_task(f"{arm:<{width}}", total=steps, loss=" ... ") for arm in ARMS}
        yield lambda arm, step, loss: progress.update(tasks[arm], completed=step, loss=f"{loss:.3f}")


def _conclude(
    console: Console,
    errors: Console,
    found: dict[str, list[RankResult]],
    corpus: Corpus,
    settings: dict[str, int],
    json_path: Path | None,
) -> None:
    arms = [arm_report(name, results) for name, results in found.items()]
    torchs, ours, overlapped = arms
    difference = largest_difference(*list(found.values())[:2])
    said = sentences(torchs, ours, overlapped)
    one = next(iter(found.values()))[0]
    console.print()
    console.print(table(arms, difference))
    console.print(
        f"[dim]{one.parameters:,} parameters in {one.tensors} tensors. Loss in nats per byte. Times: the "
        f"median of all ranks' steps after the first {UNTIMED_STEPS}, +- half the width of the middle half.[/]"
    )
    for arm in arms:
        console.print(f"[dim]{arm.name} ran as: {escape(arm.tier)}[/]")
    console.print()
    for sentence in said:
        console.print(sentence)
    if json_path is not None:
        _write(json_path, arms, difference, said, one, corpus, settings)
    if problem := _problem(torchs, ours, overlapped):
        _fail(errors, problem)


def _problem(torchs: ArmReport, ours: ArmReport, overlapped: ArmReport) -> str | None:
    """What must never be, however the times turned out."""
    arms = (torchs, ours, overlapped)
    if len({arm.start_digest for arm in arms}) > 1:
        return "the arms did not start from the same parameters, so their numbers cannot be compared"
    for arm in arms:
        if not arm.ranks_identical:
            return f"the ranks of {arm.name} do not hold the same parameters: {', '.join(arm.parameter_digests)}"
    if overlapped.parameter_digests != ours.parameter_digests:
        return f"{overlapped.name} and {ours.name} ended at different parameters, though overlap changes no number"
    return None


def _write(
    path: Path,
    arms: list[ArmReport],
    difference: float,
    said: list[str],
    one: RankResult,
    corpus: Corpus,
    settings: dict[str, int],
) -> None:
    content = {
        **settings,
        "versions": {"offbeat": offbeat.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "parameters": one.parameters,
        "tensors": one.tensors,
        "files": corpus.files,
        "train_bytes": len(corpus.train),
        "held_out_bytes": len(corpus.held_out),
        "arms": [arm.as_json() for arm in arms],
        "largest_difference": difference,
        "sentences": said,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
