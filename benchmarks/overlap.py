"""Overlap, measured.

    python -m benchmarks.overlap gpu    # a 1.42 B GPT on one GPU: time and memory
    python -m benchmarks.overlap race   # two ranks on one GPU: bit for bit as without overlap, many times
    python -m benchmarks.overlap link   # DDP over 1 Gbit/s on the CPU: how much of the optimizer is hidden (root)

``--save`` writes benchmarks/results/overlap-*.md and .json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"


def gpu(rounds: int, steps: int) -> dict[str, Any]:
    """Memory: each variant in a process of its own. Times: all in one process, taking turns."""
    from benchmarks.overlap_gpu import VARIANTS

    def run(*words: str) -> Any:
        command = [sys.executable, "-m", "benchmarks.overlap_gpu", *words]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]
        print(*words, line, flush=True)
        return json.loads(line)

    turns = run("turns", str(rounds), str(steps))
    caches = {"none": "autocast(cache_enabled=False)", "forward": "autocast's weight cache, the default"}
    memory = [
        {"cache": words, "name": name, **run(variant, "5", "0", cache)}
        for cache, words in caches.items()
        for name, variant in VARIANTS.items()
    ]
    return {"turns": turns, "memory": memory}


def gpu_report(result: dict[str, Any]) -> list[str]:
    names = {row["variant"]: row["name"] for row in result["memory"]}
    lines = ["## Time", "", "| arm | median ms a step | fastest ms | against torch after backward, in the same round |"]
    lines += ["|---|---|---|---|"]
    for variant, row in result["turns"].items():
        spread = f"{row['ratio']:.3f} ({row['ratios'][0]:.2f} to {row['ratios'][-1]:.2f})"
        lines.append(f"| {names[variant]} | {row['ms']:.1f} | {row['fastest_ms']:.1f} | {spread} |")
    for cache in dict.fromkeys(row["cache"] for row in result["memory"]):
        rows = [row for row in result["memory"] if row["cache"] == cache]
        base = rows[0]
        lines += [
            "",
            f"## Memory, with {cache}",
            "",
            "| arm | peak GiB | saved, of the gradients' bytes |",
            "|---|---|---|",
        ]
        for row in rows:
            saved = (base["peak_gib"] - row["peak_gib"]) / row["gradients_gib"]
            lines.append(f"| {row['name']} | {row['peak_gib']:.2f} | {saved:.0%} |")
        different = len({row["last_loss"] for row in rows if "clip" not in row["name"]}) > 1
        lines += ["", f"Gradients: {base['gradients_gib']} GiB. The last losses without clipping are"]
        lines[-1] += f" {'NOT ' if different else ''}the same bits."
    return [*lines, ""]


def link_report(result: dict[str, Any]) -> list[str]:
    from benchmarks.overlap_link import ARMS

    lines = [f"| median ms a step | {' | '.join(ARMS)} | offbeat's step() alone | hidden |", "|---" * 7 + "|"]
    for name, measured in result.items():
        cells = [f"{measured[arm]['ms']:.0f}" for arm in ARMS]
        alone = measured["offbeat after"]["step_ms"]
        lines.append(f"| {name} | {' | '.join(cells)} | {alone:.1f} | {measured['hidden']:.0%} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gpu", "race", "link"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = describe_machine("python -m benchmarks.overlap " + " ".join(sys.argv[1:]))
    given = {key: value for key in ("rounds", "steps") if (value := getattr(options, key)) is not None}
    if options.what == "link":
        from benchmarks.overlap_link import link

        result = link(**given)
        lines = link_report(result)
        title = "DDP over a link of 1 Gbit/s, two ranks with one thread each"
    elif options.what == "race":
        from benchmarks.overlap_race import race

        result = race(**given)
        lines = [f"{key}: {value}" for key, value in result.items()]
        title = "Two ranks on one GPU through gloo"
    else:
        result = gpu(**{"rounds": 15, "steps": 5, **given})
        lines = gpu_report(result)
        title = "Stepping in backward: a GPT of 1.42 B parameters, batch 1 x 1024, bfloat16 autocast, checkpointing"
    text = "\n".join([f"# {title}", "", *(f"- {key}: {value}" for key, value in machine.items()), "", *lines])
    print("\n" + text)
    if options.save:
        options.out.mkdir(exist_ok=True, parents=True)
        (options.out / f"overlap-{options.what}.md").write_text(text.rstrip() + "\n")
        (options.out / f"overlap-{options.what}.json").write_text(
            json.dumps({"machine": machine, "result": result}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
