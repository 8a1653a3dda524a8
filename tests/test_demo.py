"""The demo, run as a user runs it: in processes of its own, to the end or into a failure."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from offbeat.cli import backward, link, sites
from offbeat.cli.app import app
from offbeat.cli.data import read_text
from offbeat.cli.screen import backward_table, sites_table, summary

SOURCE = Path(__file__).parent.parent / "src"
SECONDS = 270
SMALL = ("--seconds", "1", "--mbit", "1000")


class Demo:
    """The demo in processes that can be found again by a word in their environment."""

    def __init__(self, *options: str) -> None:
        self.tag = f"OFFBEAT_TEST={uuid.uuid4().hex}"
        name, value = self.tag.split("=")
        paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "offbeat", "demo", *options],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Whoever runs in the background of a shell ignores interrupts, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"{text!r} was never said: {self.finish()}")

    def finish(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            for pid in self.alive():
                os.kill(pid, signal.SIGKILL)
            raise
        until = monotonic() + 5  # the system takes a moment
        while self.alive() and monotonic() < until:
            sleep(0.05)
        assert self.alive() == {}, "processes are left"
        return self.process.returncode, out, err

    def alive(self) -> dict[int, list[str]]:
        """Running processes and their commands."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is somebody else's
                if self.tag.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
        return found

    def worker(self, rank: int) -> int:
        (found,) = (pid for pid, words in self.alive().items() if words[4:5] == [str(rank)])
        return found


@pytest.fixture(scope="module")
def possible() -> list[str]:
    return link.possible()


def rows_of(out: str, names: list[str]) -> list[list[float]]:
    """The numbers behind each name, in the tables."""
    lines = out.splitlines()
    found = [[line for line in lines if line[:38].rstrip() == name and " step " not in line] for name in names]
    assert [len(row) for row in found] == [1] * len(names)
    return [[float(cell) for cell in row[0][38:].split()] for row in found]


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["namespaces", "pacing"])
def test_small_but_whole(way: str, possible: list[str], tmp_path: Path) -> None:
    if way not in possible:
        pytest.skip(f"this system cannot limit a link by {way}")
    code, out, err = Demo(*SMALL, "--link", way, "--json", str(tmp_path / "found.json")).finish()
    assert code == 0, out + err
    assert link.DESCRIPTIONS[way] in out
    assert "starting 2 processes" in out
    assert "\x1b" not in out  # not a terminal: no control codes
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 80
    # Namespaces have no names, and end with their processes, of which none is left; nor is a device in this one.
    assert not {link.interface("namespaces", rank) for rank in (0, 1)} & {name for _, name in socket.if_nameindex()}
    found = json.loads((tmp_path / "found.json").read_text())
    assert " ".join(found["summary"].split()) in " ".join(out.split())

    arms = found["sites"]["arms"]
    assert list(arms) == [*sites.ARMS, sites.LONGER]
    ddp, local, diloco, compressed, longer = rows_of(out, list(arms))
    for row, arm in zip((ddp, local, diloco, compressed, longer), arms.values(), strict=True):
        assert row[0] == arm["steps"] > 0
        assert row[1] == pytest.approx(arm["steps"] / arm["seconds"], abs=0.06)
        assert 2.0 < row[4] < 4.6  # 5.5 is what one starts from
    assert ddp[0] == local[0] == diloco[0] == compressed[0]
    # What the system counts is what should be sent: 4 bytes a parameter a step by DDP, and so on.
    megabytes, rounds = 4e-6 * found["sites"]["parameters"], ddp[0] / 16
    assert ddp[2] == pytest.approx(megabytes, rel=0.05)
    assert local[2] == pytest.approx(megabytes * (2 * rounds + 1) / ddp[0], rel=0.05)  # one more at the end
    assert 0.9 * megabytes / 16 < diloco[2] < 2.1 * megabytes / 16
    assert compressed[2] == pytest.approx(diloco[2] * 4.25 / 32, rel=0.2)

    everywhere, fused, ours, overlapped = rows_of(out, list(backward.ARMS))
    assert everywhere[1] == fused[1] == ours[1] == pytest.approx(4e-6 * found["backward"]["parameters"], abs=0.06)
    assert 1.0 <= overlapped[1] <= 2.0
    assert found["backward"]["same_bits"] is True


