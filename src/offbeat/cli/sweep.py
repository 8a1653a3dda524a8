"""The plot of ``offbeat plan --sweep``: utilisation against bandwidth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from offbeat.plan.choose import CANDIDATES
from offbeat.plan.cost import Setting, estimate_settings
from offbeat.plan.settings import Settings

__all__ = ["FASTEST", "SLOWEST", "draw_sweep", "lines"]

#: Bytes a second: 10 Mbit/s and 400 Gbit/s.
SLOWEST, FASTEST = 10e6 / 8, 400e9 / 8
POINTS = 121
MANY = 100_000
#: What is drawn, with colours that can be told apart without telling red from green.
COLOURS = ("#000000", "#0072b2", "#56b4e9", "#e69f00", "#009e73", "#cc79a7")
SHOWN = tuple(CANDIDATES[index] for index in (0, 4, 1, 3, 2, 9))


def lines(setting: Setting) -> tuple[list[float], dict[Settings, list[float]]]:
    """Bandwidths in bytes a second, and for each of the settings that are shown the utilisation at each of them."""
    ratio = (FASTEST / SLOWEST) ** (1 / (POINTS - 1))
    bandwidths = [SLOWEST * ratio**index for index in range(POINTS)]
    return bandwidths, {
        one: [estimate_settings(one, replace(setting, bandwidth=bandwidth)).utilisation for bandwidth in bandwidths]
        for one in SHOWN
    }


def draw_sweep(setting: Setting, output: Path) -> None:
    """Draw the plot into a file. Dashed lines are the same with 100,000 replicas.

    Args:
        setting: the model and the replicas; its bandwidth is marked.
        output: the file, whose ending says the format.
    """
    figure = Figure(figsize=(9, 5.8), layout="constrained")
    axes = figure.add_subplot()
    bandwidths, found = lines(setting)
    _, with_many = lines(replace(setting, replicas=MANY))
    mbit = [8e-6 * bandwidth for bandwidth in bandwidths]
    for (settings, values), colour in zip(found.items(), COLOURS, strict=True):
        axes.plot(mbit, [100 * value for value in values], color=colour, label=settings.name, linewidth=2)
        axes.plot(mbit, [100 * value for value in with_many[settings]], color=colour, linestyle=":", linewidth=1)
    axes.axvline(8e-6 * setting.bandwidth, color="#999999", linewidth=1)
    axes.set(xscale="log", xlim=(mbit[0], mbit[-1]), ylim=(0, 102))
    axes.set_xticks([10, 100, 1e3, 1e4, 1e5], ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"])
    axes.set_xlabel("bandwidth of each replica's link (the grey line: the one of the table)")
    axes.set_ylabel("time that training takes, %")
    axes.set_title(
        f"{setting.params:,.0f} parameters, {1e3 * setting.step_seconds:g} ms a step alone, "
        f"{setting.replicas:,} replicas (dotted: {MANY:,})",
        fontsize=11,
    )
    axes.grid(color="#e5e5e5")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    with mpl.rc_context({"svg.hashsalt": "offbeat"}):
        figure.savefig(output, dpi=150)
