"""Between steps an optimizer keeps tables of addresses. Whatever is done to its tensors meanwhile, none may be stale.

Each case does something between steps, to an optimizer in the fused tier and to a twin in the loop tier, which keeps
nothing; both must go on alike.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import offbeat
from offbeat.engine import batch as batch_module
from offbeat.engine import choice as choice_module
from offbeat.engine.batch import NativeBatch
from offbeat.engine.build import Part
from offbeat.engine.cpu.reader import wait_for_reader, why_no_reader
from offbeat.overlap.registry import overlapped
from tests.cases import CASES, make_params, set_gradients


@pytest.fixture(params=["compiled", "Python"], autouse=True)
def reader(request, monkeypatch):
    """Both ways of reading addresses."""
    if request.param == "Python":
        monkeypatch.setenv("OFFBEAT_READER", "python")
    else:
        assert wait_for_reader(170), why_no_reader()
    return request.param


def new_storage(optimizer, params):
    params[0].data = params[0].data.clone()


def other_layout(optimizer, params):
    params[4].data = params[4].data.t().contiguous().t()


def same_address_other_strides(optimizer, params):
    """A square tensor whose rows and columns change places without moving."""
    params[6].data = params[6].data.t()


def replaced_state(optimizer, params):
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].clone() + 1


def state_in_new_storage(optimizer, params):
    state = optimizer.state[params[0]]["exp_avg"]
    state.data = state.data.clone() + 1


def state_in_shared_memory(optimizer, params):
    for p in params:
        optimizer.state[p]["exp_avg"].share_memory_()


def params_in_shared_memory(optimizer, params):
    for p in params:
        p.data.share_memory_()


def cleared_state(optimizer, params):
    optimizer.state.clear()


def popped_state(optimizer, params):
    optimizer.state.pop(params[0])


def updated_entry(optimizer, params):
    optimizer.state[params[0]].update(exp_avg=torch.ones_like(params[0]))


def another_dictionary(optimizer, params):
    optimizer.state = defaultdict(dict)


def state_of_another_dtype(optimizer, params):
    entry = optimizer.state[params[0]]
    entry["exp_avg"] = entry["exp_avg"].double()


def counter_changed_in_place(optimizer, params):
    optimizer.state[params[0]]["step"].fill_(50)


def counter_in_new_storage(optimizer, params):
    optimizer.state[params[0]]["step"].data = torch.tensor(50.0)


def counter_replaced(optimizer, params):
    optimizer.state[params[0]]["step"] = torch.tensor(50.0)


def reordered_parameters(optimizer, params):
    optimizer.param_groups[0]["params"].reverse()


def parameter_removed(optimizer, params):
    del optimizer.param_groups[0]["params"][0]


def parameter_appended(optimizer, params):
    params.append(torch.ones(3, requires_grad=True))
    optimizer.param_groups[0]["params"].append(params[-1])


def structure_changed(optimizer, params):
    optimizer.param_groups[0]["amsgrad"] = True


def weight_decay_off(optimizer, params):
    optimizer.param_groups[0]["weight_decay"] = 0


def reloaded(optimizer, params):
    optimizer.load_state_dict(optimizer.state_dict())


def swapped_tensors(optimizer, params):
    torch.utils.swap_tensors(params[0], torch.nn.Parameter(params[0].detach().clone() + 1))


CHANGES = [
    new_storage, other_layout, same_address_other_strides, replaced_state, state_in_new_storage,
    state_in_shared_memory, params_in_shared_memory, cleared_state, popped_state, updated_entry, another_dictionary,
    state_of_another_dtype, counter_changed_in_place, counter_replaced, counter_in_new_storage,
    reordered_parameters, parameter_removed,
    parameter_appended, structure_changed, weight_decay_off, reloaded, swapped_tensors,
]  # fmt: skip


def take_turns(step, *models):
    """Every third parameter has a gradient, others at every step; laid out as the parameter, as autograd has it."""
    for params in models:
        for i, p in enumerate(params):
            p.grad = torch.empty_like(p, requires_grad=False).copy_(p.grad) if (i + step) % 3 == 0 else None


@pytest.mark.parametrize("turns", [False, True], ids=["", "in turns"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_between_steps_reaches_the_next_step(change, turns):
    shapes = [(3, 4), (), (0,), (7,), (130, 5), (1, 33), (5, 5)]
    ours, twins = make_params(torch.float32, shapes=shapes), make_params(torch.float32, shapes=shapes)
    ours, twins = ([torch.nn.Parameter(p.detach()) for p in ps] for ps in (ours, twins))
    a, b = offbeat.AdamW(list(ours), lr=0.1), offbeat.AdamW(list(twins), lr=0.1, foreach=False)
    for step in range(9):
        if step == 4:
            assert a._engine._parts, "the tables this test is about do not exist"
            a.zero_grad()
            b.zero_grad()
            change(a, ours)
            change(b, twins)
        set_gradients(step, ours, twins)
        if turns:
            take_turns(step, ours, twins)
        a.step()
        b.step()
        for i, (p, q) in enumerate(zip(ours, twins, strict=True)):
            torch.testing.assert_close(p, q, rtol=3e-6, atol=3e-6, msg=lambda m: f"step {step}, parameter {i}: {m}")
        for p, q in zip(ours, twins, strict=True):
            assert a.state.get(p, {}).keys() == b.state.get(q, {}).keys()


# torch's operators want one dtype for parameter and state.
NATIVE_CHANGES = [change for change in CHANGES if change is not state_of_another_dtype]


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("change", NATIVE_CHANGES, ids=lambda f: f.__name__)
def test_a_change_reaches_the_next_step_of_torchs_operator_too(change, parts, monkeypatch):
    monkeypatch.setattr(choice_module, "_why_not_fused", lambda *args: "this test wants torch's operator")
    shapes = [(3, 4), (), (0,), (7,), (130, 5), (1, 33), (5, 5)]
    ours, twins = make_params(torch.float32, shapes=shapes), make_params(torch.float32, shapes=shapes)
    ours, twins = ([torch.nn.Parameter(p.detach()) for p in ps] for ps in (ours, twins))
    a = offbeat.AdamW(list(ours), lr=0.1, fused=True)
    b = offbeat.AdamW(list(twins), lr=0.1, foreach=False)
    bucketwise = overlapped(a)
    for step in range(9):
        if step == 4:
            found = a._engine._parts.values()
            assert [type(b) for part in found for b, _ in part.batches] == [NativeBatch] * (2 if parts else 1)
            a.zero_grad()
            b.zero_grad()
            change(a, ours)
            change(b, twins)
        set_gradients(step, ours, twins)
        if parts:
            bucketwise.begin_step()
            members = [p for p in a.param_groups[0]["params"] if p.grad is not None]
            for bucket in (members[4:], members[:4]):
                bucketwise.step_bucket(bucket, [p.grad for p in bucket])
        else:
            a.step()
        b.step()
        for i, (p, q) in enumerate(zip(ours, twins, strict=True)):
            torch.testing.assert_close(p, q, rtol=3e-6, atol=3e-6, msg=lambda m: f"step {step}, parameter {i}: {m}")


def count_reuse(monkeypatch, used):
    """Add to the list whenever batches of an earlier step are used again."""
    fits = Part.fits

    def counted(self, *args):
        found = fits(self, *args)
        used.extend([1] * found)
        return found

    monkeypatch.setattr(Part, "fits", counted)


def test_a_plan_is_used_when_nothing_changes(monkeypatch):
    params = make_params(torch.float32)
    optimizer = offbeat.AdamW(params)
    used = []
    count_reuse(monkeypatch, used)
    for step in range(6):
        set_gradients(step, params, none_at=((3, 1), (4, 4)))
        optimizer.step()
    assert len(used) == 5


@pytest.mark.parametrize("eager", [False, True], ids=["", "init_state"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_that_come_in_turns_find_a_plan(case, eager, monkeypatch):
    """As in a mixture of experts. Counters of those who began at different steps lie in different places."""
    used = []
    count_reuse(monkeypatch, used)
    shapes = [(3, 4), (), (0,), (7,), (2, 5)] * 5
    ours, theirs = make_params(torch.float64, shapes=shapes), make_params(torch.float64, shapes=shapes)
    a, b = case.ours(ours, **case.hyper), case.reference(theirs)
    if eager:
        a.init_state()
    for step in range(12):
        set_gradients(step, ours, theirs)
        take_turns(step, ours, theirs)
        a.step()
        b.step()
    assert len(used) >= 9
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    for p, q in zip(ours, theirs, strict=True):
        if "step" in b.state[q]:
            assert float(a.state[p]["step"]) == float(b.state[q]["step"]) == 4


def test_gradients_that_do_not_suit_the_tables_are_still_used_rightly():
    ours, twins = make_params(torch.float32), make_params(torch.float32)
    a, b = offbeat.RMSprop(ours), offbeat.RMSprop(twins, foreach=False)
    for step in range(8):
        set_gradients(step, ours, twins)
        if step in (3, 5):
            ours[4].grad = ours[4].grad.t().contiguous().t()
            ours[0].grad = torch.ones(1).expand(3, 4)
            twins[0].grad = torch.ones(3, 4)
        a.step()
        b.step()
        for p, q in zip(ours, twins, strict=True):
            torch.testing.assert_close(p, q, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("tier", [{}, {"foreach": True}, {"foreach": False}], ids=str)
def test_autograd_notices_a_step_between_forward_and_backward(tier):
    p = torch.ones(3, requires_grad=True)
    optimizer = offbeat.SGD([p], lr=0.1, **tier)
    for _ in range(3):
        loss = p.square().sum()
        p.grad = torch.ones(3)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Negated(torch.Tensor):
    """A gradient that is the negative of what its memory holds."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        def plain(x):
            return -x.as_subclass(torch.Tensor) if isinstance(x, Negated) else x

        return func(*map(plain, args), **{k: plain(v) for k, v in (kwargs or {}).items()})


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch._neg_view(torch.ones(3)),
        lambda: torch._efficientzerotensor((3,)),
        lambda: torch.complex(torch.zeros(3), torch.ones(3)).conj().imag,
        lambda: torch.nn.Parameter(torch.ones(3)),
    ],
    ids=["negative bit", "zero tensor", "imaginary part", "parameter"],
)
@pytest.mark.parametrize("plain_steps", [0, 2])
def test_gradients_that_are_not_what_their_memory_holds(odd, plain_steps):
    p, q = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    a, b = offbeat.Adam([p], lr=0.1), torch.optim.Adam([q], lr=0.1, foreach=False)
    for step in range(plain_steps + 2):
        g = torch.full((3,), 2.0) if step < plain_steps else odd().detach()
        p.grad, q.grad = g, g.clone() if step < plain_steps else g
        a.step()
        b.step()
        torch.testing.assert_close(p, q)
        assert a.state[p]["step"] == step + 1


