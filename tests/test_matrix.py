"""Rules that need whole matrices: numbers against torch.optim's, stacks, layouts, checkpoints, errors.

Tolerances: Adafactor in float64 within 1e-12. Muon's Newton-Schulz iteration runs in bfloat16, where the order of sums
matters: an element of the update is within 2 % of the learning rate (``TOLERANCE``). With
``ns_dtype=torch.float64`` it is within 1e-10 of the polynomial of the singular values.
"""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import offbeat
from offbeat.engine.matrix import matrices as matrix_module
from offbeat.rules import Matrix, Rule, Slot, Surface
from offbeat.rules.checks import learning_rate
from offbeat.rules.newton_schulz import newton_schulz
from tests.cases import MATRIX_CASES, Case, make_params, set_gradients

TOLERANCE = 0.02
#: Several of a shape, tall and wide, one that is larger than a block of a symmetric product.
MATRICES = [(8, 12), (12, 8), (8, 12), (16, 16), (1, 5), (8, 12), (5, 1), (40, 24)]
NONE_AT = ((0, 4), (3, 0), (4, 0), (5, 3))
BY_NAME = pytest.mark.parametrize("case", MATRIX_CASES, ids=str)
ONE_EACH = pytest.mark.parametrize("case", [MATRIX_CASES[0], MATRIX_CASES[4]], ids=str)


def shapes(case: Case):
    return MATRICES if case.name == "Muon" else [*MATRICES, (), (7,), (7,), (2, 3, 4), (2, 2, 3, 4)]


def assert_same(case: Case, ours, theirs, updates=1):
    """Within the tolerance of the rule after so many updates."""
    for p, q in zip(ours, theirs, strict=True):
        if case.name == "Muon":
            rate = case.hyper["lr"] * (0.2 * max(p.shape[-2:]) ** 0.5 if "adjust_lr_fn" in case.hyper else 1)
            rate *= max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5 * updates
            assert (p.double() - q.double()).abs().max().item() <= TOLERANCE * rate
        else:
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (3, 6, 6), (0, 4), (4, 0)], ids=str)
def test_learning_rates_by_shape(shape):
    """torch has "spectral_unclamped" since 2.15."""
    factors = {}
    for name in ("original", "match_rms_adamw", "spectral_unclamped"):
        p = torch.zeros(shape, requires_grad=True)
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        offbeat.Muon([p], lr=1.0, weight_decay=0.0, adjust_lr_fn=name).step()
        factors[name] = p.detach()
    rows, columns = shape[-2], max(1, shape[-1])
    x = factors["original"] / max(1.0, rows / columns) ** 0.5
    torch.testing.assert_close(factors["match_rms_adamw"], 0.2 * max(rows, columns) ** 0.5 * x)
    torch.testing.assert_close(factors["spectral_unclamped"], (rows / columns) ** 0.5 * x)
    assert not x.numel() or x.abs().max() > 0.1


@BY_NAME
@pytest.mark.parametrize("swapped", [False, True], ids=["alone", "checkpoints change places"])
def test_numbers_are_torchs(case, swapped):
    ours, theirs = (make_params(torch.float64, shapes=shapes(case)) for _ in range(2))
    a, b = case.ours(ours, **case.hyper), case.reference(theirs)
    for step in range(10):
        set_gradients(step, ours, theirs, none_at=NONE_AT)
        a.step()
        b.step()
        assert_same(case, ours, theirs, step + 1)
        for p, q in zip(ours, theirs, strict=True):
            assert a.state[p].keys() == b.state[q].keys()
            for key, value in b.state[q].items():
                torch.testing.assert_close(a.state[p][key].double(), value.double(), rtol=1e-12, atol=1e-12)
        if swapped and step in (3, 6):
            saved = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
            a, b = case.ours(ours, **case.hyper), case.reference(theirs)
            a.load_state_dict(saved[1])
            b.load_state_dict(saved[0])


@BY_NAME
def test_signature_and_groups_are_torchs(case):
    ours, theirs = (inspect.signature(c).parameters for c in (case.ours, case.theirs))
    kept = [(p.name, p.default, p.kind) for p in ours.values() if p.name != "ns_dtype"]
    assert kept == [(p.name, p.default, p.kind) for p in theirs.values()]
    p = torch.zeros(1, 1)
    assert case.ours([p]).defaults.keys() - {"ns_dtype"} == case.theirs([p]).defaults.keys()


