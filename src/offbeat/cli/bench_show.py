"""The tables of ``offbeat bench``."""

from __future__ import annotations

from rich.console import Console

from offbeat.cli.output import print_table
from offbeat.plan.result import BenchResult

__all__ = ["megabytes", "show_result"]


def megabytes(count: float | None) -> str:
    """Bytes as megabytes, with three digits."""
    return "-" if count is None else f"{count / 1e6:.3g}" if count < 1e9 else f"{count / 1e6:,.0f}"


def show_result(console: Console, result: BenchResult) -> None:
    """Print the link, the work of rounds, and the strategies."""
    said = result.environment
    console.print(f"{result.replicas} replicas over {said['backend']}, {said['device']}, torch {said['torch']}")
    if result.bandwidth is not None and result.latency is not None:
        console.print(f"Link: {result.bandwidth * 8e-6:,.0f} Mbit/s, {1e3 * result.latency:.2f} ms a collective")
        rows = [("collective", "KiB", "ms", "Mbit/s")]
        for one in result.link:
            rate = f"{8e-6 * one['sent'] / one['seconds']:,.0f}"
            rows.append((one["collective"], f"{one['bytes'] / 1024:,.0f}", f"{1e3 * one['seconds']:.2f}", rate))
        print_table(console, rows)
        console.print()
    console.print(f"Model: {result.params:,} parameters, {1e3 * result.step_seconds:.2f} ms a step alone")
    rows_of_work = [("work of a round", "ns a parameter")]
    rows_of_work += [(key, f"{1e9 * seconds:.2f}") for key, seconds in result.machine.local.items()]
    print_table(console, rows_of_work)
    if result.machine.round is not None:
        console.print(
            f"A round of no bytes takes {1e3 * result.machine.round:.2f} ms; sending in the background costs training "
            f"{1e9 * result.machine.busy:.2f} ns a byte",
            soft_wrap=True,
        )
    if not result.strategies:
        console.print("One process: there is no link to measure. Start two or more with torchrun.")
        return
    console.print()
    table = [("strategy", "ms a step", "predicted", "utilisation", "MB a step", "extra MB")]
    for row in result.strategies:
        times = (f"{1e3 * row['step_seconds']:.2f}", f"{1e3 * row['predicted_step_seconds']:.2f}")
        costs = (f"{row['utilisation']:.0%}", megabytes(row["bytes_per_step"]), megabytes(row["extra_memory"]))
        table.append((row["name"], *times, *costs))
    print_table(console, table)
