"""The convergence benchmark: its worker processes, and runs that are cut off and resumed."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from benchmarks import convergence
from benchmarks.convergence_jobs import Clock, Job, in_processes
from tests.convergence_work import prepare, work

pytestmark = [pytest.mark.ranks]

SHORT = ["--quick", "--tasks", "gpt4", "--seeds", "0", "1"]


def do(jobs, workers, seconds=None):
    return list(in_processes(jobs, workers, prepare, work, Clock(seconds)))


def test_a_run_that_fails_does_not_stop_the_others():
    arms = ["raises", "dies", "works", "works"]
    outcomes = do([Job("task", arm, seed) for seed, arm in enumerate(arms)], 2)
    found = {one.job.seed: one for one in outcomes}
    assert "this arm is broken" in found[0].error
    assert "exit code 3" in found[1].error
    assert [found[seed].found for seed in (2, 3)] == [2, 3]


def test_what_is_not_over_in_time_is_killed():
    start = time.perf_counter()
    outcomes = do([Job("task", arm, 0) for arm in ("works", "takes long", "works")], 2, seconds=5)
    assert time.perf_counter() - start < 15
    assert [one.job.arm for one in outcomes] == ["works", "works"]


def test_nothing_begins_that_would_not_end_in_time():
    clock = Clock(60)
    clock.note(3600)
    assert not list(in_processes([Job("task", "works", 0)], 1, prepare, work, clock))


@pytest.fixture
def small(monkeypatch):
    """A task with two arms, and no plot."""
    task = dataclasses.replace(convergence.TASKS["gpt4"], arms=["DDP", "LocalSGD(8)"])
    monkeypatch.setitem(convergence.TASKS, "gpt4", task)
    monkeypatch.setattr(convergence, "plot", lambda shown, path: None)


@pytest.mark.usefixtures("small")
def test_a_run_that_was_cut_off_goes_on(tmp_path, capsys):
    with pytest.raises(SystemExit, match="begin without --resume"):
        convergence.main([*SHORT, "--out", str(tmp_path), "--resume"])
    convergence.main([*SHORT, "--out", str(tmp_path), "--save"])
    file, page = tmp_path / "convergence.json", tmp_path / "convergence.md"
    whole = json.loads(file.read_text())["tasks"]["gpt4"]["runs"]
    assert "Left out" not in page.read_text()

    cut = json.loads(file.read_text())
    del cut["tasks"]["gpt4"]["runs"]["1"]["LocalSGD(8)"]
    convergence.write(cut, tmp_path / "convergence")
    assert "| LocalSGD(8) |" not in page.read_text()
    assert "LocalSGD(8) (seed 1)" in page.read_text()

    with pytest.raises(SystemExit, match="seeds"):
        convergence.main([*SHORT, "2", "--out", str(tmp_path), "--resume"])
    capsys.readouterr()
    convergence.main([*SHORT, "--out", str(tmp_path), "--resume"])
    assert capsys.readouterr().out.count("finished") == 1  # one run was missing
    again = json.loads(file.read_text())["tasks"]["gpt4"]["runs"]
    for seed, runs in whole.items():
        for arm, run in runs.items():
            assert again[seed][arm]["curve"] == run["curve"]
    assert "| LocalSGD(8) |" in page.read_text()


def test_the_arms_that_say_most_come_first_with_all_seeds():
    options = convergence.options_from(["--tasks", "gpt10m", "--jobs", "12"])
    jobs = convergence.jobs_for(convergence.empty(options), by_importance=True)
    assert [job.arm for job in jobs[:15:3]] == convergence.FIRST
    assert [job.seed for job in jobs[:3]] == [0, 1, 2]
    assert len(jobs) == 3 * len(convergence.LARGE)