def test_a_subclass_as_gradient_is_asked_and_not_read():
    p = torch.ones(3, requires_grad=True)
    optimizer = offbeat.SGD([p], lr=0.1)
    for _ in range(2):
        p.grad = torch.ones(3)
        optimizer.step()
    p.grad = torch.ones(3).as_subclass(Negated)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.9))


def test_autograd_notices_a_step_in_state_too():
    p = torch.ones(3, requires_grad=True)
    optimizer = offbeat.SGD([p], lr=0.1, momentum=0.9)
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
    w = torch.ones(3, requires_grad=True)
    loss = (optimizer.state[p]["momentum_buffer"] * w).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_plans_do_not_keep_gradients_or_removed_parameters_alive():
    import gc
    import weakref

    params = make_params(torch.float32)
    optimizer = offbeat.AdamW(params)
    for step in range(3):
        set_gradients(step, params)
        optimizer.step()
    gradient = weakref.ref(params[0].grad)
    optimizer.zero_grad()
    gc.collect()
    assert gradient() is None
    # A parameter that has left the optimizer is let go with the next step.
    parameter = weakref.ref(params[0])
    optimizer.state.pop(params[0])
    optimizer.param_groups[0]["params"] = params = params[1:]
    set_gradients(3, params)
    optimizer.step()
    gc.collect()
    assert parameter() is None


