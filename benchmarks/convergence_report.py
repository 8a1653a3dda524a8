"""Table and plots of the convergence benchmark, from its numbers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["pages", "plot"]

#: Bytes a second of the links for which times are computed.
LINKS = {"1 Gbit/s": 1e9 / 8, "100 Mbit/s": 1e8 / 8}
ALONE = "one replica alone"
#: A loss that ends further than this above its lowest has been trained too long; evaluations differ by less.
OVERFIT = 0.02
#: Of DDP's run: where its loss is what others have to reach.
MARKS = (0.8, 0.5)

HOW = """\
Replicas are threads of one process over `offbeat.Simulation`, with the code that real processes run. With the same
seed all arms begin with the same parameters, and each replica sees the same samples in the same order, from a part of
the data that is its own. During the synchronised steps at the start the learning rate rises linearly, and all arms
average gradients as DDP does (except the replica alone). After that the rate falls along a cosine to a tenth.
Gradients are clipped to a norm of 1.0 in all arms, after averaging where they are averaged. "(8)" is the number of
steps between rounds.

- DDP: gradients are averaged at every step, by the code that averages them during warm-up.
- LocalSGD(1), a control, averages parameters after every step. Its replicas never drift apart, but each has an
  optimizer of its own, whose state comes from its own batches. What LocalSGD(1) loses is therefore not drift; what
  LocalSGD(8) loses beyond it is.
- "lr × √replicas" applies after the synchronised steps. The replica alone trains on its own batches for as many steps
  as the others; its tokens are counted as if the others had trained too.
- Held-out loss: that of the mean of the replicas' parameters after the last step, in nats. Another column has the
  loss after `finish()`. Where DDP's loss rises again before its end, because the same text was seen too often, one more
  has the lowest loss of all evaluations, which is what early stopping would keep.
- Equal loss: the loss that DDP has with the same seed after 80 % (or 50 %) of its steps. Losses between evaluations
  are interpolated. "Never": not within the run, for half of the seeds or more.
- Times are computed, not measured: the number of steps times the processor time of a local step (on a GPU the time by
  the clock, with nothing else running), plus the bytes that a replica has sent over the rate of the link. Of rounds
  with a delay only what takes longer than the steps of the delay is added. Latency, encoding and the processor's work
  for sending are left out.
- Bytes are what one replica has sent in the simulation, per step after the synchronised ones, with the messages by
  which ranks compare what they are about to do. In the synchronised steps every arm that communicates sends as much
  as DDP.
- Error feedback is 1.0 for int2 and 0.95 for TopK. SlowMo and DiLoCo have their default outer settings (a slow
  momentum of 0.5; Nesterov with learning rate 0.6 and momentum 0.9) unless the name says otherwise.
- Settings were chosen with another seed (100), whose runs are not in the .json. The learning rate of the small GPT is
  between the two that were best for DDP: its loss was 1.998 at 4e-3, 1.905 at 8e-3 and 1.879 at 1.6e-2. The outer
  settings 0.8 and 0.6 were the best of six for DiLoCo(32) in the short run, at 8e-3. Eight times as long, 3e-3 was the
  best of seven rates for DDP."""

LATER = """\
- {arms}: added after the results of the other arms were known."""

HOW_ON_A_GPU = """\
- On the GPU forward and backward of a replica are one CUDA graph. Its gradients were compared with those of the same
  code without it on three batches: they were equal, bit for bit.
- The learning rate, 2e-3, was the best of four with another seed (100) and 832 steps for DDP (a loss of 1.027 at 1e-3,
  0.963 at 2e-3, 1.043 at 4e-3, 2.498 at 8e-3) and for LocalSGD(8) (1.216, 1.082, 1.181, 2.039), and of the first three
  for DiLoCo(32) (1.277, 1.250, 1.502). Four times as long it was not searched for.
