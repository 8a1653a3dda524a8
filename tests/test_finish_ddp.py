"""``finish()`` under DistributedDataParallel on a rank with no batch, one, or more; and where it must raise."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.harness import adamw, batch, everyone, flat, loss, make, sgd
from tests.ranks import run_ranks
from tests.scenarios import Scenarios

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("finish_ddp")]
scenario = Scenarios(__name__)

#: The batches of both ranks, and backward passes a step, each of which DDP counts.
CASES = [((5, 0), 1), ((0, 5), 1), ((1, 5), 1), ((2, 5), 1), ((1, 0), 1), ((0, 0), 1), ((5, 0), 2), ((0, 4), 2)]
KINDS = {
    "every step": lambda inner, module, **options: offbeat.LocalSGD(inner, module, every=1, **options),
    "LocalSGD": lambda inner, module, **options: offbeat.LocalSGD(inner, module, every=3, **options),
    "DiLoCo": lambda inner, module, **options: offbeat.DiLoCo(inner, module, every=2, delay=1, **options),
}


def epochs(module, optimizer, counts, rank, passes):
    """Two epochs, in the second of which the other rank has less data. Returns parameters after each."""
    rows = []
    for epoch in (counts, counts[::-1]):
        for step in range(epoch[rank]):
            for part in range(passes):
                loss(module, batch(10 * step + part, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        rows.append(flat(module))
    return rows


def expected(counts, kind, passes):
    """The same in a simulation, where there is no DDP."""

    def run(rank, peers, model):
        return epochs(model, kind(adamw(model.parameters()), model, group=peers, subgroup=None), counts, rank, passes)

    return offbeat.Simulation(2).run(run, make=make)


@scenario(2)
def test_ranks_with_no_batch_one_or_more(rank, world):
    for name, kind in KINDS.items():
        for counts, passes in CASES:
            ddp = DistributedDataParallel(make(), bucket_cap_mb=0.0005)
            replica = kind(adamw(ddp.parameters()), ddp, subgroup=None)
            found = epochs(ddp, replica, counts, rank, passes)
            for ours, theirs in zip(found, expected(counts, kind, passes)[rank], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=f"{name} {counts} {passes}")
                assert torch.equal(*everyone(ours))


@scenario(2)
def test_overlapped_and_with_gradients_in_buckets(rank, world):
    """Nothing is stepped, and no gradient changes, on the rank that has no batch."""
    for counts in ((5, 0), (0, 5)):
        reference = expected(counts, KINDS["DiLoCo"], 1)[rank]
        for overlapped, views in ((False, True), (True, False), (True, True)):
            ddp = DistributedDataParallel(make(), bucket_cap_mb=0.0005, gradient_as_bucket_view=views)
            inner = adamw(ddp.parameters())
            if overlapped:
                offbeat.overlap(inner, ddp)
            replica = offbeat.DiLoCo(inner, ddp, every=2, delay=1, subgroup=None)
            for ours, theirs in zip(epochs(ddp, replica, counts, rank, 1), reference, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@scenario(2)
def test_gradients_of_a_rank_that_is_done_stay(rank, world):
    ddp = DistributedDataParallel(make())
    replica = offbeat.LocalSGD(sgd(ddp.parameters()), ddp, every=2, subgroup=None)
    for p in ddp.parameters():
        p.grad = torch.full_like(p, 3.0) if rank else None
    if rank == 0:
        for step in range(4):
            loss(ddp, batch(step, rank)).backward()
            replica.step()
            replica.zero_grad()
    replica.finish()
    assert all((p.grad == 3.0).all() if rank else p.grad is None for p in ddp.parameters())


@scenario(2)
def test_one_step_of_warm_up(rank, world):
    """The second batch is the first local one."""
    for counts in ((6, 1), (1, 6)):
        ddp = DistributedDataParallel(make())
        replica = offbeat.DiLoCo(sgd(ddp.parameters()), ddp, every=2, warmup=1, subgroup=None)
        for step in range(counts[rank]):
            loss(ddp, batch(step, rank)).backward()
            replica.step()
            replica.zero_grad()
        replica.finish()
        assert replica.steps == 6
        assert torch.equal(*everyone(flat(ddp)))


@scenario(2)
def test_all_ranks_may_end_in_warm_up_together(rank, world):
    ddp = DistributedDataParallel(make())
    replica = offbeat.LocalSGD(sgd(ddp.parameters()), ddp, every=2, warmup=9, subgroup=None)
    for step in range(3):
        loss(ddp, batch(step, rank)).backward()
        replica.step()
        replica.zero_grad()
    replica.finish()
    assert replica.steps == 3
    assert torch.equal(*everyone(flat(ddp)))


def test_finish_in_warm_up_raises():
    def run(rank, peers, model):
        replica = offbeat.LocalSGD(sgd(model.parameters()), model, every=2, warmup=9, group=peers, subgroup=None)
        for step in range(5 - 2 * rank):
            loss(model, batch(step, rank)).backward()
            replica.step()
            replica.zero_grad()
        replica.finish()

    with pytest.raises(RuntimeError, match=r"after 3 steps, .* still warm-up, .* Agree on the number of steps"):
        offbeat.Simulation(2).run(run, make=make)


def end_inside_a_node(rank, world):
    pairs = [dist.new_group(pair, timeout=timedelta(seconds=20)) for pair in ([0, 1], [2, 3])]
    model = make()
    replica = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, subgroup=pairs[rank // 2])
    try:
        for step in range(2 if rank == 1 else 9):
            loss(model, batch(step, rank)).backward()
            replica.step()
            replica.zero_grad()
        replica.finish()
    except (RuntimeError, offbeat.ExchangeError) as error:
        return type(error).__name__, str(error), replica.steps
    return None


def test_finish_inside_a_node_raises_and_ends_the_others_rounds():
    alone, caller, *others = run_ranks(end_inside_a_node, 4)
    assert caller[0] == "RuntimeError"
    assert "after 2 steps, while gradients are averaged inside its node" in caller[1]
    assert alone is not None  # it waited for the caller's gradients
    assert [(kind, steps) for kind, _, steps in others] == [("ExchangeError", 5)] * 2


def static_graph(rank, world, counts):
    ddp = DistributedDataParallel(
        make(), static_graph=True, process_group=dist.new_group(timeout=timedelta(seconds=25))
    )
    replica = offbeat.DiLoCo(sgd(ddp.parameters()), ddp, every=2, subgroup=None)
    try:
        for step in range(counts[rank]):
            loss(ddp, batch(step, rank)).backward()
            replica.step()
            replica.zero_grad()
        replica.finish()
    except RuntimeError as error:
        return str(error)
    return flat(ddp)


@pytest.mark.parametrize("counts", [(6, 1), (1, 6), (0, 0), (6, 0)])
def test_static_graph(counts):
    """It learns the graph of its first batch, so that a rank needs one if another has one."""
    one, two = run_ranks(static_graph, 2, counts)
    if counts == (6, 0):
        assert "had no batch, while DistributedDataParallel(static_graph=True)" in two
        assert isinstance(one, str)
    else:
        assert torch.equal(one, two)


def end_while_all_are_asked(rank, world, counts):
    group = dist.new_group(timeout=timedelta(seconds=15))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(make(), find_unused_parameters=True, process_group=group)
        replica = offbeat.LocalSGD(sgd(ddp.parameters()), ddp, every=4, subgroup=None)
    try:
        for step in range(counts[rank]):
            loss(ddp, batch(step, rank)).backward()
            replica.step()
            replica.zero_grad()
        replica.finish()
    except RuntimeError as error:
        return str(error)
    return flat(ddp)


@pytest.mark.parametrize("counts", [(3, 3), (3, 9)])
def test_find_unused_parameters_needs_equally_many_steps(counts):
    one, two = run_ranks(end_while_all_are_asked, 2, counts)
    if counts == (3, 3):
        assert torch.equal(one, two)
    else:
        assert "find_unused_parameters=True makes DistributedDataParallel ask all ranks" in one
        assert isinstance(two, str)  # it waited for the other in backward
