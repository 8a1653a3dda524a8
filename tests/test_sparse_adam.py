"""SparseAdam against torch.optim's: numbers, checkpoints, errors."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

import offbeat

HYPER = [{}, {"lr": 0.1, "betas": (0.5, 0.9), "maximize": True}, {"lr": 0.01, "eps": 1e-3}]


def parameters(dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in [(6, 3), (5,), (4, 2, 3)]]


def sparse_gradients(step, *sets):
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(sets[0]):
        count = 0 if (step, i) == (3, 0) else 4  # one gradient that touches nothing
        rows = torch.randint(len(p), (1, count), generator=generator)  # with repeats
        values = torch.randn((count, *p.shape[1:]), dtype=torch.float64, generator=generator)
        for params in sets:
            values_there = values.to(params[i].dtype)
            params[i].grad = None if (step, i) == (2, 1) else torch.sparse_coo_tensor(rows, values_there, p.shape)


@pytest.mark.parametrize("hyper", HYPER, ids=str)
@pytest.mark.parametrize("swapped", [False, True], ids=["alone", "checkpoints change places"])
def test_numbers_are_torchs(hyper, swapped):
    ours, theirs = parameters(), parameters()
    a, b = offbeat.SparseAdam(ours, **hyper), torch.optim.SparseAdam(theirs, **hyper)
    for step in range(12):
        sparse_gradients(step, ours, theirs)
        a.step()
        b.step()
        if swapped and step in (4, 8):
            saved_a, saved_b = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
            assert all(isinstance(entry["step"], int) for entry in saved_a["state"].values())
            a, b = offbeat.SparseAdam(ours, **hyper), torch.optim.SparseAdam(theirs, **hyper)
            a.load_state_dict(saved_b)
            b.load_state_dict(saved_a)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(a.state[p].get(key), b.state[q].get(key), rtol=1e-12, atol=1e-12)


def test_signature_and_groups_are_torchs():
    ours, theirs = inspect.signature(offbeat.SparseAdam), inspect.signature(torch.optim.SparseAdam)
    assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
        (p.name, p.default, p.kind) for p in theirs.parameters.values()
    ]
    p = torch.zeros(2)
    assert set(offbeat.SparseAdam([p]).param_groups[0]) == set(torch.optim.SparseAdam([p]).param_groups[0])


def test_rows_that_no_gradient_touches_stay_as_they_are():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = offbeat.SparseAdam(embedding.parameters())
    optimizer.init_state()
    embedding(torch.tensor([1, 3, 1])).sum().backward()
    optimizer.step()
    changed = (embedding.weight != before).any(1)
    assert changed.tolist() == [False, True, False, True, False]


def test_a_dense_gradient_raises_and_changes_nothing():
    rows, dense = torch.zeros(3, 2), torch.ones(2)
    rows.grad, dense.grad = torch.ones(3, 2).to_sparse(1), torch.ones(2)
    optimizer = offbeat.SparseAdam([rows, dense])
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients, please consider Adam instead"):
        optimizer.step()
    assert not rows.any()
    assert not optimizer.state


def test_half_precision_is_the_rounded_step():
    p = torch.ones(4, 2, dtype=torch.bfloat16)
    q = p.double()
    rows, values = torch.tensor([[0, 2]]), torch.tensor([[0.5, -1.0], [2.0, 3.0]])
    p.grad, q.grad = (torch.sparse_coo_tensor(rows, values.to(t.dtype), t.shape) for t in (p, q))
    offbeat.SparseAdam([p], lr=0.1).step()
    torch.optim.SparseAdam([q], lr=0.1).step()
    assert torch.equal(p, q.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["rounding", "state_dtype", "foreach", "fused"])
def test_options_that_torch_does_not_have_raise(name):
    with pytest.raises(TypeError, match=name):
        offbeat.SparseAdam([torch.zeros(2)], **{name: None})


def test_functional_form():
    p, q = torch.ones(3), torch.ones(3)
    g = torch.tensor([0.0, 1.0, 0.0]).to_sparse()
    fn = offbeat.as_functional(torch.optim.SparseAdam, [p], lr=0.5)
    fn.step([g])
    q.grad = g
    torch.optim.SparseAdam([q], lr=0.5).step()
    torch.testing.assert_close(p, q)
