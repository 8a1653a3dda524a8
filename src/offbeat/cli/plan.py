"""``offbeat plan``: what each strategy costs on a link, and which settings to use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from offbeat.cli.bench_show import megabytes
from offbeat.cli.output import fail, make_console, print_json, print_table
from offbeat.plan.choose import TARGET, Option, compare, recommend
from offbeat.plan.cost import Setting
from offbeat.plan.result import ResultError, load_result

__all__ = ["plan_command"]

EPILOG = """Examples:

\b
    offbeat plan --params 1e9 --step-ms 100 --replicas 2 --mbit 1000
    offbeat plan bench.json
    offbeat plan bench.json --mbit 200 --replicas 8 --json
    offbeat plan --params 1e9 --step-ms 100 --replicas 2 --sweep --output plan.png
"""


def plan_command(
    *,
    result: Annotated[Path | None, typer.Argument(help="What offbeat bench --json has written.")] = None,
    params: Annotated[float | None, typer.Option(help="Parameters of the model, such as 1e9.")] = None,
    step_ms: Annotated[float | None, typer.Option(help="Milliseconds of a step without communication.")] = None,
    replicas: Annotated[int | None, typer.Option(help="How many replicas train.")] = None,
    mbit: Annotated[float | None, typer.Option(help="Mbit/s of each replica's link, in each direction.")] = None,
    latency_ms: Annotated[float | None, typer.Option(help="Milliseconds of a collective among them.")] = None,
    target: Annotated[float, typer.Option(help="The part of the time that training should take.")] = TARGET,
    sweep: Annotated[bool, typer.Option("--sweep", help="Plot utilisation against bandwidth.")] = False,
    output: Annotated[Path, typer.Option(help="The file for --sweep; .png, .svg or .pdf.")] = Path("offbeat-plan.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Compare strategies on a link and recommend settings, from a result of `bench` or from numbers given here.

    Numbers given here replace those of the result.
    """
    numbers = {
        "params": params,
        "step_seconds": None if step_ms is None else step_ms / 1e3,
        "replicas": replicas,
        "bandwidth": None if mbit is None else mbit * 1e6 / 8,
        "latency": None if latency_ms is None else latency_ms / 1e3,
    }
    if sweep and numbers["bandwidth"] is None and result is None:
        numbers["bandwidth"] = 125e6  # the plot has all of them; the table is of 1 Gbit/s
    try:
        setting = _setting(result, numbers)
        options = compare(setting)
        best = recommend(options, target)
    except ResultError as error:
        fail(str(error))
    except ValueError as error:
        fail(str(error), code=2)
    if sweep:
        _sweep(setting, output)
    if as_json:
        print_json(_as_dict(setting, options, best, target))
        return
    _show(make_console(), setting, options, best, target)
    if sweep:
        make_console().print(f"Plot: {output}", soft_wrap=True)


def _setting(result: Path | None, numbers: dict[str, Any]) -> Setting:
    if result is not None:
        return load_result(result).setting(**numbers)
    flags = {"params": "--params", "step_seconds": "--step-ms", "replicas": "--replicas", "bandwidth": "--mbit"}
    if missing := [flag for name, flag in flags.items() if numbers[name] is None]:
        raise ValueError(
            f"{', '.join(missing)} missing; give them, or the file that offbeat bench --json has written. Example: "
            "offbeat plan --params 1e9 --step-ms 100 --replicas 2 --mbit 1000"
        )
    return Setting(**{**numbers, "latency": numbers["latency"] or 0.0})


def _sweep(setting: Setting, output: Path) -> None:
    try:
        from offbeat.cli.sweep import draw_sweep

        draw_sweep(setting, output)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        fail("--sweep needs matplotlib, which is not installed; run: pip install matplotlib")
    except (OSError, ValueError) as error:
        fail(f"the plot cannot be written to {output}: {error}; name another file with --output")


def _as_dict(setting: Setting, options: list[Option], best: Option, target: float) -> dict[str, Any]:
    link = {"bandwidth": setting.bandwidth, "latency": setting.latency, "machine": setting.machine.as_dict()}
    model = {"params": int(setting.params), "step_seconds": setting.step_seconds, "replicas": setting.replicas}
    rows = [option.as_dict() for option in options]
    reached = best.estimate.utilisation >= target
    return {**model, **link, "target": target, "options": rows, "recommended": best.as_dict(), "reached": reached}


def _show(console: Console, setting: Setting, options: list[Option], best: Option, target: float) -> None:
    console.print(
        f"{int(setting.params):,} parameters, {1e3 * setting.step_seconds:g} ms a step alone, {setting.replicas} "
        f"replicas, {setting.bandwidth * 8e-6:,.0f} Mbit/s, {1e3 * setting.latency:g} ms a collective",
        soft_wrap=True,
    )
    rows: list[tuple[str, ...]] = [
        ("strategy", "ms a step", "utilisation", "MB a step", "MB at once", "extra MB", "loss")
    ]
    for option in options:
        costs = option.estimate
        numbers = (costs.bytes_per_step, costs.peak_bytes, costs.extra_memory)
        times = (f"{1e3 * costs.step_seconds:,.4g}", f"{costs.utilisation:.1%}")
        rows.append((option.settings.name, *times, *map(megabytes, numbers), _short_loss(option)))
    print_table(console, rows)
    console.print(
        "Loss: held-out, with Muon as the inner optimizer, against DDP with Muon. -: not measured.",
        style="dim",
        soft_wrap=True,
    )
    console.print()
    costs = best.estimate
    if costs.utilisation < target:
        console.print(
            f"No strategy here reaches {target:.0%}. The best reaches {costs.utilisation:.1%}; a longer period or "
            "fewer bits would reach more.",
            soft_wrap=True,
        )
    console.print(
        f"Use {escape(best.settings.name)}: training takes {costs.utilisation:.1%} of the time.", style="bold"
    )
    for line in best.code.splitlines():
        console.print(f"    {escape(line)}", soft_wrap=True)
    for row in best.losses:
        spread = "" if row.spread is None else f" ({row.spread[0]:+.1f} to {row.spread[1]:+.1f})"
        other = "" if row.adamw is None else f"; {row.adamw:+.1f} % against DDP with AdamW"
        console.print(
            f"Loss with {row.inner} inside: {row.percent:+.1f} %{spread} against DDP{other}. {row.where}.",
            soft_wrap=True,
        )
    if not best.losses:
        console.print(
            "The loss of these settings has not been measured: compare with a short run of DDP.", soft_wrap=True
        )


def _short_loss(option: Option) -> str:
    return next((f"{row.percent:+.1f} %" for row in option.losses if row.inner == "Muon"), "-")