@pytest.mark.parametrize("name", ["Rprop", "ASGD"])
def test_a_counter_wound_back_begins_anew_in_every_tier(name):
    ours, twins = make_params(torch.float32), make_params(torch.float32)
    a, b = getattr(offbeat, name)(ours, lr=0.1), getattr(offbeat, name)(twins, lr=0.1, foreach=False)
    for step in range(8):
        if step == 4:
            for p, q in zip(ours, twins, strict=True):
                a.state[p]["step"].zero_()
                b.state[q]["step"].zero_()
            a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 0.02
        set_gradients(step, ours, twins)
        a.step()
        b.step()
        for p, q in zip(ours, twins, strict=True):
            torch.testing.assert_close(p, q, rtol=3e-6, atol=3e-6)


def test_many_groups_and_dtypes_have_plans_of_their_own():
    def build(**tier):
        params = [torch.randn(9, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(6)]
        params[1] = params[1].detach().bfloat16().requires_grad_()
        groups = [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "betas": (0.5, 0.9)}]
        return params, offbeat.AdamW(groups, **tier)

    (ours, a), (twins, b) = build(), build(foreach=False)
    for step in range(6):
        set_gradients(step, ours, twins, none_at=((2, 1), (3, 4)))
        a.step()
        b.step()
    assert len(a._engine._parts) == 2
    for p, q in zip(ours, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=3e-6, atol=3e-6)