- These two comparisons are not in the .json."""

#: Arms that were thought of after the results of the others were known.
AFTERWARDS = [
    "DDP, lr × √2",
    "DiLoCo(8), outer SGD 1.0, delay 7, mixing 0.5",
    "streaming DiLoCo(32), outer lr 0.8, momentum 0.6",
    "streaming DiLoCo(64), 4 fragments, delay 15, int4, error feedback",
]


def middle(values: list[float], form: str = "{:+.2%}") -> str:
    """Median and range."""
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} to {form.format(max(values))})"


class Rows:
    """The numbers of one task, by arm; every list has a value for each seed."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task, self.seeds = task, list(task["runs"])

    def all(self, arm: str, get: Callable[[dict[str, Any]], Any]) -> list[Any]:
        return [get(self.task["runs"][seed][arm]) for seed in self.seeds]

    def losses(self, arm: str) -> list[float]:
        return self.all(arm, lambda run: run["curve"][-1]["loss"])

    def gaps(self, arm: str, base: str, get: Callable[[dict[str, Any]], float] | None = None) -> list[float]:
        ends = self.all(arm, get) if get else self.losses(arm)
        return [mine / other - 1 for mine, other in zip(ends, self.losses(base), strict=True)]

    def lowest(self, arm: str) -> list[float]:
        return self.all(arm, lambda run: min(evaluations(run))[0])

    def lowest_gaps(self, arm: str) -> list[float]:
        return [mine / ddp - 1 for mine, ddp in zip(self.lowest(arm), self.lowest("DDP"), strict=True)]

    @property
    def overfits_by(self) -> list[float]:
        """How far DDP's loss at the end is above its lowest."""
        return [end / low - 1 for end, low in zip(self.losses("DDP"), self.lowest("DDP"), strict=True)]

    @property
    def overfits(self) -> bool:
        return statistics.median(self.overfits_by) > OVERFIT

    @property
    def step_seconds(self) -> float:
        """Of a local step: timed by itself on a GPU, in the runs on the CPU."""
        if "local_step" in self.task:
            timed: float = self.task["local_step"]
            return timed
        arm = next((name for name in self.task["arms"] if name.startswith(ALONE)), "DDP")
        return statistics.median(self.all(arm, lambda run: run["seconds"]))

    def sent_each(self, arm: str) -> float:
        """Bytes a step, after the synchronised ones."""
        each = self.all(arm, lambda run: run["sent"]["all"] - run["sent"]["synchronised"])
        return statistics.median(each) / (self.task["steps"] - self.task["synchronised"])

    def steps_to(self, mark: float, arm: str) -> list[float | None]:
        found = []
        for seed in self.seeds:
            run = self.task["runs"][seed]
            loss = loss_at(run["DDP"]["curve"], mark * self.task["steps"])
            found.append(first_at(run[arm]["curve"], loss))
        return found

    def seconds(self, arm: str, steps: float, rate: float) -> float:
        """The time that this many steps take over a link, computed."""
        task = self.task
        synchronised = 0 if arm.startswith(ALONE) else min(steps, task["synchronised"])
        run = task["runs"][self.seeds[0]][arm]
        start = run["sent"]["synchronised"] / max(task["synchronised"], 1) * synchronised / rate
        link = self.sent_each(arm) * (steps - synchronised) / rate
        rounds = run["rounds"] * (steps - synchronised) / (task["steps"] - task["synchronised"])
        hidden = task["arms"][arm]["delay"] * self.step_seconds * rounds
        return steps * self.step_seconds + start + max(0.0, link - hidden)


def evaluations(run: dict[str, Any]) -> list[tuple[float, int]]:
    """Loss and step of each, after the last step too."""
    return [(point["loss"], point["step"]) for point in run["curve"]]


def loss_at(curve: list[dict[str, Any]], step: float) -> float:
    """By linear interpolation."""
    for a, b in itertools.pairwise(curve):
        if a["step"] <= step <= b["step"]:
            return a["loss"] + (b["loss"] - a["loss"]) * (step - a["step"]) / (b["step"] - a["step"])
    return curve[-1]["loss"]


