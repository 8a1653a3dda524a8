"""Overlap in pipeline schedules, where a step has a backward pass for every micro-batch and stage."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.overlap.consumed import ConsumedGradient
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("overlap_ranks"), pytest.mark.timeout(120)]

PARTS = 4
SCHEDULES = {"ScheduleGPipe": 1, "Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2, "ScheduleInterleavedZeroBubble": 2}


def train(name: str, options: dict[str, Any] | None, rank: int, world: int) -> tuple[list[torch.Tensor], int]:
    """Parameters of this rank's stages, and how many gradients were used before ``step()``."""
    from torch.distributed import pipelining

    torch.manual_seed(0)
    stages = SCHEDULES[name]
    modules = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(stages * world)]
    mine = range(rank, stages * world, world)
    made = [pipelining.PipelineStage(modules[i], i, len(modules), torch.device("cpu")) for i in mine]
    schedule = getattr(pipelining, name)(
        made if stages > 1 else made[0],
        n_microbatches=PARTS,
        loss_fn=lambda out, target: (out - target).square().mean() / PARTS,
        scale_grads=options is not None and "clip_norm" in options,
    )
    module = nn.ModuleList([modules[i] for i in mine])
    optimizer = offbeat.AdamW(module.parameters(), lr=0.1)
    overlapped = options is not None and options.pop("overlapped")
    if overlapped:
        offbeat.overlap(optimizer, module, accumulate=PARTS * stages, **options)
    early = 0
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, target = (torch.randn(8, 6, generator=generator) for _ in range(2))
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)
        early += sum(isinstance(p.grad, ConsumedGradient) for p in module.parameters())
        if options and not overlapped:
            nn.utils.clip_grad_norm_(module.parameters(), options["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()], early


def compare_all(rank: int, world: int) -> dict[str, Any]:
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in SCHEDULES:
            for options in ({}, {"clip_norm": 0.1}) if name == "Schedule1F1B" else ({},):
                a, early = train(name, {"overlapped": True, **options}, rank, world)
                b, _ = train(name, {"overlapped": False, **options}, rank, world)
                found[f"{name} {options}"] = (all(torch.equal(p, q) for p, q in zip(a, b, strict=True)), early > 0)
                dist.barrier()
    return found


def test_a_step_has_a_pass_for_every_micro_batch_and_stage():
    for found in run_ranks(compare_all, 2, seconds=90):
        for what, (same, early) in found.items():
            assert same, what
            # Zero-bubble schedules compute gradients of weights outside of backward(); updates are then in step().
            assert early == ("clip_norm" not in what and "ZeroBubble" not in what), what