def test_options_that_change_names_are_seen():
    """As many options as before, and those that are left are the same objects."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = offbeat.AdamW([p])
    group = optimizer.param_groups[0]
    for _ in range(2):
        p.grad = torch.ones(3)
        optimizer.step()
    del group["foreach"]  # was None, which is what a look for it finds now
    group["state_dtype"] = torch.bfloat16
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16


def test_options_that_change_places_with_names_are_seen():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = offbeat.AdamW([("p", p)])
    for step in range(3):
        if step == 2:
            del optimizer.param_groups[0]["param_names"]
            optimizer.param_groups[0]["rounding"] = "kahan"
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert "compensation" in optimizer.state[p]


def test_a_gradient_without_memory_where_another_was():
    """Sparse tensors have no storage to look at; the allocator gives one the place of a dense one that is gone."""
    params = [torch.nn.Parameter(torch.zeros(10, 2)) for _ in range(200)]
    optimizer = offbeat.SGD(params, lr=1.0)
    hits = 0
    for _ in range(20):
        for _ in range(2):
            for p in params:
                p.grad = torch.zeros(10, 2)
            optimizer.step()
        row = {p.grad._cdata: i for i, p in enumerate(params)}
        optimizer.zero_grad()
        one = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 2)
        made = [torch.sparse_coo_tensor(*one, (10, 2), check_invariants=False) for _ in params]
        for g in made:
            if g._cdata in row:
                hits += 1
                params[row[g._cdata]].grad = g
        optimizer.step()
    assert sum(-p.sum().item() / 2 for p in params) == hits


def gaps(ps, state):
    ps[2].data = torch.zeros(16)[::2]


def complex_numbers(ps, state):
    ps[2].data = ps[2].data.to(torch.complex64)


def double_precision(ps, state):
    ps[2].data = ps[2].data.double()


def without_memory(ps, state):
    ps[2].untyped_storage().resize_(0)


def odd_counter(ps, state):
    state[ps[2]]["step"].fill_(-1)


def long_counter(ps, state):
    state[ps[2]]["step"].data = torch.ones(2)


def freed_state(ps, state):
    state[ps[2]]["exp_avg"].untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "change",
    [gaps, complex_numbers, double_precision, without_memory, odd_counter, long_counter, freed_state],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_what_becomes_of_a_parameter_without_a_gradient_does_not_touch_the_others(name, change):
    """It is taken over into new tables only if everything about it is as it was."""
    if name == "SGD" and change in (odd_counter, long_counter, freed_state):
        pytest.skip("it has no such state")

    def train(**tier):
        torch.manual_seed(0)
        ps = [torch.nn.Parameter(torch.randn(8)) for _ in range(3)]
        optimizer = getattr(offbeat, name)(ps, lr=0.1, **tier)
        generator = torch.Generator().manual_seed(1)
        for step in range(6):
            idle = 2 <= step < 5
            if step == 2:
                for p in ps:
                    p.grad = None
                change(ps, optimizer.state)
                ps[1].data = ps[1].data.clone()
                optimizer.state[ps[0]]["note"] = 1  # tables are made anew
            for i, p in enumerate(ps):
                g = torch.randn(16, generator=generator).to(p.dtype)
                p.grad = (
                    None
                    if i == 2 and (idle or change is not gaps) and step > 1
                    else (g[::2] if p.stride() == (2,) else g[:8].clone())
                )
            optimizer.step()
        between = [] if change is not gaps else [ps[2].as_strided((15,), (1,))[1::2].detach()]
        last = [ps[2].detach()] if change is gaps else []
        return [ps[0].detach(), ps[1].detach(), *last, *between]

    for p, q in zip(train(), train(foreach=False), strict=True):
        torch.testing.assert_close(p, q, rtol=3e-6, atol=3e-6)


def test_counters_in_storages_that_share_an_address():
    import numpy as np

    for start in (0, 1):
        memory = np.ones(20, np.float32)
        whole, head = torch.from_numpy(memory), torch.from_numpy(memory[:1])
        params = [torch.nn.Parameter(torch.ones(2)) for _ in range(9)]
        optimizer = offbeat.Adam(params)
        for step in range(3):
            for p in params:
                p.grad = torch.ones(2)
            if step == 1:
                for i, p in enumerate(params):
                    optimizer.state[p]["step"] = head[0] if i == 0 else whole[i + start]
            optimizer.step()
        assert [optimizer.state[p]["step"].item() for p in params] == [3.0] * 9


def test_a_step_without_memory_for_its_tables_changes_nothing(monkeypatch):
    def fail(*args):
        raise RuntimeError("no memory")

    ours, twins = make_params(torch.float32), make_params(torch.float32)
    a, b = offbeat.AdamW(ours), offbeat.AdamW(twins, foreach=False)
    set_gradients(0, ours, twins)
    with monkeypatch.context() as patched:
        patched.setattr(batch_module, "AddressBook", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            a.step()
    assert not a.state
    for step in range(3):
        set_gradients(step, ours, twins)
        a.step()
        b.step()
    for p, q in zip(ours, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=3e-6, atol=3e-6)
