"""Replicas in one process, over a simulated network: the same bits as real processes."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.wire.peers import GroupPeers, gather
from offbeat.wire.simulated import SimulatedConnector
from tests.harness import adamw, batch, flat, loss, make
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("simulation")]

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
    "sparse": lambda opt, model, group: offbeat.DiLoCo(
        opt, model, every=3, codec=offbeat.TopK(0.1), error_feedback=0.95, outer=adam, group=group, subgroup=None
    ),
    "warm-up": lambda opt, model, group: offbeat.Replica(
        opt, model, [offbeat.Level(every=4, outer=adam, ordered=True)], warmup=3, group=group, subgroup=None,
        weighted=True,
    ),
}  # fmt: skip


def make_float32() -> torch.nn.Module:
    return make(dtype=torch.float32)


def train(rank: int, group: Any, model: torch.nn.Module, name: str) -> torch.Tensor:
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
    return {name: train(rank, None, make_float32(), name) for name in CASES if name != "warm-up" or world == 2}


@pytest.mark.parametrize("world", [2, 3, 8])
def test_simulated_replicas_have_the_bits_of_real_ones(world):
    expected = run_ranks(real, world)
    for name in expected[0]:
        simulation = offbeat.Simulation(world)
        found = simulation.run(train, name, make=make_float32)
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

    def run(rank, peers, model):
        levels = [offbeat.Level(every=2, group=2), offbeat.Level(every=4, outer=adam)]
        replica = offbeat.Replica(adamw(model.parameters()), model, levels, group=peers, subgroup=None)
        rows = []
        for step in range(4):
            loss(model, batch(step, rank)).backward()
            replica.step()
            replica.zero_grad()
            rows.append(flat(model))
        return torch.stack(rows)

    found = offbeat.Simulation(4).run(run, make=make)
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], found[2][1])
    assert all(torch.equal(one[3], found[0][3]) for one in found)


def test_finishing_after_a_round_changes_nothing():
    """Replicas are equal then, and an outer step without a step of theirs would be one of its momentum alone."""

    def run(rank, peers, model, steps, fragments):
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

    for before, after, rounds in offbeat.Simulation(2).run(run, 8, 1, make=make):
        assert torch.equal(before, after)
        assert rounds == 0
    for steps, fragments, expected in ((9, 1, 1), (8, 2, 1)):
        found = offbeat.Simulation(2).run(run, steps, fragments, make=make)
        assert torch.equal(found[0][1], found[1][1])
        assert [rounds for _, _, rounds in found] == [expected] * 2


CALLS: dict[str, tuple[Any, Any, str]] = {
    "kind": (
        lambda peers: peers.all_reduce(torch.zeros(4)),
        lambda peers: peers.all_gather(torch.zeros(8), torch.zeros(4)),
        r"rank 0: all_reduce sum torch.float32 4; rank 1: all_gather torch.float32 4",
    ),
    "operation": (
        lambda peers: peers.all_reduce(torch.zeros(4)),
        lambda peers: peers.all_reduce(torch.zeros(4), "max"),
        r"rank 0: all_reduce sum .*; rank 1: all_reduce max",
    ),
    "dtype": (
        lambda peers: peers.all_reduce(torch.zeros(4)),
        lambda peers: peers.all_reduce(torch.zeros(4, dtype=torch.float64)),
        r"rank 0: .* torch.float32 4; rank 1: .* torch.float64 4",
    ),
    "size": (
        lambda peers: peers.all_reduce(torch.zeros(4)),
        lambda peers: peers.all_reduce(torch.zeros(1)),
        r"rank 0: .* torch.float32 4; rank 1: .* torch.float32 1",
    ),
    "root": (
        lambda peers: peers.broadcast(torch.zeros(4), 0),
        lambda peers: peers.broadcast(torch.zeros(4), 1),
        r"rank 0: broadcast from rank 0 .*; rank 1: broadcast from rank 1",
    ),
    "splits": (
        lambda peers: peers.all_to_all(torch.zeros(6), torch.zeros(6), [2, 2, 2], [2, 2, 2]),
        lambda peers: peers.all_to_all(torch.zeros(5), torch.zeros(6), [2, 2, 1], [2, 2, 2]),
        r"rank 0: .* expects \[2, 2, 2\]; rank 1: .* expects \[2, 2, 1\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_collectives_that_do_not_fit_fail_on_every_rank(name):
    first, second, words = CALLS[name]

    def run(rank, peers):
        with pytest.raises(offbeat.ExchangeError, match=words):
            (second if rank == 1 else first)(peers).wait()
        return True

    assert offbeat.Simulation(3, timeout=20).run(run) == [True] * 3


def traffic(rank, world, peers):
    """The bytes of one collective of each kind."""
    counts = []
    for call in (
        lambda: peers.all_reduce(torch.zeros(300)).wait(),
        lambda: peers.all_gather(torch.zeros(world * 7), torch.zeros(7)).wait(),
        lambda: peers.all_to_all(torch.zeros(2 * world), torch.zeros(2 * world), [2] * world, [2] * world).wait(),
        lambda: peers.broadcast(torch.zeros(5), 1).wait(),
    ):
        before = peers.bytes_sent
        call()
        counts.append(peers.bytes_sent - before)
    before = peers.bytes_sent
    gather(peers, "x" * 1000)
    return counts, peers.bytes_sent - before


def real_traffic(rank, world):
    return traffic(rank, world, GroupPeers(dist.group.WORLD, range(world)))


@pytest.mark.parametrize("world", [2, 3])
def test_peers_count_what_they_send(world):
    simulation = offbeat.Simulation(world)
    found = simulation.run(lambda rank, peers: traffic(rank, world, peers))
    assert found == run_ranks(real_traffic, world)
    for rank, (counts, gathered) in enumerate(found):
        assert counts == [
            2 * (world - 1) * 1200 // world, (world - 1) * 28, (world - 1) * 8, (world - 1) * 20 * (rank == 1)
        ]  # fmt: skip
        assert simulation.bytes_sent[rank] == sum(counts) + gathered
        assert (world - 1) * 1000 < gathered < (world - 1) * 2200


def test_a_rank_alone_takes_no_time():
    simulation = offbeat.Simulation(3, bandwidth=100.0, latency=1.0)

    def run(rank, peers):
        (mine,) = SimulatedConnector(simulation, rank, [[0, 1] if rank < 2 else [2]], "part").connect()
        one = torch.full((2,), float(rank))
        mine.all_reduce(one).wait()
        assert gather(mine, rank) == mine.ranks
        return one[0].item()

    assert simulation.run(run) == [1.0, 1.0, 2.0]
    assert simulation.seconds[0] > 2
    assert simulation.seconds[2] == simulation.bytes_sent[2] == 0


def test_a_collective_that_was_given_up_fails_for_those_who_come_late():
    late, came = threading.Event(), threading.Event()

    def run(rank, peers):
        if rank == 1:
            assert late.wait(20)
        with pytest.raises(offbeat.ExchangeError, match=r"not all ranks came|closed the connection"):
            peers.all_reduce(torch.ones(1)).wait()
        late.set()
        with pytest.raises(offbeat.ExchangeError, match="was closed"):
            peers.all_reduce(torch.ones(1)).wait()
        (peers,) = SimulatedConnector(peers.simulation, rank, [[0, 1]], "again").connect()
        mine = torch.tensor([float(rank)])
        peers.all_reduce(mine).wait()  # parts of two different collectives are not taken together
        came.set()
        return mine.item()

    assert offbeat.Simulation(2, timeout=1).run(run) == [1.0, 1.0]
    assert came.is_set()


def test_closing_ends_what_others_wait_for():
    def run(rank, peers):
        whole = peers.all_gather(torch.zeros(3), torch.ones(1))
        if rank == 1:
            whole.wait()
            peers.close()
            peers.close()
        else:
            with pytest.raises(offbeat.ExchangeError, match="closed the connection"):
                peers.all_reduce(torch.ones(1)).wait()
            whole.wait()  # all parts of it are there
        (again,) = SimulatedConnector(peers.simulation, rank, [[0, 1, 2]], "again").connect()
        assert gather(again, rank) == [0, 1, 2]
        return True

    assert offbeat.Simulation(3, timeout=20).run(run) == [True] * 3


@pytest.mark.parametrize("delay", [0, 2])
def test_replicas_agree_again_after_a_timeout(delay):
    """One of them sleeps longer than the others wait."""
    awake = threading.Event()

    def run(rank, peers, model):
        replica = offbeat.LocalSGD(adamw(model.parameters()), model, every=4, delay=delay, group=peers, subgroup=None)
        failed = 0
        for step in range(24):
            loss(model, batch(step, rank)).backward()
            if rank == 1 and step == 4:
                assert awake.wait(20)
            try:
                replica.step()
            except offbeat.ExchangeError:
                failed += 1
                awake.set()
            replica.zero_grad()
        replica.finish()
        return flat(model), failed

    found = offbeat.Simulation(2, timeout=1).run(run, make=make)
    assert torch.equal(found[0][0], found[1][0])
    assert all(failed for _, failed in found)