@BY_NAME
def test_init_state_save_and_load_change_nothing(case):
    plain, other = (make_params(torch.float32, shapes=shapes(case)) for _ in range(2))
    a, b = case.ours(plain, **case.hyper), case.ours(other, **case.hyper)
    b.init_state()
    for step in range(5):
        set_gradients(step, plain, other, none_at=NONE_AT)
        a.step()
        b.step()
        saved = copy.deepcopy(b.state_dict())
        b = case.ours(other, **case.hyper)
        b.load_state_dict(saved)
    assert all(torch.equal(p, q) for p, q in zip(plain, other, strict=True))


@BY_NAME
def test_explicit_gradients_one_by_one_and_in_parts(case):
    plain, functional, parts = (make_params(torch.float64, shapes=shapes(case)) for _ in range(3))
    a, c = case.ours(plain, **case.hyper), case.ours(parts, **case.hyper)
    fn = offbeat.as_functional(case.theirs, functional, **case.hyper)
    for step in range(3):
        set_gradients(step, plain, functional, none_at=NONE_AT)
        gradients = [p.grad for p in functional]
        a.step()
        fn.step(gradients)
        for i in range(0, len(parts), 3):
            c.step_params(parts[i : i + 3], gradients[i : i + 3])
    assert all(torch.equal(p, q) for p, q in zip(plain, functional, strict=True))
    assert_same(case, parts, plain, 3)


@ONE_EACH
def test_batches_are_kept_from_step_to_step(case):
    params = make_params(torch.float32, shapes=shapes(case))
    optimizer = case.ours(params, **case.hyper)
    for step in range(4):
        set_gradients(step, params)
        optimizer.step()
        (part,) = optimizer._engine._parts.values()
        assert part.keeps
        if step == 1:
            before = part
        if step > 1:
            assert part is before
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert list(optimizer._engine._parts.values()) == [part]
    assert [choice.tier for choice in optimizer.tiers()] == ["matrix"]


def _transposed(t):
    return t.t().contiguous().t()


def _set(key, value):
    return lambda optimizer, params: optimizer.param_groups[0].update({key: value})


def _state(change):
    def disturb(optimizer, params):
        entry = optimizer.state[params[0]]
        key = "momentum_buffer" if "momentum_buffer" in entry else "row_var"
        change(entry, key)

    return disturb


def _grads(change):
    def disturb(optimizer, params):
        for i, p in enumerate(params):
            p.grad = change(i, p.grad)

    return disturb


def _data(change):
    def disturb(optimizer, params):
        for p in params[1:]:
            p.data = change(p.data)

    return disturb


#: What a program may do between two steps.
DISTURBANCES = {
    "nothing": lambda optimizer, params: None,
    "lr": _set("lr", 0.3),
    "weight decay": _set("weight_decay", 0.7),
    "lr is a tensor": _set("lr", torch.tensor(0.25)),
    "parameters moved": _data(torch.clone),
    "parameters transposed": _data(_transposed),
    "gradients transposed": _grads(lambda i, g: _transposed(g)),
    "gradients are views": _grads(lambda i, g: torch.stack([g, g])[1]),
    "a gradient is missing": _grads(lambda i, g: None if i == 1 else g),
    "only one gradient": _grads(lambda i, g: None if i != 1 else g),
    "state replaced": _state(lambda entry, key: entry.update({key: 2 * entry[key]})),
    "state changed in place": _state(lambda entry, key: entry[key].mul_(2)),
    "state moved": _state(lambda entry, key: setattr(entry[key], "data", entry[key].clone())),
    "state in another layout": _state(lambda entry, key: entry.update({key: _transposed(entry[key])})),
    "another group": lambda optimizer, params: optimizer.add_param_group({"params": [params.pop()], "lr": 0.5}),
}
MUONS = {
    "ns_steps": _set("ns_steps", 3),
    "ns_dtype": _set("ns_dtype", torch.float32),
    "ns_coefficients": _set("ns_coefficients", (1.5, -0.5, 0.0)),
    "nesterov": _set("nesterov", False),
    "adjust_lr_fn": _set("adjust_lr_fn", "match_rms_adamw"),
}


