"""What the engine keeps between steps, what it lets go, and what it checks before anything changes."""

from __future__ import annotations

import gc
import inspect
import weakref
from dataclasses import replace

import pytest
import torch

import offbeat
from offbeat.engine import choice as choice_module
from offbeat.rules.checks import learning_rate, weight_decay
from offbeat.rules.rule import Hyper
from tests.cases import make_params, set_gradients

ones = torch.ones


@pytest.fixture
def native(monkeypatch):
    """torch's own fused operators, with ``fused=True``."""
    monkeypatch.setattr(choice_module, "_why_not_fused", lambda *args: "this test wants torch's operator")


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_a_batch_without_gradients_is_passed_over(name):
    def train(cls, **tier):
        p, q = torch.nn.Parameter(ones(4)), torch.nn.Parameter(ones(4, dtype=torch.float64))
        optimizer = cls([p, q], lr=0.1, **tier)
        for step in range(5):
            p.grad = None if step in (2, 4) else ones(4)
            q.grad = None if step == 4 else ones(4, dtype=torch.float64)
            optimizer.step()
        return p.detach(), q.detach()

    ours, theirs = train(getattr(offbeat, name), fused=True), train(getattr(torch.optim, name), foreach=False)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_removed_groups_and_their_state_are_let_go():
    p, q = torch.nn.Parameter(ones(5)), torch.nn.Parameter(ones(5))
    optimizer = offbeat.Adam([{"params": [p]}, {"params": [q]}], lr=0.1)
    for _ in range(3):
        p.grad, q.grad = ones(5), ones(5)
        optimizer.step()
    gone = [weakref.ref(q), weakref.ref(optimizer.state[q]["exp_avg"])]
    del optimizer.state[q]
    optimizer.param_groups.pop(1)
    del q
    optimizer.step()
    gc.collect()
    assert [one() for one in gone] == [None, None]


