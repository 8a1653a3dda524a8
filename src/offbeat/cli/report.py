"""``offbeat report``: one page about a run, from the lines that ``offbeat.log_rounds`` has written."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.cli.output import fail, make_console

__all__ = ["EPILOG", "Run", "read_run", "report"]

EPILOG = """Examples:

\b
    offbeat report run/
    offbeat report run/ other-run/ --output both.html
"""
#: Colours that can be told apart without telling red from green.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#000000", "#56b4e9")
FATES = {"landed": "#0072b2", "skipped": "#e69f00", "failed": "#000000"}
#: The numbers that a line of rounds.jsonl must have.
NEEDED = {"step", "level", "status", "seconds", "bytes_sent"}


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        name: its folder.
        rounds: the lines of rounds.jsonl.
        losses: steps and losses of loss.jsonl, if there is one.
    """

    name: str
    rounds: list[dict[str, Any]]
    losses: list[tuple[int, float]]


def report(
    runs: Annotated[list[Path], typer.Argument(help="One or two folders with rounds.jsonl, and loss.jsonl if wanted.")],
    *,
    output: Annotated[Path | None, typer.Option(help="The page; by default report.html in the first folder.")] = None,
) -> None:
    """Make a page about a run: waiting, bytes, and what became of each round. It needs no network to be read.

    rounds.jsonl is what offbeat.log_rounds(optimizer, path="run/rounds.jsonl") writes. loss.jsonl may hold lines such
    as {"step": 10, "loss": 2.5}. Two runs are shown side by side.
    """
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        fail("offbeat report needs matplotlib: pip install matplotlib")
    if len(runs) > 2:
        fail(f"offbeat report shows one or two runs, but got {len(runs)}", code=2)
    try:
        read = [read_run(folder) for folder in runs]
    except (OSError, ValueError) as error:
        fail(str(error))
    path = runs[0] / "report.html" if output is None else output
    try:
        path.write_text(_page(read))
    except OSError as error:
        fail(f"the page cannot be written: {error}")
    make_console().print(f"wrote {path}", soft_wrap=True)


def read_run(folder: Path) -> Run:
    """Read a folder.

    Raises:
        OSError: there is no rounds.jsonl that can be read.
        ValueError: a line is not what ``log_rounds`` writes.
    """
    path = folder / "rounds.jsonl"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there; write it with offbeat.log_rounds(optimizer, path={str(path)!r}) while training"
        )
    rounds = list(_lines(path))
    for number, line in enumerate(rounds, 1):
        if not line.keys() >= NEEDED:
            missing = min(NEEDED - line.keys())
            raise ValueError(f"line {number} of {path} has no {missing!r}; log_rounds writes it")
    losses = folder / "loss.jsonl"
    pairs = [(int(line["step"]), float(line["loss"])) for line in _lines(losses)] if losses.exists() else []
    return Run(folder.name or str(folder), rounds, pairs)


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"line {number} of {path} is not an object: {text[:60]}")
        yield line


def _page(runs: Sequence[Run]) -> str:
    columns = "".join(f"<section>{_column(run)}</section>" for run in runs)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>offbeat report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><style>'
        "body{font:16px/1.5 system-ui,sans-serif;margin:1rem auto;max-width:1200px;padding:0 1rem;color:#222}"
        "main{display:grid;gap:2rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr))}"
        "section{min-width:0}svg{width:100%;height:auto}table{border-collapse:collapse}"
        "td,th{padding:.15rem .8rem .15rem 0;text-align:left}td+td{text-align:right}"
        f"</style><h1>What rounds did</h1><main>{columns}</main></html>"
    )


