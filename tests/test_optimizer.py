"""Everything around a step that torch.optim's classes do: groups, closures, hooks, copies, schedulers, scalers."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import typing

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

import offbeat
from tests.cases import CASES, ONE_A_RULE, make_params, set_gradients

WITH_TORCH = [case for case in ONE_A_RULE if case.name != "Lion"]


@pytest.mark.parametrize("case", WITH_TORCH, ids=str)
def test_signature_is_torchs_plus_fused(case):
    """Names, order, defaults and what may be given by position."""
    ours = inspect.signature(case.ours).parameters
    theirs = {k: v for k, v in inspect.signature(case.theirs.__init__).parameters.items() if k != "self"}
    assert set(ours) - {"fused", "state_dtype", "rounding"} == set(theirs) - {"fused"}
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name
    by_position = [n for n, p in theirs.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [n for n, p in ours.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD] == by_position


@pytest.mark.parametrize("case", WITH_TORCH, ids=str)
def test_groups_have_torchs_keys(case):
    ours, theirs = case.ours([torch.zeros(1)]), case.theirs([torch.zeros(1)])
    assert set(ours.param_groups[0]) - {"fused"} == set(theirs.param_groups[0]) - {"fused"}
    assert set(ours.defaults) - {"fused"} == set(theirs.defaults) - {"fused"}


def test_adamw_is_an_adam_as_in_torch():
    assert issubclass(offbeat.AdamW, offbeat.Adam)
    assert issubclass(offbeat.AdamW, torch.optim.Optimizer)


@pytest.mark.parametrize("case", WITH_TORCH, ids=str)
def test_per_group_options_match_torch(case):
    ours, theirs = make_params(torch.float64), make_params(torch.float64)
    groups = [
        [{"params": ps[:2]}, {"params": ps[2:4], "lr": 0.003}, {"params": ps[4:], "maximize": True}]
        for ps in (ours, theirs)
    ]
    a, b = case.ours(groups[0], **case.hyper), case.theirs(groups[1], **case.hyper, foreach=False)
    for step in range(6):
        if step == 3 and not (case.name == "Adagrad" and torch.__version__ < "2.12"):  # torch's own fails there
            new = [make_params(torch.float64, seed=9, shapes=[(4,)])[0] for _ in range(2)]
            a.add_param_group({"params": new[0], "lr": 0.05})
            b.add_param_group({"params": new[1], "lr": 0.05})
            ours, theirs = [*ours, new[0]], [*theirs, new[1]]
        if step == 4:
            a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 0.2
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_named_parameters():
    model = torch.nn.Linear(2, 3)
    optimizer = offbeat.AdamW(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_state_is_matched_by_name_where_both_sides_have_the_same_names():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    named = list(model.named_parameters())
    first = offbeat.Adam(named)
    model(torch.randn(4, 3)).square().sum().backward()
    first.step()
    second = offbeat.Adam(reversed(named))
    second.load_state_dict(first.state_dict())
    for _, p in named:
        assert torch.equal(first.state[p]["exp_avg"], second.state[p]["exp_avg"])
    assert second.param_groups[0]["param_names"] == [name for name, _ in reversed(named)]


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_closure_runs_with_gradients_and_its_loss_is_returned(case):
    p = torch.full((3,), 2.0, requires_grad=True)
    optimizer = case.ours([p], **case.hyper)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == 12.0
    assert not torch.equal(p.detach(), torch.full((3,), 2.0))
    assert optimizer.step() is None


def test_all_hooks_run_once_and_in_order():
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    optimizer = offbeat.SGD([p], lr=0.1, momentum=0.9)
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", p[0].item())))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", p[0].item())))
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, sd: {**sd, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, sd: {k: v for k, v in sd.items() if k != "extra"})
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    handle = register_optimizer_step_pre_hook(lambda o, a, k: seen.append("global"))
    optimizer.step()
    handle.remove()
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert seen == ["global", ("pre", 1.0), ("post", pytest.approx(0.9)), "save", "loaded"]


def test_a_pre_hook_can_replace_the_arguments():
    p = torch.ones(1, requires_grad=True)
    optimizer = offbeat.SGD([p], lr=1.0)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 7.0), {}))
    assert optimizer.step() == 7.0


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_copies_go_on_alike(case, how):
    params = make_params(torch.float32)
    optimizer = case.ours(params, **case.hyper)
    for step in range(3):
        set_gradients(step, params)
        optimizer.step()
    if how == "deepcopy":
        params2, twin = copy.deepcopy((params, optimizer))
    elif how == "pickle":
        params2, twin = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        buffer = io.BytesIO()
        torch.save((params, optimizer), buffer)
        buffer.seek(0)
        params2, twin = torch.load(buffer, weights_only=False)
    for step in range(3, 6):
        set_gradients(step, params, params2)
        optimizer.step()
        twin.step()
    assert all(torch.equal(p, q) for p, q in zip(params, params2, strict=True))
    assert all(p is not q for p, q in zip(params, params2, strict=True))


def test_a_checkpoint_loads_with_weights_only():
    params = make_params(torch.float32)
    optimizer = offbeat.NAdam(params)
    set_gradients(0, params)
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    again = offbeat.NAdam(params)
    again.load_state_dict(torch.load(buffer, weights_only=True))
    assert again.state[params[0]]["step"].item() == 1


def test_zero_grad():
    params = make_params(torch.float32)
    optimizer = offbeat.AdamW(params)
    set_gradients(0, params)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def schedulers():
    return {
        "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
        "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.95),
        "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
        "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3),
        "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.4, 4),
        "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=5),
        "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 3),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
        "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
        "SequentialLR": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [4]
        ),
        "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
        "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
    }


def test_the_list_of_schedulers_is_torchs():
    found = {n for n in lr_scheduler.__all__ if n != "LRScheduler"} | {"SWALR"}
    assert found == set(schedulers())


@pytest.mark.parametrize("name", list(schedulers()))
@pytest.mark.parametrize(("cls", "hyper"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"lr": 0.01})])
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_schedulers(name, cls, hyper, tensor_lr):
    ours, theirs = make_params(torch.float64), make_params(torch.float64)
    hyper = {**hyper, "lr": torch.tensor(hyper["lr"], dtype=torch.float64)} if tensor_lr else hyper
    a = getattr(offbeat, cls)(ours, **copy.deepcopy(hyper))
    b = getattr(torch.optim, cls)(theirs, **copy.deepcopy(hyper), foreach=False)
    sa, sb = schedulers()[name](a), schedulers()[name](b)
    for step in range(10):
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
        for s in (sa, sb):
            s.step(1.0) if name == "ReduceLROnPlateau" else s.step()
        assert float(a.param_groups[0]["lr"]) == float(b.param_groups[0]["lr"])
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_grad_scaler_skips_an_overflow_and_unscales_the_rest(case, fused):
    ours, plain = make_params(torch.float32), make_params(torch.float32)
    a, b = case.ours(ours, **case.hyper, fused=fused), case.ours(plain, **case.hyper)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step in range(8):
        set_gradients(step, ours, plain)
        scale = scaler.get_scale()
        for p in ours:
            p.grad.mul_(scale)
        scaler.scale(torch.zeros(1))  # makes the scaler create its scale
        overflow = step in (2, 5)
        if overflow:
            ours[4].grad[0, 0] = float("inf")
            before = [p.detach().clone() for p in ours]
        scaler.step(a)
        scaler.update()
        if overflow:
            assert all(torch.equal(p, q) for p, q in zip(ours, before, strict=True))
            assert scaler.get_scale() == scale / 2
        else:
            b.step()
            # A power of two divides out exactly.
            assert all(torch.equal(p, q) for p, q in zip(ours, plain, strict=True))


def test_swa_utils_average_the_model():
    model = torch.nn.Linear(3, 2)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    weights = []
    for _ in range(4):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(averaged.module.weight, torch.stack(weights).mean(0))


@pytest.mark.parametrize("case", WITH_TORCH, ids=str)
def test_compile_around_a_step(case):
    torch._dynamo.reset()
    ours, theirs = make_params(torch.float64), make_params(torch.float64)
    a, b = case.ours(ours, **case.hyper), case.ours(theirs, **case.hyper)
    compiled = torch.compile(a.step, backend="eager")

    @torch.compile(backend="eager")
    def training_step(x):
        (ours[0] * x).sum().backward()
        a.step()
        a.zero_grad()

    for step in range(3):
        set_gradients(step, ours, theirs)
        compiled()
        b.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    a.zero_grad()
    b.zero_grad()
    training_step(torch.ones(3, 4, dtype=torch.float64))
    theirs[0].grad = torch.ones(3, 4, dtype=torch.float64)
    b.step()
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_differentiable_gives_the_true_derivative(case):
    """Against finite differences, with respect to parameter, gradient, state and learning rate."""

    def step(p, g, lr, *state):
        p = p.clone()
        p.grad = g
        optimizer = case.ours([p], **{**case.hyper, "lr": lr}, differentiable=True)
        optimizer.init_state()
        keys = [k for k in optimizer.state[p] if k not in ("step", "mu_product", "eta", "mu")]
        for key, value in zip(keys, state, strict=False):
            optimizer.state[p][key] = value.clone()
        for key, value in (("step", 7.0), ("eta", 0.03)):
            if key in optimizer.state[p]:
                optimizer.state[p][key].fill_(value)
        optimizer.step()
        return (p, *(optimizer.state[p][k] for k in keys))

    if case.name in ("Rprop", "Lion"):
        pytest.skip("piecewise constant in the gradient: finite differences see its jumps")
    generator = torch.Generator().manual_seed(3)
    p, g = (torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    lr = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    # Positive, and large enough for a centered second moment.
    state = [(torch.rand(4, dtype=torch.float64, generator=generator) + 4).requires_grad_() for _ in range(3)]
    if case.name == "RMSprop" and case.hyper.get("centered"):
        state[-1 if case.hyper.get("momentum") else 1].data.mul_(0.1)
    assert torch.autograd.gradcheck(step, (p, g, lr, *state))


def test_differentiable_wants_no_gradient_for_the_step_counter():
    p = torch.ones(2, requires_grad=True).clone()
    p.grad = torch.ones(2)
    optimizer = offbeat.Adam([p], differentiable=True)
    optimizer.init_state()
    optimizer.state[p]["step"] = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(RuntimeError, match="requires_grad"):
        optimizer.step()


def test_repr_and_tiers_say_what_runs_and_why():
    p = torch.zeros(3, requires_grad=True)
    optimizer = offbeat.AdamW([p])
    assert optimizer.tiers()[0].tier == "fused"
    assert "tier of group 0: fused (one kernel, compiled from the rule" in repr(optimizer)
    assert "lr: 0.001" in repr(optimizer)
    assert offbeat.AdamW([p], foreach=False).tiers()[0] == ("loop", "foreach=False")
    assert offbeat.AdamW([p], foreach=True).tiers()[0] == ("foreach", "foreach=True")
    assert offbeat.AdamW([p], fused=False).tiers()[0] == ("loop", "fused=False")
    assert offbeat.AdamW([p], differentiable=True).tiers()[0].tier == "loop"
    mixed = offbeat.AdamW([torch.zeros(2), torch.zeros(8, 8)[:, ::2]])
    assert mixed.tiers()[0].tier == "fused+loop"


def test_tensor_learning_rate_of_one_element_counts_as_a_number():
    p, q = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    a, b = offbeat.SGD([p], lr=torch.tensor([0.5])), offbeat.SGD([q], lr=0.5)
    p.grad = q.grad = torch.ones(2)
    a.step()
    b.step()
    assert torch.equal(p, q)


def test_documentation_of_every_class_has_formula_arguments_and_example():
    for case in ONE_A_RULE:
        doc = case.ours.__doc__
        assert ".. math::" in doc
        assert "Args:" in doc
        assert f">>> optimizer = offbeat.{case.name}(" in doc


def test_a_groups_dictionary_stays_the_users_own():
    p = torch.ones(2, requires_grad=True)
    mine = {"params": [p], "lr": 0.1, "mask": torch.ones(5), "name": "decoder"}
    optimizer = offbeat.SGD([mine])
    assert optimizer.param_groups[0] is mine
    p.grad = torch.ones(2)
    mine["lr"] = 0.0
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(2))


def test_numbers_of_other_kinds_are_numbers():
    np = pytest.importorskip("numpy")
    p, q = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    a = offbeat.Adam([p], lr=np.float32(0.5), betas=np.array([0.5, 0.75]), amsgrad=np.True_)
    b = offbeat.Adam([q], lr=0.5, betas=(0.5, 0.75), amsgrad=True)
    p.grad = q.grad = torch.ones(2)
    a.step()
    b.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("tier", [{}, {"foreach": False}], ids=str)
def test_a_repeated_parameter_is_updated_again_as_in_torch(tier):
    p, q = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match="duplicate"):
        a, b = offbeat.Adam([p, p], lr=0.1, **tier), torch.optim.Adam([q, q], lr=0.1, foreach=False)
    for _ in range(3):
        p.grad = torch.ones(2)
        q.grad = torch.ones(2)
        a.step()
        b.step()
    torch.testing.assert_close(p, q)
    assert a.state[p]["step"] == b.state[q]["step"] == 6


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_the_default_device_does_not_matter(case):
    params, twins = make_params(torch.float32), make_params(torch.float32)
    a, b = case.ours(params, **case.hyper), case.ours(twins, **case.hyper)
    a.init_state()
    for step in range(3):
        set_gradients(step, params, twins)
        with torch.device("meta"):
            a.step()
        b.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


@pytest.mark.parametrize("name", ["NAdam", "ASGD", "Rprop"])
def test_differentiable_through_several_steps_and_stored_scalars(name):
    generator = torch.Generator().manual_seed(5)
    grads = torch.randn(3, 4, dtype=torch.float64, generator=generator)

    def after(lr):
        p = torch.ones(4, dtype=torch.float64, requires_grad=True).clone()
        optimizer = getattr(offbeat, name)([p], lr=lr, differentiable=True)
        for g in grads:
            p.grad = g
            optimizer.step()
        return p

    torch.set_default_dtype(torch.float64)
    try:
        assert torch.autograd.gradcheck(after, (torch.tensor(0.05, dtype=torch.float64, requires_grad=True),))
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_step_inside_vmap():
    def one(start, gradient):
        p = start.clone()
        p.grad = gradient
        optimizer = offbeat.SGD([p], lr=0.1)
        optimizer.step()
        return p

    result = torch.vmap(one)(torch.ones(3, 2), torch.arange(6.0).reshape(3, 2))
    torch.testing.assert_close(result, torch.ones(3, 2) - 0.1 * torch.arange(6.0).reshape(3, 2))


@pytest.mark.parametrize(
    "how",
    [lambda s: s.copy(), copy.copy, lambda s: s | {"x": 1}, lambda s: {"x": 1} | s, lambda s: s | s],
    ids=["copy()", "copy.copy", "or", "ror", "self"],
)
def test_state_is_copied_and_merged_as_torchs_is(how):
    """A shallow copy in a plain defaultdict: the entries are the optimizer's own, the dictionary is not."""
    model = torch.nn.Linear(3, 2)
    optimizers = [cls(model.parameters(), lr=0.1, momentum=0.9) for cls in (torch.optim.SGD, offbeat.SGD)]
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    theirs, ours = (how(optimizer.state) for optimizer in optimizers)
    assert type(ours) is type(theirs)
    assert ours.default_factory is dict
    assert list(ours) == list(theirs)
    assert ours[model.weight] is optimizers[1].state[model.weight]
    before = optimizers[1].state.clock[0]
    ours["y"], ours["z"] = 2, ours["new"]
    assert optimizers[1].state.clock[0] == before
    assert set(optimizers[1].state) == set(model.parameters())
    entry = ours[model.weight]
    for merged in (entry.copy(), copy.copy(entry), entry | {"x": 1}, {"x": 1} | entry):
        assert type(merged) is dict
        assert merged["momentum_buffer"] is entry["momentum_buffer"]
    with pytest.raises(TypeError, match="unsupported operand"):
        optimizers[1].state | 3


