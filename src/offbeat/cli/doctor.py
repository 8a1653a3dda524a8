"""``offbeat doctor``: whether everything that offbeat uses is there and works."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from offbeat._version import __version__
from offbeat.cli.doctor_checks import run_checks
from offbeat.cli.output import make_console, print_json

__all__ = ["doctor_command"]

EPILOG = """Examples:

\\b
    offbeat doctor
    offbeat doctor --json > doctor.json
    offbeat doctor && torchrun --nproc-per-node=8 train.py
"""
STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


def doctor_command(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False
) -> None:
    """Check this installation: one line for each part, with what to do where something is missing.

    OK: it works. WARN: offbeat works, but slower or without a feature. FAIL: it does not work.
    The exit code is 1 if a line says FAIL.
    """
    findings = run_checks()
    failed = any(finding.status == "FAIL" for finding in findings)
    if as_json:
        checks = [vars(finding) for finding in findings]
        print_json({"offbeat": __version__, "ok": not failed, "checks": checks})
        raise typer.Exit(int(failed))
    console = make_console()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        fix = f" -> {finding.fix}" if finding.fix else ""
        line = f"[{STYLES[finding.status]}]{finding.status:4}[/]  {finding.name:{width}}  {escape(finding.said + fix)}"
        console.print(line, soft_wrap=True)
    raise typer.Exit(int(failed))