@pytest.mark.parametrize(
    ("case", "disturb"),
    [(case, name) for case in (MATRIX_CASES[0], MATRIX_CASES[4]) for name in DISTURBANCES]
    + [(MATRIX_CASES[0], name) for name in MUONS],
    ids=str,
)
@pytest.mark.parametrize("sizes", [[(8, 12)] * 3, [(8, 12), (12, 8), (8, 12), (6, 6)]], ids=["alike", "several shapes"])
def test_what_is_kept_between_steps_is_checked_again(case, disturb, sizes):
    """One optimizer goes on, the other is made anew for every step; both are disturbed alike."""
    change = {**DISTURBANCES, **MUONS}[disturb]
    extra = [(8, 12)] if disturb == "another group" else []
    kept, anew = (make_params(torch.float32, shapes=sizes + extra) for _ in range(2))
    everyone = [*kept], [*anew]
    a, b = (case.ours(params[: len(sizes)], **case.hyper) for params in (kept, anew))
    for step in range(7):
        set_gradients(step, *everyone)
        if step == 4 or (step == 5 and disturb == "lr"):
            change(a, kept)
            change(b, anew)
        versions = [(p, p._version) for group in a.param_groups for p in group["params"] if p.grad is not None]
        a.step()
        b.step()
        assert all(p._version > version for p, version in versions)
        for p, q in zip(*everyone, strict=True):
            assert torch.equal(p, q), step
            for key, value in b.state[q].items():
                assert torch.equal(a.state[p][key], value), (step, key)
        groups, saved = [dict(group) for group in b.param_groups], copy.deepcopy(b.state_dict())
        b = case.ours(groups, **case.hyper)
        b.load_state_dict(saved)


@ONE_EACH
def test_chunks_do_not_change_the_numbers(case, monkeypatch):
    whole, cut = (make_params(torch.float64, shapes=shapes(case)) for _ in range(2))
    a, b = case.ours(whole, **case.hyper), case.ours(cut, **case.hyper)
    for step in range(3):
        set_gradients(step, whole, cut)
        monkeypatch.setitem(matrix_module.CHUNK_BYTES, "cpu", 1 << 30)
        a.step()
        monkeypatch.setitem(matrix_module.CHUNK_BYTES, "cpu", 1 if step else 1200)
        b.step()
    assert_same(case, whole, cut, 3)


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_the_rounded_step(case, dtype):
    ours, theirs = make_params(dtype, shapes=shapes(case)), make_params(torch.float64, shapes=shapes(case))
    hyper = dict(case.hyper)
    if case.name == "Adafactor":
        hyper["eps"] = (torch.finfo(dtype).eps, 1e-3)  # the default is that of the dtype
    a, b = case.ours(ours, **hyper), Case(case.name, hyper).reference(theirs)
    for step in range(4):
        with torch.no_grad():
            for p, q in zip(ours, theirs, strict=True):
                q.copy_(p)
                for key, value in a.state[p].items():
                    b.state[q][key] = value.clone() if key == "step" else value.double()
        set_gradients(step, ours, theirs)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.double()
        a.step()
        b.step()
        for p, q in zip(ours, theirs, strict=True):
            room = TOLERANCE * case.hyper["lr"] * 3 if case.name == "Muon" else 0.0
            assert (p.double() - q).abs().max() <= torch.finfo(dtype).eps * q.abs().max().clamp(min=1) + room


@BY_NAME
def test_transposed_strided_and_gappy_parameters(case):
    def laid_out(values):
        wide = torch.zeros(4, 8, 24, dtype=torch.float64)
        made = [values[0].t().contiguous().t(), wide[0, :, ::2].copy_(values[1]), values[2]]
        if case.name == "Adafactor":
            made.append(values[3].permute(1, 2, 0).contiguous().permute(2, 0, 1))
        return [v.requires_grad_() for v in made]

    values = [torch.randn(8, 12, dtype=torch.float64) for _ in range(3)] + [torch.randn(3, 4, 5, dtype=torch.float64)]
    ours = laid_out([v.clone() for v in values])
    theirs = [v.clone().requires_grad_() for v in values[: len(ours)]]
    before = [(p.stride(), p.data_ptr()) for p in ours]
    a, b = case.ours(ours, **case.hyper), case.reference(theirs)
    for step in range(4):
        set_gradients(step, ours, theirs)
        if step == 2:  # a gradient laid out in another way than its parameter
            ours[0].grad = ours[0].grad.contiguous()
            ours[2].grad = ours[2].grad.t().contiguous().t()
        a.step()
        b.step()
    assert_same(case, ours, theirs, 4)
    assert [(p.stride(), p.data_ptr()) for p in ours] == before


