"""The pure form: nothing mutated, differentiable through, one graph for torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call, grad, vmap

import offbeat
from tests.cases import CASES, ONE_A_RULE, make_params, set_gradients


@pytest.fixture
def float64_counters():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64_counters")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pure_equals_the_optimizer_and_mutates_nothing(case):
    usual = make_params(torch.float64)
    optimizer = case.ours(usual, **case.hyper, foreach=False)
    pure = offbeat.as_pure(case.ours, **case.hyper)
    params = {str(i): p.detach().clone() for i, p in enumerate(usual)}
    state = pure.init(params)
    for step in range(6):
        set_gradients(step, usual, none_at=((2, 0),))
        old = {k: v.clone() for k, v in params.items()}
        kept, kept_state = params, state
        versions = [v._version for v in params.values()]
        params, state = pure.update(params, {str(i): p.grad for i, p in enumerate(usual)}, state)
        optimizer.step()
        assert all(torch.equal(kept[k], old[k]) for k in old)
        assert versions == [v._version for v in kept.values()]
        assert kept_state is not state
        for p, q in zip(usual, params.values(), strict=True):
            torch.testing.assert_close(p.detach(), q, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_one_graph_and_no_recompilation(case):
    torch._dynamo.reset()
    pure = offbeat.as_pure(case.ours, **case.hyper)
    counter = CompileCounter()
    update = torch.compile(pure.update, fullgraph=True, backend=counter)
    params = [torch.randn(4), torch.randn(2, 3)]
    state = pure.init(params)
    plain, plain_state = params, state
    for _ in range(4):
        grads = [torch.randn(4), torch.randn(2, 3)]
        params, state = update(params, grads, state)
        plain, plain_state = pure.update(plain, grads, plain_state)
    assert counter.frame_count == 1
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_maml_learns_an_initialisation_and_an_inner_learning_rate():
    """Sine regression: after meta-training, two inner steps help more than from where it began."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
    meta = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
    lr = torch.tensor(0.01, requires_grad=True)
    outer = offbeat.Adam([*meta.values(), lr], lr=0.01)
    inner = offbeat.as_pure(offbeat.SGD, momentum=0.5)

    def task(seed):
        generator = torch.Generator().manual_seed(seed)
        amplitude, phase = torch.rand(2, generator=generator)
        x = torch.rand(20, 1, generator=generator) * 6 - 3
        return x, (amplitude + 0.5) * torch.sin(x + phase * 3)

    def loss(params, x, y):
        return (functional_call(model, params, (x,)) - y).square().mean()

    def adapted(params, seed):
        x, y = task(seed)
        state = inner.init(params)
        for _ in range(2):
            params, state = inner.update(params, grad(loss)(params, x[:10], y[:10]), state, lr=lr)
        return loss(params, x[10:], y[10:])

    def evaluate():
        return torch.stack([adapted(meta, seed) for seed in range(1000, 1020)]).mean().item()

    before = evaluate()
    for round_ in range(60):
        outer.zero_grad()
        torch.stack([adapted(meta, round_ * 4 + i) for i in range(4)]).mean().backward()
        assert lr.grad is not None
        assert torch.isfinite(lr.grad)
        outer.step()
    assert evaluate() < 0.6 * before
    assert lr.item() != pytest.approx(0.01)


def test_vmap_trains_several_models_at_once():
    pure = offbeat.as_pure(offbeat.AdamW, lr=0.1)
    params = torch.randn(3, 4)
    grads = torch.randn(3, 4)
    state = vmap(pure.init)(params)
    together, _ = vmap(pure.update)(params, grads, state)
    for i in range(3):
        alone, _ = pure.update(params[i], grads[i], pure.init(params[i]))
        torch.testing.assert_close(together[i], alone)


def test_derivative_through_several_steps_is_right():
    pure = offbeat.as_pure(offbeat.RMSprop, lr=0.1, momentum=0.9)

    def after(p, scale):
        state = pure.init(p)
        for i in range(3):
            p, state = pure.update(p, scale * (p - i), state)
        return p

    p = torch.randn(3, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(after, (p, scale))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: offbeat.as_pure(offbeat.SGD, lr=-1), ValueError, "Invalid learning rate: -1"),
        (lambda: offbeat.as_pure(offbeat.SGD, fused=True), TypeError, "does not take fused"),
        (lambda: offbeat.as_pure(torch.optim.LBFGS), TypeError, "not made from an update rule"),
    ],
)
def test_bad_construction(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_bad_updates():
    pure = offbeat.as_pure(offbeat.SGD, lr=0.1)
    p = {"a": torch.ones(2)}
    s = pure.init(p)
    with pytest.raises(ValueError, match="gradients are not nested like the parameters"):
        pure.update(p, [torch.ones(2)], s)
    with pytest.raises(ValueError, match=r"got a gradient of shape \(3,\) for a parameter of shape \(2,\)"):
        pure.update(p, {"a": torch.ones(3)}, s)
    with pytest.raises(TypeError, match="no hyperparameter rate"):
        pure.update(p, {"a": torch.ones(2)}, s, rate=1)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        pure.update(p, {"a": torch.ones(2)}, s, lr=-1)
    with pytest.raises(
        ValueError, match=r"got a gradient of dtype torch\.float64 for a parameter of dtype torch\.float32"
    ):
        pure.update(p, {"a": torch.ones(2).double()}, s)
    with pytest.raises(TypeError, match="must be a Tensor or None, but got float"):
        pure.update(p, {"a": 1.0}, s)
    with pytest.raises(ValueError, match="the state has no momentum_buffer"):
        pure.update(p, {"a": torch.ones(2)}, s, momentum=0.9)


@pytest.mark.parametrize("name", ["Adam", "RAdam", "NAdam", "Adamax"])
def test_float32_is_as_good_as_the_optimizer_also_for_slow_averages(name):
    """Bias corrections near 1 need more digits than a float32 counter's arithmetic has."""
    hyper = {"lr": 0.1, "betas": (0.9, 0.99999)}
    pure = offbeat.as_pure(getattr(offbeat, name), **hyper)
    q = torch.zeros(2, dtype=torch.float64)
    reference = getattr(torch.optim, name)([q], **hyper, foreach=False)
    p = torch.zeros(2)
    state = pure.init(p)
    for _ in range(40):
        p, state = pure.update(p, torch.ones(2), state)
        q.grad = torch.ones(2, dtype=torch.float64)
        reference.step()
    torch.testing.assert_close(p.double(), q, rtol=2e-5, atol=0)


@pytest.mark.parametrize("name", ["ASGD", "Rprop", "NAdam"])
def test_derivative_by_the_learning_rate_reaches_the_initial_state(name):
    generator = torch.Generator().manual_seed(5)
    grads = torch.randn(3, 4, dtype=torch.float64, generator=generator)

    def after(lr):
        pure = offbeat.as_pure(getattr(offbeat, name), lr=lr)
        p = torch.ones(4, dtype=torch.float64)
        state = pure.init(p)
        for g in grads:
            p, state = pure.update(p, g, state)
        return p

    assert torch.autograd.gradcheck(after, (torch.tensor(0.05, dtype=torch.float64, requires_grad=True),))
