"""The convergence benchmark: its worker processes, and runs that are cut off and resumed."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time

import pytest
import torch

from benchmarks import convergence, convergence_data, convergence_recipes_report
from benchmarks.convergence_jobs import Clock, Job, in_processes
from benchmarks.convergence_models import ByteGPT
from benchmarks.convergence_recipes import FilledSGD
from benchmarks.convergence_train import train
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
    monkeypatch.setattr(convergence.convergence_report, "plot", lambda shown, path: None)


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
    assert len(jobs) == 3 * len(convergence.TASKS["gpt10m"].arms)


def test_each_text_of_the_packages_is_there_once(tmp_path):
    for name, text in {"a/b.py": b"two", "a.py": b"one", "z.py": b"two", "empty.py": b"", "c.txt": b"no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    files = convergence_data.package_files(tmp_path)
    assert files == {"a.py": b"one", "a/b.py": b"two"}
    assert convergence_data.digest(files) != convergence_data.digest({**files, "a.py": b"One"})


@pytest.fixture
def packages(monkeypatch):
    """Sixty files, each of one byte many times."""
    files = {f"{number:02}.py": bytes([number]) * 90 for number in range(1, 61)}
    monkeypatch.setattr(convergence_data, "package_files", lambda root: files)
    return {part: convergence_data.packages(part, length=8, held_out=6) for part in ("choose", "report")}


def test_what_is_held_out_is_not_trained_on(packages):
    trained = set(packages["choose"].x.unique().tolist())
    assert trained == set(packages["report"].x.unique().tolist()) == {n for n in range(1, 61) if n % 10}
    assert set(packages["choose"].held_out_x.unique().tolist()) == {20, 40, 60}
    assert set(packages["report"].held_out_x.unique().tolist()) == {10, 30, 50}
    x, y = next(convergence_data.batches(packages["choose"], rank=0, ranks=2, size=3, seed=0))
    assert x.dtype == y.dtype == torch.int64


@pytest.fixture
def tiny():
    """The task of the recipes with a model of 5,000 parameters and two replicas."""
    return dataclasses.replace(
        convergence.TASKS["recipes-choose"],
        model=functools.partial(ByteGPT, layers=1, width=8, heads=1, length=8),
        replicas=2,
        batch=2,
        tokens=8,
        synchronised=4,
        evaluate=20,
    )


@pytest.mark.parametrize("arm", ["DDP", "Muon, DDP"])
def test_ddp_as_one_replica_with_the_whole_batch_is_ddp(arm, tiny, packages):
    apart = train(tiny, convergence.ARMS[arm], packages["choose"], 0, 40)
    whole = train(dataclasses.replace(tiny, whole=True), convergence.ARMS[arm], packages["choose"], 0, 40)
    assert [point["loss"] for point in whole["curve"]] == pytest.approx([p["loss"] for p in apart["curve"]], rel=1e-4)
    assert whole["sent"]["all"] == pytest.approx(apart["sent"]["all"], rel=0.1)  # with what ranks compare


@pytest.mark.parametrize(
    ("arm", "rounds", "less"),
    [
        ("Muon, DiLoCo(32), 1.0/0.6, int4", 1, 15),
        ("Muon, streaming DiLoCo(32), 1.0/0.6, delay 1, mixing 0.0, int4", 4, 5),
        ("Muon, DiLoCo(32), 1.0/0.6, average", 1, 5),
        ("LocalSGD(8), average", 4, 1),
        ("Muon, DiLoCo(32), 0.8/0.6, momentum filled", 1, 15),
    ],
)
def test_recipes_train_in_their_rounds(arm, rounds, less, tiny, packages):
    result = train(tiny, convergence.ARMS[arm], packages["choose"], 0, 36)
    assert result["rounds"] == rounds
    assert len(result["first_losses"]) == tiny.synchronised
    ddp = train(dataclasses.replace(tiny, whole=True), convergence.ARMS["DDP"], packages["choose"], 0, 36)
    sent = [each["sent"]["all"] - each["sent"]["synchronised"] for each in (ddp, result)]
    assert sent[0] > less * sent[1]


def test_all_arms_of_the_recipes_are_known():
    for task in convergence.RECIPE_TASKS.values():
        assert not [arm for arm in task.arms if arm not in convergence.ARMS]
    jobs = convergence.jobs_for(
        {"tasks": {"recipes": {"arms": dict.fromkeys(["b", "DDP"]), "device": "cpu", "runs": {"3": {}, "4": {}}}}},
        by_importance=True,
    )
    assert [(job.arm, job.seed) for job in jobs] == [("b", 3), ("b", 4), ("DDP", 3), ("DDP", 4)]


def test_a_filled_momentum_steps_at_once_as_far_as_it_will():
    p = torch.nn.Parameter(torch.zeros(2))
    outer = FilledSGD([p], lr=0.5, momentum=0.6, nesterov=True)
    for step in range(1, 4):
        p.grad = torch.ones(2)
        outer.step()
        torch.testing.assert_close(p.detach(), torch.full((2,), -0.5 * step / (1 - 0.6)))


def result_of(losses):
    """Results of two seeds: the losses of an arm by seed."""
    runs = {
        seed: {
            arm: {"curve": [{"step": 8, "seen": 64, "loss": each[at]}], "sent": {"all": 5000, "synchronised": 1000}}
            for arm, each in losses.items()
        }
        for at, seed in enumerate("34")
    }
    task = {"title": "t", "data": "d", "settings": "s", "unit": "tokens", "replicas": 2, "batch": 1, "tokens": 8}
    task |= {"steps": 8, "synchronised": 4, "arms": {arm: {} for arm in [*losses, "never run"]}, "runs": runs}
    return {"machine": {"command": "c"}, "tasks": {"recipes": task}}


def test_the_report_says_by_how_much_goals_are_missed():
    page = convergence_recipes_report.pages(
        result_of(
            {
                "DDP": [1.0, 2.0],
                "Muon, DDP": [0.8, 1.6],
                "Muon, DiLoCo(32), 1.0/0.6, int4": [0.82, 1.632],
                "LocalSGD(8), average": [1.01, 2.02],
            }
        )
    )
    assert "| Muon, DiLoCo(32), 1.0/0.6, int4 | +1.5 | +2.2 (+2.0 to +2.5) | missed by 0.7 points |" in page
    assert "| LocalSGD(8), average | +2.0 | +1.0 (+1.0 to +1.0) | met |" in page
    row = "| Muon, DDP | 3 4 | 1.2000 (0.8000 to 1.6000) | - | -20.0 (-20.0 to -20.0) | 1 |"
    assert row in page
    assert "Not run: never run." in page


def test_results_of_several_commands_go_into_one(tmp_path):
    parts = result_of({"DDP": [1.0, 2.0]}), result_of({"Muon, DDP": [3.0, 4.0]})
    for number, part in enumerate(parts):
        (tmp_path / f"{number}.json").write_text(json.dumps(part))
    merged = convergence.merged([tmp_path / "0.json", tmp_path / "1.json"])
    assert convergence_recipes_report.losses(merged, "recipes", "Muon, DDP") == {"3": 3.0, "4": 4.0}
    assert math.isclose(convergence_recipes_report.gaps(merged, "recipes", "Muon, DDP", "DDP")[1], 100)
    assert list(merged["tasks"]["recipes"]["arms"]) == ["DDP", "never run", "Muon, DDP"]
