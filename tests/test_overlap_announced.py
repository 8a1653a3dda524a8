"""Overlap as frameworks use it: a function announces backward passes, and the norm is read before ``step()``."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.ranks import run_ranks
from tests.test_overlap import TINY, assert_same, batch, make

INF = math.inf


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}])
def test_a_function_tells_whether_more_passes_follow(clip):
    a, b = make(), make()
    opt_a, opt_b = offbeat.AdamW(a.parameters()), offbeat.AdamW(b.parameters())
    more = True
    offbeat.overlap(opt_a, a, accumulate=lambda: more, bucket_cap_mb=TINY, **clip)
    step = 0
    for passes in (3, 1, 2, 1):  # a number of passes that changes, as at the end of an epoch
        for i in range(passes):
            more = i < passes - 1
            a(batch(step)).square().mean().backward()
            b(batch(step)).square().mean().backward()
            step += 1
        if clip:
            torch.nn.utils.clip_grad_norm_(b.parameters(), 0.1)
        for optimizer in (opt_a, opt_b):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(a, b)


def test_a_pass_that_was_not_announced_still_raises():
    model = make()
    offbeat.overlap(offbeat.SGD(model.parameters(), lr=0.1), model, accumulate=lambda: False, bucket_cap_mb=TINY)
    model(batch(0)).square().mean().backward()
    with pytest.raises(RuntimeError, match="announce the backward passes of a step"):
        model(batch(1)).square().mean().backward()


def test_accumulate_must_be_a_number_or_a_function():
    model = make()
    with pytest.raises(TypeError, match="or a function that returns whether more passes follow, but got 'two'"):
        offbeat.overlap(offbeat.SGD(model.parameters(), lr=0.1), model, accumulate="two")


@pytest.mark.parametrize(
    ("clip", "limit"), [("exact", 0.1), ("previous", 0.1), ("bucket", 0.1), ("bucket", INF), ("exact", INF)]
)
def test_the_norm_of_this_step_is_known_before_step(clip, limit):
    a, b = make(), make()
    opt_a, opt_b = offbeat.AdamW(a.parameters()), offbeat.AdamW(b.parameters())
    handle = offbeat.overlap(opt_a, a, clip_norm=limit, clip=clip, bucket_cap_mb=TINY)
    assert handle.clip_norm == limit
    for step in range(3):
        b.load_state_dict(a.state_dict())  # clipping by bucket is another algorithm, so that parameters differ
        for model in (a, b):
            model(batch(step)).square().mean().backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in b.parameters()])
        assert torch.equal(handle.norm(), expected)
        assert torch.equal(handle.norm(), expected)  # asking changes nothing
        for optimizer in (opt_a, opt_b):
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(handle.last_norm, expected)
        if limit == INF:
            assert_same(a, b)


def test_without_clip_norm_there_is_no_norm():
    model = make()
    handle = offbeat.overlap(offbeat.SGD(model.parameters(), lr=0.1), model)
    model(batch(0)).square().mean().backward()
    assert handle.norm() is None
    assert handle.clip_norm is None


def test_the_norm_waits_for_the_scaler():
    model, scaler = make(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model, scaler=scaler, clip_norm=1.0, bucket_cap_mb=TINY)
    scaler.scale(model(batch(0)).square().mean()).backward()
    with pytest.raises(RuntimeError, match=r"call scaler.unscale_\(optimizer\) first"):
        handle.norm()
    scaler.unscale_(optimizer)
    other = make()
    other(batch(0)).square().mean().backward()
    torch.testing.assert_close(handle.norm(), torch.nn.utils.get_total_norm([p.grad for p in other.parameters()]))


def passes_that_nobody_announced(rank: int, world: int, kind: str, accumulate: int) -> tuple[list[float], list[float]]:
    """Norms of steps with more passes than announced, and parameters at the end: without overlap, and with it."""
    result = []
    for overlapped in (False, True):
        model = make(dtype=torch.float64)
        module: nn.Module = model
        if kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for part in (model[0], model[2], model):
                fully_shard(part)
        else:
            module = DistributedDataParallel(model, bucket_cap_mb=TINY, gradient_as_bucket_view=kind == "views")
        optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
        handle = offbeat.overlap(optimizer, module, accumulate=accumulate, clip_norm=0.1) if overlapped else None
        numbers: list[float] = []
        for step, passes in enumerate((accumulate + 1, accumulate, accumulate + 2)):
            for i in range(passes):
                (module(batch(10 * step + 3 * i + rank, torch.float64)) - i).square().mean().backward()
            if handle is None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            else:
                optimizer.step()
                norm = handle.last_norm
            numbers.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.zero_grad()
        whole = [p.full_tensor() if kind == "fsdp" else p for p in model.parameters()]
        result.append(numbers + torch.cat([p.detach().flatten() for p in whole]).tolist())
    return result[0], result[1]


@pytest.mark.ranks
@pytest.mark.xdist_group("overlap_ranks")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["ddp", "views", "fsdp"])
def test_with_exact_clipping_a_pass_too_many_counts_in_the_norm(kind, accumulate):
    """FSDP2 adds to the shards of gradients, and adds up norms of shards in another order."""
    ranks = run_ranks(passes_that_nobody_announced, 2, kind, accumulate)
    assert ranks[0] == ranks[1]
    for expected, found in ranks:
        assert found == (pytest.approx(expected, rel=1e-9) if kind == "fsdp" else expected)


def changed_shards(rank: int, world: int) -> str:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make())
    optimizer, scaler = offbeat.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    handle = offbeat.overlap(optimizer, model, scaler=scaler)
    scaler.scale(model(batch(rank)).sum()).backward()
    with torch.no_grad():
        model[0].weight.grad.to_local().mul_(2.0)
    with pytest.raises(RuntimeError, match=r"gradient of parameter '0.weight' was changed between backward\(\)"):
        scaler.step(optimizer)
    handle.reset()
    scaler.scale(model(batch(rank)).sum()).backward()
    scaler.step(optimizer)
    return "ok"


@pytest.mark.ranks
@pytest.mark.xdist_group("overlap_ranks")
def test_unscaled_shards_of_gradients_must_not_be_changed():
    assert run_ranks(changed_shards, 2) == ["ok"] * 2
