"""Parameters of every kind: complex, mixed, strided, empty, frozen, sparse."""

from __future__ import annotations

import pytest
import torch

import offbeat
from tests.cases import CASES, ONE_A_RULE, TIERS, make_params, set_gradients

WITH_TORCH = [case for case in CASES if case.name != "Lion"]


def clones(params):
    return [p.detach().clone(memory_format=torch.preserve_format).requires_grad_() for p in params]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", WITH_TORCH, ids=str)
def test_complex(case, tier):
    ours = [torch.randn(shape, dtype=torch.complex128, requires_grad=True) for shape in [(3, 4), (), (5,)]]
    theirs = clones(ours)
    a, b = case.ours(ours, **case.hyper, **TIERS[tier]), case.reference(theirs)
    for step in range(10):
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_complex_lion_treats_real_and_imaginary_part_alike():
    z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    x = torch.view_as_real(z.detach()).clone().requires_grad_()
    a, b = offbeat.Lion([z], lr=0.1), offbeat.Lion([x], lr=0.1)
    for _ in range(3):
        z.grad = torch.randn_like(z)
        x.grad = torch.view_as_real(z.grad).clone()
        a.step()
        b.step()
    assert torch.equal(torch.view_as_real(z.detach()), x.detach())


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_mixed_dtypes_in_one_group_are_each_as_if_alone(case, tier):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    together = [torch.randn(6, dtype=torch.float64).to(d).requires_grad_() for d in dtypes]
    alone = clones(together)
    one = case.ours(together, **case.hyper, **TIERS[tier])
    many = [case.ours([p], **case.hyper, **TIERS[tier]) for p in alone]
    for step in range(5):
        set_gradients(step, together, alone)
        one.step()
        for optimizer in many:
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(together, alone, strict=True))


def strided_parameters():
    return {
        "transposed": torch.randn(5, 3).t(),
        "channels_last": torch.randn(4, 6, 5, 5).contiguous(memory_format=torch.channels_last),
        "permuted": torch.randn(4, 6, 5, 5).permute(2, 0, 3, 1),
        "gaps": torch.randn(8, 10)[::2, 1:7:3],
        "column": torch.randn(8, 10)[:, 2],
        "ones": torch.randn(1, 5, 1).transpose(0, 1),
    }


@pytest.mark.parametrize("gradient", ["same", "contiguous", "expanded"])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_strides_do_not_matter(case, tier, gradient):
    """Each parameter moves as its contiguous copy does, whatever its strides and its gradient's."""
    ours = [t.detach().requires_grad_() for t in strided_parameters().values()]
    plain = [p.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for p in ours]
    kinds = [(p.stride(), p.data_ptr()) for p in ours]
    a, b = case.ours(ours, **case.hyper, **TIERS[tier]), case.ours(plain, **case.hyper, foreach=False)
    for _ in range(4):
        for p, q in zip(ours, plain, strict=True):
            if gradient == "expanded":
                q.grad = torch.randn(1).expand(q.shape)
                p.grad = q.grad
            else:
                q.grad = torch.randn_like(q)
                p.grad = torch.empty_like(p).copy_(q.grad) if gradient == "same" else q.grad.clone()
        a.step()
        b.step()
        for p, q in zip(ours, plain, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)
    assert kinds == [(p.stride(), p.data_ptr()) for p in ours]


def test_memory_between_the_elements_is_not_touched():
    whole = torch.arange(60.0).reshape(6, 10)
    untouched = whole.clone()
    p = whole[1::2, 2:8:3].requires_grad_()
    p.grad = torch.ones(p.shape)
    offbeat.AdamW([p], lr=0.1).step()
    changed = whole != untouched
    assert changed.sum() == p.numel()
    assert changed[1::2, 2:8:3].all()


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_frozen_parameters_and_missing_gradients_have_no_state(case):
    params = make_params(torch.float32)
    frozen = torch.randn(3)
    optimizer = case.ours([*params, frozen], **case.hyper)
    set_gradients(0, params, none_at=((0, 1), (0, 3)))
    before = [p.detach().clone() for p in [*params, frozen]]
    optimizer.step()
    for i, (p, old) in enumerate(zip([*params, frozen], before, strict=True)):
        assert torch.equal(p, old) == (i in (1, 2, 3, 6))  # 2 is empty


