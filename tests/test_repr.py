"""What objects say of themselves: what they are set to, and what they have done."""

from __future__ import annotations

import functools
import inspect
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from tests.ranks import run_ranks


def lines(one: object) -> list[str]:
    return [line.strip() for line in repr(one).splitlines()]


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def several(rank: int, world: int) -> list[str]:
    def made(kind, **options):
        model = nn.Linear(4, 2)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
        for _ in range(4):
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return repr(optimizer)

    def late(step: int) -> bool:
        return step < 1

    nesterov = functools.partial(offbeat.SGD, lr=0.7, momentum=0.9, nesterov=True)
    levels = [
        offbeat.Level(every=2, group=1),
        offbeat.Level(every=4, outer=nesterov, fragments=2, delay=1, codec="int8"),
    ]
    return [
        made(offbeat.LocalSGD, every=2, warmup=1, subgroup=None),
        made(offbeat.LocalSGD, every=2, warmup=late),
        made(offbeat.Replica, levels=levels, subgroup=dist.group.WORLD),
        made(offbeat.SlowMo, every=2, subgroup=None),
        made(offbeat.DiLoCo, every=8, subgroup=None),
    ]


@pytest.mark.ranks
@pytest.mark.xdist_group("repr")
@pytest.mark.filterwarnings("ignore:all 2 ranks")
def test_replicas_say_what_they_do():
    local, guessed, levels, slow, diloco = run_ranks(several, 2)[1]
    assert local.startswith(
        inspect.cleandoc("""
            LocalSGD (
                ranks: 2, replicas: 2
                gradients: averaged over all ranks in warm-up (1 step); then every rank by itself (subgroup=None)
                parameters: every 2 steps, all 2 ranks
                done: 4 steps, 2 rounds,
        """)
    )
    # Gradients of the warm-up step and two means of 40 bytes, and the messages with which ranks compare and vote.
    assert re.search(r"rounds, \d+(\.\d+)? kB sent\n    SGD \(\n    Parameter Group 0", local)
    assert local.endswith("    )\n)")
    assert "in warm-up (while late(step)); then every rank by itself (all are on one host, and LOCAL" in guessed
    assert "ranks: 2, replicas: 1\n" in levels
    assert "then all 2 ranks (subgroup= was given)" in levels
    assert "parameters: every 2 steps, rank 1\n" in levels
    assert (
        "parameters: every 4 steps, all 2 ranks, outer SGD(lr=0.7, momentum=0.9), 2 fragments, delay 1 step" in levels
    )
    assert ", delay 1 step, codec int8\n" in levels
    assert "outer SlowMomentum(lr=1, momentum=0.5)" in slow
    assert "done: 4 steps, 0 rounds, " in diloco


def test_torchs_names(alone):
    model = nn.Linear(4, 2)
    state = offbeat.PostLocalSGDState(None, None, 3)
    assert lines(state)[1:3] == ["warm-up: 3 iterations, 0 done", "gradients after it: not chosen yet"]
    averager = offbeat.PeriodicModelAverager(period=2, warmup_steps=3)
    optimizer = offbeat.PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    assert lines(optimizer)[:3] == ["PostLocalSGDOptimizer (", "averager: PeriodicModelAverager, 0 steps", "SGD ("]


def test_overlap():
    model = nn.Linear(4, 2)
    optimizer = offbeat.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    handle = offbeat.overlap(optimizer, model, accumulate=2, clip_norm=0.5, clip="previous", scaler=scaler)
    for _ in range(2):
        for _ in range(2):
            scaler.scale(model(torch.ones(3, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert lines(handle) == [
        "Overlap (",
        "optimizer: AdamW",
        "module: Linear, 2 parameters",
        "accumulate: 2 backward passes",
        "clip: previous, to a norm of 0.5",
        "scaler: GradScaler",
        "steps: 2",
        ")",
    ]
    handle.remove()
    assert repr(handle) == "Overlap (removed)"


def test_functional_and_pure():
    functional = offbeat.as_functional(offbeat.SGD, [torch.ones(2), torch.ones(3)], lr=0.5)
    assert lines(functional)[:3] == ["functional SGD (", "parameters: 2", "Parameter Group 0"]
    pure = offbeat.as_pure(offbeat.AdamW, lr=0.5, maximize=True)
    assert lines(pure)[0] == "pure AdamW ("
    assert "lr: 0.5" in lines(pure)
    assert "maximize: True" in lines(pure)
    assert lines(pure)[-1] == ")"
