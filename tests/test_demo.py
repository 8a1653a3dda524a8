"""The demo, run as a user runs it: in processes of its own, to the end, or into a failure."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from offbeat.cli import app, launch
from offbeat.cli.data import read_corpus
from offbeat.cli.report import ArmReport, Timing, sentences
from offbeat.cli.train import Job

SOURCE = Path(__file__).parent.parent / "src"
SECONDS = 150


def start(*options: str, **environment: str) -> subprocess.Popen[str]:
    """The demo in a session of its own, by which its processes are found again."""
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "offbeat.cli", "demo", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Who runs in the background of a shell ignores interrupts, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def alive(session: int) -> list[str]:
    """The processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().rsplit(")", 1)
        except OSError:  # it ended while we looked
            continue
        state, _, _, of_session = rest.split()[:4]
        if int(of_session) == session and state != "Z":
            found.append(name)
    return found


def assert_nobody_left(session: int) -> None:
    until = monotonic() + 10  # multiprocessing's own helper process takes a moment to notice the end
    while alive(session) and monotonic() < until:
        sleep(0.1)
    assert alive(session) == []


@pytest.mark.ranks
def test_all_arms_learn_and_agree(tmp_path: Path) -> None:
    process = start("--quick", "--json", str(tmp_path / "results.json"))
    code, out, err = finish(process)
    assert code == 0, f"exit code {code}: {out}{err}"
    results = json.loads((tmp_path / "results.json").read_text())
    torchs, ours, overlapped = results["arms"]
    names = ["torch.optim.AdamW(fused=True)", "offbeat.AdamW", "offbeat.AdamW, overlap"]
    assert [arm["name"] for arm in results["arms"]] == names
    assert overlapped["parameter_digests"] == ours["parameter_digests"]
    for arm in results["arms"]:
        assert arm["held_out_loss_after"] < arm["held_out_loss_before"] - 0.3
        assert arm["ranks_identical"] is True
        assert len(arm["parameter_digests"]) == results["ranks"] == 2
        assert arm["parameter_digests"][0] != arm["start_digest"]
        assert arm["tier"] in " ".join(out.split())
    assert torchs["start_digest"] == ours["start_digest"]
    assert torchs["held_out_loss_before"] == ours["held_out_loss_before"]
    assert results["largest_difference"] < 1e-3
    assert "\x1b" not in out  # not a terminal: plain text
    assert_nobody_left(process.pid)


@pytest.mark.ranks
def test_a_rank_that_dies_ends_the_demo() -> None:
    process = start("--quick", OFFBEAT_DEMO_FAIL_RANK="1")
    code, _, err = finish(process)
    assert code == 1
    assert "The demo failed: rank 1 died (exit code 13)" in " ".join(err.split())
    assert_nobody_left(process.pid)


@pytest.mark.ranks
def test_a_rank_that_raises_is_reported_with_its_traceback() -> None:
    process = start("--quick", GLOO_SOCKET_IFNAME="nosuchdevice0")
    code, _, err = finish(process)
    assert code == 1
    assert "Traceback" in err
    assert "nosuchdevice0" in err
    assert "died (exit code 1)" in " ".join(err.split())
    assert_nobody_left(process.pid)


def _finishes_but_never_exits(rank: int, job: Any, on_step: Any) -> dict[str, int]:
    """Leaves behind what would keep an interpreter from shutting down."""
    threading.Thread(target=sleep, args=(SECONDS,)).start()
    atexit.register(sleep, SECONDS)
    on_step("arm", 1, 0.5)
    return {"rank": rank}


def _work_with(function: Any, rank: int, job: Any, reports: Any) -> None:
    launch.train = function
    launch._work(rank, job, reports)


@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_a_rank_that_has_its_result_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_work", partial(_work_with, _finishes_but_never_exits))
    heard: list[Any] = []
    job = Job(ranks=2, steps=1, seed=0, directory=tmp_path)
    assert launch.launch(job, lambda *report: heard.append(report)) == [{"rank": 0}, {"rank": 1}]
    assert heard == [("arm", 1, 0.5)]


@pytest.mark.ranks
def test_an_interrupt_stops_every_process() -> None:
    process = start("--steps", "100")
    assert process.stdout is not None
    for line in process.stdout:
        if " step " in line:  # training has begun
            break
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert_nobody_left(process.pid)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--ranks", "1"], r"'--ranks'.* 2\b"),
        (["--ranks", "1000"], r"'--ranks'.* 64\b"),
        (["--steps", "3"], r"'--steps'.* 10\b"),
        (["--seed", "-1"], r"'--seed'.* 0\b"),
        (["--json", "/no/such/directory/file.json"], "the directory of /no/such/directory/file.json does not exist"),
        (["--json", "/"], "is a directory"),
        (["--quick", "--steps", "20"], "exclude each other"),
    ],
)
def test_options_are_checked(options: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["demo", *options], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert re.search(named, result.output)  # typer's own words for a range differ between its versions


def test_a_library_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds 0 bytes of Python source"):
        read_corpus(directory=tmp_path)


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i:02}.py").write_bytes(bytes([i]) * 20_000)
    corpus = read_corpus(directory=tmp_path)
    assert set(corpus.held_out.tolist()) == {9, 19, 29}
    assert not set(corpus.train.tolist()) & {9, 19, 29}
    assert corpus.files == 30


def report(*, optimizer: float, whole: float, spread: float = 0.01, after: float = 2.0) -> ArmReport:
    def timing(ms: float) -> Timing:
        return Timing(ms, ms - spread, ms + spread)

    return ArmReport("arm", "loop", 5.0, after, 5.0, after, 1.0, timing(optimizer), timing(whole), True, "", [""])


def test_the_sentences_follow_the_numbers() -> None:
    def said(torchs: ArmReport, ours: ArmReport) -> list[str]:
        return sentences(torchs, ours, report(optimizer=0.1, whole=48.0))

    torchs = report(optimizer=2.0, whole=50.0)
    better = said(torchs, report(optimizer=1.0, whole=49.0))
    assert "2.00 times as fast and saved 1 ms" in better[0]
    assert "4.0% of it" in better[1]
    assert "optimizer.step() took 0.1 ms instead of 1" in better[2]
    assert "48 ms instead of 49, and the parameters are bit for bit the same" in better[2]
    worse = said(torchs, report(optimizer=3.0, whole=51.0))
    assert "took 1.50 times as long and lost 1 ms" in worse[0]
    assert "lost 1 ms" in worse[1]
    same = said(torchs, report(optimizer=1.9, whole=50.0, spread=0.5))
    assert "within the spread" in same[0]
    elsewhere = said(torchs, report(optimizer=2.5, whole=60.0))
    assert "+10 ms, +0.5 ms is due to the optimizer and the rest to something else" in elsewhere[1]
    assert "did not go down with arm" in said(torchs, report(optimizer=1.0, whole=50.0, after=6.0))[3]


def test_the_library_does_not_need_the_command_line() -> None:
    check = "import sys, offbeat; sys.exit(bool({'typer', 'rich', 'offbeat.cli'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", check], env=environment, timeout=SECONDS).returncode == 0