def sparse_gradient(dtype=torch.float64):
    return torch.sparse_coo_tensor([[0, 2, 2, 5]], torch.randn(4, 3, dtype=dtype), (7, 3), check_invariants=True)


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
        ("Adagrad", {"lr": 0.1}),
        ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "maximize": True}),
    ],
)
@pytest.mark.parametrize("tier", [{}, {"foreach": False}, {"foreach": True}], ids=str)
def test_sparse_gradients(name, hyper, tier):
    ours = [torch.randn(7, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    theirs = clones(ours)
    a = getattr(offbeat, name)(ours, **hyper, **tier)
    b = getattr(torch.optim, name)(theirs, **hyper, foreach=False)
    for step in range(6):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            g = torch.randn(7, 3, dtype=torch.float64) if i == 2 else sparse_gradient()
            p.grad, q.grad = g, g.clone()
        a.step()
        b.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13, msg=f"step {step}")


def test_a_sparse_momentum_buffer_from_torch_loads():
    ours, theirs = [torch.zeros(7, 3, requires_grad=True)], [torch.zeros(7, 3, requires_grad=True)]
    b = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    theirs[0].grad = sparse_gradient(torch.float32)
    b.step()
    a = offbeat.SGD(ours, lr=0.1, momentum=0.9)
    a.load_state_dict(b.state_dict())
    with torch.no_grad():
        ours[0].copy_(theirs[0])
    ours[0].grad = sparse_gradient(torch.float32)
    theirs[0].grad = ours[0].grad.clone()
    a.step()
    b.step()
    torch.testing.assert_close(ours[0], theirs[0])


def test_a_sparse_momentum_buffer_put_in_by_hand_is_kept_dense_and_used():
    p = torch.zeros(7, 3, requires_grad=True)
    optimizer = offbeat.SGD([p], lr=0.1, momentum=0.5)
    optimizer.state[p]["momentum_buffer"] = sparse_gradient(torch.float32)
    expected = optimizer.state[p]["momentum_buffer"].to_dense()
    for _ in range(2):
        p.grad = torch.ones(7, 3)
        optimizer.step()
        expected = 0.5 * expected + 1
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], expected)


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_nan_and_infinity_are_values(case):
    p = torch.ones(4, requires_grad=True)
    p.grad = torch.tensor([1.0, float("nan"), float("inf"), -1.0])
    optimizer = case.ours([p], **case.hyper)
    optimizer.step()
    assert torch.isfinite(p[[0, 3]]).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_kernel_gives_the_same_bits_however_the_work_is_cut(threads):
    """The bucket or the thread an element is in must not matter: overlapping relies on it."""
    values = torch.randn(300_001)
    gradient = torch.randn(300_001)
    whole = values.clone().requires_grad_()
    parts = [t.clone().requires_grad_() for t in values.split([1, 7, 99_990, 3, 200_000])]
    a, b = offbeat.AdamW([whole], lr=0.1, amsgrad=True), offbeat.AdamW(parts, lr=0.1, amsgrad=True)
    before = torch.get_num_threads()
    try:
        for _ in range(3):
            whole.grad = gradient
            for p, g in zip(parts, gradient.split([1, 7, 99_990, 3, 200_000]), strict=True):
                p.grad = g
            torch.set_num_threads(1)
            a.step()
            torch.set_num_threads(threads)
            b.step()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole.detach(), torch.cat([p.detach() for p in parts]))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "gaps"])
@pytest.mark.parametrize("tier", TIERS)
def test_tensors_larger_than_the_pieces_they_are_cut_into(tier, layout):
    """More than 4 MB: the loop and foreach tiers bound their temporaries by cutting."""
    shape = (1100, 1000)
    values, gradient = torch.randn(shape), torch.randn(shape)
    p = {
        "contiguous": lambda: values.clone(),
        "transposed": lambda: values.t().contiguous().t(),
        "gaps": lambda: torch.zeros(1100, 2000)[:, ::2].copy_(values),
    }[layout]().requires_grad_()
    q = values.double().requires_grad_()
    a = offbeat.RMSprop([p, torch.ones(3, requires_grad=True)], momentum=0.9, **TIERS[tier])
    b = torch.optim.RMSprop([q], momentum=0.9, foreach=False)
    for _ in range(2):
        p.grad, q.grad = gradient.clone(), gradient.double()
        a.step()
        b.step()
    torch.testing.assert_close(p.double(), q, rtol=1e-6, atol=1e-6)
