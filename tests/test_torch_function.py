"""torch.optim's own functions, which run where there is no kernel and ours would take longer: torch's bits."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch

import offbeat
from offbeat.engine import choice as choice_module
from tests.cases import CASES

FUNCTIONS = [case for case in CASES if case.ours.rule.surface.function is not None]
#: Dtype and shapes of a group that torch's function updates.
GROUPS = {
    "few": (torch.float32, [(4, 3), (4,)]),
    "few, float64": (torch.float64, [(4, 3)]),
    "few, complex": (torch.complex64, [(4, 3), (4,)]),
    "few, bfloat16": (torch.bfloat16, [(4, 3), (4,)]),
    "large, bfloat16": (torch.bfloat16, [(70, 65), (5000,), (65, 70), (1, 4097)]),
    "large, float16": (torch.float16, [(70, 65), (5000,), (65, 70)]),
}


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    monkeypatch.setattr(choice_module, "_why_not_fused", lambda *args: "this test wants torch's function")


def make(group):
    dtype, shapes = GROUPS[group]
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def set_gradients(step, params):
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) if (step + i) % 4 else None


def same(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        # torch adds weight decay to complex numbers, we to their parts. In float16 eps is zero, and some squares are.
        tolerance = 1e-6 if p.is_complex() else 0.0
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, equal_nan=p.dtype == torch.float16)


def same_state(a, b):
    for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
        mine, other = a.state.get(p, {}), b.state.get(q, {})
        assert {k for k, v in other.items() if v is not None} <= mine.keys()
        for key, value in other.items():
            if isinstance(value, torch.Tensor):
                same([mine[key]], [value])


def train(optimizer, params, steps, tiers=None):
    for step in steps:
        set_gradients(step, params)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step // 3)
        optimizer.step()
        if tiers is not None:
            tiers.add(optimizer.tiers()[0].tier)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("case", FUNCTIONS, ids=str)
def test_the_bits_are_torchs(case, group):
    ours, theirs = make(group), make(group)
    if theirs[0].is_complex() and case.name == "Rprop":
        pytest.skip("torch's Rprop has no complex numbers")
    a, b = case.ours(ours, **case.hyper), case.reference(theirs)
    tiers = set()
    train(a, ours, range(6), tiers)
    train(b, theirs, range(6))
    if case.hyper.get("dampening"):  # a first step that differs is not left to torch's function
        assert "torch" not in tiers
        return
    # Some operators of torch's are quicker still.
    if tiers == {"native"}:
        assert case.name == "SGD"
        return
    assert tiers == {"torch"}
    same(ours, theirs)
    same_state(a, b)
    # A checkpoint of torch's, in the middle of the run.
    c = case.ours(ours, **case.hyper)
    c.load_state_dict(copy.deepcopy(b.state_dict()))
    c.param_groups[0]["foreach"] = None  # the reference asks for a for-loop
    train(c, ours, range(6, 12), tiers)
    train(b, theirs, range(6, 12))
    assert tiers == {"torch"}
    same(ours, theirs)
    same_state(c, b)


@pytest.mark.parametrize("name", ["ASGD", "Rprop"])
def test_state_begins_with_the_rate_of_the_first_step(name):
    ours, theirs = make("few"), make("few")
    a = getattr(offbeat, name)(ours, lr=0.5)
    a.init_state()
    a.param_groups[0]["lr"] = 0.125
    b = getattr(torch.optim, name)(theirs, lr=0.125, foreach=False)
    for step in range(1, 4):  # the first parameter has its first gradient in another step than the second
        set_gradients(step + 2, ours)
        set_gradients(step + 2, theirs)
        a.step()
        b.step()
    assert a.tiers()[0].tier == "torch"
    same(ours, theirs)


@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bucket_has_the_bits_of_the_whole_group(name, dtype):
    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(80, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3)).to(dtype)

    def run(overlapped):
        model = build()
        optimizer = getattr(offbeat, name)(model.parameters(), lr=0.01)
        if overlapped:
            offbeat.overlap(optimizer, model)
        for step in range(4):
            x = torch.randn(8, 80, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    same(run(True), run(False))


def test_tiers_say_why():
    (tier,) = offbeat.RMSprop(make("few")).tiers()
    assert str(tier) == "torch (torch.optim's own function, because this test wants torch's function)"
    assert offbeat.RMSprop(make("few"), foreach=True).tiers()[0].tier == "foreach"
    assert offbeat.RMSprop([*make("few"), *make("few")]).tiers()[0].tier == "foreach"
    assert offbeat.RMSprop(make("few"), differentiable=True).tiers()[0].tier == "loop"
    with pytest.raises(RuntimeError, match="`fused=True` is not possible for RMSprop here"):
        train(offbeat.RMSprop(params := make("few"), fused=True), params, [1])


def test_a_function_with_options_that_nobody_knows_is_not_called():
    def later(params, grads, square_avgs, state_steps, foreach=None, *, lr, alpha, curvature):
        raise AssertionError("called without an option")

    known = offbeat.RMSprop.rule
    rule = replace(known, surface=replace(known.surface, function=later))

    class Later(offbeat.RuleOptimizer, rule=rule): ...

    optimizer = Later(make("few"))
    assert optimizer.tiers()[0].tier == "foreach"
    train(optimizer, optimizer.param_groups[0]["params"], range(2))


def test_groups_that_grow_are_no_longer_few():
    params = make("few")
    optimizer = offbeat.Adadelta(params)
    assert optimizer.tiers()[0].tier == "torch"
    optimizer.param_groups[0]["params"].extend(make("few"))
    assert optimizer.tiers()[0].tier == "foreach"


def test_what_does_not_fit_raises_before_anything_changes():
    params = make("few")
    optimizer = offbeat.Adamax(params, lr=0.1)
    train(optimizer, params, range(2))
    before = [p.detach().clone() for p in params]
    set_gradients(2, params)
    optimizer.state[params[1]]["exp_inf"] = torch.zeros(7)
    with pytest.raises(RuntimeError, match="exp_inf"):
        optimizer.step()
    same(params, before)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_a_rule_with_maths_of_its_own_is_not_torchs(name):
    """It was taken for torch's rule by the operators that run without kernels."""
    known = getattr(offbeat, name).rule

    def half(p, g, c, **state):
        changed, *rest = known.update(p=p, g=g, c=c, **state)
        return (p + 0.5 * (changed - p), *rest)

    def halved(**tensors):
        return half(**tensors)

    halved.__signature__ = __import__("inspect").signature(known.update)
    rule = replace(known, name="Mine", update=halved)
    assert (rule.surface.native, rule.surface.function) == (None, None)
    assert known.surface.native is not None or known.surface.function is not None

    class Mine(offbeat.RuleOptimizer, rule=rule): ...

    (p,), (q,) = ([torch.ones(3, requires_grad=True)] for _ in range(2))
    p.grad = q.grad = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Mine([p], lr=0.5, weight_decay=0.0).step()
        getattr(offbeat, name)([q], lr=0.5, weight_decay=0.0).step()
    torch.testing.assert_close(1 - p, 0.5 * (1 - q))
