"""Votes that one rank misses: it takes over what the others have in the next round."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat
from tests.harness import flat, make, miss_vote, simulated, train_step
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("votes")

nesterov = functools.partial(offbeat.SGD, lr=0.7, momentum=0.5, nesterov=True)


def anchors_of(optimizer, level):
    return torch.cat([a.reshape(-1).clone() for a in optimizer.anchors(level).values()])


def momentum_of(optimizer, level):
    state = optimizer.outers[level].state
    return torch.cat([state[a]["momentum_buffer"].reshape(-1).clone() for a in optimizer.anchors(level).values()])


def outer_parts(optimizer, levels):
    return [part(optimizer, level) for level in levels for part in (anchors_of, momentum_of)]


def failed_steps(errors):
    return [step for step, error in enumerate(errors) if error]


@pytest.mark.parametrize("outer", [nesterov, functools.partial(torch.optim.SGD, lr=0.7, momentum=0.5)])
@pytest.mark.parametrize("delay", [0, 2])
def test_lower_anchors_are_equal_again_after_a_vote_above_that_one_rank_missed(outer, delay):
    def replica(rank, peers, model):
        levels = [offbeat.Level(every=4, outer=outer), offbeat.Level(every=8, delay=delay, outer=outer)]
        optimizer = offbeat.Replica(offbeat.SGD(model.parameters(), lr=0.05), model, levels, group=peers, subgroup=None)
        errors = [train_step(optimizer, model, step, rank) for step in range(36)]
        return failed_steps(errors), outer_parts(optimizer, (0, 1))

    with miss_vote(1, 3):  # lower rounds after steps 3 and 7, and then the first upper one
        first, second = simulated(replica)
    assert first[0] == []
    assert second[0] == [7 + delay]
    assert all(map(torch.equal, first[1], second[1]))


def test_lower_anchors_are_equal_again_after_a_mean_above_that_one_rank_missed():
    def replica(rank, peers, model):
        levels = [offbeat.Level(every=4, group=2, outer=nesterov), offbeat.Level(every=8)]
        optimizer = offbeat.Replica(offbeat.SGD(model.parameters(), lr=0.05), model, levels, group=peers, subgroup=None)
        errors = [train_step(optimizer, model, step, rank) for step in range(24)]
        assert failed_steps(errors) == ([7] if rank == 1 else [])
        return *outer_parts(optimizer, (0,)), flat(model)

    with miss_vote(1, 3):
        answers = simulated(replica, 4)
    for first, second in ((0, 1), (2, 3)):
        assert all(map(torch.equal, answers[first], answers[second]))
    assert all(torch.equal(answer[2], answers[0][2]) for answer in answers)


def test_a_replica_behind_takes_over_the_anchor_has_no_weight_and_says_so():
    """In numbers: the round after the missed one is the other replica's alone."""

    def replica(rank, peers, model):
        weight = model.weight
        optimizer = offbeat.DiLoCo(
            torch.optim.SGD([weight], lr=1.0), model, every=1, outer=functools.partial(offbeat.SGD, lr=1.0),
            group=peers, subgroup=None,
        )  # fmt: skip
        history = []
        for gradient in (1.0, 2.0, 4.0):
            weight.grad = torch.full_like(weight, gradient * (rank + 1))
            with contextlib.suppress(offbeat.ExchangeError):
                optimizer.step()
            history.append((weight.item(), *(a.item() for a in optimizer.anchors().values())))
        return history

    with miss_vote(1, 2):
        first, second = simulated(replica, make=lambda: zeros(torch.nn.Linear(1, 1, bias=False)))
    # Anchors: 0, then -(1 + 2) / 2, then -1.5 - (2 + 4) / 2 on rank 0 only; then -4.5 - 4, without rank 1.
    assert first == [(-1.5, -1.5), (-4.5, -4.5), (-8.5, -8.5)]
    assert second == [(-1.5, -1.5), (-5.5, -1.5), (-8.5, -8.5)]