def test_a_users_subclass_has_its_own_arguments():
    class Scaled(offbeat.AdamW):
        def __init__(self, params, scale, *, eps=1e-6):
            super().__init__(params, lr=0.1 * scale, eps=eps)

    class Same(offbeat.AdamW): ...

    assert list(inspect.signature(Scaled).parameters) == ["params", "scale", "eps"]
    assert inspect.signature(Same) == inspect.signature(offbeat.AdamW)
    w, v = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    mine, plain = Scaled([w], 2.0), offbeat.AdamW([v], lr=0.2, eps=1e-6)
    for p, optimizer in ((w, mine), (v, plain)):
        p.grad = torch.arange(3.0)
        optimizer.step()
    assert torch.equal(w, v)
    with pytest.raises(TypeError, match="weight_deacy"):
        super(Scaled, mine).__init__([w], weight_deacy=0.1)


@pytest.mark.parametrize("name", [*offbeat.optimizers.__all__, "LBFGS"])
def test_init_has_the_signature_of_the_class_with_types(name):
    """Tools that make options of a class read its ``__init__``, as LightningCLI does."""
    cls = getattr(offbeat, name)
    own, of_class = inspect.signature(cls.__init__), inspect.signature(cls)
    first, *rest = own.parameters.values()
    assert first.name == "self"
    assert [(p.name, p.kind, p.default) for p in rest] == [
        (p.name, p.kind, p.default) for p in of_class.parameters.values()
    ]
    assert all(p.annotation is not p.empty for p in rest)
    if name != "LBFGS":
        assert typing.get_type_hints(cls.__init__) == {p.name: p.annotation for p in rest} | {"return": type(None)}
        assert cls.__init__.__qualname__ == f"{name}.__init__"


def test_init_of_a_rules_class_goes_on_to_its_bases():
    calls = []

    class Noted:
        def __init__(self, *args, **kwargs):
            calls.append(kwargs)
            super().__init__(*args, **kwargs)

    class Mine(Noted, offbeat.RuleOptimizer, rule=offbeat.AdamW.rule):
        pass

    class Derived(Mine):
        pass

    for cls in (Mine, Derived):
        assert cls([torch.ones(1)], lr=0.5).defaults["lr"] == 0.5
        assert "amsgrad" in inspect.signature(cls.__init__).parameters
    assert calls == [{"lr": 0.5}] * 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'weight_dcay'; did you mean 'weight_decay'"):
        offbeat.AdamW([torch.ones(1)], weight_dcay=0.1)
