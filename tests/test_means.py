"""What a mean is made of: dtypes and layouts, frozen parameters, weights; and when it is taken at will."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat
from tests.harness import (
    agreements,
    batch,
    close,
    everyone,
    flat,
    loss,
    make,
    ranks,
    sgd,
    simulate,
    train,
    write,
)

pytestmark = pytest.mark.xdist_group("means")


@ranks(2)
def test_odd_tensors(rank, world):
    """Dtypes, layouts, sizes: all averaged, each in its own dtype, wherever it lies."""

    def tensors() -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(rank)
        base = torch.randn(40, 30, generator=g)
        return [
            torch.randn(8, 3, 5, 5, generator=g).to(memory_format=torch.channels_last),
            torch.randn(17, 23, generator=g).t(),
            base[3:20, 2:19],  # gaps in memory
            torch.randn(100, 64, generator=g).to(torch.bfloat16),
            torch.randn(9, generator=g).half(),
            torch.randn(7, 3, generator=g, dtype=torch.float64),
            torch.randn(5, 5, generator=g, dtype=torch.complex64),
            torch.randn((), generator=g),
            torch.randn(0, 4, generator=g),
            torch.randn(1, generator=g),
        ]

    both: list[Any] = [None, None]
    dist.all_gather_object(both, tensors())
    expected = [(a / 2 + b / 2).to(a.dtype) for a, b in zip(*both, strict=True)]
    for bucket_mb in (0.0001, 0.001, 32):
        for delay in (0, 1):
            params = nn.ParameterList([nn.Parameter(t) for t in tensors()])
            addresses = [p.data_ptr() for p in params]
            strides = [p.stride() for p in params]
            local = offbeat.LocalSGD(
                torch.optim.SGD(params, lr=0.0), params, every=4, subgroup=None, bucket_mb=bucket_mb, delay=delay
            )
            for _ in range(delay + 1):
                local.step()
            for p, value in zip(params, expected, strict=True):
                # A late difference is rounded once when it is taken and once when it is added, by numbers up to 4.
                rounding = 2 * 4 * torch.finfo(p.dtype).eps if delay else 0.0
                torch.testing.assert_close(p.detach(), value, rtol=0, atol=rounding)
            assert [p.data_ptr() for p in params] == addresses
            assert [p.stride() for p in params] == strides
    # Half precision may travel in float32, where the sum of many does not lose digits.
    params = nn.ParameterList([nn.Parameter(torch.tensor([1.0 + rank / 128]).bfloat16())])
    local = offbeat.LocalSGD(
        torch.optim.SGD(params, lr=0.0), params, every=4, subgroup=None, reduce_dtype=torch.float32
    )
    sent = local.bytes_sent
    local.step()
    assert params[0].item() == torch.tensor(1 + 1 / 256).bfloat16().item()
    assert local.bytes_sent - sent == 4 + 2056 + 8  # one number in float32, a hello and a vote


@ranks(2)
def test_gradients_do_not_decide(rank, world):
    """Parameters without a gradient, on one rank or on all, are averaged; frozen ones that never moved are not."""
    for make_optimizer in (
        lambda opt, holder: offbeat.LocalSGD(opt, holder, every=2, subgroup=None),
        lambda opt, holder: offbeat.PostLocalSGDOptimizer(opt, offbeat.PeriodicModelAverager(2)),
    ):
        holder = nn.ParameterList([nn.Parameter(torch.full((3,), float(rank))) for _ in range(3)])
        holder[2].requires_grad_(False)
        optimizer = make_optimizer(torch.optim.SGD(holder.parameters(), lr=0.0), holder)
        if rank == 0:
            holder[0].sum().backward()
        optimizer.step()
        assert [p.tolist()[0] for p in holder] == [0.5, 0.5, float(rank)]
    # Frozen between two averages, after it has moved: averaged all the same, or it would differ for good.
    holder = nn.ParameterList([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))])
    local = offbeat.LocalSGD(torch.optim.SGD(holder.parameters(), lr=1.0), holder, every=2, subgroup=None)
    for step in range(3):
        (sum(p.sum() for p in holder) * float(rank)).backward()
        local.step()
        local.zero_grad()
        if step == 1:
            holder[0].requires_grad_(False)
    assert torch.equal(*everyone(holder[0].detach()))


@ranks(2)
def test_weights(rank, world):
    """Ranks count by what they have seen since the last average, in the background too."""
    amounts = [[3.0, 1.0], [2.0, 6.0], [0.0, 5.0], [4.0, 4.0], [1.0, 0.0], [2.0, 2.0], [7.0, 1.0]]
    for delay in (0, 1):
        model = make()
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every=2, weighted=True, subgroup=None, delay=delay)
        history = []
        for step in range(7):
            local.seen(amounts[step][rank])
            history += train(model, local, range(step, step + 1), rank)

        def weight(r, step):
            return amounts[step][r] + (amounts[step - 1][r] if step else 0)

        expected = simulate(2, 7, sgd, lambda s: [[0, 1]] if s % 2 == 0 else [], weight=weight, delay=delay)
        close(history, expected, rank)
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, weighted=True, subgroup=None)
    with pytest.raises(ValueError, match="no rank has a weight"):
        train(model, local, range(1), rank)
    with pytest.raises(ValueError, match="non-negative"):
        local.seen(-1)
    with pytest.raises(ValueError, match="weighted=True"):
        offbeat.LocalSGD(sgd(model.parameters()), model, subgroup=None).seen(3)
    # A rank that does not count may hold anything.
    model = make()
    if rank == 1:
        write(model, torch.full_like(flat(model), float("nan")))
    local = offbeat.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.0), model, weighted=True, subgroup=None)
    local.seen(1 - rank)
    local.step()
    assert torch.equal(flat(model), flat(make()))


@ranks(2)
def test_sync_at_will(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=5, subgroup=None, delay=2)
    train(model, local, range(4), rank)
    before = everyone(flat(model))
    assert not torch.equal(*before)
    local.sync()
    torch.testing.assert_close(flat(model), (before[0] + before[1]) / 2, rtol=1e-13, atol=1e-13)
    assert torch.equal(*everyone(flat(model)))


@ranks(2)
def test_an_average_at_will_counts(rank, world):
    """With a period that is a function, the next average is that many steps after sync()."""
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=lambda step: 4, subgroup=None)
    agreed = agreements(model, local, range(3), rank)
    local.sync()
    assert torch.equal(*everyone(flat(model)))
    agreed += agreements(model, local, range(3, 8), rank)
    assert agreed == [True, False, False, False, False, False, True, False]


@ranks(2)
def test_one_replica(rank, world):
    """Sharded over all ranks there is nothing to average, and a warning says so."""

    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.warns(UserWarning, match="one replica and nothing to average"):
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every=2)
    loss(model, batch(0, rank)).backward()
    local.step()
    assert (local.steps, local.syncs) == (1, 0)
