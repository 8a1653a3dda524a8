"""The kernel Triton makes of a rule: on a GPU where there is one, else through Triton's interpreter on the CPU."""

from __future__ import annotations

import copy
import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch

import offbeat
from offbeat.engine.choice import uses_triton
from offbeat.engine.cuda import capture as capture_module
from offbeat.engine.cuda import kernel as kernel_module
from offbeat.engine.cuda import table as table_module
from offbeat.engine.cuda.numbers import NotTraceable
from offbeat.overlap import clipping, registry
from tests.cases import CASES, ONE_A_RULE, make_params, set_gradients
from tests.test_plan import count_reuse

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
#: Where numbers are worked out: on the host, or with ``fused=True`` where the counters are.
MODES = [{}, {"fused": True}]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def there(params):
    return [p.detach().to(DEVICE, copy=True).requires_grad_() for p in params]


def give(ours, theirs):
    """Our parameters the gradients of theirs."""
    for p, q in zip(ours, theirs, strict=True):
        p.grad = None if q.grad is None else q.grad.to(p.device, p.dtype, copy=True)


def assert_close(ours, theirs, tolerance):
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach().cpu().double(), q.detach().cpu().double(), rtol=tolerance, atol=tolerance)


def assert_fused(optimizer):
    for choice in optimizer.tiers():
        assert uses_triton(choice, DEVICE), choice


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rule_in_float64(case, mode):
    """With gradients missing now and then, and a checkpoint in the middle."""
    theirs = make_params(torch.float64)
    ours = there(theirs)
    a, b = case.ours(ours, **case.hyper, **mode), case.reference(theirs)
    for step in range(6):
        set_gradients(step, theirs, none_at=((0, 4), (4, 0)))
        give(ours, theirs)
        a.step()
        b.step()
        if step == 2:
            saved = copy.deepcopy(a.state_dict())
            a = case.ours(ours, **case.hyper, **mode)
            a.load_state_dict(saved)
    assert_close(ours, theirs, 1e-12)
    assert_fused(a)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_gradients_that_come_in_turns(case, mode, monkeypatch):
    """As in a mixture of experts: tables hold everyone who has had a gradient before."""
    used = []
    count_reuse(monkeypatch, used)
    theirs = make_params(torch.float64)
    ours = there(theirs)
    a, b = case.ours(ours, **case.hyper, **mode), case.reference(theirs)
    for step in range(9):
        set_gradients(step, theirs)
        for i, p in enumerate(theirs):
            p.grad = p.grad if (i + step) % 3 == 0 else None
        give(ours, theirs)
        a.step()
        b.step()
    assert_close(ours, theirs, 1e-12)
    assert len(used) >= 6
    assert_fused(a)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_is_the_loop_tier(case, mode):
    """To the bit, but for divisions by a number: on a GPU torch multiplies by the inverse, which rounds twice."""
    ours, loop = there(make_params(torch.float32)), there(make_params(torch.float32))
    a, b = case.ours(ours, **case.hyper, **mode), case.ours(loop, **case.hyper, foreach=False)
    for step in range(4):
        set_gradients(step, loop)
        give(ours, loop)
        a.step()
        b.step()
    exact = GPU and case.name in ("SGD", "ASGD", "Rprop", "Lion", "Adadelta")
    assert_close(ours, loop, 0 if exact else 3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_precision_rounds_once(case, dtype):
    ours = there(make_params(dtype))
    theirs = [p.detach().cpu().double().requires_grad_() for p in ours]
    a, b = case.ours(ours, **case.hyper), case.reference(theirs)
    set_gradients(0, theirs)
    give(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        q.grad = p.grad.cpu().double()
    a.step()
    b.step()
    assert_close(ours, theirs, torch.finfo(dtype).eps)
    assert_fused(a)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_may_be_mixed(state):
    """State keeps the dtype it was loaded in; the maths runs in the widest."""
    ours, loop = there(make_params(torch.bfloat16)), there(make_params(torch.bfloat16))
    a, b = offbeat.AdamW(ours, lr=0.1), offbeat.AdamW(loop, lr=0.1, foreach=False)
    for optimizer, params in ((a, ours), (b, loop)):
        optimizer.init_state()
        for p in params:
            optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"].to(state)
    for step in range(3):
        set_gradients(step, loop)
        give(ours, loop)
        a.step()
        b.step()
    assert a.state[ours[0]]["exp_avg_sq"].dtype == state
    assert_close(ours, loop, torch.finfo(torch.bfloat16).eps)
    assert_fused(a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sizes_and_places(dtype):
    """Tensors of every size around a block, at odd addresses, without elements, and with dimensions in any order."""
    memory = torch.randn(9000, dtype=dtype, device=DEVICE)
    sizes = [1, 3, 1023, 1024, 1025, 2048, 2500]
    ours = [memory[7 + 2 * i : 7 + 2 * i + n].clone() for i, n in enumerate(sizes)]
    ours += [memory.clone()[offset : offset + 2049] for offset in (1, 3, 8)]
    ours += [memory[:0].clone(), memory[:600].clone().view(20, 30).t(), torch.ones((), dtype=dtype, device=DEVICE)]
    ours = [p.requires_grad_() for p in ours]
    loop = [p.detach().clone(memory_format=torch.preserve_format).requires_grad_() for p in ours]
    a, b = offbeat.AdamW(ours, lr=0.1), offbeat.AdamW(loop, lr=0.1, foreach=False)
    for step in range(3):
        for p, q in zip(ours, loop, strict=True):
            q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(step)).to(DEVICE, dtype)
            # Gradients move from step to step, and lie at odd addresses now and then.
            home = torch.empty(q.numel() + 3, dtype=dtype, device=DEVICE)
            p.grad = home[step : step + q.numel()].view(q.shape).copy_(q.grad)
        a.step()
        b.step()
    assert_close(ours, loop, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_nothing_outside_is_touched(mode, count):
    """Neighbours in memory keep their values."""
    memory = torch.full((4096,), 7.0, device=DEVICE)
    params = [memory[100 + 1500 * i : 100 + 1500 * i + 1027].requires_grad_() for i in range(count)]
    optimizer = offbeat.AdamW([p.detach().requires_grad_() for p in params], lr=0.1, **mode)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    inside = torch.zeros(4096, dtype=torch.bool)
    for i in range(count):
        inside[100 + 1500 * i : 100 + 1500 * i + 1027] = True
    assert (memory.cpu()[~inside] == 7).all()
    assert (memory.cpu()[inside] != 7).all()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_learning_rate_on_the_device(case, mode):
    """A tensor is read where it lies; changing it in place counts."""
    theirs = make_params(torch.float64)
    ours = there(theirs)
    lr = case.hyper.get("lr", 0.01)
    a = case.ours(ours, **{**case.hyper, "lr": torch.tensor(lr, dtype=torch.float64, device=DEVICE)}, **mode)
    b = case.reference(theirs)
    b.param_groups[0]["lr"] = lr
    for step in range(5):
        set_gradients(step, theirs)
        give(ours, theirs)
        if step == 3:
            a.param_groups[0]["lr"].mul_(0.5)
            b.param_groups[0]["lr"] *= 0.5
        a.step()
        b.step()
    assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_clip_and_clear_in_the_same_pass(case, mode):
    ours, plain = there(make_params(torch.float32)), there(make_params(torch.float32))
    a, b = case.ours(ours, **case.hyper, **mode), case.ours(plain, **case.hyper, **mode)
    for step in range(3):
        set_gradients(step, plain)
        give(ours, plain)
        kept = [p.grad.clone() for p in ours]
        coefficient = torch.tensor(0.25, device=DEVICE)
        a.step(clip=coefficient if step else 0.25, zero_grad=step == 2)
        for p, g in zip(ours, kept, strict=True):
            assert torch.equal(p.grad, torch.zeros_like(g) if step == 2 else g)
        for p in plain:
            p.grad.mul_(0.25)
        b.step()
    assert_close(ours, plain, 0)


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_what_a_grad_scaler_says(case):
    """Divided, and skipped with everything as it was, counters too."""
    ours, plain = there(make_params(torch.float32)), there(make_params(torch.float32))
    a, b = case.ours(ours, **case.hyper, fused=True), case.ours(plain, **case.hyper, fused=True)
    a.grad_scale = torch.tensor([256.0], device=DEVICE)
    for step in range(4):
        set_gradients(step, plain)
        give(ours, plain)
        for p in ours:
            p.grad.mul_(256.0)
        a.found_inf = torch.tensor([float(step == 2)], device=DEVICE)
        before = copy.deepcopy(a.state_dict()["state"])
        values = [p.detach().clone() for p in ours]
        a.step()
        if step != 2:
            b.step()
            for p, q in zip(ours, plain, strict=True):
                assert torch.equal(p.grad, q.grad)
            continue
        for p, value in zip(ours, values, strict=True):
            assert torch.equal(p, value)
        after = a.state_dict()["state"]
        for i, entry in before.items():
            for key, value in entry.items():
                assert torch.equal(after[i][key], value), key
    assert_close(ours, plain, 0)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_coefficients_made_on_the_device(case, traced, monkeypatch):
    """By a kernel made from the rule's functions; on the host for rules that cannot be traced."""

    def not_traceable(*args):
        raise NotTraceable("because")

    if not traced:
        monkeypatch.setattr("offbeat.engine.cuda.numbers._trace_numbers", not_traceable)
    theirs = make_params(torch.float64)
    ours = there(theirs)
    a, b = case.ours(ours, **case.hyper, fused=True), case.reference(theirs)
    for step in range(4):
        set_gradients(step, theirs, none_at=((2, 0),))
        give(ours, theirs)
        if step == 2:
            for optimizer in (a, b):
                optimizer.param_groups[0]["lr"] *= 0.5
        a.step()
        b.step()
    (part,) = a._engine._parts.values()
    if part.options.scalar_keys:
        assert all((batch.numbers is not None) == traced for batch, _ in part.batches)
    assert_close(ours, theirs, 1e-12)


def test_a_hyperparameter_the_coefficients_branch_on():
    """RAdam's are another function for a small beta; a change of it needs another kernel."""
    theirs = make_params(torch.float64)
    ours = there(theirs)
    a, b = offbeat.RAdam(ours, lr=0.1, fused=True), torch.optim.RAdam(theirs, lr=0.1, foreach=False)
    for step in range(6):
        set_gradients(step, theirs)
        give(ours, theirs)
        if step == 3:
            for optimizer in (a, b):
                optimizer.param_groups[0]["betas"] = (0.9, 0.5)
        a.step()
        b.step()
    assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    ("name", "option", "before", "after"),
    [
        ("AdamW", "betas", [0.9, 0.999], [0.5, 0.9]),
        ("AdamW", "lr", np.float32(0.125), np.float32(0.5)),
        ("AdamW", "weight_decay", Fraction(1, 8), Fraction(1, 2)),
        ("Rprop", "etas", [0.5, 1.2], [0.25, 1.5]),
        ("NAdam", "betas", [0.9, 0.999], (0.5, 0.9)),
        ("RAdam", "eps", np.float64(1e-8), 0.5),
    ],
)
def test_hyperparameters_of_any_kind_are_live(name, option, before, after, mode):
    theirs = make_params(torch.float64)
    ours = there(theirs)
    plain = lambda x: tuple(map(float, x)) if isinstance(x, (list, tuple)) else float(x)  # noqa: E731
    a = getattr(offbeat, name)(ours, **{option: before}, **mode)
    b = getattr(torch.optim, name)(theirs, **{option: plain(before)}, foreach=False)
    for step in range(6):
        set_gradients(step, theirs)
        give(ours, theirs)
        if step == 3:
            a.param_groups[0][option], b.param_groups[0][option] = after, plain(after)
        a.step()
        b.step()
    assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("name", ["AdamW", "RAdam", "ASGD"])
def test_numbers_that_change_do_not_compile_anew(name):
    ours = there(make_params(torch.float32))
    optimizer = getattr(offbeat, name)(ours, fused=True)
    set_gradients(0, ours)
    for step in range(8):
        if step == 3:
            compiled = kernel_module.compile_source.cache_info().misses
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            group["weight_decay"] = 0.1 + 0.01 * step
        optimizer.step()
    assert kernel_module.compile_source.cache_info().misses == compiled


@pytest.mark.parametrize("mode", [{}, {"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_gradients_are_cleared_also_if_a_step_is_skipped(mode):
    ours = there(make_params(torch.float32))
    optimizer = offbeat.AdamW(ours, **mode)
    for step in range(3):
        set_gradients(step, ours)
        before = [p.detach().clone() for p in ours]
        optimizer.found_inf = torch.tensor([float(step == 1)], device=DEVICE)
        versions = [p.grad._version for p in ours]
        optimizer.step(zero_grad=True)
        assert all((p.grad == 0).all() for p in ours)
        assert all(p.grad._version > version for p, version in zip(ours, versions, strict=True))
        assert all(torch.equal(p, q) == (step == 1) for p, q in zip(ours, before, strict=True) if p.numel())


def odd_gradients():
    """Gradients a kernel cannot write to as they are."""
    return {
        "another layout": torch.ones(30, 20, device=DEVICE).t(),
        "negative bit": torch._neg_view(torch.full((20, 30), -1.0, device=DEVICE)),
        "sparse": torch.ones(20, 30, device=DEVICE).to_sparse(),
    }


@pytest.mark.parametrize("which", odd_gradients())
@pytest.mark.parametrize("mode", [{}, {"foreach": True}, {"foreach": False}], ids=str)
def test_the_users_own_gradients_are_changed(which, mode):
    p = torch.ones(20, 30, device=DEVICE).requires_grad_()
    optimizer = offbeat.SGD([p], lr=0.1, momentum=0.5, **mode)
    for _ in range(2):
        p.grad = odd_gradients()[which]
        optimizer.grad_scale, optimizer.found_inf = torch.full((1,), 4.0, device=DEVICE), torch.zeros(1, device=DEVICE)
        optimizer.step()
        dense = p.grad.to_dense() if p.grad.layout != torch.strided else p.grad
        assert (dense == 0.25).all()
        del optimizer.grad_scale, optimizer.found_inf
        optimizer.step(zero_grad=True)
        dense = p.grad.to_dense() if p.grad.layout != torch.strided else p.grad
        assert (dense == 0).all()
    buffer, value = 0.0, 1.0
    for gradient in (0.25, 0.25, 0.25, 0.25):
        buffer = 0.5 * buffer + gradient
        value -= 0.1 * buffer
    torch.testing.assert_close(p, torch.full_like(p, value))


def test_two_parameters_with_one_gradient():
    for together in (True, False):
        p, q = (torch.zeros(4, device=DEVICE).requires_grad_() for _ in range(2))
        optimizer = offbeat.SGD([p, q] if together else [{"params": [p]}, {"params": [q]}], lr=1.0)
        for _ in range(3):
            p.grad = q.grad = torch.ones(4, device=DEVICE)
            optimizer.step(zero_grad=True)
            assert (p.grad == 0).all()
        assert (p == -3).all()
        assert (q == -3).all()


def test_clip_in_double_precision():
    for clip in (0.1, torch.tensor(0.1, dtype=torch.float64, device=DEVICE)):
        p = torch.zeros(4, dtype=torch.float64, device=DEVICE).requires_grad_()
        p.grad = torch.ones_like(p)
        offbeat.SGD([p], lr=1.0).step(clip=clip)
        assert (p == -0.1).all()


def test_a_grad_scaler_without_gradients():
    p = torch.zeros(4, device=DEVICE).requires_grad_()
    scaler = torch.amp.GradScaler(DEVICE.type)
    scaler.scale(torch.ones((), device=DEVICE))
    scaler.step(offbeat.AdamW([p], fused=True))
    assert (p == 0).all()


def test_tables_are_kept(monkeypatch):
    """An unchanged group is stepped by its plan; addresses travel when they change, and only then."""
    used, sent = [], []
    send = table_module.DeviceTable._send
    count_reuse(monkeypatch, used)
    ours = there(make_params(torch.float32))
    optimizer = offbeat.AdamW(ours)
    set_gradients(0, ours)
    optimizer.step()
    optimizer.step()
    monkeypatch.setattr(
        table_module.DeviceTable, "_send", lambda self, column, words: (sent.append(column), send(self, column, words))
    )
    optimizer.step()
    assert sent == []
    held = [p.grad for p in ours]  # so that new ones lie elsewhere
    set_gradients(1, ours)
    optimizer.step()
    assert sent == [1]
    optimizer.step()
    assert sent == [1]
    assert len(used) == 4
    del held


def test_memory_of_a_graph_is_not_freed_during_a_capture(monkeypatch):
    capturing = [True]
    monkeypatch.setattr(capture_module, "is_capturing", lambda: capturing[0])

    def dying_table():
        table = table_module.DeviceTable(1, [8], torch.device("cpu"))
        pinned = torch.zeros(1)
        table._kept.append((pinned, table.words))  # as a capture leaves it
        return weakref.ref(pinned)

    first, second = dying_table(), dying_table()
    assert first() is not None
    assert second() is not None
    capturing[0] = False
    third = dying_table()
    assert [ref() for ref in (first, second, third)] == [None] * 3


def test_without_triton(monkeypatch):
    monkeypatch.setenv("OFFBEAT_NO_TRITON", "1")
    ours = there(make_params(torch.float32))
    optimizer = offbeat.AdamW(ours)
    set_gradients(0, ours)
    optimizer.step()
    (choice,) = optimizer.tiers()
    assert choice.tier == ("native" if ours[0].device.type == "cpu" else "foreach")
    assert "OFFBEAT_NO_TRITON" in choice.reason


def test_a_kernel_that_cannot_be_compiled(monkeypatch):
    """Another tier does it, and says why."""

    def broken(self, variant, device):
        raise kernel_module.TritonError("Triton could not compile the kernel (because)")

    monkeypatch.setattr(kernel_module, "compile_kernel", broken)
    ours = there(make_params(torch.float32))
    plain = there(make_params(torch.float32))
    hyper = {"lr": 0.02, "momentum": 0.625}  # no other test has compiled this
    a, b = offbeat.RMSprop(ours, **hyper, centered=True), offbeat.RMSprop(plain, **hyper, centered=True, foreach=True)
    set_gradients(0, plain)
    give(ours, plain)
    monkeypatch.setattr(kernel_module, "_why_not_compiled", kernel_module._why_not_compiled.__wrapped__)
    a.step()
    b.step()
    assert_close(ours, plain, 0)
    assert a.tiers()[0].tier == "foreach"
    assert "because" in a.tiers()[0].reason
    with pytest.raises(RuntimeError, match="because"):
        offbeat.RMSprop(ours, fused=True).step()


@pytest.mark.parametrize("clip", ["previous", "bucket"])
@pytest.mark.parametrize("groups", [1, 2])
def test_overlap_clips_in_the_pass_that_updates(clip, groups, monkeypatch):
    """To the bit as with gradients multiplied in a pass of their own."""
    passes = []
    multiply = clipping.multiply
    for module in (clipping, registry):
        monkeypatch.setattr(module, "multiply", lambda *a: (passes.append(1), multiply(*a))[1])
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 20)).to(DEVICE)
    other = copy.deepcopy(one)
    batches = [torch.randn(8, 40, device=DEVICE) for _ in range(7)]
    handles, optimizers = [], []
    for model in (one, other):
        parts = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.02}]
        optimizer = offbeat.AdamW(parts if groups == 2 else model.parameters(), lr=0.01)
        handles.append(offbeat.overlap(optimizer, model, clip_norm=0.01, clip=clip, bucket_cap_mb=1e-3))
        optimizers.append(optimizer)
    handles[1]._step._overlapped._rule_optimizer.clips_exactly = lambda params: False
    for step, x in enumerate(batches):
        counts = []
        for model, optimizer in zip((one, other), optimizers, strict=True):
            if step == 5:  # the maths is wider than gradients from here on
                for p in model.parameters():
                    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].double()
            before = len(passes)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(passes) - before)
        assert counts[1] > 0
        if 2 <= step < 5:  # every bucket has its tables
            assert counts[0] == 0
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_overlap_clips_parameters_that_came_later():
    """The groups of a bucket are those of this step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4)).to(DEVICE)
    twin = copy.deepcopy(model)
    optimizer = offbeat.AdamW([{"params": [p]} for p in model[0].parameters()], lr=0.01)
    handle = offbeat.overlap(optimizer, model, clip_norm=1e-3, clip="previous")
    other = offbeat.AdamW([{"params": [p]} for p in twin[0].parameters()], lr=0.01)
    norm = None
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.1})
            other.add_param_group({"params": list(twin[1].parameters()), "lr": 0.1})
        x = torch.randn(8, 6, device=DEVICE)
        model(x).square().sum().backward()
        twin(x).square().sum().backward()
        optimizer.step()
        grads = [p.grad for group in other.param_groups for p in group["params"]]
        before, norm = norm, torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, (1e-3 / ((norm if before is None else before) + 1e-6)).clamp(max=1.0))
        other.step()
        for one in (model, twin):
            one.zero_grad()
        assert_close(model.parameters(), twin.parameters(), 1e-6)
    assert handle.last_norm is not None


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_clip_is_gradient_times_number(dtype, mode):
    """To the bit, also where the product is rounded, and as the tiers do that make a copy."""
    ours = there(make_params(dtype))
    twins = there(ours)
    a, b = offbeat.AdamW(ours, lr=0.1, **mode), offbeat.AdamW(twins, lr=0.1, **mode)
    clip = torch.tensor(0.3, device=DEVICE)
    for step in range(4):
        set_gradients(step, twins)
        give(ours, twins)
        for p in twins:
            p.grad = p.grad * clip.item()
        a.step(clip=clip)
        b.step()
        if GPU and dtype != torch.float32:  # there products and sums may become one operation, and round once
            assert_close(ours, twins, 0.01)
        else:
            assert all(torch.equal(p, q) for p, q in zip(ours, twins, strict=True))
    assert_fused(a)
