"""Every script in examples/ runs to its end, on as many ranks as it is for, and prints what it promises."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import runpy
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tests.ranks import rank_context

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SECONDS = 90

Run = tuple[str, ...]  # a script and its arguments
ALONE: list[Run] = [
    ("faster_step.py", "--steps", "12", "--layers", "20"),
    ("less_memory.py", "--steps", "3", "--layers", "3", "--width", "128"),
    ("custom_rule.py", "--steps", "60"),
    ("explicit_gradients.py", "--steps", "40"),
    ("meta_learning.py", "--steps", "60"),
]
TWO: list[Run] = [
    ("less_memory.py", "--steps", "3", "--layers", "3", "--width", "128"),
    ("recipe.py", "--method", "ddp", "--steps", "64"),
    ("recipe.py", "--method", "recipe", "--steps", "64"),
    ("recipe.py", "--method", "short", "--steps", "64"),
    ("slow_link.py", "--method", "ddp", "--steps", "60"),
    ("slow_link.py", "--method", "local-sgd", "--steps", "60"),
    ("slow_link.py", "--method", "diloco", "--steps", "60"),
    ("muon.py", "--parallel", "ddp", "--steps", "12"),
    ("muon.py", "--parallel", "fsdp2", "--steps", "12"),
    ("migrate_torch_distributed.py", "--steps", "20"),
    ("resume.py", "--steps", "42"),
]
FOUR: list[Run] = [("several_sites.py", "--steps", "34", "--ranks-per-site", "2")]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _main(rank, world, runs, ports, results):
    """One process of a launcher's, for one script after the other."""
    import torch

    faulthandler.dump_traceback_later(SECONDS - 10, exit=True)  # who hangs says where
    torch.set_num_threads(1)
    answers = []
    for (script, *words), port in zip(runs, ports, strict=True):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
        sys.argv = [script, *words]
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except BaseException:
            results.put((rank, f"{script}:\n{traceback.format_exc()}", answers))
            return
        answers.append(out.getvalue())
    results.put((rank, None, answers))


def run_examples(runs, world):
    """What each run printed, by rank and run."""
    context = rank_context()
    results = context.Queue()
    ports = [free_port() for _ in runs]
    workers = [context.Process(target=_main, args=(r, world, runs, ports, results), daemon=True) for r in range(world)]
    for worker in workers:
        worker.start()
    try:
        answers = {}
        for _ in workers:
            rank, problem, printed = results.get(timeout=SECONDS)
            assert problem is None, f"rank {rank}: {problem}"
            answers[rank] = printed
        return [answers[rank] for rank in range(world)]
    finally:
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.kill()
                worker.join()


def losses(text):
    return [float(one) for one in re.findall(r"loss (?:after \d+ inner steps )?(\d+\.\d+)", text)]


def test_every_example_is_run_here_and_is_short():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    with_a_lighthouse = {"elastic.py"}  # run by tests/test_elastic.py
    assert scripts - with_a_lighthouse == {run[0] for run in ALONE + TWO + FOUR}
    for name in scripts:
        assert len((EXAMPLES / name).read_text().splitlines()) < 100, name


@pytest.mark.ranks
def test_examples_in_one_process():
    ((faster, memory, rule, explicit, meta),) = run_examples(ALONE, 1)
    torchs, fused, ours = losses(faster)
    assert torchs == pytest.approx(fused, rel=1e-3)
    assert torchs == pytest.approx(ours, rel=1e-3)
    after, overlapped = losses(memory)
    assert after == overlapped
    assert [float(mb) > 0 for mb in re.findall(r"([\d.]+) MB", memory)] == [True, False]
    assert all(float(one) < 1e-4 for one in re.findall(r"largest difference (\S+)", rule))
    assert losses(explicit)[-1] < losses(explicit)[0] / 2
    assert losses(meta)[-1] < losses(meta)[0]


@pytest.mark.ranks
def test_examples_on_two_ranks():
    printed = run_examples(TWO, 2)
    memory, *recipes, ddp, local, diloco, muon, muon_sharded, migrate, resume = printed[0]
    rows = [re.search(r"loss ([\d.]+), ([\d.]+) kB a step", text).groups() for text in recipes]
    assert all(float(value) < 2.5 for value, _ in rows)  # 3.47 without training
    with_ddp, recipe, short = (float(sent) for _, sent in rows)
    assert with_ddp > 3 * short > 3 * recipe
    after, overlapped = losses(memory)
    assert after == overlapped
    sent = [float(re.search(r"([\d.]+) MB sent", one)[1]) for one in (ddp, local, diloco)]
    # Warm-up is counted, too.
    assert sent[0] > 2.5 * sent[1] > 2.5 * sent[2]
    for text in (ddp, local, diloco):
        assert losses(text)[-1] < losses(text)[0] / 5
    for text in (muon, muon_sharded):
        assert losses(text)[-1] < losses(text)[0] / 2
    assert losses(muon)[-1] == pytest.approx(losses(muon_sharded)[-1], rel=0.1)
    assert "a hidden matrix" in muon
    assert [float(one) for one in re.findall(r"difference from torch (\S+)", migrate)] == pytest.approx(
        [0, 0, 0], abs=1e-6
    )
    assert all("same bits: True" in by_rank[-1] for by_rank in printed)
    assert "same bits: True" in resume


@pytest.mark.ranks
def test_examples_on_four_ranks():
    printed = run_examples(FOUR, 4)
    between = [float(one) for one in re.findall(r"between (\S+)", printed[0][0])]
    assert 0 in between[2:]
    assert max(between) > 1e-4
    assert all("spread after finish() 0.0e+00" in texts[0] for texts in printed)


@pytest.mark.ranks
def test_an_example_as_torchrun_starts_it():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "slow_link.py"), "--steps", "12"]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert "MB sent a step" in done.stdout
