"""LBFGS is torch.optim's: the same points, checkpoints both ways, and an error for shards."""

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
        assert torch.equal(la, lb)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q)
        mine, other = a.state_dict()["state"][0], b.state_dict()["state"][0]
        assert mine["n_iter"] == other["n_iter"]
        assert mine["func_evals"] == other["func_evals"]
        if swapped:
            saved_a, saved_b = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
            assert set(saved_a["state"][0]) == set(saved_b["state"][0])
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
    assert offbeat.LBFGS([p]).defaults == torch.optim.LBFGS([p]).defaults


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


def test_bad_input():
    p = torch.zeros(2, requires_grad=True)
    optimizer = offbeat.LBFGS([p])
    with pytest.raises(TypeError):
        optimizer.step()
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    with pytest.raises(ValueError, match="parameter groups"):
        offbeat.LBFGS([{"params": [p]}, {"params": [torch.zeros(1)]}])
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        offbeat.LBFGS([p], lr=-1)
    module = model()
    with pytest.raises(TypeError, match="cannot be overlapped"):
        offbeat.overlap(offbeat.LBFGS(module.parameters()), module)


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


def refuse_shards(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(TypeError, match=r"LBFGS does not support DTensor parameters .* use an optimizer such as AdamW"):
        offbeat.LBFGS(sharded.parameters())
    return True


@pytest.mark.ranks
def test_shards_are_refused():
    assert run_ranks(refuse_shards, 2) == [True, True]


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


def test_maximizing_is_torchs_or_refused():
    p = torch.zeros(2, requires_grad=True)
    if "maximize" in inspect.signature(torch.optim.LBFGS).parameters:
        assert offbeat.LBFGS([p], maximize=True).param_groups[0]["maximize"] is True
    else:
        with pytest.raises(ValueError, match=r"needs torch 2\.15"):
            offbeat.LBFGS([p], maximize=True)
