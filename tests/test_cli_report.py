"""``offbeat report`` and ``offbeat lighthouse``: what they read, write and refuse."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

import offbeat
from offbeat.cli.app import app
from tests.harness import batch, loss, make

runner = CliRunner()


def write_run(folder, steps=16):
    """Two simulated replicas, the first of which logs its rounds."""
    folder.mkdir()

    def replica(rank, peers, model):
        inner = offbeat.SGD(model.parameters(), lr=0.05)
        optimizer = offbeat.DiLoCo(inner, model, every=4, fragments=2, delay=1, group=peers, subgroup=None)
        if rank == 0:
            offbeat.log_rounds(optimizer, folder / "rounds.jsonl")
            optimizer.register_round_hook(lambda report: None, norms=True)
        for step in range(steps):
            loss(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        return optimizer.last_round

    return offbeat.Simulation(2, timeout=20).run(replica, make=make)


def test_a_page_says_what_the_lines_say(tmp_path):
    write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert {line["fragment"] for line in lines} == {0, 1}
    assert all(line["status"] == "landed" and line["members"] == [0, 1] for line in lines)
    averaged = [line for line in lines if line["bytes_sent"].get("parameters")]
    assert averaged
    assert all(line["outer_step"] > 0 and line["pseudo_gradient"] > 0 for line in averaged)
    (tmp_path / "run" / "loss.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    result = runner.invoke(app, ["report", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"<td>landed</td><td>{len(lines)}</td>" in page
    sent = sum(sum(line["bytes_sent"].values()) for line in lines) / 1e6
    assert f"<td>MB sent</td><td>{sent:,.2f}</td>" in page
    assert page.count("<svg") == 5
    assert not re.search(r"(src|href)=\"https?://(?!www\.w3)", page)  # nothing is loaded


def test_two_runs_stand_side_by_side(tmp_path):
    write_run(tmp_path / "one", 8)
    write_run(tmp_path / "other", 8)
    path = tmp_path / "both.html"
    assert (
        runner.invoke(app, ["report", str(tmp_path / "one"), str(tmp_path / "other"), "--output", str(path)]).exit_code
        == 0
    )
    assert path.read_text().count("<section>") == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is not there"),
        ("nonsense\n", "is not JSON"),
        ('{"step": 1}\n', "has no 'bytes_sent'"),
        ("[]\n", "not an object"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "rounds.jsonl").write_text(text)
    result = runner.invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())


def test_a_log_that_cannot_be_written_warns_once_and_training_goes_on(tmp_path):
    def replica(rank, peers, model):
        inner = offbeat.SGD(model.parameters(), lr=0.05)
        optimizer = offbeat.LocalSGD(inner, model, every=1, group=peers, subgroup=None)
        if rank == 0:
            offbeat.log_rounds(optimizer, tmp_path / "no such folder" / "rounds.jsonl")
        for step in range(3):
            loss(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.syncs

    with pytest.warns(UserWarning, match="rounds are not logged") as caught:
        assert offbeat.Simulation(2, timeout=20).run(replica, make=make) == [3, 3]
    assert len([w for w in caught if "rounds are not logged" in str(w.message)]) == 1


def test_reports_of_rounds_that_fail_say_why_and_handles_can_be_removed():
    def replica(rank, peers, model):
        inner = offbeat.SGD(model.parameters(), lr=0.05)
        optimizer = offbeat.LocalSGD(inner, model, every=1, group=peers, subgroup=None)
        reports = []
        handle = optimizer.register_round_hook(reports.append)
        assert optimizer.last_round is None
        loss(model, batch(0, rank)).backward()
        optimizer.step()
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        with pytest.raises(offbeat.NotFinite):
            optimizer.step()
        assert [report.status for report in reports] == ["landed", "failed"]
        assert "NaN or infinite" in reports[1].reason
        assert optimizer.last_round is reports[1]
        assert reports[0].weights == (1.0, 1.0)
        assert reports[0].seconds["exposed"] >= reports[0].seconds["applying"] > 0
        numel = sum(p.numel() * p.itemsize for p in model.parameters())
        assert reports[0].bytes_sent["parameters"] == numel  # 2 (n-1)/n of it, with two ranks
        handle.remove()
        with pytest.raises(offbeat.NotFinite):
            optimizer.step()
        assert len(reports) == 2

    offbeat.Simulation(2, timeout=20).run(replica, make=make)


def test_a_lighthouse_needs_an_address():
    result = runner.invoke(app, ["lighthouse", "--bind", "somewhere"])
    assert result.exit_code == 2
    assert "must be host:port" in " ".join(result.output.split())


@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="torchft is here")
def test_without_torchft_the_lighthouse_says_what_to_install():
    result = runner.invoke(app, ["lighthouse"])
    assert result.exit_code == 1
    assert "pip install 'torchft>=0.2'" in " ".join(result.output.split())


@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs torchft")
def test_the_lighthouse_serves_until_it_is_told_to_stop():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "offbeat", "lighthouse", "--bind", f"127.0.0.1:{port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        else:
            raise AssertionError("the lighthouse does not listen")
    finally:
        process.terminate()
        process.wait(20)
    assert process.returncode == 0
