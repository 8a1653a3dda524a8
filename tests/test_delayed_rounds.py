"""Rounds in the background: late, in bounded memory, and without losing what is learnt meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offbeat
from offbeat.wire.peers import GroupPeers
from tests.harness import (
    batch,
    close,
    everyone,
    flat,
    flight_of,
    loss,
    make,
    ranks,
    sgd,
    simulate,
    train,
    write,
)

pytestmark = pytest.mark.xdist_group("delayed_rounds")


@ranks(2, 4)
def test_late_averages(rank, world):
    """The difference the average made is added some steps later; nothing that was learnt meanwhile is lost."""
    everybody = [list(range(world))]
    for every, delay in ((4, 1), (4, 3), (4, 4), (1, 1), (5, 2)):
        for place in ("device", "cpu")[: 2 if delay == 3 else 1]:
            model = make()
            local = offbeat.LocalSGD(
                sgd(model.parameters()), model, every=every, warmup=2, subgroup=None, delay=delay, snapshot=place
            )
            addresses = [p.data_ptr() for p in model.parameters()]
            history = train(model, local, range(14), rank)
            due = lambda s, every=every: everybody if s >= 2 and (s - 2) % every == 0 else []  # noqa: E731
            close(history, simulate(world, 14, sgd, due, warmup=2, delay=delay), rank)
            assert [p.data_ptr() for p in model.parameters()] == addresses
            local.finish()
            assert all(torch.equal(one, flat(model)) for one in everyone(flat(model)))
    # A function may ask for the next average before the last has landed, which then lands first.
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=lambda s: 2, subgroup=None, delay=5)
    close(
        train(model, local, range(9), rank),
        simulate(world, 9, sgd, lambda s: everybody if s % 2 == 0 else [], delay=5),
        rank,
    )


@ranks(4)
def test_late_averages_in_a_hierarchy(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every={2: 2, 6: 4}, subgroup=None, delay=1)
    everybody, pairs = [[0, 1, 2, 3]], [[0, 1], [2, 3]]
    due = lambda s: everybody if s % 6 == 0 else pairs if s % 2 == 0 else []  # noqa: E731
    close(train(model, local, range(15), rank), simulate(4, 15, sgd, due, delay=1), rank)
    local.finish()
    assert all(torch.equal(one, flat(model)) for one in everyone(flat(model)))


@ranks(2)
def test_training_goes_on_meanwhile(rank, world):
    """Between launch and landing the link may be slow: steps do not wait, and the program's own collectives work."""
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=8, subgroup=None, delay=6)
    released = threading.Event()
    real = GroupPeers.all_reduce

    def slow(*args, **kwargs):
        assert threading.current_thread().name == "offbeat-rounds"
        assert released.wait(60)
        return real(*args, **kwargs)

    GroupPeers.all_reduce = slow
    try:
        history = []
        for step in range(6):
            history += train(model, local, range(step, step + 1), rank)
            total = torch.tensor([float(rank + step)])
            dist.all_reduce(total)  # on the group of all ranks, while the average is held up
            assert total.item() == 2 * step + 1
        assert not released.is_set()
        released.set()
        history += train(model, local, range(6, 9), rank)
    finally:
        released.set()
        GroupPeers.all_reduce = real
    close(history, simulate(2, 9, sgd, lambda s: [[0, 1]] if s % 8 == 0 else [], delay=6), rank)
    local.finish()


class Memory(TorchDispatchMode):
    """Bytes of storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                self.made += t.untyped_storage().nbytes()
        return result


@ranks(2)
def test_bounded_memory(rank, world):
    """A model of 4 MB through a bucket of 0.25 MB; one tensor alone is larger than the bucket."""
    model = nn.Sequential(nn.Linear(600, 1000), nn.Linear(1000, 400), nn.Linear(400, 100))
    size = sum(p.numel() * p.itemsize for p in model.parameters())
    for p in model.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(rank))
    mine = flat(model)
    mean = sum(everyone(mine)) / 2
    limit = size + 0.25 * 2**20 + 8192  # one copy of the parameters, the bucket, and the few bytes of messages
    for delay in (0, 1):
        write(model, mine)
        local = offbeat.LocalSGD(
            torch.optim.SGD(model.parameters(), lr=0.0), model, every=2, subgroup=None, delay=delay, bucket_mb=0.25
        )
        sent = local.bytes_sent
        with Memory() as memory:
            for _ in range(delay + 1):
                local.step()
        assert memory.made <= limit, (memory.made, limit)
        torch.testing.assert_close(flat(model), mean)
        # A ring all-reduce of two ranks sends every byte once; a hello has 2056 bytes and a vote 8.
        assert local.bytes_sent - sent == size + 2056 + 8
        with Memory() as memory:
            for _ in range(2):
                local.step()
        assert memory.made <= (8192 if delay else limit), memory.made  # a copy for the background is made once
        local.finish()
    averager = offbeat.PeriodicModelAverager(2, bucket_mb=0.25)
    with Memory() as memory:
        averager.average_parameters(model.parameters())
    assert memory.made <= limit
    assert size <= averager.bytes_sent <= size + 8192


@ranks(2)
def test_an_interrupted_wait(rank, world):
    """Whoever interrupts the program while it waits for an average can go on: it lands the next time."""
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, subgroup=None, delay=2)
    train(model, local, range(2), rank)
    pending = flight_of(local).pending

    def interrupted():
        raise KeyboardInterrupt

    pending.wait = interrupted
    loss(model, batch(2, rank)).backward()
    with pytest.raises(KeyboardInterrupt):
        local.step()
    del pending.wait
    local.zero_grad()
    train(model, local, range(3, 4), rank)
    expected = simulate(2, 4, sgd, lambda s: [[0, 1]] if s == 0 else [], delay=3)
    close([flat(model)], [expected[3]], rank)


@ranks(2)
def test_dropped_in_the_middle(rank, world):
    """An optimizer may be dropped with an average under way, which then ends by itself, and so does its thread."""
    before = set(threading.enumerate())
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=5, subgroup=None, delay=4)
    train(model, local, range(1), rank)
    flight, gone = flight_of(local), weakref.ref(local)
    peers = local._board.top[0].membership.peers
    threads = [t for t in threading.enumerate() if t not in before and t.name == "offbeat-rounds"]
    assert len(threads) == 1
    del local
    gc.collect()
    assert gone() is None
    threads[0].join(30)
    assert not threads[0].is_alive()
    assert flight.pending.wait().status == "averaged"
    assert peers.is_closed


@ranks(2)
def test_parameters_that_leave_during_a_flight(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, subgroup=None, delay=2)
    train(model, local, range(1), rank)
    gone = local.param_groups[0]["params"].pop()
    before = gone.detach().clone()
    train(model, local, range(1, 3), rank)
    assert torch.equal(gone, before)
    local.param_groups[0]["params"].append(gone)
    local.finish()
