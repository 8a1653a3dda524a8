"""Rounds that fail: nothing is half-changed, nothing is lost, and the next round works."""

from __future__ import annotations

import functools
import os
import random
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat
from offbeat.replicas import background, board, landing, round
from offbeat.wire import connect
from offbeat.wire.limit import within
from offbeat.wire.peers import GroupPeers
from tests.harness import (
    batch,
    everyone,
    failing_reduce,
    flat,
    loss,
    make,
    ranks,
    same_everywhere,
    sgd,
    simulated,
    small,
    train_step,
    wait_for_flight,
    write,
)
from tests.ranks import rank_context, run_ranks

pytestmark = pytest.mark.xdist_group("rounds_fail")


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)


nesterov = functools.partial(offbeat.SGD, lr=0.7, momentum=0.5, nesterov=True)


@ranks(2)
def test_collectives_that_fail(rank, world):
    """In the first, a middle and the last bucket, at once and late: parameters are as they were before the round."""
    module = Norm()
    for p in (*module.parameters(), module.norm.running_mean):
        nn.init.normal_(p, generator=torch.Generator().manual_seed(rank))
    kept = [t.clone() for t in (*module.parameters(), *module.buffers())]

    def unchanged():
        return all(torch.equal(a, b) for a, b in zip([*module.parameters(), *module.buffers()], kept, strict=True))

    def local_sgd(**options):
        inner = torch.optim.SGD(module.parameters(), lr=0.0)
        return offbeat.LocalSGD(inner, module, subgroup=None, bucket_mb=0.0002, **options)

    for at in (1, 2, 3, 5):
        local = local_sgd(every=2)
        with failing_reduce(at), pytest.raises(dist.DistBackendError, match="network"):
            local.step()
        assert unchanged(), at
        assert local.steps == 1  # the step was made
        dist.barrier()
    local = local_sgd(every=3, delay=2)
    with failing_reduce(4):
        local.step()
        local.step()
        with pytest.raises(dist.DistBackendError, match="network"):
            local.step()
    assert unchanged()
    dist.barrier()
    mean = sum(everyone(flat(module))) / 2
    for _ in range(3):  # and the next one works, once the network is back
        local.step()
    torch.testing.assert_close(flat(module), mean)
    write(module, torch.cat([t.reshape(-1) for t in kept[: len(list(module.parameters()))]]))
    averager = offbeat.PeriodicModelAverager(2, bucket_mb=0.0002)
    with failing_reduce(2), pytest.raises(dist.DistBackendError, match="network"):
        averager.average_parameters(module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), kept, strict=False))
    assert averager.step == 1
    dist.barrier()


