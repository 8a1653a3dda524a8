"""Muon and LBFGS as inner optimizers of DiLoCo and SlowMo: plain, overlapped, and sharded inside a replica."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import offbeat
from tests.harness import batch, everyone, flat, loss, make, write
from tests.scenarios import Scenarios

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("replica_inner")]
scenario = Scenarios(__name__)

EVERY, STEPS = 3, 10


def muon(model: nn.Module) -> Any:
    """Muon for hidden matrices, AdamW for the rest."""
    params = list(model.parameters())
    matrices = [p for p in params if p.dim() == 2][1:-1]
    rest = [p for p in params if all(p is not one for one in matrices)]
    return offbeat.Chain([offbeat.Muon(matrices, lr=0.05, ns_dtype=torch.float64), offbeat.AdamW(rest, lr=0.01)])


def lbfgs(model: nn.Module) -> Any:
    return offbeat.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=4)


INNERS = {"muon": muon, "lbfgs": lbfgs}


def step(model: nn.Module, optimizer: Any, x: Tensor, closures: bool) -> None:
    """One step of a loop with a closure, or without."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        return value

    if closures:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


class Nesterov:
    """DiLoCo's outer step on a flat vector."""

    def __init__(self) -> None:
        self.buffer: Any = 0.0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.buffer = 0.6 * self.buffer + gradient
        return 0.6 * (gradient + 0.6 * self.buffer)


class SlowMomentum:
    """SlowMo's outer step on a flat vector, for a constant inner learning rate."""

    def __init__(self, rate: float) -> None:
        self.buffer: Any = 0.0
        self.rate = rate

    def __call__(self, gradient: Tensor) -> Tensor:
        self.buffer = 0.5 * self.buffer + gradient / self.rate
        return self.rate * self.buffer


def expected(inner: Any, outer: Any, delay: int, worlds: int = 2) -> list[list[Tensor]]:
    """Every replica's parameters after every step, in one process."""
    models = [make() for _ in range(worlds)]
    optimizers = [inner(model) for model in models]
    anchor, mean, history = flat(models[0]), None, []
    for number in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(model, optimizer, batch(number, rank), inner is lbfgs)
        if (number + 1) % EVERY == 0:
            mean = sum(flat(model) for model in models) / worlds
        if mean is not None and (number + 1) % EVERY == delay % EVERY:
            anchor, mean = anchor - outer(anchor - mean), None
            for model in models:
                write(model, anchor)
        history.append([flat(model) for model in models])
    return history


def outer_of(kind: str, inner: Any) -> Any:
    # The parameters of the second group have another learning rate than those of the first.
    if kind == "DiLoCo":
        return Nesterov()
    model = make()
    rates = {id(p): group["lr"] for group in inner(model).param_groups for p in group["params"]}
    return SlowMomentum(torch.cat([torch.full((p.numel(),), rates[id(p)]).double() for p in model.parameters()]))


def wrap(kind: str, opt: Any, model: nn.Module, delay: int, **options: Any) -> Any:
    if kind == "DiLoCo":
        return offbeat.DiLoCo(opt, model, every=EVERY, outer_lr=0.6, delay=delay, **options)
    return offbeat.SlowMo(opt, model, every=EVERY, level={"delay": delay}, **options)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("kind", ["DiLoCo", "SlowMo"])
@pytest.mark.parametrize("name", ["muon", "muon, overlapped", "lbfgs"])
def test_inner_optimizers(name, kind, delay):
    inner = INNERS[name.split(",")[0]]
    history = expected(inner, outer_of(kind, inner), delay)

    def run(rank, peers, model):
        opt = inner(model)
        if "overlapped" in name:
            offbeat.overlap(opt, model)
        replica = wrap(kind, opt, model, delay, group=peers, subgroup=None)
        for number in range(STEPS):
            step(model, replica, batch(number, rank), name == "lbfgs")
            torch.testing.assert_close(flat(model), history[number][rank], rtol=1e-9, atol=1e-10)
        replica.finish()
        return flat(model)

    one, two = offbeat.Simulation(2).run(run, make=make)
    assert torch.equal(one, two)


@scenario(4)
def test_shards_inside_a_replica(rank, world):
    """Two replicas of two shards each: as two whole ones."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    site = rank // 2
    for name, overlapped in (("muon", False), ("muon", True)):
        for kind, delay in (("DiLoCo", 0), ("DiLoCo", 2), ("SlowMo", 0)):
            inner = INNERS[name]
            history = expected(inner, outer_of(kind, inner), delay)
            model = make()
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=mesh["shard"])
            opt = inner(model)
            if overlapped:
                offbeat.overlap(opt, model)
            replica = wrap(kind, opt, model, delay)
            for number in range(STEPS):
                step(model, replica, batch(number, site), name == "lbfgs")
                now = torch.cat([p.full_tensor().reshape(-1) for p in model.parameters()]).detach()
                torch.testing.assert_close(now, history[number][site], rtol=1e-9, atol=1e-10)
            replica.finish()
            now = torch.cat([p.full_tensor().reshape(-1) for p in model.parameters()]).detach()
            assert all(torch.equal(now, one) for one in everyone(now))
