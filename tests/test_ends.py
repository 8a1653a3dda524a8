"""The end of training: ranks without data, finish(), and programs that end."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.harness import (
    agreements,
    everyone,
    flat,
    make,
    ranks,
    same_everywhere,
    sgd,
    simulated,
    train,
    train_step,
    write,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("ends")


@ranks(2, 4)
def test_ranks_without_data(rank, world):
    """Ranks run out at different steps; nobody hangs, and all end with the same parameters."""
    batches = [11, 6, 7, 2][rank] if world == 4 else [9, 4][rank]
    total = [11, 6, 7, 2][:world] if world == 4 else [9, 4]
    for delay in (0, 2):
        for weighted in (False, True):
            model = make()
            local = offbeat.LocalSGD(
                sgd(model.parameters()), model, every=4, subgroup=None, delay=delay, weighted=weighted
            )
            for step in range(batches):
                if weighted:
                    local.seen(3 + rank)
                train(model, local, range(step, step + 1), rank)
            local.finish()
            mine = flat(model)
            assert all(torch.equal(one, mine) for one in everyone(mine))
            assert local.steps == max(total)
            if delay == 0 and not weighted:
                torch.testing.assert_close(mine, uneven(total), rtol=1e-11, atol=1e-12)
    if world == 4:
        model = make()
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every={2: 2, 4: 4}, subgroup=None)
        train(model, local, range(batches), rank)
        local.finish()
        assert all(torch.equal(one, flat(model)) for one in everyone(flat(model)))


def uneven(total: list[int]) -> torch.Tensor:
    """Ranks count in the average after their last step, and no more after it."""
    models = [make() for _ in total]
    optimizers = [sgd(m.parameters()) for m in models]
    moved = [False] * len(total)
    for step in range(100):
        for r, m in enumerate(models):
            if step < total[r]:
                train(m, optimizers[r], range(step, step + 1), r)
                moved[r] = True
        if step % 4 == 0:
            counting = [flat(m) for r, m in enumerate(models) if moved[r] or step < total[r]]
            if counting:
                mean = sum(counting) / len(counting)
                for m in models:
                    write(m, mean)
            moved = [False] * len(total)
            if step >= max(total):
                return flat(models[0])
    raise AssertionError("the schedule never came to an end")


@ranks(2)
def test_finish_without_weights(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, weighted=True, subgroup=None)
    local.seen(1)
    train(model, local, range(1), rank)
    assert agreements(model, local, range(1, 3), rank) == [False, False]  # and nobody says how much was seen
    local.finish()
    assert torch.equal(*everyone(flat(model)))
    assert local.steps == 3


def test_steps_are_those_of_the_checkpoint_that_is_loaded_after_a_finish_that_failed():
    def replica(rank, peers, model):
        optimizer = offbeat.LocalSGD(
            offbeat.SGD(model.parameters(), lr=0.05), model, every=4, group=peers, subgroup=None
        )
        for step in range(4):
            train_step(optimizer, model, step, rank)
        optimizer.sync()
        weights, saved = {name: t.clone() for name, t in model.state_dict().items()}, optimizer.state_dict()
        for step in range(4, 14):
            train_step(optimizer, model, step, rank)
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
        with pytest.raises(offbeat.NotFinite):
            optimizer.finish()
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        optimizer.finish()
        return optimizer.steps

    assert simulated(replica) == [4, 4]


def test_a_rank_without_data_counts_a_round_that_failed():
    def replica(rank, peers, model):
        optimizer = offbeat.LocalSGD(
            offbeat.SGD(model.parameters(), lr=0.05), model, every=4, group=peers, subgroup=None
        )
        good = [p.detach().clone() for p in model.parameters()]
        for step in range(2 if rank else 21):
            if rank == 0 and step == 8:
                with torch.no_grad():
                    model[0].weight[0, 0] = float("nan")
            error = train_step(optimizer, model, step, rank)
            assert isinstance(error, offbeat.NotFinite) == (step == 8)
            if error:  # as a program would: go back
                with torch.no_grad():
                    for p, value in zip(model.parameters(), good, strict=True):
                        p.copy_(value)
        if rank:
            with pytest.raises(offbeat.NotFinite):
                optimizer.finish()
        optimizer.finish()
        return flat(model), optimizer.steps

    (a, steps), (b, others) = simulated(replica)
    assert torch.equal(a, b)
    assert steps == others == 21


def late_for_one_round(rank, world):
    model = make()
    optimizer = offbeat.LocalSGD(offbeat.SGD(model.parameters(), lr=0.05), model, every=4, subgroup=None, deadline=1.0)
    errors = []
    for step in range(2 if rank else 18):
        if rank == 0 and step == 8:
            time.sleep(3)
        errors.append(train_step(optimizer, model, step, rank))
    if rank:
        with pytest.raises(offbeat.ExchangeError):
            optimizer.finish()
    optimizer.finish()
    return flat(model), [step for step, error in enumerate(errors) if error], optimizer.steps


@pytest.mark.ranks
def test_a_rank_without_data_meets_one_that_was_late():
    (a, failed, steps), (b, _, others) = run_ranks(late_for_one_round, 2)
    assert torch.equal(a, b)
    assert failed == [8]
    assert steps == others == 18


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


@pytest.mark.timeout(400)
def test_a_program_ends_in_peace(tmp_path):
    """An optimizer is dropped just before the end, while a thread of its own closes connections."""
    for turn in range(2):
        store = str(tmp_path / f"store{turn}")
        programs = [
            subprocess.Popen([sys.executable, "-c", LEAVING, str(rank), store], stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        for program in programs:
            _, said = program.communicate(timeout=150)
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


@pytest.mark.timeout(400)
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
            output, _ = workers[0].communicate(timeout=150)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        assert workers[0].returncode == 1, output
        assert "ExchangeError" in output
        assert "terminate called" not in output


# Issue: leaving without finish()


GOING = """
import sys, torch, torch.distributed as dist, offbeat

rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
inner = torch.optim.SGD(model.parameters(), lr=0.001)
local = offbeat.LocalSGD(inner, model, every=4, delay=2, subgroup=None)
for _ in range(3 if how == "agreed" else 6):
    (model(torch.ones(1, 4)) * (rank + 1)).sum().backward()
    local.step()
    local.zero_grad()
if how == "saved":
    local.state_dict()
elif how != "left":
    getattr(local, how)()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["left", "finish", "sync", "saved"])
def test_leaving_while_replicas_differ_warns_unless_that_is_saved(how, tmp_path):
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", GOING, str(rank), str(tmp_path / "store"), how], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for program in programs:
        _, said = program.communicate(timeout=150)
        assert program.returncode == 0, said
        assert ("LocalSGD ends while replicas differ" in said) == (how == "left"), said


# finish() beside DDP


@ranks(2)
def test_finish_under_ddp_after_no_batch_or_one_after_warmup(rank, world):
    """DDP averages gradients in its first passes, before it knows that they are averaged no more."""
    for warmup in (0, 2):
        for batches in (0, 1, 2):
            model = make()
            ddp = DistributedDataParallel(model)
            local = offbeat.LocalSGD(sgd(model.parameters()), ddp, every=3, warmup=warmup, subgroup=None)
            train(ddp, local, range(warmup + (batches if rank else 5)), rank)
            local.finish()
            assert same_everywhere(flat(model)), (warmup, batches)
            assert local.steps == warmup + 5


def finish_in_warmup(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, warmup=20, subgroup=None)
    train(model, local, range(2), rank)
    if rank == 0:
        with pytest.raises(RuntimeError, match="called after 2 steps, while gradients are averaged over all ranks"):
            local.finish()
        return flat(model)
    return None


@pytest.mark.ranks
def test_finish_in_warmup_raises_if_the_others_go_on():
    run_ranks(finish_in_warmup, 2)


@ranks(2)
def test_finish_in_warmup_on_all_ranks(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, warmup=20, subgroup=None)
    train(model, local, range(2), rank)
    local.finish()
    assert local.agreed
    assert same_everywhere(flat(model))


@pytest.mark.parametrize("end", ["finish", "sync"])
@pytest.mark.parametrize(("weights", "expected"), [((1.0, 3.0), 0.75), ((1.0, 1.0), 0.5)])
def test_a_mean_in_flight_that_nobody_has_trained_since_lands_without_mixing(end, weights, expected):
    """Rank r holds r; the round begins after step 3 (phase 4), and the end comes right after it."""

    def replica(rank, peers, model):
        torch.nn.init.constant_(model.weight, float(rank))
        local = offbeat.Replica(
            torch.optim.SGD(model.parameters(), lr=0.0), model, offbeat.Level(every=4, delay=2, mixing=0.9),
            weighted=True, group=peers, subgroup=None,
        )  # fmt: skip
        for _ in range(4):
            local.seen(weights[rank])
            local.step()
        getattr(local, end)()
        return model.weight.item()

    answers = simulated(replica, make=lambda: torch.nn.Linear(1, 1, bias=False))
    assert answers == pytest.approx([expected, expected], abs=1e-7)


def test_ranks_with_unequal_steps_and_a_mean_in_flight_end_at_the_mean():
    """One rank has 4 steps and the other 5: the last step counts, and the mean of both is where they end."""

    def replica(rank, peers, model):
        torch.nn.init.constant_(model.weight, float(rank))
        local = offbeat.LocalSGD(
            torch.optim.SGD(model.parameters(), lr=0.0), model, every=4, delay=2, mixing=0.9, group=peers, subgroup=None
        )
        for _ in range(5 if rank else 4):
            local.step()
        local.finish()
        return model.weight.item()

    first, second = simulated(replica, make=lambda: torch.nn.Linear(1, 1, bias=False))
    assert first == second == pytest.approx(0.5, abs=1e-6)


@ranks(2)
def test_join_says_what_takes_its_place(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, subgroup=None)
    with pytest.raises(RuntimeError, match=r"call finish\(\) on every rank"):
        Join([local])