def _column(run: Run) -> str:
    parts = [f"<h2>{html.escape(run.name)}</h2>", _table(run)]
    plots = [_plot_losses(run), _plot_seconds(run), _plot_bytes(run), _plot_fates(run), _plot_norms(run)]
    parts += [f"<h3>{html.escape(title)}</h3>{svg}" for title, svg in filter(None, plots)]
    failed = [line for line in run.rounds if line["status"] == "failed"]
    if failed:
        reasons = [(line["step"], html.escape(str(line.get("reason", "")))) for line in failed[:20]]
        rows = "".join(f"<li>step {step}: {reason}</li>" for step, reason in reasons)
        parts.append(f"<h3>Rounds that failed</h3><ul>{rows}</ul>")
    return "".join(parts)


def _table(run: Run) -> str:
    statuses = [line["status"] for line in run.rounds]
    exposed = sum(line["seconds"].get("exposed", 0.0) for line in run.rounds)
    sent = sum(sum(line["bytes_sent"].values()) for line in run.rounds)
    members = [len(line.get("members", ())) for line in run.rounds if line.get("members")]
    rows = [
        ("rounds", f"{len(statuses):,}"),
        *((fate, f"{statuses.count(fate):,}") for fate in FATES),
        ("seconds that training waited", f"{exposed:,.2f}"),
        ("MB sent", f"{sent / 1e6:,.2f}"),
        ("replicas", f"{min(members)} to {max(members)}" if members else "not recorded"),
    ]
    return "<table>" + "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows) + "</table>"


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 2.8), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    return figure, axes


def _svg(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _plot_losses(run: Run) -> tuple[str, str] | None:
    if not run.losses:
        return None
    figure, axes = _figure()
    axes.plot(*zip(*run.losses, strict=True), color=COLOURS[0])
    axes.set_ylabel("loss")
    return "Loss", _svg(figure)


def _plot_seconds(run: Run) -> tuple[str, str] | None:
    figure, axes = _figure()
    steps = [line["step"] for line in run.rounds]
    names = (("exposed", "training waited"), ("comparing", "comparing"), ("exchanging", "exchanging"))
    for (key, label), colour in zip(names, COLOURS, strict=False):
        values = [1e3 * line["seconds"].get(key, 0.0) for line in run.rounds]
        axes.plot(steps, values, ".", markersize=4, color=colour, label=label)
    axes.set_ylabel("ms a round")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return "Time of each round", _svg(figure)


def _plot_bytes(run: Run) -> tuple[str, str] | None:
    figure, axes = _figure()
    levels = sorted({line["level"] for line in run.rounds})
    for level, colour in zip(levels, COLOURS, strict=False):
        total, steps, sums = 0.0, [], []
        for line in run.rounds:
            if line["level"] == level:
                total += sum(line["bytes_sent"].values()) / 1e6
                steps.append(line["step"])
                sums.append(total)
        axes.step(steps, sums, where="post", color=colour, label=f"level {level}")
    axes.set_ylabel("MB sent so far")
    axes.legend(fontsize=8)
    return "Bytes by level", _svg(figure)


def _plot_fates(run: Run) -> tuple[str, str] | None:
    figure, axes = _figure()
    for height, (fate, colour) in enumerate(FATES.items()):
        steps = [line["step"] for line in run.rounds if line["status"] == fate]
        axes.plot(steps, [height] * len(steps), "|", markersize=14, color=colour)
    axes.set_yticks(range(len(FATES)), list(FATES))
    axes.set_ylim(-0.6, len(FATES) - 0.4)
    return "What became of each round", _svg(figure)


def _plot_norms(run: Run) -> tuple[str, str] | None:
    names = ("pseudo_gradient", "outer_step")
    if not any(line.get(name) is not None for line in run.rounds for name in names):
        return None
    figure, axes = _figure()
    for name, colour in zip(names, COLOURS, strict=False):
        pairs = [(line["step"], line[name]) for line in run.rounds if line.get(name) is not None]
        axes.plot(*zip(*pairs, strict=True), ".", markersize=4, color=colour, label=name.replace("_", " "))
    axes.set_ylabel("norm")
    axes.legend(fontsize=8)
    return "Drift between replicas", _svg(figure)