@ONE_EACH
def test_nan_stays_in_its_own_parameter(case):
    params, others = (make_params(torch.float32, shapes=[(4, 6)] * 3) for _ in range(2))
    a, b = case.ours(params, **case.hyper), case.ours(others, **case.hyper)
    set_gradients(0, params, others)
    params[1].grad[0, 0] = torch.nan
    a.step()
    b.step()
    assert params[1].isnan().all()
    assert torch.equal(params[0], others[0])
    assert torch.equal(params[2], others[2])


@ONE_EACH
def test_zero_tiny_huge_and_empty_matrices(case):
    p = [torch.full((4, 6), value) for value in (1.0, 0.0, 1.0, 1.0)] + [torch.zeros(0, 3)]
    q = [t.clone() for t in p[:4]]
    a, b = case.ours(p, **case.hyper), case.reference(q)
    for t, u, g in zip(p, [*q, None], (0.0, 0.0, 1e-30, 1e15, 0.0), strict=True):
        t.grad = torch.randn_like(t) * g
        if u is not None:
            u.grad = t.grad.clone()
    a.step()
    b.step()
    assert all(t.isfinite().all() for t in p)
    for t, u in zip(p[: 3 if case.name == "Adafactor" else 4], q, strict=False):  # torch's own overflows
        torch.testing.assert_close(t, u, rtol=1e-3, atol=1e-3)


def test_stacked_experts_are_orthogonalised_one_by_one():
    experts = torch.randn(3, 8, 12)
    single = [e.clone() for e in experts]
    a, b = offbeat.Muon([experts], lr=0.1), torch.optim.Muon(single, lr=0.1)
    for _ in range(3):
        experts.grad = torch.randn(3, 8, 12)
        for i, e in enumerate(single):
            e.grad = experts.grad[i].clone()
        a.step()
        b.step()
    for i, e in enumerate(single):
        assert (experts[i] - e).abs().max() <= 3 * 0.1 * TOLERANCE


@pytest.mark.parametrize("factors", [(3.4445, -4.7750, 2.0315), (1.5, -0.5, 0.0), (1.5, 0.0, -0.5)])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 9, 4), (2, 40, 24), (1, 530, 600), (1, 600, 530)], ids=str)
def test_newton_schulz_is_the_polynomial_of_the_singular_values(shape, factors):
    x = torch.randn(shape, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x / torch.linalg.matrix_norm(x, keepdim=True), full_matrices=False)
    for _ in range(5):
        s = factors[0] * s + factors[1] * s**3 + factors[2] * s**5
    exact = u @ torch.diag_embed(s) @ vh
    torch.testing.assert_close(newton_schulz(x.clone(), factors, 5, 1e-7), exact, rtol=1e-10, atol=1e-10)
    rough = newton_schulz(x.bfloat16(), factors, 5, 1e-7)
    assert (rough.double() - exact).norm() <= 0.05 * exact.norm()


def test_the_precision_of_the_iteration_can_be_chosen():
    p = torch.randn(6, 9, dtype=torch.float64)
    before, g = p.clone(), torch.randn(6, 9, dtype=torch.float64)
    p.grad = g
    offbeat.Muon([p], lr=0.1, weight_decay=0.0, nesterov=False, ns_dtype=torch.float64).step()
    exact = newton_schulz((0.05 * g)[None].clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)[0]
    torch.testing.assert_close(p, before - 0.1 * exact, rtol=1e-12, atol=1e-12)


@ONE_EACH
@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_traced_steps(case, kind):
    def train(device):
        params = [torch.nn.Parameter(torch.randn(s, device=device)) for s in [(3, 4), (3, 4), (4, 2)]]
        optimizer = case.ours(params, **case.hyper)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return params, optimizer

    if kind == "meta":
        params, optimizer = train("meta")
    else:
        with FakeTensorMode():
            params, optimizer = train("cpu")
    real, other = train("cpu")
    for p, q in zip(params, real, strict=True):
        assert {k: v.shape for k, v in optimizer.state[p].items()} == {k: v.shape for k, v in other.state[q].items()}