@pytest.mark.ranks
def test_a_process_that_dies_is_named_at_once() -> None:
    demo = Demo("--link", "none")
    demo.wait_for("DDP ")
    os.kill(demo.worker(1), signal.SIGKILL)
    code, _, err = demo.finish()
    assert code == 1
    assert re.search(r"The demo failed: process 1 was killed by SIGKILL while: \w+", " ".join(err.split()))


@pytest.mark.ranks
def test_an_interrupt_stops_every_process() -> None:
    demo = Demo("--link", "none")
    demo.wait_for("DDP ")
    demo.process.send_signal(signal.SIGINT)
    code, _, err = demo.finish()
    assert (code, err) == (130, "interrupted; all processes were stopped\n")


@pytest.mark.ranks
def test_workers_leave_when_their_parent_is_killed(possible: list[str]) -> None:
    demo = Demo("--link", possible[0])
    demo.wait_for("DDP ")
    demo.process.kill()
    code, _, _ = demo.finish()
    assert code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--seconds", "0"], r"'--seconds'.* 1\b"),
        (["--mbit", "0"], r"'--mbit'.* 1\b"),
        (["--link", "magic"], "magic"),
        (["--json", "/no/such/directory/file.json"], "/no/such/directory/file.json cannot be written"),
        (["--json", "/"], "is a directory"),
    ],
)
def test_options_are_checked(options: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["demo", *options], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert re.search(named, result.output)  # typer's own words differ between its versions


def test_a_link_that_is_not_possible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "possible", lambda: ["none"])
    result = CliRunner().invoke(app, ["demo", "--link", "namespaces"], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert "cannot make a slow link by 'namespaces', only by: none" in result.output


def figures(*, ours: float, mb: float | None = 2.9) -> tuple[dict[str, Any], dict[str, Any]]:
    arm = {"steps": 100, "seconds": 20.0, "worst_ms": 12345.6, "mb_per_step": mb, "held_out_loss": 2.5}
    arms: dict[str, Any] = {name: dict(arm) for name in [*sites.ARMS, sites.LONGER]}
    arms[sites.LONGER].update(steps=int(100 * ours), held_out_loss=2.5 / ours, mb_per_step=mb and mb / ours)
    steps: dict[str, Any] = {name: {"ms": 20.0, "gradient_mb": 26.0} for name in backward.ARMS}
    steps[list(backward.ARMS)[-1]] = {"ms": 20.0 / ours, "gradient_mb": 26.0 / ours}
    part2 = {"arms": steps, "parameters": 10_000_000, "tensors": 1000, "steps": 1000, "same_bits": True}
    return {"arms": arms, "parameters": 10_000_000}, part2


def test_the_last_line_is_true_for_good_and_bad_numbers() -> None:
    good = summary(100, *figures(ours=2.0))
    assert "DDP made 100 steps over 100 Mbit/s, to a loss of 2.50" in good
    assert "int4 made 200, to 1.25, with 50.0% of the bytes a step" in good
    assert "took 50% of the time" in good
    bad = summary(100, *figures(ours=0.5))
    assert "int4 made 50, to 5.00, with 200.0% of the bytes a step" in bad
    assert "took 200% of the time" in bad
    assert "bytes" not in summary(100, *figures(ours=2.0, mb=None))


def test_tables_fit_into_80_columns() -> None:
    first, second = figures(ours=50.0)
    for table in (sites_table(first), backward_table(second)):
        assert max(map(len, table.splitlines())) <= 80


def test_a_library_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has only 0 bytes of Python source"):
        read_text(tmp_path)


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i:02}.py").write_bytes(bytes([i]) * 20_000)
    train, held_out = read_text(tmp_path)
    assert set(held_out.tolist()) == {9, 19, 29}
    assert not set(train.tolist()) & {9, 19, 29}
