"""Bad input: an error of torch.optim's kind that names the value, and nothing half-changed."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import offbeat
import offbeat.rules.checks
from tests.cases import ONE_A_RULE, TIERS, make_params, set_gradients

P = [torch.zeros(2, requires_grad=True)]


@pytest.mark.parametrize(
    ("name", "hyper", "error", "message"),
    [
        ("SGD", {"lr": -1}, ValueError, "Invalid learning rate: -1"),
        ("SGD", {"lr": float("nan")}, ValueError, "Invalid learning rate: nan"),
        ("SGD", {"lr": "0.1"}, TypeError, "Invalid lr: '0.1'"),
        ("SGD", {"lr": torch.tensor([1.0, 2.0])}, ValueError, "Tensor lr must be 1-element"),
        ("SGD", {"lr": 1, "momentum": -0.5}, ValueError, "Invalid momentum value: -0.5"),
        ("SGD", {"lr": 1, "weight_decay": -2}, ValueError, "Invalid weight_decay value: -2"),
        ("SGD", {"lr": 1, "nesterov": True}, ValueError, "Nesterov momentum requires .* momentum=0"),
        ("SGD", {"lr": 1, "momentum": 0.9, "dampening": 0.1, "nesterov": True}, ValueError, "dampening=0.1"),
        ("SGD", {"lr": 1, "momentums": 0.9}, TypeError, "momentums.*it takes .*momentum"),
        ("SGD", {"lr": 1, "capturable": True}, TypeError, "capturable"),
        ("Adam", {"betas": (1.0, 0.9)}, ValueError, "Invalid beta parameter at index 0: 1.0"),
        ("Adam", {"betas": (0.9, -0.1)}, ValueError, "Invalid beta parameter at index 1: -0.1"),
        ("Adam", {"betas": 0.9}, ValueError, "Invalid betas: 0.9"),
        ("Adam", {"betas": (0.9, torch.tensor(0.9))}, ValueError, "both floats or both Tensors"),
        ("Adam", {"eps": -1e-8}, ValueError, "Invalid epsilon value: -1e-08"),
        ("Adam", {"amsgrad": "yes"}, TypeError, "Invalid amsgrad value: 'yes'"),
        ("AdamW", {"decoupled_weight_decay": True}, TypeError, "decoupled_weight_decay"),
        ("Adamax", {"betas": (0.0, 1.0)}, ValueError, "Invalid beta parameter at index 1: 1.0"),
        ("NAdam", {"momentum_decay": -0.2}, ValueError, "Invalid momentum_decay value: -0.2"),
        ("RAdam", {"weight_decay": -1}, ValueError, "Invalid weight_decay value: -1"),
        ("Adagrad", {"lr_decay": -0.5}, ValueError, "Invalid lr_decay value: -0.5"),
        ("Adagrad", {"initial_accumulator_value": -1}, ValueError, "Invalid initial_accumulator_value value: -1"),
        ("Adadelta", {"rho": 1.1}, ValueError, "Invalid rho value: 1.1"),
        ("RMSprop", {"momentum": -1.0}, ValueError, "Invalid momentum value: -1.0"),
        ("RMSprop", {"alpha": -1.0}, ValueError, "Invalid alpha value: -1.0"),
        ("Rprop", {"etas": (1.0, 0.5)}, ValueError, "Invalid eta values: 1.0, 0.5"),
        ("Rprop", {"step_sizes": (2, 1)}, ValueError, "Invalid step_sizes: 2, 1"),
        ("ASGD", {"weight_decay": -0.5}, ValueError, "Invalid weight_decay value: -0.5"),
        ("Lion", {"betas": (0.9, 1.0)}, ValueError, "Invalid beta parameter at index 1: 1.0"),
        ("Lion", {"foreach": True, "fused": True}, RuntimeError, "`fused` and `foreach` cannot be `True` together"),
        ("Lion", {"fused": True, "differentiable": True}, RuntimeError, "`fused` does not support `differentiable`"),
        (
            "Lion",
            {"foreach": True, "differentiable": True},
            RuntimeError,
            "`foreach` does not support `differentiable`",
        ),
    ],
)
def test_hyperparameters(name, hyper, error, message):
    with pytest.raises(error, match=message):
        getattr(offbeat, name)(P, **hyper)


def test_a_groups_own_options_are_checked_too():
    with pytest.raises(ValueError, match="Invalid learning rate: -3"):
        offbeat.AdamW([{"params": P, "lr": -3}])
    optimizer = offbeat.AdamW(P)
    with pytest.raises(ValueError, match="Invalid beta parameter at index 0: 2"):
        optimizer.add_param_group({"params": torch.zeros(1), "betas": (2, 0.9)})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "empty parameter list"),
        (torch.zeros(1), TypeError, "iterable of Tensors or dicts"),
        ([1.0], TypeError, "can only optimize Tensors"),
        ([{"params": {torch.zeros(1)}}], TypeError, "ordered collections"),
        ([torch.ones(1, requires_grad=True) * 2], ValueError, "non-leaf"),
        ([{"params": P}, {"params": P}], ValueError, "more than one parameter group"),
        ([("a", torch.zeros(1)), torch.zeros(1)], ValueError, "with/without names"),
    ],
)
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_parameter_lists(case, params, error, message):
    with pytest.raises(error, match=message):
        case.ours(params)


NO_SPARSE = [case for case in ONE_A_RULE if case.name not in ("SGD", "Adagrad")]


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", NO_SPARSE, ids=str)
def test_a_failed_step_changes_nothing(case, tier, after):
    """The bad gradient is the last of many: those before it must not have been used, at first or later on."""
    params = [torch.randn(5, 3, requires_grad=True) for _ in range(300)]
    groups = [{"params": params[:200]}, {"params": params[200:]}]
    optimizer = case.ours(groups, **case.hyper, **TIERS[tier])
    for step in range(after):
        set_gradients(step, params)
        optimizer.step()
    set_gradients(after, params)
    params[-1].grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (5, 3), check_invariants=True)
    before, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=f"{case.name} does not support sparse gradients"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    now = optimizer.state_dict()
    assert now["state"].keys() == saved["state"].keys()
    for i, entry in saved["state"].items():
        assert all(torch.equal(value, now["state"][i][key]) for key, value in entry.items())
    # And it goes on as if nothing had happened.
    twins = [p.detach().clone().requires_grad_() for p in params]
    twin = case.ours([{"params": twins[:200]}, {"params": twins[200:]}], **case.hyper, **TIERS[tier])
    twin.load_state_dict(saved)
    set_gradients(after, params, twins)
    optimizer.step()
    twin.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


def test_sparse_with_weight_decay():
    p = torch.zeros(3, 2, requires_grad=True)
    p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (3, 2), check_invariants=True)
    for cls in (offbeat.SGD, offbeat.Adagrad):
        with pytest.raises(RuntimeError, match="weight_decay option is not compatible with sparse gradients"):
            cls([p], weight_decay=0.1).step()


@pytest.mark.parametrize("case", [c for c in ONE_A_RULE if "capturable" in c.ours.rule.surface.flags], ids=str)
def test_capturable_needs_a_device_that_captures(case):
    p = torch.zeros(2, requires_grad=True)
    p.grad = torch.ones(2)
    optimizer = case.ours([p], **case.hyper, capturable=True)
    with pytest.raises(AssertionError, match="If capturable=True, params and state_steps must be on supported devices"):
        optimizer.step()
    assert not p.any()


@pytest.mark.parametrize("name", ["Adamax", "Lion"])
def test_fused_without_a_kernel_says_why(name, monkeypatch):
    monkeypatch.setenv("OFFBEAT_NO_COMPILER", "1")
    p = torch.zeros(2, requires_grad=True)
    p.grad = torch.ones(2)
    optimizer = getattr(offbeat, name)([p], fused=True)
    with pytest.raises(RuntimeError, match="OFFBEAT_NO_COMPILER is set"):
        optimizer.step()
    assert not p.any()
    assert optimizer.tiers()[0].tier == "none"


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("hyper", [{}, {"maximize": True, "weight_decay": 0.1}], ids=str)
def test_torchs_own_operator_serves_where_there_is_no_compiler(name, hyper, monkeypatch):
    """Also the test that those operators agree with the rule."""
    hyper = {**hyper, "lr": 0.1, **({"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {})}
    ours, loop = make_params(torch.float32), make_params(torch.float32)
    monkeypatch.setenv("OFFBEAT_NO_COMPILER", "1")
    a = getattr(offbeat, name)(ours, **hyper, fused=True)
    b = getattr(offbeat, name)(loop, **hyper, foreach=False)
    assert a.tiers()[0].tier == "native"
    for step in range(5):
        set_gradients(step, ours, loop, none_at=((2, 0),))
        a.step()
        b.step()
    for p, q in zip(ours, loop, strict=True):
        torch.testing.assert_close(p, q, rtol=3e-6, atol=3e-6)


def test_without_a_compiler_the_default_is_foreach_and_says_why(monkeypatch):
    monkeypatch.setenv("OFFBEAT_NO_COMPILER", "1")
    choice = offbeat.Lion([torch.zeros(2)]).tiers()[0]
    assert choice == ("foreach", "OFFBEAT_NO_COMPILER is set")


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiler_that_fails_is_asked_once_and_the_step_still_happens(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("OFFBEAT_CACHE_DIR", str(tmp_path / "cache"))
    p = torch.ones(3, requires_grad=True)
    optimizer = offbeat.AdamW([p], lr=0.1)
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
    assert optimizer.tiers()[0].tier == "native"
    assert "no such flag" in optimizer.tiers()[0].reason
    assert (tmp_path / "calls").read_text().count("called") == 2  # its version, and one kernel
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.697), rtol=1e-3, atol=0)


def snapshot(params, optimizer):
    return [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())


def assert_unchanged(params, optimizer, before):
    assert all(torch.equal(p, q) for p, q in zip(params, before[0], strict=True))
    now = optimizer.state_dict()["state"]
    assert now.keys() == before[1]["state"].keys()
    for i, entry in before[1]["state"].items():
        assert all(torch.equal(value, now[i][key]) for key, value in entry.items())


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("bad", [{"lr": None}, {"lr": "x"}, {"betas": (1.0, 0.999)}, {"eps": None}], ids=str)
@pytest.mark.parametrize("after", [0, 2])
def test_a_hyperparameter_gone_bad_in_a_later_group_changes_nothing(bad, tier, after):
    params = [torch.ones(3, requires_grad=True) for _ in range(4)]
    optimizer = offbeat.Adam([{"params": params[:2]}, {"params": params[2:]}], **TIERS[tier])
    for step in range(after):
        set_gradients(step, params)
        optimizer.step()
    set_gradients(9, params)
    before = snapshot(params, optimizer)
    optimizer.param_groups[1].update(bad)
    with pytest.raises((TypeError, ValueError, ZeroDivisionError, KeyError)):
        optimizer.step()
    assert_unchanged(params, optimizer, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o, p: setattr(p, "data", torch.zeros(2_000_000)), "state 'exp_avg' has shape"),
        (lambda o, p: setattr(p, "data", torch.zeros(2)), "state 'exp_avg' has shape"),
        (lambda o, p: o.state[p].__setitem__("exp_avg", torch.zeros(1)), "state 'exp_avg' has shape"),
        (lambda o, p: o.state[p].__setitem__("exp_avg", torch.zeros(4, device="meta")), "on meta"),
        (lambda o, p: o.state[p].__setitem__("step", torch.zeros(4)), "state 'step' must be one number"),
    ],
)
@pytest.mark.parametrize("tier", TIERS)
def test_state_that_does_not_fit_its_parameter_raises_instead_of_corrupting_memory(change, message, tier):
    p, other = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    optimizer = offbeat.Adam([other, p], **TIERS[tier])
    for _ in range(3):
        p.grad, other.grad = torch.ones(4), torch.ones(4)
        optimizer.step()
    p.grad = None
    change(optimizer, p)
    p.grad = torch.ones_like(p)
    before = other.detach().clone()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert torch.equal(other, before)


def test_parameters_whose_elements_share_memory():
    p, other = torch.ones(1).expand(4).requires_grad_(), torch.ones(2, requires_grad=True)
    p.grad, other.grad = torch.ones(4), torch.ones(2)
    optimizer = offbeat.SGD([other, p], lr=0.1)
    with pytest.raises(RuntimeError, match="share memory"):
        optimizer.step()
    assert torch.equal(other, torch.ones(2))


def test_differentiable_leaves_are_refused_before_anything_changes():
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    optimizer = offbeat.Adam([p], differentiable=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        optimizer.step()
    assert not optimizer.state_dict()["state"]


def test_gradients_are_not_divided_by_a_step_that_cannot_happen(monkeypatch):
    monkeypatch.setenv("OFFBEAT_NO_COMPILER", "1")
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.full((2,), 8.0)
    optimizer = offbeat.Lion([p], fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="OFFBEAT_NO_COMPILER"):
        optimizer.step()
    assert torch.equal(p.grad, torch.full((2,), 8.0))


def test_fused_with_sparse_gradients():
    for cls in (offbeat.SGD, offbeat.Adagrad):
        p = torch.zeros(3, 2, requires_grad=True)
        p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (3, 2), check_invariants=True)
        with pytest.raises(RuntimeError, match="fused=True does not support sparse gradients"):
            cls([p], fused=True).step()


@pytest.fixture
def fresh_compiler():
    from offbeat.engine.cpu import compiler, kernel

    caches = (
        compiler._find, compiler._target, compiler.load, compiler._private_directory, kernel._compiled,
    )  # fmt: skip
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("trouble", ["arguments", "not a program", "missing", "no home", "cache is a file"])
@pytest.mark.usefixtures("fresh_compiler")
def test_odd_compilers_and_homes_never_stop_a_step(trouble, monkeypatch, tmp_path):
    monkeypatch.setenv("OFFBEAT_CACHE_DIR", str(tmp_path / "cache"))
    expected = "native"
    if trouble == "arguments":
        monkeypatch.setenv("CC", "cc -m64")
        expected = "fused"
    elif trouble == "not a program":
        (tmp_path / "cc").write_bytes(b"\x7fnonsense")
        (tmp_path / "cc").chmod(0o755)
        monkeypatch.setenv("CC", str(tmp_path / "cc"))
    elif trouble == "missing":
        monkeypatch.setenv("CC", "/nonexistent/cc")
    elif trouble == "no home":
        from pathlib import Path

        def homeless():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("OFFBEAT_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", homeless)
        expected = "fused"
    else:
        (tmp_path / "cache").write_text("in the way")
        expected = "fused"
    p = torch.ones(3, requires_grad=True)
    optimizer = offbeat.Adam([p], lr=0.1)
    p.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.9))
    assert optimizer.tiers()[0].tier == expected


def test_arguments_in_the_wrong_place():
    module = torch.nn.Linear(2, 2)
    first = offbeat.AdamW(module.parameters())
    with pytest.raises(TypeError, match=r"by position \(list\); parameters are given to init\(\) and update\(\)"):
        offbeat.as_pure(offbeat.Adam, list(module.parameters()))
    with pytest.raises(TypeError, match="an instance of AdamW; pass the class itself"):
        offbeat.as_functional(first, list(module.parameters()))
    with pytest.raises(TypeError, match=r"write Chain\(\[first, second\]\)"):
        offbeat.Chain(first)
    for wrap in (offbeat.overlap, offbeat.LocalSGD):
        with pytest.raises(TypeError, match="but got AdamW; the optimizer comes first, then the module"):
            wrap(module, offbeat.AdamW(module.parameters()))


def _rule(update):
    return offbeat.Rule(
        name="Mistaken",
        hyper=(offbeat.rules.checks.learning_rate(0.1),),
        slots=lambda h: (offbeat.Slot("m"),),
        structure=lambda h: {},
        coefficients=lambda h, s: {"lr": h.lr},
        update=update,
    )


@pytest.mark.parametrize(
    ("update", "error", "message"),
    [
        (lambda p, g, m, c: (p - c.lr * g**2, m), TypeError, r"to a power; write g \* g"),
        (lambda p, g, m, c: (p - c.lr * torch.sign(g), m), TypeError, r"cannot call torch\.sign; .* sign, maximum"),
        (lambda p, g, m, c: (p - c.lr * g.sign(), m), AttributeError, "no attribute 'sign'; an update may use"),
        (lambda p, g, m, c: (p - c.lr * math.sqrt(g), m), TypeError, "cannot turn a value into a number"),
        (lambda p, g, m, c: None, TypeError, "must return a tuple, .* but it returned None"),
        (lambda p, g, m, c: p - c.lr * g, TypeError, "must return a tuple, .* but it returned one value"),
        (lambda p, g, c: (p - c.lr * g,), TypeError, "does not take m: its arguments are p, g, m"),
        (lambda p, g, m, n, c: (p - c.lr * g, m), TypeError, "takes n, which is no slot or coefficient"),
    ],
)
def test_mistakes_in_an_update_rule(update, error, message):
    class Mistaken(offbeat.RuleOptimizer, rule=_rule(update)): ...

    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    with pytest.raises(error, match=message):
        Mistaken([p]).step()
    assert (p == 1).all()


def test_a_state_dict_of_something_else():
    model = torch.nn.Linear(2, 2)
    optimizer = offbeat.AdamW(model.parameters())
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(ValueError, match=r"its keys are 'model', 'optimizer'; pass state_dict\['optimizer'\]"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"'weight', 'bias'; pass what optimizer\.state_dict\(\) returned"):
        optimizer.load_state_dict(saved["model"])


@pytest.mark.parametrize("tier", [{"foreach": False}, {"foreach": True}, {}], ids=str)
@pytest.mark.parametrize("which", ["parameter", "gradient", "square_avg"])
@pytest.mark.parametrize("left", [0, 16])
@pytest.mark.parametrize("reader", ["python", ""])
def test_memory_that_was_freed_raises(tier, which, left, reader, monkeypatch):
    """It crashed the process, as torch.optim does."""
    monkeypatch.setenv("OFFBEAT_READER", reader)
    p, q = torch.nn.Parameter(torch.ones(50)), torch.nn.Parameter(torch.ones(2, 30).t())
    optimizer = offbeat.RMSprop([p, q], lr=0.1, **tier)
    for _ in range(2):
        p.grad, q.grad = torch.ones(50), torch.ones(30, 2)
        optimizer.step()
    before = p.detach().clone()
    p.grad, q.grad = torch.ones(50), torch.ones(30, 2)
    there = {"parameter": q, "gradient": q.grad, "square_avg": optimizer.state[q]["square_avg"]}[which]
    there.untyped_storage().resize_(left)
    with pytest.raises(RuntimeError, match=f"the memory of a {which} of shape .* has been freed .* {left} bytes"):
        optimizer.step()
    assert torch.equal(p, before)
    assert optimizer.state[p]["step"] == 2
