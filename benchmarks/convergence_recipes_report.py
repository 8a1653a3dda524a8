"""Table and plots of the search for recipes, from its numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["gaps", "pages", "plot"]

HOW = """\
Replicas are threads of one process over `offbeat.Simulation`, with the code that real processes run. With the same seed
all arms of a task begin with the same parameters and see the same samples, each replica its own part. The first steps
average gradients as DDP does, while the learning rate rises linearly; after them it falls along a cosine to a tenth.
Gradients are clipped to a norm of 1.0.

- No text is seen twice. Each file with the bytes of another is left out. The list of all files is in
  [convergence-recipes-files.txt.gz](convergence-recipes-files.txt.gz).
- Arms whose name begins with "Muon" have `offbeat.muon_with_adamw` inside, the others AdamW, at the same learning rate.
- "0.8/0.6" is an outer learning rate of 0.8 and an outer momentum of 0.6 (Nesterov unless it says otherwise).
- "average" is `state="average"`; all others keep the state.
- Streaming is four fragments, each exchanged every 32 steps.
- "DiLoCo(32)" without numbers has the default outer settings, 0.6/0.9.
- Held-out loss: that of the mean of the replicas' parameters after the last step, in nats a byte.
- In the long runs and those with one seed DDP is one replica with the whole batch: the same gradient up to rounding, in
  less time. With seed 0 its loss differed from that of four replicas by 0.2 % (AdamW) and 0.04 % (Muon).
- Gaps are of runs with the same seed: median (lowest to highest) over seeds. "Its own DDP" has the same optimizer
  inside.
