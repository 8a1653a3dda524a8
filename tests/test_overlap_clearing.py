"""Gradients may be cleared at any place of the loop, to None or to zero, under DDP of every kind and FSDP2."""

from __future__ import annotations

import itertools
import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("overlap_ranks"), pytest.mark.timeout(120)]

KINDS = {"usual": {}, "find_unused": {"find_unused_parameters": True}, "static_graph": {"static_graph": True}}
PLACES = ("after step", "before forward", "before backward")
CASES = [
    (kind, view, set_to_none, place, passes)
    for kind, view, set_to_none, place, passes in itertools.product(KINDS, (False, True), (True, False), PLACES, (1, 2))
    # The other places to set them to None are in every other test.
    if (place == "before backward" or not set_to_none) and (passes == 1 or (kind == "find_unused" and not set_to_none))
]


class Model(nn.Module):
    """Two dtypes, which are in buckets of their own from the first pass on; layers that not every rank uses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.even, self.odd, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.wide = nn.ModuleList([nn.Linear(4, 4).double() for _ in range(2)])
        self.never = nn.Linear(4, 4) if kind != "usual" else None

    def forward(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        x = self.wide[0](self.first(x).double()).float()
        if self.kind == "find_unused":  # by both ranks, one of them, or none
            x = self.even(x) if step % 4 == rank else self.odd(x) if step % 3 == 0 else x
        elif self.kind == "static_graph":
            x = self.even(x) if rank == 0 else self.odd(x)
        else:
            x = self.odd(self.even(x))
        return self.last(self.wide[1](x.double()).float())


def train(case: Any, overlapped: bool, rank: int) -> list[torch.Tensor]:
    kind, view, set_to_none, place, passes = case
    model = Model(kind)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0004, gradient_as_bucket_view=view, **KINDS[kind])
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1, foreach=True if passes == 2 else None)
    if overlapped:
        offbeat.overlap(optimizer, ddp, accumulate=passes)
    for step in range(4):
        if place == "before forward":
            optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(passes):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            loss = ddp(torch.randn(3, 4, generator=generator), step + part, rank).square().mean()
            if place == "before backward" and part == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss.backward()
        optimizer.step()
        if place == "after step":
            optimizer.zero_grad(set_to_none=set_to_none)
    return [p.detach().clone() for p in model.parameters()]


def train_sharded(place: str, overlapped: bool, rank: int) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    if overlapped:
        offbeat.overlap(optimizer, model, accumulate=2)
    for step in range(4):
        if place == "before forward":
            optimizer.zero_grad(set_to_none=False)
        for part in range(2):
            loss = model(torch.full((2, 4), 1.0 + step + part + rank)).square().mean()
            if place == "before backward" and part == 0:
                optimizer.zero_grad(set_to_none=False)
            loss.backward()
        optimizer.step()
        if place == "after step":
            optimizer.zero_grad(set_to_none=False)
    return [p.full_tensor() for p in model.parameters()]


def forget_to_clear() -> str:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 4))
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    try:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


def compare_sharded(rank: int) -> dict[Any, str]:
    wrong = {}
    for place in PLACES:
        pair = [train_sharded(place, overlapped, rank) for overlapped in (True, False)]
        if not all(torch.equal(p, q) for p, q in zip(*pair, strict=True)):
            wrong[place] = "the numbers differ"
    said = forget_to_clear()
    return wrong if "call optimizer.zero_grad() after every step" in said else {**wrong, "forgotten": said}


def compare_all(rank: int, world: int) -> dict[Any, str]:
    return {**compare(CASES, rank), **compare_sharded(rank)}


def train_views(case: str, overlapped: bool, rank: int) -> list[torch.Tensor]:
    """Parameters that overlap does not cover in every pass, and whose gradients are in a bucket all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=0.0002, gradient_as_bucket_view=True, find_unused_parameters=case == "unfrozen"
    )
    optimizer = offbeat.SGD(model[:3].parameters() if case == "others" else model.parameters(), lr=0.1, momentum=0.9)
    others = torch.optim.SGD(model[3].parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, ddp) if overlapped else None
    for step in range(16):
        if case == "unfrozen":
            for number, layer in enumerate(model):
                layer.requires_grad_(step % 2 == 0 or step % 4 == number)
        if case == "removed" and handle is not None and step == 4:
            handle.remove()
        generator = torch.Generator().manual_seed(10 * step + rank)
        ddp(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        if case == "others":
            others.step()
        ddp.zero_grad(set_to_none=False)
    return [p.detach().clone() for p in model.parameters()]


def compare_views(rank: int, world: int) -> dict[Any, str]:
    """DDP divides what is in its bucket already, and multiplies what it copies there."""
    wrong = {}
    for case in ("unfrozen", "others", "removed"):
        pair = [train_views(case, overlapped, rank) for overlapped in (True, False)]
        if not all(torch.equal(p, q) for p, q in zip(*pair, strict=True)):
            wrong[case] = "the numbers differ"
    return {**wrong, **compare([case for case in CASES if case[0] != "static_graph" and case[1] and not case[2]], rank)}


def compare(cases: list[Any], rank: int) -> dict[Any, str]:
    """By case that fails, what is wrong with it."""
    wrong = {}
    for case in cases:
        expected = train(case, False, rank)
        try:
            found = train(case, True, rank)
        except Exception:  # the ranks are not at the same place any more
            return {**wrong, case: traceback.format_exc()}
        if not all(torch.equal(p, q) for p, q in zip(expected, found, strict=True)):
            wrong[case] = "the numbers differ"
    return wrong


def test_gradients_are_cleared_at_any_place_of_the_loop():
    assert run_ranks(compare_all, 2, seconds=90) == [{}, {}]


def test_an_odd_number_of_ranks_rounds_as_ddp_does():
    assert run_ranks(compare_views, 3, seconds=90) == [{}, {}, {}]
