"""What the migration pages say gives the same numbers: torchdistx's slow momentum, written down plainly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from tests.ranks import run_ranks

EVERY, STEPS, LR, SLOW_LR, FACTOR = 3, 8, 0.1, 0.9, 0.6


def _make():
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


def _backward(model, step, rank):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    (model(x) - x[:, :3]).square().mean().backward()


def _train(rank, world):
    model = _make()
    base = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = offbeat.SlowMo(
        base,
        model,
        every=EVERY,
        slow_lr=SLOW_LR,
        slow_momentum=FACTOR,
        level={"phase": EVERY + 1},
        subgroup=None,
    )
    first = offbeat.PeriodicModelAverager(period=1_000_000)
    trace = []
    for step in range(STEPS):
        _backward(model, step, rank)
        optimizer.step()
        if optimizer.steps == 1:
            first.average_parameters(model.parameters())
        optimizer.zero_grad()
        trace.append([p.detach().clone() for p in model.parameters()])
    optimizer.finish()
    return trace


def _plain(rank, world):
    """torchdistx: a mean after step 1; after every period from then on a mean and slow momentum."""
    model = _make()
    params = list(model.parameters())
    base = torch.optim.SGD(params, lr=LR)
    previous = [p.detach().clone() for p in params]
    momenta = [torch.zeros_like(p) for p in params]
    trace = []
    for step in range(STEPS):
        _backward(model, step, rank)
        base.step()
        base.zero_grad()
        with torch.no_grad():
            if step % EVERY == 0:
                for p in params:
                    dist.all_reduce(p)
                    p.div_(world)
            if step % EVERY == 0 and step > 0:
                for p, old, momentum in zip(params, previous, momenta, strict=True):
                    momentum.mul_(FACTOR).add_((old - p) / LR)
                    old.sub_(SLOW_LR * LR * momentum)
                    p.copy_(old)
        trace.append([p.detach().clone() for p in params])
    return trace


def _both(rank, world):
    return _plain(rank, world), _train(rank, world)


@pytest.mark.ranks
def test_slowmo_has_the_numbers_of_torchdistx():
    for plain, ours in run_ranks(_both, 2):
        for expected, got in zip(plain, ours, strict=True):
            for a, b in zip(expected, got, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)