@ranks(4)
def test_weights_come_back_after_a_late_average_that_failed(rank, world):
    """What was trained before it counts in the next round: 20 steps' worth on even ranks, 60 on odd ones."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, float(rank))
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    level = offbeat.Level(every=2, delay=1, group=2)
    local = offbeat.Replica(inner, model, [level, offbeat.Level(every=6)], subgroup=None, weighted=True)
    failed = []
    for step in range(4):
        local.seen(30 if step < 2 and rank % 2 else 10)
        if step == 1:
            with failing_reduce():
                local.step()
                wait_for_flight(local)
        else:
            try:
                local.step()
            except dist.DistBackendError:
                failed.append(step)
        dist.barrier()
    assert failed == [2]
    local.sync()  # lands the round of pairs that began after step 3, with weights 40 and 80
    pairs = [(40 * 0 + 80 * 1) / 120, (40 * 2 + 80 * 3) / 120]
    assert model.weight.item() == pytest.approx(sum(pairs) / 2)


@ranks(2)
def test_one_rank_fails_to_land(rank, world):
    """It begins the next average all the same, and the two do not lose each other."""
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=2, subgroup=None, delay=2)
    real = landing.land

    def no_room(*args, **options):
        raise MemoryError("no room")

    failed = []
    for step in range(9):
        loss(model, batch(step, rank)).backward()
        if step == 2 and rank == 0:
            board.land = no_room
        try:
            local.step()
        except MemoryError:
            failed.append(step)
        board.land = real
        local.zero_grad()
    assert failed == ([2] if rank == 0 else [])
    local.finish()
    assert same_everywhere(flat(model))


@ranks(2)
def test_one_parameter_twice(rank, world):
    """Given twice, it is averaged once, and comes back after a failure."""
    p = nn.Parameter(torch.full((300,), float(rank)))
    others = [nn.Parameter(torch.full((300,), float(rank))) for _ in range(9)]
    averager = offbeat.PeriodicModelAverager(2, bucket_mb=0.002)
    with failing_reduce(4, error=RuntimeError("gone")), pytest.raises(RuntimeError, match="gone"):
        averager.average_parameters([p, p, *others, p])
    assert all((same == rank).all() for same in (p, *others))
    dist.barrier()
    averager = offbeat.PeriodicModelAverager(2, bucket_mb=0.002)
    averager.average_parameters([p, p, *others, p])
    assert all((same == 0.5).all() for same in (p, *others))


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


def test_a_round_that_failed_below_does_not_keep_the_one_above_from_landing(monkeypatch):
    real = round.reduce

    def reduce(offer, meeting, verdict):
        if offer.fragment.place == 0 and offer.step == 7 and meeting.peers.ranks[0] == 0:
            raise offbeat.ExchangeError("the link of this site was cut")
        return real(offer, meeting, verdict)

    monkeypatch.setattr(round, "reduce", reduce)

    def replica(rank, peers, model):
        low = offbeat.Level(every=2, group=2, delay=2, outer=nesterov)
        top = offbeat.Level(every=4, delay=1, outer=nesterov)
        optimizer = offbeat.Replica(
            offbeat.SGD(model.parameters(), lr=0.05), model, [low, top], group=peers, subgroup=None
        )
        errors, anchors = [], []
        for step in range(20):
            errors.append(train_step(optimizer, model, step, rank))
            anchors.append(torch.cat([a.reshape(-1).clone() for a in optimizer.anchors(1).values()]))
        return [step for step, error in enumerate(errors) if error], anchors

    answers = simulated(replica, 4)
    assert [failed for failed, _ in answers] == [[8], [8], [], []]
    for _, anchors in answers[1:]:
        assert all(map(torch.equal, anchors, answers[0][1]))


def sharded_levels(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    fully_shard(model, mesh=mesh["shard"])
    # Deadlines of their own, so that levels have connections of their own.
    low = offbeat.Level(every=1, deadline=5.0, phase=1)
    top = offbeat.Level(every=4, delay=3, deadline=6.0, fragments=2, outer=nesterov)
    optimizer = offbeat.Replica(torch.optim.SGD(model.parameters(), lr=0.05), model, [low, top])
    draw, real = random.Random(rank), background.exchange

    def exchange(*args):
        time.sleep(draw.uniform(0, 0.05))  # as on a busy machine
        return real(*args)

    background.exchange = exchange
    return [train_step(optimizer, model, step, rank // 2) for step in range(20)]


@pytest.mark.ranks
@pytest.mark.xdist_group("sync_one_sided")
def test_levels_of_sharded_replicas_take_turns_with_the_connection_of_all_shards():
    assert run_ranks(sharded_levels, 4) == [[None] * 20] * 4


def test_what_takes_too_long_raises():
    assert within(20, lambda: 3, "that") == 3
    with pytest.raises(ZeroDivisionError):
        within(20, lambda: 1 / 0, "that")
    let_go = threading.Event()
    with pytest.raises(offbeat.ExchangeError, match=r"that: the store .* did not answer within 0.1 s"):
        within(0.1, lambda: let_go.wait(20), "that")
    let_go.set()


def slow_store(rank, world):
    model = make()
    optimizer = offbeat.LocalSGD(
        offbeat.SGD(model.parameters(), lr=0.05), model, every=4, delay=2, subgroup=None, deadline=0.5
    )
    for membership in optimizer._memberships:
        membership.close()
    let_go = threading.Event()
    connect._torch.default_store = lambda: let_go.wait(30)  # as if its host had stopped
    connect.SHORTEST, connect.SECONDS_BEYOND = timedelta(seconds=0.2), 0.2
    errors = [train_step(optimizer, model, step, rank) for step in range(3)]
    saved = optimizer.state_dict()["step"]
    let_go.set()
    return [type(error).__name__ for error in errors], saved


@pytest.mark.ranks
@pytest.mark.xdist_group("sync_one_sided")
def test_a_store_that_does_not_answer_is_not_waited_for_for_ever():
    for errors, saved in run_ranks(slow_store, 2):
        assert errors == ["NoneType", "NoneType", "ExchangeError"]
        assert saved == 3


def test_several_failures_of_one_step_are_raised_together():
    """Rounds of two levels after one step, both of which cannot be: neither error is dropped."""

    def replica(rank, peers, model):
        levels = [offbeat.Level(every=1, group=1, outer=nesterov), offbeat.Level(every=2, outer=nesterov)]
        optimizer = offbeat.Replica(offbeat.SGD(model.parameters(), lr=0.05), model, levels, group=peers, subgroup=None)
        assert train_step(optimizer, model, 0, rank) is None
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
        return train_step(optimizer, model, 1, rank), optimizer.steps

    for error, steps in simulated(replica):
        assert isinstance(error, offbeat.NotFinite)
        assert [type(part) for part in error.errors] == [offbeat.NotFinite] * 2
        assert all(str(part) in str(error) for part in error.errors)
        assert str(error).startswith("2 things failed")
        assert steps == 2


def test_failures_of_rounds_in_flight_are_raised_together_at_the_end():
    """Both fragments have failed; sync() works and warns of both."""

    def replica(rank, peers, model):
        optimizer = offbeat.DiLoCo(
            offbeat.SGD(model.parameters(), lr=0.05), model, every=2, fragments=2, delay=2, group=peers, subgroup=None
        )
        good = {name: t.clone() for name, t in model.state_dict().items()}
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float("nan"))
        for step in range(2):
            assert train_step(optimizer, model, step, rank) is None
        model.load_state_dict(good)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                optimizer.sync()
            except offbeat.NotFinite as error:
                return len(getattr(error, "errors", [error]))
        text = " ".join(str(warning.message) for warning in caught)
        return text.count("NaN or infinite")

    (count,) = offbeat.Simulation(1).run(replica, make=small)
    assert count == 2
