"""Averaging replicas, measured.

    python -m benchmarks.sync link     # over 1 Gbit/s on the CPU: time a step, bytes (root and iproute2)
    python -m benchmarks.sync memory   # how much more memory a sync takes

``--save`` writes benchmarks/results/sync-*.md and .json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"


def link_report(result: dict[str, Any]) -> list[str]:
    lines = []
    for title, launches in result.items():
        lines += [
            f"## {title}, {len(launches)} launches",
            "",
            "| arm | mean ms | against never | worst step, of the mean | coding, % of a step | "
            "MB a step, on the interface | counted |",
            "|---|---|---|---|---|---|---|",
        ]
        for arm in launches[0]:
            rows = [one[arm] for one in launches]
            means = [row["mean"] for row in rows]
            ratios = sorted(one[arm]["mean"] / one["never"]["mean"] for one in launches)
            worst = [row["worst"] / row["mean"] for row in rows]
            counted = rows[0]["counted_mb"]
            coding = statistics.median(100 * one[arm]["coding_ms"] / one["never"]["mean"] for one in launches)
            lines.append(
                f"| {arm} | {statistics.median(means):.1f} | {statistics.median(ratios):.2f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f}) | {statistics.median(worst):.1f} | "
                f"{f'{coding:.1f}' if coding else ''} | "
                f"{rows[0]['interface_mb']:.3f} | {f'{counted:.3f}' if counted else ''} |"
            )
        lines.append("")
    lines += [
        "A launch's mean is the median over its rounds, its worst step the median of the rounds' slowest. Arms take "
        "turns. Each rank, with all its threads, is pinned to a core: training, sending and the network share it. "
        '"The bytes alone" sends what an average in float32 sends, and does nothing else. "Coding" is the processor '
        "time of encoding and decoding, of a step that never communicates. Arms of torchft are there if it is "
        "installed; all their rounds were committed."
    ]
    return lines


def memory_report(result: dict[str, Any]) -> list[str]:
    from benchmarks.sync_memory import BUCKET_MB

    size = next(iter(result.values()))["parameters_mb"]
    lines = [f"Parameters take {size:.0f} MB; `bucket_mb={BUCKET_MB}`.", "", "| arm | extra MB, at peak |", "|---|---|"]
    lines += [f"| {arm} | {row['extra_mb']:.0f} |" for arm, row in result.items()]
    return [*lines, "", "As the kernel counts it, buffers that gloo makes for itself included."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("link", "memory"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--launches", type=int)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    machine = describe_machine("python -m benchmarks.sync " + " ".join(sys.argv[1:]))
    if options.what == "link":
        from benchmarks.sync_link import link
        from benchmarks.sync_torchft import is_installed

        given = {key: value for key in ("rounds", "launches") if (value := getattr(options, key)) is not None}
        result = link(**given)
        if is_installed():
            machine["torchft"] = importlib.metadata.version("torchft")
        lines, title = link_report(result), "Averaging over slow links, two ranks with one thread each"
    else:
        from benchmarks.sync_memory import memory

        result = memory()
        lines, title = memory_report(result), "Memory of averaging, two ranks on the CPU"
    text = "\n".join([f"# {title}", "", *(f"- {key}: {value}" for key, value in machine.items()), "", *lines])
    print("\n" + text)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"sync-{options.what}.md").write_text(text.rstrip() + "\n")
        (RESULTS / f"sync-{options.what}.json").write_text(
            json.dumps({"machine": machine, "result": result}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