@pytest.mark.parametrize("tier", [{"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.usefixtures("native")
def test_a_step_that_does_not_happen_keeps_no_gradient_alive(tier):
    p, q = torch.nn.Parameter(ones(9)), torch.nn.Parameter(ones(9))
    optimizer = offbeat.Adam([{"params": [p]}, {"params": [q]}], lr=0.1, **tier)
    for _ in range(3):
        p.grad, q.grad = ones(9), ones(9)
        optimizer.step()
    p.grad, q.grad = ones(9), ones(9).to_sparse()
    gradient = weakref.ref(p.grad)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(p, before)
    p.grad = None
    gc.collect()
    assert gradient() is None


def test_parts_are_bounded_by_their_parameters():
    params = make_params(torch.float32, shapes=[(3,)] * 20)
    optimizer = offbeat.AdamW(params)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        some = [params[i] for i in torch.randperm(20, generator=generator)[:15]]
        optimizer.step_params(some, [torch.ones_like(p) for p in some])
    assert sum(map(len, optimizer._engine._parts)) <= 5 * 20
    for _ in range(3):  # one by one, all of them are kept
        for p in params:
            optimizer.step_params([p], [torch.ones_like(p)])
    assert sum(len(key) == 1 for key in optimizer._engine._parts) == 20


def test_every_gradient_of_a_repeated_parameter_is_checked_first():
    p = torch.nn.Parameter(ones(4))
    optimizer = offbeat.SGD([p], lr=0.1)
    with pytest.raises(ValueError, match="shape"):
        optimizer.step_params([p, p], [ones(4), ones(5)])
    assert torch.equal(p, ones(4))


def test_step_params_says_what_it_takes():
    p = torch.nn.Parameter(ones(4))
    optimizer = offbeat.SGD([p], lr=0.1)
    optimizer.step_params(iter([p]), iter([ones(4)]))
    assert torch.equal(p, torch.full((4,), 0.9))
    with pytest.raises(TypeError, match="a parameter must be a Tensor, but got int"):
        optimizer.step_params([1], [ones(4)])
    with pytest.raises(ValueError, match="2 gradients for 1 parameters"):
        optimizer.step_params([p], [ones(4), ones(4)])
    with pytest.raises(ValueError, match="in no group of this optimizer"):
        optimizer.step_params([torch.zeros(3)], [ones(3)])
    with pytest.raises(TypeError, match="clip must be a number"):
        optimizer.step_params([p], [ones(4)], clip="x")


def test_groups_may_change_between_step_params():
    p, q = torch.nn.Parameter(ones(2)), torch.nn.Parameter(ones(2))
    optimizer = offbeat.SGD([{"params": [p], "lr": 0.1}, {"params": [q], "lr": 1.0}])
    optimizer.step_params([p, q], [ones(2), ones(2)])
    groups = optimizer.param_groups
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
    optimizer.step_params([p, q], [ones(2), ones(2)])
    torch.testing.assert_close(p.detach(), torch.full((2,), -0.1))
    torch.testing.assert_close(q.detach(), torch.full((2,), -0.1))


def test_a_default_device_does_not_reach_the_counters():
    params = make_params(torch.float32, shapes=[(3,)] * 32)
    optimizer = offbeat.Adam(params, lr=0.1)
    for step in range(2):
        set_gradients(step, params, none_at=tuple((0, i) for i in range(16)))
        optimizer.step()
    with torch.device("meta"):
        optimizer.step(clip=0.5)
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [3.0] * 16 + [4.0] * 16


def test_a_dampened_first_step_that_was_skipped_is_still_the_first():
    p = torch.nn.Parameter(ones(3))
    optimizer = offbeat.SGD([p], lr=0.1, momentum=0.9, dampening=0.5)
    p.grad = ones(3)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    del optimizer.found_inf
    optimizer.step()
    assert torch.equal(p, torch.full((3,), 0.9))


def test_a_batch_without_gradients_that_was_built_beside_another_runs_when_its_gradients_come():
    ours = [torch.ones(4), torch.ones(4, dtype=torch.bfloat16)]
    theirs = [p.clone() for p in ours]
    a, b = offbeat.SGD(ours, lr=0.1, momentum=0.9), torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for step, which in enumerate([(0, 1), (0,), (1,), (1,), (0, 1)]):
        for params in (ours, theirs):
            for i, p in enumerate(params):
                p.grad = torch.ones_like(p) if i in which else None
        if step == 1:  # its tables are built anew, and with them those of the other
            a.state[ours[0]]["momentum_buffer"] = a.state[ours[0]]["momentum_buffer"].clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("reads", ["an attribute", "all of them"])
@pytest.mark.parametrize("tier", [{"foreach": False}, {"foreach": True}, {}], ids=str)
def test_a_structure_that_depends_on_the_learning_rate_follows_a_schedule(reads, tier):
    """What is derived from the options is taken over when a scheduler changes a number, but not what depends on it."""

    def structure(h):
        rate = h.lr if reads == "an attribute" else vars(h)["lr"]
        return {"halved": rate > 0.25}

    def update(p, g, c):
        return (p - c.lr * (0.5 * g if c.halved else g),)

    rule = offbeat.Rule(
        name="Halving", hyper=(learning_rate(1.0),), slots=lambda h: (), structure=structure,
        coefficients=lambda h, s: {"lr": h.lr}, update=update,
    )  # fmt: skip

    class Halving(offbeat.RuleOptimizer, rule=rule): ...

    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = Halving([p], lr=1.0, **tier)
    expected = 0.0
    for rate in (1.0, 0.5, 0.25, 0.125, 0.5):
        optimizer.param_groups[0]["lr"] = rate
        p.grad = ones(3)
        optimizer.step()
        expected -= rate / 2 if rate > 0.25 else rate
        assert p.tolist() == [expected] * 3


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_rule_with_maths_of_its_own_is_not_torchs(name):
    """It was taken for torch's rule by the operators that run without kernels."""
    known = getattr(offbeat, name).rule

    def half(p, g, c, **state):
        changed, *rest = known.update(p=p, g=g, c=c, **state)
        return (p + 0.5 * (changed - p), *rest)

    def halved(**tensors):
        return half(**tensors)

    halved.__signature__ = inspect.signature(known.update)
    rule = replace(known, name="Mine", update=halved)
    assert (rule.surface.native, known.surface.native is not None) == (None, True)
    surface = replace(known.surface, example=("torch.nn.Linear(2, 2)", "torch.ones(1, 2)"))
    assert replace(known, name="Mine", update=halved, surface=surface).surface.native is None
    assert replace(known, name="Mine", surface=surface).surface.native is not None  # only the name is another

    class Mine(offbeat.RuleOptimizer, rule=rule): ...

    (p,), (q,) = ([torch.ones(3, requires_grad=True)] for _ in range(2))
    p.grad = q.grad = torch.ones(3)
    Mine([p], lr=0.5, weight_decay=0.0).step()
    getattr(offbeat, name)([q], lr=0.5, weight_decay=0.0).step()
    torch.testing.assert_close(1 - p, 0.5 * (1 - q))


@pytest.mark.parametrize("tier", [{"foreach": False}, {"foreach": True}, {}], ids=str)
def test_state_that_begins_with_a_rate_follows_a_schedule(tier):
    """A slot's function may look at the numbers that it was made with."""
    rule = offbeat.Rule(
        name="Kept", hyper=(learning_rate(1.0),), coefficients=lambda h, s: {"lr": h.lr},
        slots=lambda h: (offbeat.Slot("step", scalar=True), offbeat.Slot("size", init=lambda _: h.lr, late=True)),
        structure=lambda h: {}, update=lambda p, g, size, c: (p - size * g, size),
    )  # fmt: skip

    class Kept(offbeat.RuleOptimizer, rule=rule): ...

    p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))
    optimizer = Kept([p, q], lr=0.5, **tier)
    p.grad = ones(3)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.125
    q.grad = ones(2)
    optimizer.step()
    assert p.tolist() == [-1.0] * 3
    assert q.tolist() == [-0.125] * 2


@pytest.mark.parametrize("tier", [{"foreach": False}, {"foreach": True}, {}], ids=str)
@pytest.mark.parametrize("values", [(0.0, 0.5), (0.5, 0.0)], ids=str)
def test_coefficients_with_other_names_after_a_change(tier, values):
    """The fused tier went on with the kernel of the old ones, without a word."""

    def update(p, g, c):
        return (p - c.lr * g - (c.pull * p if hasattr(c, "pull") else 0.0 * p),)

    rule = offbeat.Rule(
        name="Pulled", hyper=(learning_rate(1.0), weight_decay(0.0)), slots=lambda h: (), structure=lambda h: {},
        coefficients=lambda h, s: {"lr": h.lr} | ({"pull": h.weight_decay} if h.weight_decay else {}), update=update,
    )  # fmt: skip

    class Pulled(offbeat.RuleOptimizer, rule=rule): ...

    p = torch.nn.Parameter(ones(3))
    optimizer = Pulled([p], lr=0.25, weight_decay=values[0], **tier)
    expected = 1.0
    for value in (*values, *values):
        optimizer.param_groups[0]["weight_decay"] = value
        p.grad = ones(3)
        optimizer.step()
        expected = expected - 0.25 - value * expected
        assert p.tolist() == [expected] * 3


def test_a_hyperparameter_may_have_any_name():
    rule = offbeat.Rule(
        name="Named", hyper=(learning_rate(1.0), Hyper("names", 0.5, lambda value: None, "a number", "float")),
        slots=lambda h: (), structure=lambda h: {"big": h.names > 0.25}, coefficients=lambda h, s: {"lr": h.lr},
        update=lambda p, g, c: (p - c.lr * (0.5 * g if c.big else g),),
    )  # fmt: skip

    class Named(offbeat.RuleOptimizer, rule=rule): ...

    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = Named([p], lr=1.0)
    for value, expected in ((0.5, -0.5), (0.125, -1.5)):
        optimizer.param_groups[0]["names"] = value
        p.grad = ones(1)
        optimizer.step()
        assert p.item() == expected


def test_coefficients_that_are_the_same_at_every_step_are_computed_once():
    computed = []

    def coefficients(h, s):
        computed.append(h.lr)
        return {"lr": h.lr}

    rule = offbeat.Rule(
        name="Counted", hyper=(learning_rate(1.0),), slots=lambda h: (offbeat.Slot("step", scalar=True),),
        structure=lambda h: {}, coefficients=coefficients, update=lambda p, g, c: (p - c.lr * g,),
    )  # fmt: skip

    class Counted(offbeat.RuleOptimizer, rule=rule): ...

    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    optimizer = Counted([p, q], lr=0.5)
    p.grad, q.grad = ones(2), None
    used = []
    for step in range(6):
        if step == 3:
            optimizer.param_groups[0]["lr"], q.grad = 0.25, ones(3)
        optimizer.step()
        used.append(set(computed))
        computed.clear()
    assert used == [{0.5}, set(), set(), {0.25}, set(), set()]
    assert p.tolist() == [-2.25] * 2
    assert q.tolist() == [-0.75] * 3
    assert (optimizer.state[p]["step"], optimizer.state[q]["step"]) == (6, 3)


@pytest.mark.parametrize("tier", [{"foreach": False}, {"foreach": True}, {}], ids=str)
def test_coefficients_that_cannot_be_computed_change_nothing_and_keep_no_gradient_alive(tier):
    rule = offbeat.Rule(
        name="Divided", hyper=(learning_rate(1.0), weight_decay(1.0)), slots=lambda h: (), structure=lambda h: {},
        coefficients=lambda h, s: {"lr": h.lr / h.weight_decay}, update=lambda p, g, c: (p - c.lr * g,),
    )  # fmt: skip

    class Divided(offbeat.RuleOptimizer, rule=rule): ...

    p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    optimizer = Divided([{"params": [p]}, {"params": [q]}], lr=0.5, **tier)
    for _ in range(3):
        p.grad, q.grad = ones(3), ones(3)
        optimizer.step()
    gradient = weakref.ref(p.grad)
    optimizer.param_groups[1]["weight_decay"] = 0.0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    p.grad = None
    gc.collect()
    assert gradient() is None
    assert p.tolist() == q.tolist() == [-1.5] * 3
    p.grad, optimizer.param_groups[1]["weight_decay"] = ones(3), 0.5
    optimizer.step()
    assert (p.tolist(), q.tolist()) == ([-2.0] * 3, [-2.5] * 3)
