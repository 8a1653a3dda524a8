"""Ranks that die or fall silent in the middle of a sync, and checkpoints that go to another number of ranks."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.wire.peers import GroupPeers
from tests.ranks import rank_context, run_ranks
from tests.sync_reference import batch, everyone, flat, loss, make

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("sync_failures")]

TIMEOUT = 4


def lose_a_peer(rank: int, store: str, delay: int, how: str, answers: Any) -> None:
    """Rank 1 goes away in its third bucket; rank 0 says what it has seen."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT)
    )
    torch.manual_seed(rank)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
    local = offbeat.LocalSGD(
        torch.optim.SGD(model.parameters(), lr=0.0), model, every=4, subgroup=None, bucket_mb=0.02, delay=delay
    )
    real, calls = GroupPeers.all_reduce, [0]

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if rank == 1 and calls[0] == 3:
            if how == "dies":
                os._exit(1)
            time.sleep(120)
        return real(*args, **kwargs)

    GroupPeers.all_reduce = all_reduce
    before = flat(model)
    error = None
    start = time.monotonic()
    try:
        for _ in range(delay + 1):
            local.step()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    # Buckets were under way or done: the failure was in the middle.
    answers.put((error, torch.equal(flat(model), before), calls[0], local.steps, time.monotonic() - start))
    os._exit(0)


@pytest.mark.parametrize("how", ["dies", "falls silent"])
@pytest.mark.parametrize("delay", [0, 2])
def test_a_peer_is_lost_in_the_middle_of_a_sync(how, delay):
    context = rank_context()
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(
                target=lose_a_peer, args=(rank, os.path.join(folder, "store"), delay, how, answers), daemon=True
            )
            for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        try:
            workers[0].join(timeout=60)
            assert not workers[0].is_alive(), "it hangs"
            error, unchanged, calls, steps, seconds = answers.get()
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    assert error is not None
    assert unchanged
    assert calls >= 3
    assert steps == delay + 1
    assert seconds < 10 * TIMEOUT


def save(rank: int, world: int, options: dict[str, Any], steps: int) -> Any:
    model = make()
    local = offbeat.LocalSGD(offbeat.AdamW(model.parameters(), lr=0.01), model, subgroup=None, **options)
    for step in range(steps):
        loss(model, batch(step, rank)).backward()
        local.step()
        local.zero_grad()
    return copy.deepcopy((model.state_dict(), local.state_dict()))


def load(rank: int, world: int, options: dict[str, Any], saved: Any, steps: int) -> Any:
    model = make()
    local = offbeat.LocalSGD(offbeat.AdamW(model.parameters(), lr=0.01), model, subgroup=None, **options)
    state = saved[rank % len(saved)]
    model.load_state_dict(state[0])
    local.load_state_dict(state[1])
    start = local.steps
    for step in range(start, start + steps):
        loss(model, batch(step, rank)).backward()
        local.step()
        local.zero_grad()
    synced = [torch.equal(flat(model), one) for one in everyone(flat(model))]
    local.finish()
    return start, all(synced), flat(model), [v["step"].item() for v in local.state.values()]


@pytest.mark.parametrize(("world", "delay"), [(1, 2), (4, 0)])
def test_another_number_of_ranks_goes_on_where_two_were(world, delay):
    options = {"every": 4, "warmup": 1, "delay": delay}
    saved = run_ranks(save, 2, options, 6 if delay == 0 else 7)  # after an average, or with one under way
    results = run_ranks(load, world, options, saved, 8)
    assert [start for start, *_ in results] == [6 if delay == 0 else 7] * world
    assert all(torch.equal(one[2], results[0][2]) for one in results)
    if world == 1:  # what was under way is applied, although there is nobody left to average with
        ((track,),) = saved[0][1]["replica"][0]["tracks"]
        assert track["flight"] is not None
        forgotten = copy.deepcopy(saved)
        forgotten[0][1]["replica"][0]["tracks"][0][0]["flight"] = None
        without = run_ranks(load, world, options, forgotten, 8)
        assert not torch.equal(without[0][2], results[0][2])
    assert all(set(one[3]) == {results[0][0] + 8.0} for one in results)
    if delay == 0:
        # Everybody had the same parameters (an average had just been made) and after step 13 = 1 + 3 * 4 has again.
        assert all(synced for _, synced, *_ in results)


def through_dcp(rank: int, world: int, folder: str) -> Any:
    """torch's distributed checkpoints take the optimizer as it is, each rank under a name of its own."""
    import torch.distributed.checkpoint as dcp

    finals = []
    for stop in (False, True):
        model = make()
        local = offbeat.LocalSGD(offbeat.AdamW(model.parameters(), lr=0.01), model, every=4, subgroup=None, delay=3)
        for step in range(9):
            if stop and step == 6:
                contents = {f"model{rank}": model.state_dict(), f"optimizer{rank}": local.state_dict()}
                dcp.save(contents, checkpoint_id=folder)
                local._tracks.abandon()
                model = make(seed=3)
                local = offbeat.LocalSGD(
                    offbeat.AdamW(model.parameters(), lr=0.01), model, every=4, subgroup=None, delay=3
                )
                template = copy.deepcopy(contents)
                dcp.load(template, checkpoint_id=folder)
                model.load_state_dict(template[f"model{rank}"])
                local.load_state_dict(template[f"optimizer{rank}"])
            loss(model, batch(step, rank)).backward()
            local.step()
            local.zero_grad()
        local.finish()
        finals.append(flat(model))
    return torch.equal(*finals)


def test_distributed_checkpoints(tmp_path):
    assert run_ranks(through_dcp, 2, str(tmp_path)) == [True, True]


LEAVING = """
import sys, torch, torch.distributed as dist, offbeat

def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    inner = torch.optim.SGD(model.parameters(), lr=0.001)
    diloco = offbeat.DiLoCo(inner, model, every=8, subgroup=None, delay=5, fragments=2, codec="int4")
    for _ in range(20):
        model(torch.ones(1, 40)).sum().backward()
        diloco.step()
        diloco.zero_grad()
    dist.barrier()
    dist.destroy_process_group()

main(int(sys.argv[1]), sys.argv[2])
"""


def test_a_program_ends_in_peace(tmp_path):
    """An optimizer is dropped just before the end, while a thread of its own closes connections."""
    for turn in range(4):
        store = str(tmp_path / f"store{turn}")
        programs = [
            subprocess.Popen([sys.executable, "-c", LEAVING, str(rank), store], stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        for program in programs:
            _, said = program.communicate(timeout=60)
            assert program.returncode == 0, said[-2000:]


BEREFT = """
import os, sys, time, torch, torch.distributed as dist, offbeat

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(4)))
inner = torch.optim.SGD(model.parameters(), lr=0.001)
diloco = offbeat.DiLoCo(inner, model, every=4, delay=3, fragments=4, subgroup=None)
for step in range(40):
    if rank == 1 and step == 5:
        os._exit(7)
    model(torch.ones(1, 20)).sum().backward()
    diloco.step()
    diloco.zero_grad()
"""


def test_a_program_whose_peer_has_died_ends_with_its_error(tmp_path):
    """Not after it has waited for the peer in every round that was under way, and not in the middle of such a wait."""
    for turn in range(2):
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", BEREFT, str(rank), str(tmp_path / f"store{turn}")],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            output, _ = workers[0].communicate(timeout=40)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        assert workers[0].returncode == 1, output
        assert "ExchangeError" in output
        assert "terminate called" not in output