def first_at(curve: list[dict[str, Any]], loss: float) -> float | None:
    """The step at which a loss is reached for the first time, or None."""
    for a, b in itertools.pairwise(curve):
        if b["loss"] <= loss:
            part = (a["loss"] - loss) / (a["loss"] - b["loss"]) if a["loss"] > loss else 0.0
            return a["step"] + part * (b["step"] - a["step"])
    return None


def pages(result: dict[str, Any], picture: str = "convergence.png") -> str:
    """The whole report."""
    heading = ["# LocalSGD, SlowMo and DiLoCo against DDP at equal tokens", ""]
    heading += [f"- {key}: {value}" for key, value in result["machine"].items()]
    body = [line for task in result["tasks"].values() for line in section(task)]
    tasks = result["tasks"].values()
    how = [HOW]
    later = [arm for arm in AFTERWARDS if any(arm in task["arms"] for task in tasks)]
    if later:
        how.append(LATER.format(arms=", ".join(f'"{arm}"' for arm in later)))
    if any(task.get("device") == "cuda" for task in tasks):
        how.append(HOW_ON_A_GPU)
    shown = [f"![Held-out loss]({path.name})" for path in pictures(result, Path(picture))]
    return "\n".join([*heading, "", *how, "", *(line for one in shown for line in (one, "")), *body])


def pictures(result: dict[str, Any], path: Path) -> dict[Path, dict[str, Any]]:
    """The tasks that have a picture, by its path: the GPT, and the same one trained for longer."""
    tasks = result["tasks"]
    first = "gpt" if "gpt" in tasks else next(iter(tasks))
    found = {path: tasks[first]}
    for name in tasks:
        if name == f"{first}-long":
            found[path.with_stem(f"{path.stem}-long")] = tasks[name]
    return found


def section(task: dict[str, Any]) -> Iterator[str]:
    """What was trained, and a table of how it ended."""
    rows, unit, steps = Rows(task), task["unit"], task["steps"]
    each = task["replicas"] * task["batch"] * task["tokens"]
    yield f"## {task['title']}"
    yield ""
    yield (
        f"{task['data']}. {task['settings']}. {steps} steps of {task['replicas']} x {task['batch']} samples, "
        f"{steps * each / 1e6:.2f} million {unit}; the first {task['synchronised']} steps are synchronised. Seeds "
        f"{', '.join(rows.seeds)}. A local step takes {1e3 * rows.step_seconds:.1f} ms of "
        f"{'one core' if task.get('device', 'cpu') == 'cpu' else 'the GPU, which one replica has to itself'}."
    )
    above = max(rows.all("DDP", lambda run: max(run["first_losses"]) - run["first_losses"][0]))
    yield (
        f"In the synchronised steps DDP's training loss {f'is at most {above:.2f}' if above else 'never rises'} above "
        f"that of the first step, {statistics.median(rows.all('DDP', lambda run: run['first_losses'][0])):.2f}."
    )
    if task.get("missing"):
        left_out = [f"{arm} (seed{'s' * (len(of) > 1)} {', '.join(of)})" for arm, of in task["missing"].items()]
        yield f"Left out, because these seeds have not run them: {'; '.join(left_out)}."
    overfits = rows.overfits
    if overfits:
        lowest, when = rows.lowest("DDP"), rows.all("DDP", lambda run: min(evaluations(run))[1])
        yield (
            f"DDP's held-out loss is lowest ({statistics.median(lowest):.4f}) after {min(when)} to {max(when)} steps, "
            f"and {middle(rows.overfits_by, '{:.2%}')} higher at the end."
        )
    yield ""
    extra = "| lowest of the run, against DDP's lowest, median (range) " if overfits else ""
    yield (
        "| arm | held-out loss, median | against DDP, median (range) | against another arm, median (range) "
        f"| after `finish()`, against DDP, median {extra}|"
    )
    yield "|---" * (5 + overfits) + "|"
    for arm in task["arms"]:
        yield quality(rows, arm)
    yield ""
    heads = [f"DDP's loss at {mark:.0%}: {unit}, of DDP's | " + " | ".join(
        f"seconds at {link} (of DDP's)" for link in LINKS) for mark in MARKS]  # fmt: skip
    yield f"| computed times, medians | kB sent a step | rounds | {' | '.join(heads)} |"
    yield "|---" * (3 + len(MARKS) * (1 + len(LINKS))) + "|"
    for arm in task["arms"]:
        rounds = task["runs"][rows.seeds[0]][arm]["rounds"]
        cells = [cell for mark in MARKS for cell in to_equal_loss(rows, arm, mark)]
        yield f"| {arm} | {kilobytes(rows.sent_each(arm))} | {rounds} | {' | '.join(cells)} |"
    yield ""


