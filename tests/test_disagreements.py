"""Ranks that differ: the same error on each of them, before anything is changed."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.harness import (
    batch,
    everyone,
    flat,
    loss,
    make,
    ranks,
    sgd,
    small,
    train,
    train_step,
)

pytestmark = pytest.mark.xdist_group("disagreements")


@ranks(2)
def test_ranks_that_differ(rank, world):
    """In shapes, dtypes, names, requires_grad, or steps: the same error everywhere, and nothing is changed."""

    def check(module: nn.Module, words: str, optimizer: Any = None) -> None:
        local = optimizer or offbeat.LocalSGD(torch.optim.SGD(module.parameters(), lr=0.0), module, subgroup=None)
        before = [p.detach().clone() for p in module.parameters()]
        with pytest.raises(offbeat.Disagreement, match=words) as caught:
            local.step()
        said: list[Any] = [None] * world
        dist.all_gather_object(said, str(caught.value))
        assert said[0] == said[1]
        assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))

    check(nn.Linear(3, 4 + rank), r"'weight' differs.*rank 0: .*\(4, 3\).*rank 1: .*\(5, 3\)")
    check(nn.Linear(3, 4, dtype=(torch.float32, torch.float64)[rank]), "float32.*float64")
    check(nn.Linear(3, 4, bias=rank == 0), "rank 0: 'bias'.*rank 1: nothing more")
    module = nn.Linear(3, 4)
    module.weight.requires_grad_(rank == 0)
    check(module, "rank 0: 'weight'.*rank 1: 'bias'")
    check(nn.Sequential(nn.Linear(3, 4)) if rank else nn.Linear(3, 4), "the names differ")
    module = nn.Linear(3, 4)
    local = offbeat.LocalSGD(torch.optim.SGD(module.parameters(), lr=0.0), module, every=2, subgroup=None)
    local._schedule.step = 2 * rank
    check(module, "rank 0 at step 0, rank 1 at step 2", local)
    averager = offbeat.PeriodicModelAverager(2)
    with pytest.raises(offbeat.Disagreement, match=r"'parameter 0' differs"):
        averager.average_parameters([nn.Parameter(torch.zeros(2 + rank))])
    # Found later too: parameters are compared at every sync.
    module = nn.Linear(3, 4)
    local = offbeat.LocalSGD(torch.optim.SGD(module.parameters(), lr=0.0), module, every=1, subgroup=None, delay=1)
    local.step()
    local.step()
    if rank == 1:
        local.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    local.step()
    with pytest.raises(offbeat.Disagreement, match="rank 1: 'parameter 0 of group 1'"):
        local.step()


@ranks(2)
def test_options_that_differ(rank, world):
    for options, words in (
        ({"weighted": bool(rank)}, "weighted is not the same on every rank: False on rank 0, True on rank 1"),
        ({"bucket_mb": 1 + rank}, "bucket_mb"),
        ({"reduce_dtype": (None, torch.float64)[rank]}, "reduce_dtype"),
        ({"warmup": rank}, "warmup"),
        ({"every": 4 + rank}, "every"),
        ({"delay": rank}, "delay"),
        ({"state": ("keep", "reset")[rank]}, "state"),
        ({"every": {2: 1, 4 + rank: 2}}, "every of level 1 is not the same on every rank: 4 on rank 0, 5 on rank 1"),
    ):
        model = make()
        with pytest.raises(offbeat.Disagreement, match=words):
            offbeat.LocalSGD(sgd(model.parameters()), model, subgroup=None, **options)


@ranks(4)
def test_ddp_over_a_node_alone(rank, world):
    """It makes only its own ranks equal, and warm-up averages over all: replicas must begin alike."""
    node, _ = dist.new_subgroups(group_size=2)
    model = make(seed=rank // 2)
    ddp = DistributedDataParallel(model, process_group=node)
    local = offbeat.LocalSGD(sgd(model.parameters()), ddp, every=3, warmup=2, subgroup=node)
    loss(ddp, batch(0, rank)).backward()
    with pytest.raises(offbeat.Disagreement, match=r"'0\.weight' of ranks 2, 3 differs from rank 0's"):
        local.step()


@ranks(2)
def test_frozen_on_one_rank_during_warmup(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, warmup=9, subgroup=None)
    train(model, local, range(2), rank)
    model[0].weight.requires_grad_(rank == 0)
    loss(model, batch(2, rank)).backward()
    before = flat(model)
    with pytest.raises(offbeat.Disagreement, match=r"on rank 0: '0\.weight'"):
        local.step()
    assert torch.equal(flat(model), before)


@ranks(2)
def test_closures_that_differ(rank, world):
    """A loss on one rank and None on another: both hear of it, and neither waits."""
    for wrap in (lambda model: model, DistributedDataParallel):
        model = make()
        module = wrap(model)
        local = offbeat.LocalSGD(sgd(model.parameters()), module, every=4, warmup=3, subgroup=None)

        def closure(module=module, local=local):
            local.zero_grad()
            found = loss(module, batch(0, rank))
            found.backward()
            return answers[rank](found)

        before = flat(model)
        for other in (lambda found: None, lambda found: {"loss": found}):
            answers = [lambda found: found, other]
            with pytest.raises(offbeat.Disagreement, match=r"rank 0: a number, rank 1: (None|neither)"):
                local.step(closure)
            assert torch.equal(flat(model), before)
        for answers in ([torch.Tensor.item] * 2, [lambda found: found] * 2, [lambda found: [found]] * 2):
            given = answers[rank](sum(loss(model, batch(0, r)) for r in range(world)) / world)
            mean = local.step(closure)
            assert type(mean) is type(given)
            if not isinstance(given, list):  # what is no number stays as it is
                torch.testing.assert_close(mean, given.detach() if isinstance(given, torch.Tensor) else given)
        assert local.steps == 3
        assert torch.equal(*everyone(flat(model)))


@ranks(2)
def test_a_closure_on_one_rank_alone(rank, world):
    """Both hear of it, and neither waits."""
    for wrap, first in ((lambda model: model, 0), (lambda model: model, 2), (DistributedDataParallel, 0)):
        model = make()
        module = wrap(model)
        local = offbeat.LocalSGD(sgd(model.parameters()), module, every=4, warmup=5, subgroup=None)

        def closure(module=module, local=local):
            local.zero_grad()
            found = loss(module, batch(0, rank))
            found.backward()
            return found

        for step in range(first):
            train(module, local, range(step, step + 1), rank)
        before = flat(model)
        with pytest.raises(offbeat.Disagreement, match="closure is not the same on every rank: True on rank 0, False"):
            local.step(closure) if rank == 0 else (closure(), local.step())
        assert torch.equal(flat(model), before)


@ranks(4)
def test_levels_that_leave_a_rank_out(rank, world):
    """Every rank hears of it, also those whose own groups are right."""
    group, model = dist.new_group([0, 1, 2]), make()
    levels = [offbeat.Level(every=2, group=group), offbeat.Level(every=4)]
    words = "rank 3 is not in the group of a level" if rank == 3 else "rank 3 cannot use the levels"
    with pytest.raises(ValueError, match=words):
        offbeat.Replica(sgd(model.parameters()), model, levels, subgroup=None)
    if rank == 3:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            offbeat.LocalSGD(sgd(model.parameters()), model, group=group, subgroup=None)


@pytest.mark.parametrize("delay", [0, 2])
def test_inner_learning_rates_that_differ_warn_once_by_name(delay):
    def replica(rank, peers, model):
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        local = offbeat.LocalSGD(inner, model, every=4, delay=delay, group=peers, subgroup=None)
        for step in range(16):
            if step == 6 and rank == 1:
                inner.param_groups[0]["lr"] = 0.05
            train_step(local, model, step, rank)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        offbeat.Simulation(2, timeout=20).run(replica, make=small)
    told = [str(warning.message) for warning in caught if "is not the same on every rank" in str(warning.message)]
    assert len(told) == 2  # once on each rank
    assert told[0] == told[1]
    assert re.search(r"'?lr'? .*0\.1 on rank 0, 0\.05 on rank 1", told[0]), told