- Bytes are what one replica has sent in the simulation, per step after the synchronised ones."""

CHOICE = """\
The settings were chosen in these runs. Other runs, with other seeds and other held-out text, are in
[convergence-recipes.md](convergence-recipes.md)."""

REPORTED = """\
No setting was chosen by these seeds or by this held-out text. Settings were chosen in the shorter runs of
[convergence-choose.md](convergence-choose.md)."""


#: What was aimed at: (words, task, arm, the arm it is compared with, how many percent above that are allowed).
GOALS = (
    ("long run, of Muon's DDP", "recipes", "Muon, DiLoCo(32), 1.0/0.6, int4", "Muon, DDP", 1.5),
    ("long run, of its DDP", "recipes", "LocalSGD(8), average", "DDP", 2.0),
    ("short run, of Muon's DDP", "recipes-choose", "Muon, DiLoCo(32), 0.8/0.6, int4", "Muon, DDP", 4.0),
    ("short run, of Muon's DDP", "recipes-choose", "Muon, DiLoCo(32), 1.0/0.6", "Muon, DDP", 4.0),
    ("short run, of Muon's DDP", "recipes-choose", "Muon, DiLoCo(32), 1.0/0.6, average", "Muon, DDP", 4.0),
    *(
        ("short run, of the same without a delay", "recipes-choose", f"Muon, streaming DiLoCo(32), {how}",
         f"Muon, DiLoCo(32), {how[:7]}", 1.0)
        for how in ("0.8/0.6, delay 1, mixing 0.0", "0.8/0.6, delay 4, mixing 0.0", "1.0/0.6, delay 1, mixing 0.0")
    ),
)  # fmt: skip


def losses(result: dict[str, Any], task: str, arm: str) -> dict[str, float]:
    """The loss at the end, by seed."""
    runs = result["tasks"].get(task, {}).get("runs", {})
    return {seed: found[arm]["curve"][-1]["loss"] for seed, found in runs.items() if arm in found}


def gaps(result: dict[str, Any], task: str, arm: str, base: str) -> list[float]:
    """How far an arm ends above another, in percent, for each seed that has run both.

    Tasks without the base, such as those with other numbers of replicas, are compared with that of ``recipes-choose``.
    """
    ends = losses(result, task, base) or losses(result, "recipes-choose", base)
    return [100 * (loss / ends[seed] - 1) for seed, loss in losses(result, task, arm).items() if seed in ends]


def middle(values: Sequence[float], form: str) -> str:
    """The median, and the range if there are several."""
    if not values:
        return "-"
    words = form.format(statistics.median(values))
    return words if len(values) == 1 else f"{words} ({form.format(min(values))} to {form.format(max(values))})"


def own(arm: str) -> str:
    """DDP with the same optimizer inside."""
    return "Muon, DDP" if arm.startswith("Muon") else "DDP"


def sent(task: dict[str, Any], arm: str) -> float:
    """Bytes a step after the synchronised ones, the median over seeds."""
    each = [found[arm]["sent"] for found in task["runs"].values() if arm in found]
    return statistics.median(one["all"] - one["synchronised"] for one in each) / (task["steps"] - task["synchronised"])


def pages(result: dict[str, Any], picture: str = "convergence-recipes.png") -> str:
    """The whole report."""
    tasks = result["tasks"]
    lines = ["# Recipes: Muon inside, synchronised every 8, 32 or 128 steps", ""]
    lines += [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += ["", HOW, "", REPORTED if "recipes" in tasks else CHOICE, ""]
    for path in pictures(result, Path(picture)):
        lines += [f"![Held-out loss]({path.name})", ""]
    lines += goals(result)
    for name, task in tasks.items():
        if any(task["runs"].values()):
            lines += section(result, name)
    return "\n".join(lines)


def goals(result: dict[str, Any]) -> Iterator[str]:
    """What was aimed at, and by how much it was missed."""
    rows = [(goal, gaps(result, *goal[1:4])) for goal in GOALS if goal[1] in result["tasks"]]
    rows = [(goal, found) for goal, found in rows if found]
    if not rows:
        return
    yield "| goal | arm | at most, % | measured, % | |"
    yield "|---|---|---|---|---|"
    for (words, _, arm, _, most), found in rows:
        over = statistics.median(found) - most
        verdict = "met" if over <= 0 else f"missed by {over:.1f} points"
        yield f"| {words} | {arm} | {most:+.1f} | {middle(found, '{:+.1f}')} | {verdict} |"
    yield ""


def section(result: dict[str, Any], name: str) -> Iterator[str]:
    """What was trained, and a table of how it ended."""
    task = result["tasks"][name]
    each = task["replicas"] * task["batch"] * task["tokens"]
    yield f"## {task['title']}"
    yield ""
    yield (
        f"{task['steps']} steps of {task['replicas']} x {task['batch']} samples, {task['steps'] * each / 1e6:.1f} "
        f"million {task['unit']}; the first {task['synchronised']} steps are synchronised. Settings: "
        f"{task['settings']}. {task['data']}."
    )
    yield ""
    yield "| arm | seeds | held-out loss | of its own DDP, % | of AdamW's DDP, % | kB sent a step |"
    yield "|---|---|---|---|---|---|"
    for arm in task["arms"]:
        ends = losses(result, name, arm)
        if ends:
            cells = [
                arm,
                " ".join(ends),
                middle(list(ends.values()), "{:.4f}"),
                "-" if arm == own(arm) else middle(gaps(result, name, arm, own(arm)), "{:+.1f}"),
                "-" if arm == "DDP" else middle(gaps(result, name, arm, "DDP"), "{:+.1f}"),
                f"{sent(task, arm) / 1e3:,.0f}",
            ]
            yield f"| {' | '.join(cells)} |"
    yield ""
    if missing := [arm for arm in task["arms"] if not losses(result, name, arm)]:
        yield f"Not run: {'; '.join(missing)}."
        yield ""


#: At most six lines a picture, with short names.
LINES = {
    "DDP": ("AdamW, DDP", "black", "-"),
    "LocalSGD(8), average": ("AdamW, LocalSGD(8)", "#d55e00", "--"),
    "Muon, DDP": ("Muon, DDP", "#0072b2", "-"),
    "Muon, DiLoCo(32), 1.0/0.6, int4": ("Muon, DiLoCo(32), int4", "#009e73", "-"),
    "DiLoCo(32), 1.0/0.6": ("AdamW, DiLoCo(32)", "#e69f00", "-."),
}
STREAMED = ("Muon, streaming, int4", "#cc79a7", "--")


#: Arms of the picture of the runs to choose by, with short names, from the top.
ENDS = {
    "Muon, DiLoCo(32), 0.6/0.9": "DiLoCo, 0.6/0.9",
    "Muon, DiLoCo(32), 0.8/0.6": "DiLoCo, 0.8/0.6",
    "Muon, DiLoCo(32), 1.0/0.6": "DiLoCo, 1.0/0.6",
    "Muon, DiLoCo(32), 1.0/0.6, average": "DiLoCo, 1.0/0.6, average",
    "Muon, streaming DiLoCo(32), 0.8/0.6, delay 4, mixing 0.5": "delay 4, mixing 0.5",
    "Muon, streaming DiLoCo(32), 0.8/0.6, delay 4, mixing 0.0": "delay 4, mixing 0",
    "Muon, streaming DiLoCo(32), 0.8/0.6, delay 1, mixing 0.0": "delay 1, mixing 0",
    "Muon, LocalSGD(8)": "LocalSGD(8), keep",
    "Muon, LocalSGD(8), average": "LocalSGD(8), average",
}


def pictures(result: dict[str, Any], path: Path) -> list[Path]:
    """The files that :func:`plot` draws."""
    if "recipes" not in result["tasks"]:
        return [path]
    return [path, path.with_stem(f"{path.stem}-bytes")]


def plot(result: dict[str, Any], path: Path) -> None:
    """How the runs to choose by ended; or the gap to AdamW's DDP as tokens go by, and the loss against the bytes."""
    from matplotlib import pyplot

    draws = [curves, bytes_and_loss] if "recipes" in result["tasks"] else [ends]
    for draw, file in zip(draws, pictures(result, path), strict=True):
        figure, panel = pyplot.subplots(figsize=(3.9, 4.4), layout="constrained")
        panel.tick_params(labelsize=9)
        panel.grid(alpha=0.3)
        draw(panel, result)
        figure.savefig(file, dpi=200)
        pyplot.close(figure)


