"""The command line: ``offbeat demo``. It needs ``pip install typer rich``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command ``offbeat``."""
    try:
        from offbeat.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(
            f"offbeat: the command line needs {error.name}, which is not installed; run: pip install typer rich",
            file=sys.stderr,
        )
        sys.exit(1)
    app(prog_name="offbeat")
