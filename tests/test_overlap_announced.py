"""Overlap as frameworks use it: a function announces backward passes, and the norm is read before ``step()``."""

from __future__ import annotations

import math

import pytest
import torch

import offbeat
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