def shown(result: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    """The arms of the long run that have a line, and its look."""
    arms = [arm for arm in result["tasks"]["recipes"]["arms"] if losses(result, "recipes", arm)]
    return {arm: STREAMED if "streaming" in arm else LINES[arm] for arm in arms if "streaming" in arm or arm in LINES}


def ends(panel: Any, result: dict[str, Any]) -> None:
    """One row an arm: each seed, and the median."""
    names = [arm for arm in ENDS if losses(result, "recipes-choose", arm)][::-1]
    for height, arm in enumerate(names):
        found = gaps(result, "recipes-choose", arm, "Muon, DDP")
        panel.plot(found, [height] * len(found), "o", color="#0072b2", markersize=5, markerfacecolor="none")
        panel.plot(statistics.median(found), height, "|", color="black", markersize=13, markeredgewidth=2)
        panel.text(0.3, height + 0.3, ENDS[arm], fontsize=9)
    panel.set_yticks([])
    panel.set_xlim(0, None)
    panel.set_ylim(-0.5, len(names) - 0.2)
    panel.set_xlabel("held-out loss at the end\nagainst Muon under DDP, %", fontsize=10)


def curves(panel: Any, result: dict[str, Any]) -> None:
    """The median over seeds as a line, the range as a band."""
    task = result["tasks"]["recipes"]
    for arm, (label, colour, line) in shown(result).items():
        runs = [
            [(a["seen"] / 1e6, 100 * (a["loss"] / b["loss"] - 1))
             for a, b in zip(found[arm]["curve"], found["DDP"]["curve"], strict=True)
             if a["step"] > task["synchronised"]]
            for found in task["runs"].values() if arm in found and "DDP" in found
        ]  # fmt: skip
        if not runs:
            continue
        x = [seen for seen, _ in runs[0]]
        y = [[run[i][1] for run in runs] for i in range(len(x))]
        panel.plot(x, [statistics.median(one) for one in y], color=colour, linestyle=line, lw=1.8, label=label)
        panel.fill_between(x, [min(one) for one in y], [max(one) for one in y], color=colour, alpha=0.15, lw=0)
    panel.set_xlabel("million tokens", fontsize=10)
    panel.set_ylabel("held-out loss against AdamW's DDP, %", fontsize=10)
    panel.legend(
        fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.14), ncols=2, columnspacing=1.0
    )


def bytes_and_loss(panel: Any, result: dict[str, Any]) -> None:
    """One mark an arm: all its seeds and their median."""
    task = result["tasks"]["recipes"]
    for arm, (label, colour, _) in shown(result).items():
        ends, each = list(losses(result, "recipes", arm).values()), sent(task, arm) / 1e6
        panel.plot([each] * len(ends), ends, "o", color=colour, markersize=4, markerfacecolor="none")
        panel.plot(each, statistics.median(ends), "D", color=colour, markersize=7, label=label)
    panel.set_xscale("log")
    panel.set_xlabel("MB a replica sends a step (log)", fontsize=10)
    panel.set_ylabel("held-out loss at the end, nats a byte", fontsize=10)
    panel.legend(
        fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.14), ncols=2, columnspacing=1.0
    )


def legend(panel: Any) -> None:
    """Below the picture."""
    panel.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.14), ncols=2, columnspacing=1)