def kilobytes(number: float) -> str:
    """With three digits."""
    if number < 999_500:  # from there on it would be 1e+03
        return f"{number / 1e3:.3g}"
    digits = len(str(round(number / 1e3))) - 3
    return f"{round(number / 1e3, -digits):,.0f}"


def quality(rows: Rows, arm: str) -> str:
    like = rows.task["arms"][arm]["like"]
    cells = [
        arm,
        f"{statistics.median(rows.losses(arm)):.4f}",
        "-" if arm == "DDP" else middle(rows.gaps(arm, "DDP")),
        f"{like}: {middle(rows.gaps(arm, like))}" if like in rows.task["arms"] else "-",
        f"{statistics.median(rows.gaps(arm, 'DDP', lambda run: run['finished'][0])):+.2%}",
    ]
    if rows.overfits:
        cells.append("-" if arm == "DDP" else middle(rows.lowest_gaps(arm)))
    return f"| {' | '.join(cells)} |"


def to_equal_loss(rows: Rows, arm: str, mark: float) -> list[str]:
    """Tokens and times, or "never" where most seeds do not get there."""
    steps, base = rows.steps_to(mark, arm), rows.steps_to(mark, "DDP")
    reached = [(mine, ddp) for mine, ddp in zip(steps, base, strict=True) if mine is not None and ddp is not None]
    if 2 * len(reached) <= len(steps):
        return ["never"] * (1 + len(LINKS))
    lost = len(steps) - len(reached)
    note = f" (never with {lost} of {len(steps)} seeds)" if lost else ""
    cells = [f"{statistics.median(mine / ddp for mine, ddp in reached):.2f}{note}"]
    for rate in LINKS.values():
        pairs = [(rows.seconds(arm, mine, rate), rows.seconds("DDP", ddp, rate)) for mine, ddp in reached]
        seconds, ratio = statistics.median(a for a, _ in pairs), statistics.median(a / b for a, b in pairs)
        cells.append(f"{seconds:.2f} ({ratio:.2f})")
    return cells


#: The arms of each panel of curves, with the same colour and line in every picture.
PANELS = {
    "Periods, delays and outer optimizers": {
        "DDP": ("black", "-"),
        "LocalSGD(8)": ("#0072b2", "-"),
        "LocalSGD(8), delay 7": ("#56b4e9", "--"),
        "SlowMo(8)": ("#009e73", "-."),
        "DiLoCo(32)": ("#d55e00", "-"),
        "DiLoCo(32), outer lr 0.8, momentum 0.6": ("#e69f00", "-"),
        "DiLoCo(128)": ("#7f7f7f", ":"),
        "DiLoCo(128), outer lr 0.8, momentum 0.6": ("#7f7f7f", "-."),
        "streaming DiLoCo(32), 4 fragments, delay 4": ("#cc79a7", "--"),
    },
    "Controls": {
        "DDP": ("black", "-"),
        "LocalSGD(8)": ("#0072b2", "-"),
        "LocalSGD(1)": ("#56b4e9", "--"),
        "DDP, lr / √2": ("#009e73", "-."),
        "LocalSGD(8), lr × √replicas": ("#d55e00", "-"),
        "DDP, lr × √2": ("#cc79a7", "--"),
        "DiLoCo(32), outer SGD 1.0": ("#e69f00", ":"),
        f"{ALONE}, half the batch": ("#7f7f7f", "-."),
        f"{ALONE}, a quarter of the batch": ("#7f7f7f", "-."),
    },
}


