"""What commands print: tables of plain lines, errors with an exit code, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

__all__ = ["fail", "make_console", "print_json", "print_table"]


def make_console(quiet: bool = False) -> Console:
    """A console that writes plain lines where the output is not a terminal, and no colours with ``NO_COLOR``."""
    return Console(highlight=False, quiet=quiet)


def print_json(data: Any) -> None:
    """Write JSON to standard output, and nothing else."""
    sys.stdout.write(json.dumps(data, indent=1) + "\n")


def fail(message: str, code: int = 1, quiet: bool = False) -> NoReturn:
    """Print an error and end the command.

    Args:
        message: what is wrong and what to do.
        code: the exit code: 1 if something is not as it should be, 2 if the command was called wrongly.
        quiet: print nothing, because another process does.
    """
    Console(stderr=True, highlight=False, quiet=quiet).print(f"[bold]Error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def print_table(console: Console, rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns: the first is aligned to the left, the others to the right. The first is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, (name, *cells) in enumerate(rows):
        line = f"{name:{widths[0]}}" + "".join(
            f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)
        )
        console.print(escape(line.rstrip()), style="bold" if number == 0 else None, soft_wrap=True)
