"""Replicas in one process, over a simulated network: the same bits as real processes."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch

import offbeat
from tests.ranks import run_ranks
from tests.sync_reference import adamw, batch, flat, loss, make

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("simulation")]

#: Ranks in one process share torch's generator.
SEEDING = threading.Lock()

adam = functools.partial(offbeat.Adam, lr=0.05)

CASES: dict[str, Any] = {
    "diloco": lambda opt, model, group: offbeat.DiLoCo(
        opt, model, every=4, level={"ordered": True}, group=group, subgroup=None
    ),
    "streaming": lambda opt, model, group: offbeat.DiLoCo(
        opt, model, every=6, fragments=3, delay=4, level={"ordered": True}, group=group, subgroup=None
    ),
    "int8": lambda opt, model, group: offbeat.DiLoCo(
        opt, model, every=4, codec="int8", error_feedback=0.9, delay=1, group=group, subgroup=None
    ),
    "eager": lambda opt, model, group: offbeat.DiLoCo(
        opt, model, every=4, fragments=2, eager=True, level={"ordered": True}, group=group, subgroup=None
    ),
    "eager, int4": lambda opt, model, group: offbeat.DiLoCo(
        opt, model, every=3, eager=True, codec="int4", error_feedback=1.0, group=group, subgroup=None
    ),
    "sparse": lambda opt, model, group: offbeat.DiLoCo(
        opt, model, every=3, codec=offbeat.TopK(0.1), error_feedback=0.95, outer=adam, group=group, subgroup=None
    ),
    "warm-up": lambda opt, model, group: offbeat.Replica(
        opt, model, [offbeat.Level(every=4, outer=adam, ordered=True)], warmup=3, group=group, subgroup=None,
        weighted=True,
    ),
}  # fmt: skip


def train(rank: int, name: str, group: Any) -> torch.Tensor:
    with SEEDING:
        model = make(dtype=torch.float32)
    replica = CASES[name](adamw(model.parameters()), model, group)
    for step in range(11):
        if name == "warm-up":
            replica.seen(rank + step + 1)
        loss(model, batch(step, rank, torch.float32)).backward()
        replica.step()
        replica.zero_grad()
    before = flat(model)
    replica.finish()
    return torch.stack([before, flat(model)])


def real(rank: int, world: int) -> dict[str, torch.Tensor]:
    # With more than two ranks a backend sums gradients of warm-up in an order of its own.
    return {name: train(rank, name, None) for name in CASES if name != "warm-up" or world == 2}


@pytest.mark.parametrize("world", [2, 3, 8])
def test_simulated_replicas_have_the_bits_of_real_ones(world):
    expected = run_ranks(real, world)
    for name in expected[0]:
        simulation = offbeat.Simulation(world)
        found = simulation.run(lambda rank, peers, name=name: train(rank, name, peers))
        for rank in range(world):
            assert torch.equal(found[rank], expected[rank][name]), (name, rank)
        assert all(torch.equal(one[1], found[0][1]) for one in found)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bucket_mb", [0.001, 64])
def test_sums_in_the_order_of_ranks_are_sums(world, bucket_mb):
    """Whether an average fits into the buckets, and waits for all of them twice, or not."""

    def run(rank, peers):
        weight = torch.nn.Parameter(torch.full((700,), float(rank + 1)))
        module = torch.nn.ParameterList([weight])
        inner = torch.optim.SGD([weight], lr=0.0)
        level = offbeat.Level(every=1, ordered=True)
        replica = offbeat.Replica(inner, module, level, group=peers, subgroup=None, bucket_mb=bucket_mb)
        replica.step()
        return weight.detach()

    for found in offbeat.Simulation(world).run(run):
        torch.testing.assert_close(found, torch.full((700,), (world + 1) / 2))


def test_a_link_takes_time():
    """As many bytes as were sent, over the bandwidth, and a latency for each collective."""
    simulation = offbeat.Simulation(2, bandwidth=1000.0, latency=0.5)

    def exchange(rank, peers):
        peers.all_reduce(torch.zeros(250)).wait()
        peers.all_gather(torch.empty(4), torch.zeros(2)).wait()

    simulation.run(exchange)
    assert simulation.bytes_sent == [1008, 1008]
    assert simulation.seconds == pytest.approx([2.008, 2.008])


def test_a_rank_that_fails_ends_the_others():
    def fail(rank, peers):
        if rank == 1:
            raise ValueError("no data")
        peers.all_reduce(torch.zeros(1)).wait()

    with pytest.raises((ValueError, offbeat.ExchangeError)):
        offbeat.Simulation(2).run(fail)


def test_a_simulation_can_be_used_again():
    """Also after a run that failed, or that has left something behind."""
    simulation = offbeat.Simulation(2, timeout=20)

    def fail(rank, peers):
        peers.all_reduce(torch.ones(1))
        if rank == 1:
            raise ValueError("no data")
        peers.all_reduce(torch.zeros(2))

    def add(rank, peers):
        mine = torch.tensor([float(rank)])
        peers.all_reduce(mine).wait()
        return mine.item()

    with pytest.raises(ValueError, match="no data"):
        simulation.run(fail)
    assert simulation.run(add) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "at least 1 rank"),
        ({"size": 2.0}, "at least 1 rank"),
        ({"bandwidth": 0}, "bandwidth must be a positive"),
        ({"bandwidth": -1.0}, "bandwidth must be a positive"),
        ({"latency": -0.1}, "latency must be"),
        ({"timeout": 0}, "timeout must be a positive"),
    ],
)
def test_networks_that_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        offbeat.Simulation(**{"size": 2, **options})


def test_levels_in_a_simulation():
    """Blocks of ranks, as with real ones."""

    def run(rank, peers):
        with SEEDING:
            model = make()
        levels = [offbeat.Level(every=2, group=2), offbeat.Level(every=4, outer=adam)]
        replica = offbeat.Replica(adamw(model.parameters()), model, levels, group=peers, subgroup=None)
        rows = []
        for step in range(4):
            loss(model, batch(step, rank)).backward()
            replica.step()
            replica.zero_grad()
            rows.append(flat(model))
        return torch.stack(rows)

    found = offbeat.Simulation(4).run(run)
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], found[2][1])
    assert all(torch.equal(one[3], found[0][3]) for one in found)


def test_finishing_after_a_round_changes_nothing():
    """Replicas are equal then, and an outer step without a step of theirs would be one of its momentum alone."""

    def run(rank, peers, steps, fragments):
        with SEEDING:
            model = make()
        replica = offbeat.DiLoCo(
            adamw(model.parameters()), model, every=4, fragments=fragments, group=peers, subgroup=None
        )
        for step in range(steps):
            loss(model, batch(step, rank)).backward()
            replica.step()
            replica.zero_grad()
        before, syncs = flat(model), replica.syncs
        replica.finish()
        return before, flat(model), replica.syncs - syncs

    for before, after, rounds in offbeat.Simulation(2).run(run, 8, 1):
        assert torch.equal(before, after)
        assert rounds == 0
    for steps, fragments, expected in ((9, 1, 1), (8, 2, 1)):
        found = offbeat.Simulation(2).run(run, steps, fragments)
        assert torch.equal(found[0][1], found[1][1])
        assert [rounds for _, _, rounds in found] == [expected] * 2