def plot(result: dict[str, Any], path: Path) -> None:
    """Curves of the GPT against DDP's, and how all arms ended."""
    from matplotlib import pyplot

    for picture, task in pictures(result, path).items():
        draw(pyplot, task, picture)


def draw(pyplot: Any, task: dict[str, Any], path: Path) -> None:
    """One picture."""
    rows = Rows(task)
    figure = pyplot.figure(figsize=(14, 12.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.15, 1])
    panels = above.subplots(1, 2)
    (title, names), (second, controls) = (
        (title, {name: look for name, look in looks.items() if name in task["arms"]}) for title, looks in PANELS.items()
    )
    curves(panels[0], rows, names)
    panels[0].set_title(title)
    if controls.keys() <= names.keys():  # they would say nothing more
        curves(panels[1], rows, names, against_ddp=False)
        panels[1].set_title("The losses themselves")
    else:
        curves(panels[1], rows, controls)
        panels[1].set_title(second)
    ends(below.subplots(), rows)
    number = len(rows.seeds)
    figure.suptitle(f"{task['title']}, {number} {'seed' if number == 1 else 'seeds'}")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def curves(panel: Any, rows: Rows, looks: dict[str, tuple[str, str]], *, against_ddp: bool = True) -> None:
    """Held-out loss, or how far it is from DDP's after as many tokens: the median over seeds as a line, the range as a
    band."""
    for name, (colour, line) in looks.items():
        runs = [
            [
                (mine["seen"], 100 * (mine["loss"] / ddp["loss"] - 1) if against_ddp else mine["loss"])
                for mine, ddp in zip(run[name]["curve"], run["DDP"]["curve"], strict=True)
                if mine["step"] >= rows.task["synchronised"]
            ]
            for run in rows.task["runs"].values()
        ]
        x = [point[0] / 1e6 for point in runs[0]]
        y = [[one[i][1] for one in runs] for i in range(len(x))]
        panel.plot(x, list(map(statistics.median, y)), color=colour, linestyle=line, label=name, lw=1.6)
        panel.fill_between(x, list(map(min, y)), list(map(max, y)), color=colour, alpha=0.1, lw=0)
    unit = rows.task["unit"]
    words = f"held-out loss against DDP after as many {unit}, %" if against_ddp else "held-out loss, nats"
    panel.set(xlabel=f"millions of {unit}; curves begin after the synchronised steps", ylabel=words)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=2)


def ends(panel: Any, rows: Rows) -> None:
    """One line an arm: each seed and the median, after the last step, and where DDP overfits of the lowest losses."""
    names = [name for name in rows.task["arms"] if name != "DDP"][::-1]
    for height, name in enumerate(names):
        gaps = [100 * gap for gap in rows.gaps(name, "DDP")]
        panel.plot(gaps, [height] * len(gaps), "o", color="#0072b2", markersize=6, markerfacecolor="none")
        panel.plot(statistics.median(gaps), height, "|", color="black", markersize=14, markeredgewidth=2)
        if rows.overfits:
            lowest = [100 * gap for gap in rows.lowest_gaps(name)]
            panel.plot(lowest, [height] * len(lowest), "x", color="#009e73", markersize=6)
    panel.axvline(0, color="black", lw=1)
    panel.axvline(1, color="#d55e00", lw=1.2, linestyle=":")
    panel.set_yticks(range(len(names)), names, fontsize=9)
    panel.set(xlabel="held-out loss at the end against DDP, % (dotted: the goal of 1 %)")
    title = "All arms: each seed (o) and the median (|)"
    if rows.overfits:
        title += "; x: the lowest loss of each run against DDP's lowest"
    panel.set_title(title)
    panel.grid(alpha=0.3, axis="x")