@ONE_EACH
def test_a_traced_step_computes_the_same(case):
    def step(p, g):
        fn = offbeat.as_functional(case.ours, [p], **case.hyper)
        fn.step([g])
        return p

    p, g = torch.randn(4, 6), torch.randn(4, 6)
    traced = make_fx(step)(p.clone(), g)
    torch.testing.assert_close(traced(p.clone(), g), step(p.clone(), g), rtol=1e-6, atol=1e-6)


@ONE_EACH
def test_closures_clipping_and_zeroed_gradients(case):
    plain, clipped = (make_params(torch.float64, shapes=[(4, 6), (4, 6)]) for _ in range(2))
    a, b = case.ours(plain, **case.hyper), case.ours(clipped, **case.hyper)
    set_gradients(0, plain, clipped)
    for p in plain:
        p.grad = p.grad * 0.25
    assert a.step(lambda: 3.0) == 3.0
    b.step(clip=0.25, zero_grad=True)
    assert all(torch.equal(p, q) for p, q in zip(plain, clipped, strict=True))
    assert not any(p.grad.any() for p in clipped)


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_with_foreach(foreach):
    case = Case("Adafactor", {"weight_decay": 0.1})
    ours, theirs = (make_params(torch.float64, shapes=shapes(case)) for _ in range(2))
    a, b = case.ours(ours, **case.hyper, foreach=foreach), case.theirs(theirs, **case.hyper, foreach=foreach)
    for step in range(4):
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
    assert_same(case, ours, theirs)


@BY_NAME
def test_through_tritons_interpreter(case, monkeypatch):
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs = make_params(torch.float32, shapes=[(8, 12), (12, 8), (8, 12)])
    ours = [p.detach().to(device, copy=True).requires_grad_() for p in theirs]
    a, b = case.ours(ours, **case.hyper), case.reference(theirs)
    for step in range(3):
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        tolerance = 3 * TOLERANCE * case.hyper["lr"] * 2 if case.name == "Muon" else 1e-6
        assert (p.cpu() - q).abs().max() <= tolerance


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4, 5)], ids=str)
def test_muon_refuses_what_is_not_a_matrix(shape):
    good, bad = torch.zeros(2, 2), torch.zeros(shape)
    for make in (lambda: offbeat.Muon([good, bad]), lambda: offbeat.Muon([{"params": good}, {"params": bad}])):
        with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
            make()
    optimizer = offbeat.Muon([good])
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
    fn = offbeat.as_functional(offbeat.Muon, [good])
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        fn.step_param(bad, torch.zeros(shape))
    assert len(fn.param_groups[0]["params"]) == 1


@ONE_EACH
def test_errors_come_before_anything_has_changed(case):
    first, second = torch.ones(4, 6), torch.ones(4, 6)
    optimizer = case.ours([first, second], **case.hyper)
    first.grad = torch.ones(4, 6)
    for bad, match in (
        (torch.ones(4, 6).to_sparse(), "does not support sparse gradients"),
        (torch.ones(4, 6, dtype=torch.float64), "dtype"),
    ):
        second.grad = None
        gradients = [first.grad, bad]
        with pytest.raises((RuntimeError, ValueError), match=match):
            optimizer.step_params([first, second], gradients)
        assert torch.equal(first, torch.ones(4, 6))
        assert not optimizer.state
    z = torch.zeros(2, 3, dtype=torch.complex64)
    z.grad = torch.zeros_like(z)
    with pytest.raises(RuntimeError, match=f"{case.name} does not support complex parameters"):
        case.ours([z]).step()


@pytest.mark.parametrize(
    ("name", "hyper", "match"),
    [
        ("Muon", {"lr": -1}, "Learning rate should be >= 0 but is: -1"),
        ("Muon", {"momentum": -1}, "momentum should be >= 0"),
        ("Muon", {"weight_decay": -1}, "weight decay should be >= 0"),
        ("Muon", {"ns_steps": 100}, "must be less than 100"),
        ("Muon", {"ns_steps": 2.5}, "ns_steps must be"),
        ("Muon", {"ns_coefficients": (1, 2)}, "exactly 3 values"),
        ("Muon", {"ns_dtype": torch.int8}, "ns_dtype must be"),
        ("Muon", {"adjust_lr_fn": "x"}, "Adjust learning rate function x is not supported"),
        ("Adafactor", {"lr": -1}, "Learning rate should be >= 0"),
        ("Adafactor", {"eps": 3}, "must be a pair"),
        ("Adafactor", {"eps": (None, -1)}, "epsilon2 should be >= 0"),
        ("Adafactor", {"d": 0.5}, "Clipping threshold d should be >= 1"),
        ("Adafactor", {"beta2_decay": 0.1}, "beta2_decay should be <= 0"),
    ],
    ids=str,
)
def test_hyperparameters_are_checked(name, hyper, match):
    with pytest.raises((ValueError, TypeError), match=match):
        getattr(offbeat, name)([torch.zeros(2, 2)], **hyper)


