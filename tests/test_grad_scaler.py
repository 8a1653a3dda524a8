"""A GradScaler around replicas: whose step is skipped, and whose average is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.wire.peers import GroupPeers
from tests.harness import (
    batch,
    everyone,
    flat,
    loss,
    make,
    ranks,
    write,
)

pytestmark = pytest.mark.xdist_group("grad_scaler")


@ranks(2)
def test_overflows_on_one_rank(rank, world):
    """A GradScaler skips that rank's step, and nobody's average: with DDP and without, any inner optimizer."""
    kinds: list[Any] = [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
        lambda params: offbeat.SGD(params, lr=0.1),
        lambda params: offbeat.AdamW(params, lr=0.1, foreach=False),
    ]

    overflow = {1: (0,), 3: (1,), 4: (0,), 5: (1,), 7: (0, 1)}  # step: the ranks that overflow
    for inner in kinds:
        for wrap in (lambda m: m, DistributedDataParallel):
            start = make(dtype=torch.float32)
            for index in range(2):
                model = copy.deepcopy(start)
                module: Any = wrap(model)
                if index == 0:
                    optimizer: Any = offbeat.LocalSGD(
                        inner(model.parameters()), module, every=3, warmup=2, subgroup=None
                    )
                elif module is model:
                    continue  # the hook needs DDP
                else:
                    state = offbeat.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
                    module.register_comm_hook(state, offbeat.post_local_sgd_hook)
                    averager = offbeat.PeriodicModelAverager(3, 2)
                    optimizer = offbeat.PostLocalSGDOptimizer(inner(model.parameters()), averager)
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
                reference = [copy.deepcopy(start) for _ in range(2)]
                plain = [inner(m.parameters()) for m in reference]
                for step in range(10):
                    x = batch(step, rank, torch.float32)
                    value = loss(module, x)
                    value = value * (float("inf") if rank in overflow.get(step, ()) else 1.0)
                    scaler.scale(value).backward()
                    if step % 2:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    bad = overflow.get(step, ())
                    for r, m in enumerate(reference):
                        loss(m, batch(step, r, torch.float32)).backward()
                    if step < 2:
                        for p, q in zip(*(m.parameters() for m in reference), strict=True):
                            p.grad = (p.grad + q.grad) / 2
                            q.grad = p.grad.clone()
                    for r, opt in enumerate(plain):
                        if r not in bad and not (step < 2 and bad):
                            opt.step()
                        opt.zero_grad()
                    if step >= 2 and (step - 2) % 3 == 0:
                        mean = (flat(reference[0]) + flat(reference[1])) / 2
                        for m in reference:
                            write(m, mean)
                    torch.testing.assert_close(flat(model), flat(reference[rank]), rtol=2e-5, atol=1e-6)
                    agreed = step < 2 or (step - 2) % 3 == 0
                    assert torch.equal(*everyone(flat(model))) is agreed, (step, rank)
                steps = optimizer.steps if isinstance(optimizer, offbeat.LocalSGD) else optimizer.averager.step
                assert steps == 10


@ranks(2)
def test_overflows_under_overlap(rank, world):
    """An overlapped optimizer with the scaler given to overlap(), before LocalSGD is made or after."""
    results = []
    for overlap in ("before", "after", None):
        model = make(dtype=torch.float32)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        inner = offbeat.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        if overlap == "before":
            offbeat.overlap(inner, ddp, scaler=scaler)
        local = offbeat.LocalSGD(inner, ddp, every=3, warmup=2, subgroup=None)
        if overlap == "after":
            offbeat.overlap(inner, ddp, scaler=scaler)
        history = []
        for step in range(10):
            bad = rank in {1: (0,), 3: (1,), 5: (0,), 6: (1,)}.get(step, ())
            value = loss(ddp, batch(step, rank, torch.float32)) * (float("inf") if bad else 1.0)
            scaler.scale(value).backward()
            if step % 2:
                scaler.unscale_(local)
            scaler.step(local)
            scaler.update()
            local.zero_grad()
            history.append(flat(model))
            assert torch.equal(*everyone(history[-1])) is (step < 2 or (step - 2) % 3 == 0)
        assert local.steps == 10
        results.append((history, scaler.get_scale()))
    for history, scale in results:
        assert all(torch.equal(a, b) for a, b in zip(history, results[-1][0], strict=True))
        assert scale == 1024 / 2 ** (2 + rank)


@ranks(2)
def test_a_failed_sync_under_a_scaler(rank, world):
    """The scale of the step that failed must not be taken for the next one's."""
    for build in (
        lambda opt, m: offbeat.LocalSGD(opt, m, every=2, subgroup=None),
        lambda opt, m: offbeat.PostLocalSGDOptimizer(opt, offbeat.PeriodicModelAverager(2)),
    ):
        model = nn.Linear(1, 1, bias=False)
        optimizer = build(torch.optim.SGD(model.parameters(), lr=1.0), model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        real = GroupPeers.all_reduce
        moved = []
        for step in range(4):
            before = model.weight.item()
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            if step == 0:
                GroupPeers.all_reduce = lambda *a, **k: (_ for _ in ()).throw(RuntimeError("gone"))
                with pytest.raises(RuntimeError, match="gone"):
                    scaler.step(optimizer)
                GroupPeers.all_reduce = real
            else:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step in (1, 3):
                moved.append(round(model.weight.item() - before, 4))
            dist.barrier()
        assert moved == [-1.0, -1.0]


@ranks(2)
def test_a_scaler_knows_wrappers_by_their_groups(rank, world):
    """A wrapper, made before overlap() or after, is answered for; another optimizer of the same parameters is not."""
    model = make(dtype=torch.float32)
    inner = offbeat.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    handle = offbeat.overlap(inner, model, scaler=scaler)
    local = offbeat.LocalSGD(inner, model, subgroup=None)
    handle.remove()
    handle = offbeat.overlap(inner, model, scaler=scaler)
    inner.load_state_dict(inner.state_dict())  # replaces the list of groups
    for optimizer, factor in ((inner, 1.0), (local, 1.0), (offbeat.AdamW(model.parameters()), 0.125)):
        scaler.scale(loss(model, batch(0, rank, torch.float32))).backward()
        before = [p.grad.clone() for p in model.parameters()]
        scaler.unscale_(optimizer)
        assert all(torch.equal(p.grad, factor * g) for p, g in zip(model.parameters(), before, strict=True))
        handle.reset()
        scaler.update()


@ranks(2)
def test_state_that_one_rank_does_not_have_yet(rank, world):
    """An overflow in the first step leaves torch's optimizers without state: that average goes without it, aloud."""
    model = make(dtype=torch.float32)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    local = offbeat.LocalSGD(inner, model, every=2, subgroup=None, state="average")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        value = loss(model, batch(step, rank, torch.float32)) * (float("inf") if step == 0 and rank == 1 else 1.0)
        scaler.scale(value).backward()
        if step == 0:
            with pytest.warns(UserWarning, match="optimizer state was not averaged this time"):
                scaler.step(local)
        else:
            scaler.step(local)
        scaler.update()
        local.zero_grad()
        if step in (0, 2):
            assert torch.equal(*everyone(flat(model)))
    assert torch.equal(*everyone(inner.state[model[0].weight]["exp_avg"]))
