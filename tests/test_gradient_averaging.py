"""Gradients in warm-up and inside nodes: averaged once, freed, with and without closures."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.harness import (
    agreements,
    batch,
    everyone,
    flat,
    loss,
    make,
    ranks,
    sgd,
)

pytestmark = pytest.mark.xdist_group("gradient_averaging")


@ranks(2)
def test_gradients_averaged_in_between(rank, world):
    """Backward after average_gradients(), with and without zeroing, in every spelling."""
    for clear in (None, lambda o, m: o.zero_grad(), lambda o, m: m.zero_grad(set_to_none=False)):
        model, reference = make(), make()
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, warmup=10)
        plain, ddp = sgd(reference.parameters()), DistributedDataParallel(reference)
        for step in range(3):
            loss(model, batch(step, rank)).backward()
            local.average_gradients()
            loss(ddp, batch(step, rank)).backward()
            if clear is not None:
                clear(local, model)
                clear(plain, reference)
            loss(model, batch(50 + step, rank)).backward()
            loss(ddp, batch(50 + step, rank)).backward()
            local.step()
            plain.step()
            local.zero_grad()
            plain.zero_grad()
            torch.testing.assert_close(flat(model), flat(reference), rtol=1e-11, atol=1e-12)
            assert torch.equal(*everyone(flat(model)))


@ranks(2)
def test_gradients_are_freed(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, warmup=2, subgroup=None)
    for step in range(4):
        loss(model, batch(step, rank)).backward()
        local.step()
        grad = weakref.ref(model[0].weight.grad)
        local.zero_grad()
        assert grad() is None, step


@ranks(2)
def test_closures_without_a_loss(rank, world):
    model, reference = make(), make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, warmup=3, subgroup=None)
    ddp, plain = DistributedDataParallel(reference), sgd(reference.parameters())
    for step in range(3):

        def closure(step=step):
            local.zero_grad()
            loss(model, batch(step, rank)).backward()

        assert local.step(closure) is None
        loss(ddp, batch(step, rank)).backward()
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close(flat(model), flat(reference), rtol=1e-11, atol=1e-12)


@ranks(2)
def test_looking_decides_nothing(rank, world):
    """A rank that asks in which phase it is, at a time when the others do not, stays with them."""
    model = make()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = offbeat.LocalSGD(
        optimizer, ddp, every=3, warmup=lambda step: optimizer.param_groups[0]["lr"] >= 0.1, subgroup=None
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(local, [3], gamma=0.5)
    agreed = []
    for step in range(9):
        agreed += agreements(ddp, local, range(step, step + 1), rank)
        if rank == 0:
            assert local.is_local is (step >= 3)
            with torch.no_grad():
                model(batch(0, 0))
        scheduler.step()
    assert agreed == [s < 3 or (s - 3) % 3 == 0 for s in range(9)]


@ranks(4)
def test_sharded_gradients_are_not_averaged_over_other_shards(rank, world):

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = make()
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(ValueError, match="leave subgroup out"):
        offbeat.LocalSGD(sgd(model.parameters()), model, subgroup=mesh.get_group("shard"))
