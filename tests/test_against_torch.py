"""Trajectories against torch.optim's for-loop: every rule, hyperparameters, dtype and tier.

Tolerances: float64 within 1e-12 of the reference relative to the tensor's size (the order of operations differs by a
few roundings); float32 within 1e-5 of the same rule in float64 over 30 steps; half precision within 4 roundings of
the parameter's dtype a step, against torch.optim in float64.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tests.cases import CASES, TIERS, make_params, set_gradients

STEPS = 30
NONE_AT = ((0, 4), (5, 0), (6, 0), (7, 3))


def scale(t: torch.Tensor) -> float:
    return max(1.0, t.detach().abs().max().item()) if t.numel() else 1.0


def assert_close(ours, theirs, tolerance, what):
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.numel():
            error = (a.detach().double() - b.detach().double()).abs().max().item() / scale(b)
            assert error <= tolerance, f"{what}: tensor {i} is off by {error:.3g}"


def state_tensors(optimizer, params, key):
    return [optimizer.state[p][key] for p in params if key in optimizer.state.get(p, ())]


@pytest.fixture
def float64_counters():
    """torch.optim turns ASGD's and NAdam's float32 scalars into float64 when it loads them; here they always are."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_matches_torch_at_every_step(case, tier):
    ours, theirs = make_params(torch.float64), make_params(torch.float64)
    a, b = case.ours(ours, **case.hyper, **TIERS[tier]), case.reference(theirs)
    for step in range(STEPS):
        set_gradients(step, ours, theirs, none_at=NONE_AT)
        a.step()
        b.step()
        assert_close(ours, theirs, 1e-12, f"step {step}")
        for key in {k for p in theirs for k in b.state.get(p, ())}:
            assert_close(state_tensors(a, ours, key), state_tensors(b, theirs, key), 1e-12, f"{key}, step {step}")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("float64_counters")
def test_checkpoints_change_places_in_the_middle_and_the_trajectory_goes_on(case, tier):
    ours, theirs = make_params(torch.float64), make_params(torch.float64)
    a, b = case.ours(ours, **case.hyper, **TIERS[tier]), case.reference(theirs)
    for step in range(STEPS):
        set_gradients(step, ours, theirs, none_at=NONE_AT)
        a.step()
        b.step()
        assert_close(ours, theirs, 1e-12, f"step {step}")
        if step in (9, 19):  # each goes on from the other's checkpoint
            saved_ours, saved_theirs = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
            for i, entry in saved_theirs["state"].items():
                assert set(saved_ours["state"][i]) == set(entry)
            a, b = case.ours(ours, **case.hyper, **TIERS[tier]), case.reference(theirs)
            a.load_state_dict(saved_theirs)
            b.load_state_dict(saved_ours)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_stays_near_float64(case, tier):
    ours, theirs = make_params(torch.float32), make_params(torch.float64)
    with torch.no_grad():  # start from values both can hold
        for p, q in zip(ours, theirs, strict=True):
            q.copy_(p)
    a, b = case.ours(ours, **case.hyper, **TIERS[tier]), case.reference(theirs)
    for step in range(STEPS):
        set_gradients(step, ours, theirs, none_at=NONE_AT)
        for p, q in zip(ours, theirs, strict=True):
            if p.grad is not None:
                q.grad = p.grad.double()
        a.step()
        b.step()
    assert_close(ours, theirs, 1e-5, "after all steps")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_precision_step_is_the_rounded_float64_step(case, tier, dtype):
    """From equal half-precision parameters and state, one step is the exact step, rounded."""
    ours, theirs = make_params(dtype), make_params(torch.float64)
    a, b = case.ours(ours, **case.hyper, **TIERS[tier]), case.reference(theirs)
    eps = torch.finfo(dtype).eps
    for step in range(6):
        with torch.no_grad():
            for p, q in zip(ours, theirs, strict=True):
                q.copy_(p)
                for key, value in a.state[p].items():
                    if isinstance(value, torch.Tensor) and value.dim() == p.dim() and value.shape == p.shape:
                        b.state[q][key] = value.double().clone() if value.dtype == dtype else value.clone()
        set_gradients(step, ours, theirs, none_at=NONE_AT)
        for p, q in zip(ours, theirs, strict=True):
            if p.grad is not None:
                q.grad = p.grad.double()
        a.step()
        b.step()
        assert all(p.dtype == dtype for p in ours)
        assert all(v.dtype in (dtype, torch.float32) for p in ours for v in a.state[p].values())
        assert_close(ours, theirs, eps, f"step {step}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiers_agree_to_the_last_bits(case):
    """One traced rule: foreach and fused differ from the loop by the order of a few float32 roundings at most."""
    sets = {tier: make_params(torch.float32) for tier in TIERS}
    optimizers = {tier: case.ours(params, **case.hyper, **TIERS[tier]) for tier, params in sets.items()}
    for step in range(10):
        set_gradients(step, *sets.values())
        for optimizer in optimizers.values():
            optimizer.step()
    for tier in TIERS:
        assert_close(sets[tier], sets["loop"], 3e-6, tier)
    assert [o.tiers()[0].tier for o in optimizers.values()] == ["loop", "foreach", "fused", "fused"]
    assert all(torch.equal(p, q) for p, q in zip(sets["fused"], sets["default"], strict=True))
