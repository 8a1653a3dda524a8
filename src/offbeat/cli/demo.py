"""``offbeat demo``: several processes train a small model together, with torch's optimizer and with offbeat's."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
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
from offbeat.cli.train import ARMS, EVALUATION_WINDOWS, Job

__all__ = ["demo"]

STEPS = 150
QUICK_STEPS = 10
#: Medians need a few timed steps.
LEAST_STEPS = UNTIMED_STEPS + 5


def _check_json(value: Path | None) -> Path | None:
    if value is not None and not value.absolute().parent.is_dir():
        raise typer.BadParameter(f"the directory of {value} does not exist; create it or name another file")
    return value


def demo(
    *,
    ranks: Annotated[
        int, typer.Option(min=2, max=EVALUATION_WINDOWS, help="Processes that train together; best one per core.")
    ] = 2,
    steps: Annotated[
        int | None, typer.Option(min=LEAST_STEPS, show_default=str(STEPS), help="Training steps of each arm.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seeds the model and the order of the data.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help=f"Only {QUICK_STEPS} steps, to see that it runs.")] = False,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", dir_okay=False, callback=_check_json, help="Also write a JSON file."),
    ] = None,
) -> None:
    """Train a small language model with several processes: torch's fastest AdamW, offbeat's, and that overlapped.

    All arms see the same text (Python's standard library), the same model and the same seeds.
    """
    if quick and steps is not None:
        raise typer.BadParameter(f"--steps {steps} and --quick ({QUICK_STEPS} steps) exclude each other; leave one out")
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    # So that the finally clauses run: they stop the processes and show the cursor again.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    steps = QUICK_STEPS if quick else steps or STEPS
    try:
        corpus = read_corpus()
        _introduce(console, corpus, ranks, steps)
        with TemporaryDirectory(prefix="offbeat-demo-") as directory, _display(console, steps) as show:
            found = launch(Job(ranks=ranks, steps=steps, seed=seed, directory=Path(directory)), show)
    except WorkersFailed as failure:
        message, logs = failure.args
        errors.print(escape(logs), style="dim", soft_wrap=True)
        _fail(errors, f"{message}. All processes were stopped; run the demo again, or with other --ranks")
    except (FileNotFoundError, PermissionError) as error:
        _fail(errors, str(error))
    except KeyboardInterrupt:
        errors.print("interrupted; all processes were stopped")
        raise typer.Exit(130) from None
    arms = [arm_report(name, [results[name] for results in found]) for name in ARMS]
    weights = [found[0][name].weights for name in ARMS]
    facts = {
        "ranks": ranks,
        "steps": steps,
        "seed": seed,
        "versions": {"offbeat": offbeat.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "parameters": sum(w.numel() for w in weights[0].values()),
        "tensors": len(weights[0]),
        "files": corpus.files,
        "train_bytes": len(corpus.train),
        "held_out_bytes": len(corpus.held_out),
        "arms": [asdict(arm) for arm in arms],
        "largest_difference": largest_difference(weights[0], weights[1]),
        "sentences": sentences(*arms),
    }
    _show(console, arms, facts)
    if json_path is not None:
        json_path.write_text(json.dumps(facts, indent=2) + "\n")
    if problem := _problem(*arms):
        _fail(errors, problem)


def _fail(errors: Console, message: str) -> NoReturn:
    errors.print(f"[bold red]The demo failed:[/] {escape(message)}")
    raise typer.Exit(1)


def _introduce(console: Console, corpus: Corpus, ranks: int, steps: int) -> None:
    console.print(
        f"{ranks} processes train a byte-level GPT together on {len(corpus.train) / 1e6:.1f} MB of Python's standard "
        f"library ({len(corpus.held_out) / 1e6:.1f} MB held out): {steps} steps under DistributedDataParallel, "
        "one thread each, with each optimizer in turn."
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if ranks > cores:
        console.print(f"[yellow]{ranks} processes share {cores} cores, so all times will be longer.[/]")
    console.print()


@contextmanager
def _display(console: Console, steps: int) -> Iterator[Callable[[str, int, float], None]]:
    """Yields the function that shows an arm's progress."""
    width = max(map(len, ARMS))
    if not console.is_terminal:  # a line now and then instead of a bar that moves

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


def _show(console: Console, arms: list[ArmReport], facts: dict[str, Any]) -> None:
    console.print()
    console.print(table(arms, facts["largest_difference"]))
    console.print(
        f"[dim]{facts['parameters']:,} parameters in {facts['tensors']} tensors. Loss in nats per byte. Times: the "
        f"median over all ranks and all steps after the first {UNTIMED_STEPS}, +- half the interquartile range.[/]"
    )
    for arm in arms:
        console.print(f"[dim]{arm.name} ran as: {escape(arm.tier)}[/]")
    console.print()
    for sentence in facts["sentences"]:
        console.print(sentence)


def _problem(torchs: ArmReport, ours: ArmReport, overlapped: ArmReport) -> str | None:
    """What must never happen, whatever the times are."""
    arms = (torchs, ours, overlapped)
    if len({arm.start_digest for arm in arms}) > 1:
        return "the arms did not start from the same parameters, so their numbers cannot be compared"
    for arm in arms:
        if not arm.ranks_identical:
            return f"the ranks of {arm.name} do not hold the same parameters: {', '.join(arm.parameter_digests)}"
    if overlapped.parameter_digests != ours.parameter_digests:
        return f"{overlapped.name} and {ours.name} ended at different parameters, though overlap changes no number"
    return None
