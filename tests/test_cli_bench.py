"""``offbeat bench``: a real run of two processes, what it measures, its limits and bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
import torch
from typer.testing import CliRunner

from offbeat.cli.app import app
from offbeat.cli.bench import _broken_limits
from offbeat.cli.bench_model import ModelError, load_model, make_gpt
from offbeat.plan import BenchResult, Machine, load_result

SOURCE = Path(__file__).parent.parent / "src"
MODEL = """
import torch

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    return model, lambda module: module(torch.ones(4, 64)).square().mean()

def alone():
    return torch.nn.Linear(2, 2)

def wrong():
    return torch.nn.Linear(2, 2), 5

def raises():
    import nothing_of_this_name

number = 3
"""


def environment(folder, **more):
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    paths = os.pathsep.join((str(SOURCE), str(folder)))
    return {**own, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def torchrun(*words, folder, timeout=170):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "offbeat", "bench", *words]
    return subprocess.run(command, env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=timeout)


@pytest.mark.ranks
def test_a_quick_run_of_two_processes(tmp_path):
    (tmp_path / "train.py").write_text(MODEL)
    path = tmp_path / "bench.json"
    done = torchrun("--quick", "--model", "train:make", "--json", str(path), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = load_result(path)
    assert (result.params, result.replicas) == (2 * (64 * 64 + 64), 2)
    assert result.environment["torch"] == torch.__version__
    assert {one["collective"] for one in result.link} == {"all_reduce", "all_gather"}
    assert all(one["sent"] == one["bytes"] for one in result.link)  # of two ranks, by either collective
    largest = max((one for one in result.link if one["collective"] == "all_reduce"), key=lambda one: one["bytes"])
    assert largest["sent"] / largest["seconds"] <= result.bandwidth <= 2 * largest["sent"] / largest["seconds"]
    assert set(result.machine.local) == {
        "local_sgd/float32", "slowmo/float32", "diloco/float32", "diloco/int8", "diloco/int4"
    }  # fmt: skip
    rows = {row["name"]: row for row in result.strategies}
    assert list(rows) == [
        "DDP",
        "LocalSGD(every=8)",
        "DiLoCo(every=8)",
        'DiLoCo(every=8, codec="int8")',
        'DiLoCo(every=8, fragments=4, delay=1, codec="int4")',
    ]
    # Bytes are what connections have sent, so they hold a little more than the parameters.
    dense = 4 * result.params
    assert dense <= rows["DDP"]["bytes_per_step"] <= 1.2 * dense
    assert dense / 8 <= rows["LocalSGD(every=8)"]["bytes_per_step"] <= 1.2 * dense / 8 + 1000
    assert dense / 32 <= rows['DiLoCo(every=8, codec="int8")']["bytes_per_step"] <= 1.2 * dense / 32 + 1000
    for row in rows.values():
        assert 0 < row["utilisation"] <= 1
        assert row["utilisation"] == min(1, row["compute_seconds"] / row["step_seconds"])
        assert row["predicted_step_seconds"] >= row["compute_seconds"]
    assert "\x1b" not in done.stdout
    assert done.stdout.count("measuring the link ...") == 1  # only the first process speaks
    assert re.search(r"strategy +ms a step +predicted +utilisation +MB a step +extra MB", done.stdout)

    planned = subprocess.run(
        [sys.executable, "-m", "offbeat", "plan", str(path), "--json"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert json.loads(planned.stdout)["params"] == result.params


@pytest.mark.ranks
def test_a_model_that_is_not_there_is_told_once(tmp_path):
    done = torchrun("--model", "nowhere:make", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("there is no module 'nowhere'") == 1


def test_a_port_in_use_is_told(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = subprocess.run(
            [sys.executable, "-m", "offbeat", "bench"],
            env=environment(tmp_path, **taken), capture_output=True, text=True, timeout=100,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"no process group at 127.0.0.1:{port}" in done.stderr
    assert "--master-port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("train", "'train' is not of the form module:function"),
        (":make", "is not of the form"),
        ("nothing_here:make", "there is no module 'nothing_here'"),
        ("bench_models.deep:make", "there is no module 'bench_models.deep'"),
        ("bench_models:missing", "has no function 'missing'"),
        ("bench_models:number", "has no function 'number'"),
        ("bench_models:alone", "but it returned a Linear"),
        ("bench_models:wrong", "but it returned a tuple of Linear, int"),
    ],
)
def test_a_model_that_is_none_is_refused(path, message, tmp_path, monkeypatch):
    (tmp_path / "bench_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "bench_models", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert message in str(caught.value)


def test_an_error_inside_the_users_function_is_their_own(tmp_path, monkeypatch):
    (tmp_path / "bench_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "bench_models", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        load_model("bench_models:raises")


@pytest.mark.parametrize("params", [1e5, 1e6, 1e7])
def test_the_gpt_has_about_as_many_parameters_as_asked_for(params):
    model, loss = make_gpt(params)
    count = sum(p.numel() for p in model.parameters())
    assert params / 1.6 < count < params * 1.6
    assert 5 < loss(model).item() < 6.5  # about log(256)


def test_limits_that_are_not_kept():
    result = BenchResult(
        params=1, step_seconds=1, replicas=2, bandwidth=125e6, latency=0.002, machine=Machine(),
        strategies=[{"utilisation": 0.5}, {"utilisation": 0.8}],
    )  # fmt: skip
    assert _broken_limits(result, 1000, 2, 0.8) == []
    slow, late, low = _broken_limits(result, 1001, 1.9, 0.81)
    assert slow == "the link has 1000, and --min-mbit is 1001"
    assert late == "a collective takes 2.00 ms, and --max-latency-ms is 1.9"
    assert low == "the best utilisation is 0.80, and --min-utilisation is 0.81"


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    done = CliRunner().invoke(app, ["bench", "--json", str(tmp_path / "missing" / "bench.json")])
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr
