"""``offbeat plan``: what it prints, its JSON, its plot, and what it says of bad input."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from offbeat.cli.app import app
from offbeat.plan import BenchResult, Machine, Settings, estimate, save_result
from offbeat.plan.choose import CANDIDATES
from offbeat.plan.cost import Setting

BY_HAND = ["plan", "--params", "1e9", "--step-ms", "100", "--replicas", "2", "--mbit", "1000"]
RESULT = BenchResult(
    params=10**6, step_seconds=0.02, replicas=4, bandwidth=12.5e6, latency=1e-3, machine=Machine(busy=1e-9, round=5e-3)
)


def run(*words, **options):
    return CliRunner().invoke(app, list(words), prog_name="offbeat", **options)


def test_json_has_the_estimates_of_the_library():
    done = run(*BY_HAND, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["params"], found["step_seconds"], found["replicas"], found["bandwidth"]) == (10**9, 0.1, 2, 125e6)
    assert len(found["options"]) == len(CANDIDATES)
    for row, settings in zip(found["options"], CANDIDATES, strict=True):
        every = {} if settings.strategy == "ddp" else {"every": settings.every}
        expected = estimate(
            params=1e9, step_seconds=0.1, replicas=2, bandwidth=125e6, strategy=settings.strategy,
            fragments=settings.fragments, delay=settings.delay, codec=settings.codec, **every,
        )  # fmt: skip
        assert {key: row[key] for key in expected.as_dict()} == expected.as_dict()
        assert row["name"] == settings.name
    assert found["recommended"]["name"] == 'DiLoCo(every=64, fragments=8, delay=8, codec="int4")'
    assert found["reached"] is True
    assert "offbeat.DiLoCo(inner, model, every=64" in found["recommended"]["code"]


def test_the_table_is_plain_lines_where_the_output_is_no_terminal():
    done = run(*BY_HAND)
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert done.stdout.isascii()
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    # 16.6 MB a step: 4.25 bits a parameter every 32 steps; 531 MB in 4.25 s, so that a step takes 232.8 ms.
    assert rows['DiLoCo(every=32, codec="int4")'][-7:] == ["232.8", "43.0%", "16.6", "531", "13,594", "+1.9", "%"]
    outer = "outer_lr=1.0, outer_momentum=0.6"
    line = f'optimizer = offbeat.DiLoCo(inner, model, every=64, {outer}, fragments=8, delay=8, codec="int4")'
    assert f"    {line}\n" in done.stdout
    assert "has not been measured" in done.stdout


def test_a_recommendation_says_what_loss_to_expect():
    done = run("plan", "--params", "1e9", "--step-ms", "100", "--replicas", "2", "--mbit", "50000")
    assert 'Use DiLoCo(every=32, fragments=4, delay=1, codec="int4")' in done.stdout
    assert "Loss with Muon inside: +1.3 % (+1.2 to +1.6) against DDP; -4.4 % against DDP with AdamW." in done.stdout


def test_a_link_that_nothing_can_hide_is_said_to_be_one():
    done = run("plan", "--params", "1e9", "--step-ms", "100", "--replicas", "2", "--mbit", "1")
    assert done.exit_code == 0
    assert "No strategy here reaches 95%." in done.stdout


def test_a_result_is_planned_for_and_numbers_replace_its_own(tmp_path):
    path = tmp_path / "bench.json"
    save_result(RESULT, path)
    found = json.loads(run("plan", str(path), "--json").stdout)
    settings = Settings("diloco", 32)
    expected = estimate(
        params=10**6, step_seconds=0.02, replicas=4, bandwidth=12.5e6, latency=1e-3, every=32, machine=RESULT.machine
    )
    assert (
        next(row for row in found["options"] if row["name"] == settings.name)["step_seconds"] == expected.step_seconds
    )
    changed = json.loads(run("plan", str(path), "--json", "--mbit", "8", "--replicas", "2").stdout)
    assert (changed["bandwidth"], changed["replicas"], changed["latency"]) == (1e6, 2, 1e-3)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "--params, --step-ms, --replicas, --mbit missing"),
        (["--params", "1e9"], 2, "--step-ms, --replicas, --mbit missing"),
        ([*BY_HAND[1:], "--mbit", "-1"], 2, "bandwidth=-125000.0 must be a finite number above 0"),
        ([*BY_HAND[1:], "--replicas", "0"], 2, "replicas=0 must be a whole number"),
        ([*BY_HAND[1:], "--target", "2"], 2, "target=2.0"),
        (["nowhere.json"], 1, "nowhere.json cannot be read"),
    ],
)
def test_bad_input_is_told_in_one_line(words, code, message):
    done = run("plan", *words)
    assert done.exit_code == code
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


def test_a_result_of_another_version_is_refused(tmp_path):
    path = tmp_path / "bench.json"
    save_result(RESULT, path)
    path.write_text(path.read_text().replace('"offbeat_bench": 1', '"offbeat_bench": 0'))
    done = run("plan", str(path))
    assert done.exit_code == 1
    assert "version 0 of the format and this offbeat reads version 1; measure again" in done.stderr


def test_the_sweep_has_a_line_for_each_strategy(tmp_path):
    pytest.importorskip("matplotlib")
    from offbeat.cli.sweep import FASTEST, SLOWEST, lines

    bandwidths, found = lines(Setting(1e9, 0.1, 2, 125e6))
    assert (bandwidths[0], pytest.approx(bandwidths[-1])) == (SLOWEST, FASTEST)
    assert (SLOWEST, FASTEST) == (10e6 / 8, 400e9 / 8)
    for settings, values in found.items():
        assert values == sorted(values), settings.name
        assert 0 < values[0] <= values[-1] <= 1
    middle = min(range(len(bandwidths)), key=lambda index: abs(bandwidths[index] - 125e6))
    every = estimate(params=1e9, step_seconds=0.1, replicas=2, bandwidth=bandwidths[middle], every=32, codec="int4")
    assert found[Settings("diloco", 32, codec="int4")][middle] == every.utilisation
    for name, first in (("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")):
        done = run(*BY_HAND[:-2], "--sweep", "--output", str(tmp_path / name))
        assert done.exit_code == 0, done.stderr
        assert (tmp_path / name).read_bytes().startswith(first)
        assert f"Plot: {tmp_path / name}" in done.stdout


def test_a_plot_that_cannot_be_written_is_an_error(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("missing/plan.png", "plan.xyz"):
        done = run(*BY_HAND, "--sweep", "--output", str(tmp_path / name))
        assert done.exit_code == 1
        assert "name another file with --output" in done.stderr


def test_without_matplotlib_the_sweep_says_what_to_install(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "offbeat.cli.sweep", raising=False)

    class Nowhere:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "matplotlib":
                raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")

    monkeypatch.setattr(sys, "meta_path", [Nowhere(), *sys.meta_path])
    done = run(*BY_HAND, "--sweep", "--output", str(tmp_path / "plan.png"))
    assert done.exit_code == 1
    assert "pip install matplotlib" in done.stderr


@pytest.mark.parametrize("command", ["demo", "doctor", "bench", "plan"])
def test_every_command_has_help_with_examples(command):
    done = run(command, "--help")
    assert done.exit_code == 0
    assert f"offbeat {command}" in done.stdout.partition("Examples:")[2]
    assert "\x1b" not in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("settings", "bold", "coloured"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(settings, bold, coloured, monkeypatch):
    import os
    import pty

    from offbeat.cli.output import make_console

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        make_console().print("[bold]heavy[/] [green]fine[/]")
        terminal.flush()
        shown = os.read(master, 1000).decode()
    os.close(master)
    assert ("\x1b[1m" in shown) == bold
    assert ("\x1b[32m" in shown) == coloured
    assert "heavy" in shown