def test_state_of_another_shape_does_not_load():
    optimizer = offbeat.Adafactor([torch.zeros(3, 4)])
    optimizer.init_state()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["row_var"] = torch.zeros(4, 1)
    with pytest.raises(ValueError, match="'row_var' of shape"):
        optimizer.load_state_dict(saved)
    muon = offbeat.Muon([torch.zeros(3, 4)])
    with pytest.raises(ValueError, match="another kind of optimizer"):
        muon.load_state_dict({"state": saved["state"], "param_groups": muon.state_dict()["param_groups"]})


def test_no_pure_form():
    with pytest.raises(TypeError, match="whole matrices"):
        offbeat.as_pure(offbeat.Muon)


# A rule of one's own costs one file; this is all of it.


def whiten(x: Tensor, about, left: Tensor) -> tuple[Tensor, ...]:
    """One-sided Shampoo: the gradient times the inverse square root of the sum of its Gram matrices."""
    left = left + x @ x.mT
    values, vectors = torch.linalg.eigh(left)
    scales = (values.clamp(min=0) + about.h.eps) ** -0.5
    return vectors @ (scales[..., None] * (vectors.mT @ x)), left


def whitened(p, g, c, velocity):
    velocity = 0.5 * velocity + g
    return p - c.lr * velocity, velocity


SHAMPOO = Rule(
    name="OneSidedShampoo",
    hyper=(learning_rate(0.1), replace(learning_rate(1e-6), name="eps")),
    slots=lambda h: (Slot("left", shape=lambda shape: (*shape[:-2], shape[-2], shape[-2])), Slot("velocity")),
    structure=lambda h: {},
    coefficients=lambda h, s: {"lr": h.lr},
    update=whitened,
    matrix=Matrix(transform=whiten),
    surface=Surface(flags=(), example=("torch.nn.Linear(4, 2, bias=False)", "torch.ones(3, 4)")),
)


class OneSidedShampoo(offbeat.RuleOptimizer, rule=SHAMPOO):
    """The class of the rule above."""


def test_a_new_matrix_rule_costs_one_file():
    params = [torch.randn(4, 6, dtype=torch.float64) for _ in range(3)] + [torch.randn(2, 3, 3, dtype=torch.float64)]
    exact, memory = [p.clone() for p in params], [[0.0, 0.0] for _ in params]
    optimizer = OneSidedShampoo(params, lr=0.05)
    for step in range(4):
        for p, q, m in zip(params, exact, memory, strict=True):
            p.grad = torch.randn_like(p)
            m[0] = m[0] + p.grad @ p.grad.mT
            inverse = torch.linalg.inv(m[0] + 1e-6 * torch.eye(p.shape[-2], dtype=torch.float64))
            values, vectors = torch.linalg.eigh(inverse)
            m[1] = 0.5 * m[1] + vectors @ torch.diag_embed(values.sqrt()) @ vectors.mT @ p.grad
            q.sub_(0.05 * m[1])
        optimizer.step()
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = OneSidedShampoo(params, lr=0.05)
            optimizer.load_state_dict(saved)
    for p, q in zip(params, exact, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-7)
    assert optimizer.state[params[-1]]["left"].shape == (2, 3, 3)


def test_muon_without_the_compiled_reader(tmp_path):
    """Addresses are read in Python until it is compiled: chunks must not run on tables that nobody has filled."""
    script = """
import torch, offbeat
torch.manual_seed(0)
p, q = (torch.nn.Parameter(torch.randn(6, 4)) for _ in range(2))
optimizer = offbeat.Muon([p, q], lr=0.1)
for step in range(4):
    p.grad, q.grad = torch.randn(6, 4), torch.randn(6, 4)
    optimizer.step()
print(p.sum().item(), q.sum().item())
"""

    def run(**environment):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    expected = run()
    assert run(OFFBEAT_READER="python") == expected
    assert run(OFFBEAT_CACHE_DIR=str(tmp_path)) == expected
