"""Steps that are traced instead of run: fake tensors, meta tensors, make_fx. torch must see every operation."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from tests.cases import ONE_A_RULE, TIERS


def train(case, tier, device="cpu"):
    params = [torch.nn.Parameter(torch.randn(3, 4, device=device)), torch.nn.Parameter(torch.randn(5, device=device))]
    optimizer = case.ours(params, **case.hyper, **tier)
    for step in range(4):
        if step == 2:
            optimizer.init_state()
            optimizer.load_state_dict(optimizer.state_dict())
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_fake_tensors(case, tier):
    with FakeTensorMode():
        params, optimizer = train(case, TIERS[tier])
        assert optimizer.tiers()[0].tier == "loop"
    real, other = train(case, {})
    for p, q in zip(params, real, strict=True):
        ours, theirs = optimizer.state[p], other.state[q]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert (ours[key].shape, ours[key].dtype) == (value.shape, value.dtype)


@pytest.mark.parametrize("tier", ["loop", "foreach", "default"])
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_meta_tensors(case, tier):
    params, optimizer = train(case, TIERS[tier], device="meta")
    for p in params:
        assert all(t.device.type == "meta" or t.dim() == 0 for t in optimizer.state[p].values())


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_fused_on_the_meta_device_says_what_torch_says(case):
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones(3, device="meta")
    with pytest.raises(RuntimeError, match="floating point Tensors of supported devices"):
        case.ours([p], **case.hyper, fused=True).step()


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_make_fx_has_the_update_in_its_graph(case, tier, mode):
    def two_steps(w, g):
        p = w.clone().requires_grad_()
        optimizer = case.ours([p], **case.hyper, **TIERS[tier])
        for step in range(2):
            p.grad = g * (step + 1.0)
            optimizer.step()
        return p.detach().clone()

    graph = make_fx(two_steps, tracing_mode=mode)(torch.randn(3, 4), torch.randn(3, 4))
    w, g = torch.randn(3, 4), torch.randn(3, 4)
    with torch.no_grad():
        traced = graph(w, g)
    assert not torch.equal(traced, w)
    torch.testing.assert_close(traced, two_steps(w, g), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_a_mode_that_only_watches_changes_no_number(case):
    def train(watched):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(7))
        optimizer = case.ours([p], **case.hyper)
        for step in range(5):
            p.grad = torch.randn(7)
            with FlopCounterMode(display=False) if watched and step in (0, 2, 3) else contextlib.nullcontext():
                optimizer.step()
        return p.detach()

    assert torch.equal(train(True), train(False))
