"""The commands of ``offbeat`` and what they share."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from offbeat._version import __version__
from offbeat.cli.bench import EPILOG as BENCH_EPILOG
from offbeat.cli.bench import bench_command
from offbeat.cli.demo import EPILOG as DEMO_EPILOG
from offbeat.cli.demo import demo
from offbeat.cli.doctor import EPILOG as DOCTOR_EPILOG
from offbeat.cli.doctor import doctor_command
from offbeat.cli.lighthouse import EPILOG as LIGHTHOUSE_EPILOG
from offbeat.cli.lighthouse import lighthouse
from offbeat.cli.plan import EPILOG as PLAN_EPILOG
from offbeat.cli.plan import plan_command
from offbeat.cli.report import EPILOG as REPORT_EPILOG
from offbeat.cli.report import report

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command("demo", epilog=DEMO_EPILOG)(demo)
app.command("doctor", epilog=DOCTOR_EPILOG)(doctor_command)
app.command("bench", epilog=BENCH_EPILOG)(bench_command)
app.command("plan", epilog=PLAN_EPILOG)(plan_command)
app.command("report", epilog=REPORT_EPILOG)(report)
app.command("lighthouse", epilog=LIGHTHOUSE_EPILOG)(lighthouse)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offbeat {__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Distributed optimizers that update parameters during backward and communication."""
