"""LBFGS against torch.optim's: the same points, checkpoints both ways, shards as the whole model."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

import offbeat
from tests.ranks import run_ranks

#: Few iterations: a method that learns from differences of gradients makes roundings grow, torch's too.
HYPER = [
    {"lr": 0.1, "max_iter": 8},
    {"lr": 0.5, "max_iter": 5, "history_size": 3},
    {"line_search_fn": "strong_wolfe", "max_iter": 8},
    {"line_search_fn": "strong_wolfe", "max_iter": 4, "history_size": 2, "lr": 0.3},
    {"line_search_fn": "strong_wolfe", "max_eval": 3},
    {"lr": torch.tensor(0.2, dtype=torch.float64), "tolerance_grad": 0.05, "max_iter": 8},
]


def model(dtype=torch.float64):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).to(dtype)


def closure_of(module, optimizer, step=0, count=None):
    generator = torch.Generator().manual_seed(7 + step)
    x = torch.randn(20, 4, dtype=torch.float64, generator=generator)
    y = torch.randn(20, 2, dtype=torch.float64, generator=generator)
    first = next(module.parameters())

    def closure():
        if count is not None:
            count.append(1)
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (module(x.to(first.dtype)) - y.to(first.dtype)).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("hyper", HYPER, ids=str)
@pytest.mark.parametrize("swapped", [False, True], ids=["alone", "checkpoints change places"])
def test_points_are_torchs(hyper, swapped):
    ours, theirs = model(), model()
    a, b = offbeat.LBFGS(ours.parameters(), **hyper), torch.optim.LBFGS(theirs.parameters(), **hyper)
    for step in range(4):
        evaluations = [], []
        la = a.step(closure_of(ours, a, 0, evaluations[0]))
        lb = b.step(closure_of(theirs, b, 0, evaluations[1]))
        assert len(evaluations[0]) == len(evaluations[1]), step
        torch.testing.assert_close(la, lb, rtol=1e-8, atol=1e-10)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
        mine, other = a.state_dict()["state"][0], b.state_dict()["state"][0]
        assert mine["n_iter"] == other["n_iter"]
        assert mine["func_evals"] == other["func_evals"]
        if swapped:
            saved_a, saved_b = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
            assert set(saved_a["state"][0]) - {"al"} == set(saved_b["state"][0]) - {"al"}
            a, b = offbeat.LBFGS(ours.parameters(), **hyper), torch.optim.LBFGS(theirs.parameters(), **hyper)
            a.load_state_dict(saved_b)
            b.load_state_dict(saved_a)


def test_signature_and_groups_are_torchs():
    ours, theirs = inspect.signature(offbeat.LBFGS), inspect.signature(torch.optim.LBFGS)
    known = [p for p in ours.parameters.values() if p.name in theirs.parameters or p.name != "maximize"]  # since 2.15
    assert [(p.name, p.default, p.kind) for p in known] == [
        (p.name, p.default, p.kind) for p in theirs.parameters.values()
    ]
    p = torch.zeros(2)
    assert offbeat.LBFGS([p]).defaults == {"maximize": False} | torch.optim.LBFGS([p]).defaults


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_complex_transposed_sparse_missing_and_empty_gradients(line_search):
    def build(transposed):
        torch.manual_seed(2)
        z = torch.randn(3, dtype=torch.complex128, requires_grad=True)
        w = torch.randn(4, 3, dtype=torch.float64).t()
        w = (w if transposed else w.contiguous()).requires_grad_()
        table = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
        return [z, w, table, torch.zeros(2, dtype=torch.float64, requires_grad=True), torch.zeros(0).requires_grad_()]

    def closure_for(params, optimizer):
        z, w, table, *_ = params

        def closure():
            optimizer.zero_grad()
            rows = torch.nn.functional.embedding(torch.tensor([1, 3, 1]), table, sparse=True)
            loss = (z - 1).abs().square().sum() + ((w - 0.5) ** 4).sum() + (rows - 2).square().sum()
            loss.backward()
            return loss

        return closure

    ours, theirs = build(True), build(False)  # torch's cannot view a transposed gradient
    options = {"line_search_fn": line_search, "lr": 0.2, "max_iter": 4}
    a = offbeat.LBFGS(ours, **options)
    b = torch.optim.LBFGS(theirs, **options)
    for _ in range(3):
        a.step(closure_for(ours, a))
        b.step(closure_for(theirs, b))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_save_load_go_on_is_never_saved():
    once, again = model(torch.float32), model(torch.float32)
    a, b = (offbeat.LBFGS(m.parameters(), line_search_fn="strong_wolfe", max_iter=3) for m in (once, again))
    for step in range(4):
        a.step(closure_of(once, a, step))
        b.step(closure_of(again, b, step))
        saved = copy.deepcopy(b.state_dict())
        b = offbeat.LBFGS(again.parameters(), line_search_fn="strong_wolfe", max_iter=3)
        b.init_state()
        b.load_state_dict(saved)
    assert all(torch.equal(p, q) for p, q in zip(once.parameters(), again.parameters(), strict=True))


def test_a_closure_that_raises_leaves_the_parameters_where_the_iteration_began():
    module = model()
    optimizer = offbeat.LBFGS(module.parameters(), line_search_fn="strong_wolfe")
    closure = closure_of(module, optimizer)
    before = [p.detach().clone() for p in module.parameters()]
    calls = []

    def fails():
        calls.append(1)
        if len(calls) == 2:
            raise OSError("no data")
        return closure()

    with pytest.raises(OSError, match="no data"):
        optimizer.step(fails)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_bad_input():
    p = torch.zeros(2, requires_grad=True)
    optimizer = offbeat.LBFGS([p])
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step(None)
    with pytest.raises(TypeError):
        optimizer.step()
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    with pytest.raises(ValueError, match="parameter groups"):
        offbeat.LBFGS([{"params": [p]}, {"params": [torch.zeros(1)]}])
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        offbeat.LBFGS([p], lr=-1)
    with pytest.raises(RuntimeError, match="only 'strong_wolfe' is supported"):
        offbeat.LBFGS([p], line_search_fn="armijo")
    module = model()
    with pytest.raises(TypeError, match="cannot be overlapped"):
        offbeat.overlap(offbeat.LBFGS(module.parameters()), module)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {0: {"d": torch.zeros(5)}}
    with pytest.raises(ValueError, match="5 numbers, but the parameters have 2"):
        optimizer.load_state_dict(saved)


def test_schedulers_and_hooks():
    module = model()
    optimizer = offbeat.LBFGS(module.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    optimizer.step(closure_of(module, optimizer))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert seen == [1]


def train_sharded(rank, world, line_search):
    """FSDP2 over half the batch each, and the whole model with torch's LBFGS over all of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole, sharded = model(), model()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    options = {"line_search_fn": line_search, "max_iter": 4, "lr": 0.3, "history_size": 3}
    a, b = offbeat.LBFGS(sharded.parameters(), **options), torch.optim.LBFGS(whole.parameters(), **options)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(world, 10, n, dtype=torch.float64, generator=generator) for n in (4, 2))

        def part():
            a.zero_grad()
            loss = (sharded(x[rank]) - y[rank]).square().mean()
            loss.backward()
            return loss

        def all_of_it():
            b.zero_grad()
            loss = (whole(x.flatten(0, 1)) - y.flatten(0, 1)).square().mean()
            loss.backward()
            return loss

        a.step(part)
        b.step(all_of_it)
        if step == 1:
            saved = copy.deepcopy(a.state_dict())
            a = offbeat.LBFGS(sharded.parameters(), **options)
            a.load_state_dict(saved)
    return [p.full_tensor().detach() for p in sharded.parameters()], [p.detach() for p in whole.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("world", [2, 3])
def test_shards_move_as_the_whole_model_does(line_search, world):
    results = run_ranks(train_sharded, world, line_search)
    for sharded, whole in results:
        for p, q in zip(sharded, whole, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)
    for p, q in zip(results[0][0], results[-1][0], strict=True):
        assert torch.equal(p, q)


def train_local_sgd(rank, world):
    module = model()
    optimizer = offbeat.LocalSGD(offbeat.LBFGS(module.parameters(), max_iter=2, lr=0.1), module, every=2, subgroup=None)
    for step in range(4):
        optimizer.step(closure_of(module, optimizer, 10 * rank + step))
    optimizer.finish()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.ranks
def test_replicas_that_average_now_and_then():
    first, second = run_ranks(train_local_sgd, 2)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("hyper", HYPER, ids=str)
def test_maximizing_is_minimizing_the_negative(hyper):
    ours, theirs = model(), model()
    a, b = offbeat.LBFGS(ours.parameters(), maximize=True, **hyper), offbeat.LBFGS(theirs.parameters(), **hyper)
    for _ in range(3):
        closure = closure_of(ours, a)

        def negative():
            with torch.enable_grad():
                a.zero_grad()
                loss = -closure_of(ours, a)().detach()
            for p in ours.parameters():
                p.grad.neg_()
            return loss

        result = a.step(negative)
        assert result == -b.step(closure_of(theirs, b))
        assert result < 0  # what the closure returns, not what is minimized
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q)
    state = a.state_dict()
    del state["param_groups"][0]["maximize"]  # as in checkpoints of older releases
    c = offbeat.LBFGS(ours.parameters(), **hyper)
    c.load_state_dict(state)
    assert c.step(closure) > 0


def test_a_group_without_parameters_evaluates_the_closure():
    optimizer = offbeat.LBFGS([{"params": []}])
    assert optimizer.step(lambda: torch.is_grad_enabled()) is True
