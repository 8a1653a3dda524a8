"""Functional optimizers: explicit gradients, one parameter at a time, threads."""

from __future__ import annotations

import threading

import pytest
import torch

import offbeat
from tests.cases import CASES, MATRIX_CASES, ONE_A_RULE, make_params, set_gradients


def detached(params):
    return [p.detach() for p in params]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_explicit_gradients_equal_the_optimizer(case):
    usual, given = make_params(torch.float32), detached(make_params(torch.float32))
    optimizer = case.ours(usual, **case.hyper)
    fn = offbeat.as_functional(case.ours, given, **case.hyper)
    for step in range(6):
        set_gradients(step, usual, none_at=((2, 0), (3, 4)))
        optimizer.step()
        fn.step([p.grad for p in usual])
        assert all(p.grad is None for p in given)
        assert all(torch.equal(p, q) for p, q in zip(usual, given, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_parameter_at_a_time_from_an_empty_list(case):
    usual, given = make_params(torch.float32), detached(make_params(torch.float32))
    optimizer = case.ours(usual, **case.hyper)
    fn = offbeat.as_functional(case.ours, [], **case.hyper)
    for step in range(5):
        set_gradients(step, usual)
        optimizer.step()
        for p, q in reversed(list(zip(usual, given, strict=True))):
            fn.step_param(q, p.grad)
        assert all(torch.equal(p, q) for p, q in zip(usual, given, strict=True))
    assert len(fn.param_groups[0]["params"]) == len(given)


@pytest.mark.parametrize("case", MATRIX_CASES, ids=str)
def test_one_matrix_at_a_time_from_an_empty_list(case):
    usual, given = ([p.detach() for p in make_params(torch.float32, shapes=[(3, 4), (4, 3), (3, 4)])] for _ in range(2))
    whole, fn = (
        offbeat.as_functional(case.ours, usual, **case.hyper),
        offbeat.as_functional(case.ours, [], **case.hyper),
    )
    for _ in range(3):
        grads = [torch.randn_like(p) for p in usual]
        whole.step(grads)
        for p, g in zip(given, grads, strict=True):
            fn.step_param(p, g)
    for p, q in zip(usual, given, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="2D" if case.name == "Muon" else "step"):
        fn.step_param(torch.ones(3), torch.ones(3)) if case.name == "Muon" else fn.step([])


@pytest.mark.parametrize("case", [c for c in ONE_A_RULE if c.name != "Lion"], ids=str)
def test_torchs_class_stands_for_ours(case):
    a, b = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    fn, reference = offbeat.as_functional(case.theirs, [a], **case.hyper), case.reference([b])
    for _ in range(4):
        g = torch.randn(3, dtype=torch.float64)
        b.grad = g.clone()
        fn.step([g])
        reference.step()
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_groups_and_a_changing_learning_rate():
    a, b = torch.ones(2), torch.ones(2)
    fn = offbeat.as_functional(offbeat.SGD, [{"params": [a]}, {"params": [b], "lr": 0.1}], lr=1.0)
    fn.step([torch.ones(2), torch.ones(2)])
    fn.param_groups[0]["lr"] = 0.5
    fn.step([torch.ones(2), torch.ones(2)])
    torch.testing.assert_close(a, torch.full((2,), -0.5))
    torch.testing.assert_close(b, torch.full((2,), 0.8))


def test_state_dicts_go_from_and_to_the_optimizer():
    usual, given = make_params(torch.float32), detached(make_params(torch.float32))
    optimizer, fn = offbeat.NAdam(usual), offbeat.as_functional(offbeat.NAdam, given)
    for step in range(6):
        set_gradients(step, usual)
        if step == 3:
            ours, theirs = fn.state_dict(), optimizer.state_dict()
            fn.load_state_dict(theirs)
            optimizer.load_state_dict(ours)
        fn.step([p.grad for p in usual])
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(usual, given, strict=True))


def test_wrong_counts_name_both_numbers():
    fn = offbeat.as_functional(offbeat.SGD, [torch.ones(1), torch.ones(1)], lr=0.1)
    with pytest.raises(ValueError, match="3 gradients for 2 parameters"):
        fn.step([None, None, None])
    with pytest.raises(ValueError, match="0 gradients for 2 parameters"):
        fn.step([])


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (torch.ones(4), RuntimeError, r"shape \(4,\) for a parameter of shape \(3,\)"),
        (torch.ones(1, 3), ValueError, r"shape \(1, 3\)"),
        (torch.ones(3, dtype=torch.float64), RuntimeError, "dtype torch.float64 .* dtype torch.float32"),
        (torch.ones(3, device="meta"), RuntimeError, "on meta for a parameter on cpu"),
        ([1.0, 1.0, 1.0], TypeError, "must be a Tensor or None, but got list"),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_bad_gradients_change_nothing(gradient, error, message, steps_before):
    params = [torch.ones(3), torch.ones(3)]
    fn = offbeat.as_functional(offbeat.AdamW, params, lr=0.1)
    for _ in range(steps_before):
        fn.step([torch.ones(3), torch.ones(3)])
    before = [p.clone() for p in params]
    with pytest.raises(error, match=message):
        fn.step([torch.ones(3), gradient])
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert all(entry["step"] == steps_before for entry in fn.state_dict()["state"].values())


class Unusual(torch.optim.SGD):
    def step(self, closure=None): ...


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, torch.optim.Optimizer, Unusual, 3])
def test_classes_without_a_rule_are_refused(cls):
    with pytest.raises(TypeError, match="not made from an update rule"):
        offbeat.as_functional(cls, [torch.ones(1)])


@pytest.mark.parametrize("shared", [True, False], ids=["one optimizer", "one optimizer each"])
def test_threads_step_at_once_with_their_own_gradients(shared):
    """With whole numbers the order of additions does not matter, so any lost update would show."""
    threads, steps = 4, 50
    params = [torch.zeros(20_000) for _ in range(8)]
    fns = [offbeat.as_functional(offbeat.SGD, params, lr=1.0) for _ in range(1 if shared else threads)]
    barrier = threading.Barrier(threads)
    failures = []

    def trainer(number):
        try:
            barrier.wait(timeout=30)
            for step in range(steps):
                fns[number % len(fns)].step([torch.full((20_000,), float(number + step)) for _ in params])
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=trainer, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert not failures
    assert not any(worker.is_alive() for worker in workers)
    expected = -float(sum(number + step for number in range(threads) for step in range(steps)))
    assert all(torch.equal(p, torch.full_like(p, expected)) for p in params)
    assert all(p.grad is None for p in params)


def test_threads_on_one_stateful_optimizer_count_every_step():
    params = [torch.ones(100) for _ in range(5)]
    fn = offbeat.as_functional(offbeat.AdamW, params)

    def trainer():
        for _ in range(25):
            fn.step([torch.ones(100) for _ in params])

    workers = [threading.Thread(target=trainer) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert all(entry["step"] == 100 for entry in fn.state_dict()["state"].values())


def test_a_tensor_with_history_cannot_join():
    fn = offbeat.as_functional(offbeat.SGD, [], lr=0.1)
    with pytest.raises(ValueError, match="non-leaf"):
        fn.step_param(torch.ones(2, requires_grad=True) * 2, torch.ones(2))
    assert not fn.param_groups[0]["params"]
