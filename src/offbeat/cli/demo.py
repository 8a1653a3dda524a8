"""``offbeat demo``: what offbeat gains over a slow link, and during backward."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from offbeat.cli import link
from offbeat.cli.processes import WorkersFailed, run_workers
from offbeat.cli.screen import Screen, backward_table, sites_table, summary

__all__ = ["demo"]

EPILOG = """Examples:

\b
    offbeat demo
    offbeat demo --seconds 120 --mbit 50 --json demo.json
"""
#: Seconds after which the demo fails, beside twice those of training. On a machine that is not busy it starts in ten.
LIMIT = 200


class Link(str, Enum):
    """How the link is made slow; see :mod:`offbeat.cli.link`."""

    auto = "auto"
    namespaces = "namespaces"
    pacing = "pacing"
    none = "none"


def demo(
    *,
    seconds: Annotated[float, typer.Option(min=1, help="About how long to train; starting comes on top.")] = 60,
    mbit: Annotated[float, typer.Option(min=1, help="The rate of the link, in Mbit/s.")] = 100,
    way: Annotated[Link, typer.Option("--link", help="How the link is made slow.")] = Link.auto,
    patience: Annotated[float, typer.Option(min=1, help="Give up after so many seconds without progress.")] = 60,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", dir_okay=False, help="Also write the numbers to a file.")
    ] = None,
) -> None:
    """Train a small GPT at two sites over a slow link, then step a deep model during backward.

    The text is Python's own standard library; nothing is downloaded.
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that finally clauses run
    if json_path is not None and not os.access(json_path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"{json_path} cannot be written; name a file in a directory that can")
    try:
        found = _run(console, seconds, mbit, way.value, patience)
    except WorkersFailed as failure:
        errors.print(escape(failure.log), style="dim", soft_wrap=True)
        _fail(errors, f"{failure}. All processes were stopped.")
    except OSError as error:
        _fail(errors, str(error))
    except KeyboardInterrupt:
        errors.print("interrupted; all processes were stopped")
        raise typer.Exit(130) from None
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2) + "\n")


def _run(console: Console, seconds: float, mbit: float, way: str, patience: float) -> dict[str, Any]:
    end = time.monotonic() + LIMIT + 2 * seconds
    console.print(f"1. Two sites train a small GPT over a link of {mbit:g} Mbit/s.")
    possible = link.possible()
    if way not in ("auto", *possible):
        raise typer.BadParameter(f"this system cannot make a slow link by {way!r}, only by: {', '.join(possible)}")
    way = possible[0] if way == "auto" else way
    console.print(f"The link: {link.DESCRIPTIONS[way]}.", soft_wrap=True)
    with TemporaryDirectory(prefix="offbeat-demo-") as directory, Screen(console) as screen:
        options = {"link": way, "mbit": mbit, "store": str(Path(directory) / "store"), "seconds": seconds / 3}
        found = run_workers(
            _commands(screen, "sites", 2, options),
            screen.hear,
            join=lambda pids: link.join(way, pids),
            patience=patience,
            seconds=end - time.monotonic(),
        )
    sites = found[0]
    for name, arm in sites["arms"].items():
        other = found[1]["arms"][name]["held_out_loss"]
        if arm["held_out_loss"] != other:
            raise OSError(f"the sites ended with different models ({name}: {arm['held_out_loss']} and {other})")
    console.print(sites_table(sites), soft_wrap=True)
    console.print("2. One process steps a deep model on few rows.")
    with Screen(console) as screen:
        options = {"link": "none", "seconds": seconds / 6}
        commands = _commands(screen, "backward", 1, options)
        (backward,) = run_workers(commands, screen.hear, patience=patience, seconds=end - time.monotonic())
    if not backward["same_bits"]:
        raise OSError("offbeat.AdamW ended at other parameters when overlapped, though overlap changes no number")
    console.print(backward_table(backward), soft_wrap=True)
    line = summary(mbit, sites, backward)
    console.print(textwrap.fill(line, 79), style="bold", soft_wrap=True)
    return {"link": way, "mbit": mbit, "sites": sites, "backward": backward, "summary": line}


def _commands(screen: Screen, part: str, count: int, options: dict[str, Any]) -> list[list[str]]:
    screen.say(f"starting {count} process{'es' if count > 1 else ''} ...")
    worker = [sys.executable, "-m", "offbeat.cli.worker", f"offbeat.cli.{part}"]
    return [[*worker, str(rank), json.dumps(options)] for rank in range(count)]


def _fail(errors: Console, message: str) -> NoReturn:
    errors.print(f"[bold]The demo failed:[/] {escape(message)}")
    raise typer.Exit(1)