def zeros(model):
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


@pytest.mark.parametrize("end", ["finish", "sync"])
@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}])
def test_replicas_agree_in_the_end_although_one_missed_the_vote_of_the_last_round(end, options):
    def replica(rank, peers, model):
        optimizer = offbeat.DiLoCo(
            offbeat.SGD(model.parameters(), lr=0.05), model, every=4, group=peers, subgroup=None, **options
        )
        errors = [train_step(optimizer, model, step, rank) for step in range(9)]
        assert any(errors) == (rank == 1)
        getattr(optimizer, end)()
        assert optimizer.agreed
        return flat(model), *outer_parts(optimizer, (0,))

    with miss_vote(1, 4 if options else 2):
        first, second = simulated(replica)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(("options", "number"), [({}, 3), ({"fragments": 2}, 5), ({"fragments": 2}, 6)])
def test_finish_can_be_called_again_if_one_rank_missed_the_vote_of_its_last_round(options, number):
    def replica(rank, peers, model):
        optimizer = offbeat.DiLoCo(
            offbeat.SGD(model.parameters(), lr=0.05), model, every=4, group=peers, subgroup=None, **options
        )
        for step in range(9):
            assert train_step(optimizer, model, step, rank) is None
        with pytest.raises(offbeat.ExchangeError):
            optimizer.finish()
        optimizer.finish()
        assert optimizer.agreed
        assert optimizer.steps == 9
        return flat(model), *outer_parts(optimizer, (0,))

    with miss_vote(1, number, closes=True):
        first, second = simulated(replica)
    assert all(map(torch.equal, first, second))


def sync_after_missed_vote(rank, world):
    model = make()
    optimizer = offbeat.LocalSGD(
        offbeat.SGD(model.parameters(), lr=0.05), model, every=4, delay=2, subgroup=None, deadline=20.0
    )
    with miss_vote(1, 2, closes=True):
        for step in range(5):  # rounds begin after steps 0 and 4
            assert train_step(optimizer, model, step, rank) is None
        optimizer.sync()
        errors = [train_step(optimizer, model, step, rank) for step in range(5, 22)]
        optimizer.finish()
        return failed_steps(errors), flat(model)


@pytest.mark.ranks
def test_a_sync_connects_again_after_one_rank_has_missed_the_vote_of_a_round_before():
    (failed, a), (others, b) = run_ranks(sync_after_missed_vote, 2)
    assert failed == others == []
    assert torch.equal(a, b)


def sharded(rank, world, end):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = make()
    fully_shard(model, mesh=mesh["shard"])
    level = offbeat.Level(every=4, outer=nesterov, deadline=3.0)
    optimizer = offbeat.Replica(torch.optim.SGD(model.parameters(), lr=0.05), model, [level])
    with miss_vote(1, 2, closes=True):
        errors = [train_step(optimizer, model, step, rank // 2) for step in range(32 if end == "step" else 8)]
        if end == "step":
            failed = failed_steps(errors)
            assert max(failed, default=7) <= 11, [(step, str(errors[step])) for step in failed]
        for _ in range(3):
            try:
                optimizer.finish() if end == "finish" else optimizer.sync()
                break
            except offbeat.ExchangeError:
                continue
        else:
            raise AssertionError("they have not agreed")
    assert optimizer.agreed
    return [p.to_local() for p in model.parameters()], list(optimizer.anchors().values())


@pytest.mark.ranks
@pytest.mark.parametrize("end", ["sync", "finish", "step"])
def test_all_shards_find_that_one_rank_has_missed_a_vote(end):
    answers = run_ranks(sharded, 4, end)
    for first, second in ((0, 2), (1, 3)):  # the same shards
        for mine, theirs in zip(answers[first], answers[second], strict=True):
            assert all(map(torch.equal, mine, theirs))
