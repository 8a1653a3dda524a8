"""Checkpoints: exact resume, early allocation, old formats, dtypes, and nothing half-loaded."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import offbeat
from tests.cases import CASES, MATRIX_CASES, ONE_A_RULE, SHAPES, TIERS, make_params, set_gradients

#: Parameter 1 never has a gradient, 3 only late, 4 not always.
NONE_AT = tuple((s, 1) for s in range(20)) + tuple((s, 3) for s in range(8)) + ((2, 4), (6, 4))


def run(optimizer, params, steps):
    for step in steps:
        set_gradients(step, params, none_at=NONE_AT)
        optimizer.step()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("init_first", [False, True], ids=["lazy", "init_state"])
def test_save_load_go_on_equals_never_saved(case, tier, init_first):
    straight, resumed = make_params(torch.float32), make_params(torch.float32)
    a = case.ours(straight, **case.hyper, **TIERS[tier])
    run(a, straight, range(10))

    b = case.ours(resumed, **case.hyper, **TIERS[tier])
    run(b, resumed, range(5))
    if init_first:
        b.init_state()
    buffer = io.BytesIO()
    torch.save(b.state_dict(), buffer)
    buffer.seek(0)
    c = case.ours(resumed, **case.hyper, **TIERS[tier])
    if init_first:
        c.init_state()
    c.load_state_dict(torch.load(buffer, weights_only=True))
    run(c, resumed, range(5, 10))
    assert all(torch.equal(p, q) for p, q in zip(straight, resumed, strict=True))
    for p, q in zip(straight, resumed, strict=True):
        for key, value in a.state.get(p, {}).items():
            assert torch.equal(value, c.state[q][key]), key


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_init_state_changes_nothing(case, tier):
    plain, early = make_params(torch.float32), make_params(torch.float32)
    a, b = (case.ours(ps, **case.hyper, **TIERS[tier]) for ps in (plain, early))
    before = [p.detach().clone() for p in early]
    b.init_state()
    assert all(torch.equal(p, q) for p, q in zip(early, before, strict=True))
    assert all(p.grad is None for p in early)
    stateful = bool(
        case.ours.rule.slots(offbeat.engine.options.hyperparameters({**b.param_groups[0], "capturable": False}))
    )
    assert all(bool(b.state[p]) == stateful for p in early)
    run(a, plain, range(10))
    run(b, early, range(10))
    assert all(torch.equal(p, q) for p, q in zip(plain, early, strict=True))


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_asking_for_the_state_dict_changes_nothing(case):
    a_params, b_params = make_params(torch.float32), make_params(torch.float32)
    a, b = case.ours(a_params, **case.hyper), case.ours(b_params, **case.hyper)
    for step in range(6):
        b.state_dict()
        set_gradients(step, a_params, b_params)
        a.step()
        b.step()
        b.init_state()
    assert all(torch.equal(p, q) for p, q in zip(a_params, b_params, strict=True))


@pytest.mark.parametrize("how", ["alone", "chained", "scheduled and overlapped"])
@pytest.mark.parametrize("case", [*CASES, *MATRIX_CASES], ids=str)
def test_torchs_distributed_checkpoint_asks_for_state_and_changes_nothing(case, how):
    """It makes a step with zero gradients to have state allocated, which counted (pytorch#164929)."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    shapes = [(3, 4), (4, 3), (2, 2)] if case.name == "Muon" else [s for s in SHAPES if s != (0,)]
    trained = []
    for asked in (False, True):
        params = make_params(torch.float32, shapes=shapes)
        module = torch.nn.ParameterList([torch.nn.Parameter(p.detach()) for p in params])
        params = list(module)
        params[-1].requires_grad_(False)
        optimizer = made = case.ours(params, **case.hyper)
        if how == "chained":
            optimizer = offbeat.Chain([made])
        elif how != "alone":
            torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
            offbeat.overlap(optimizer, module, clip_norm=1e9)
        if asked:
            found = get_optimizer_state_dict(module, optimizer)
            assert all(p.grad is None for p in params)
            stateful = bool(made.state.get(params[0]))
            # As in torch, for what requires a gradient; and the counters have not moved.
            assert {*found["state"]} == (
                {str(i) for i in range(len(params) - (case.name != "Adagrad"))} if stateful else set()
            )
            assert all(entry["step"] == 0 for entry in made.state.values() if "step" in entry)
        for step in range(3):
            set_gradients(step, params[:-1])
            optimizer.step()
            optimizer.zero_grad()
        trained.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*trained, strict=True))


def test_a_dampened_buffer_that_has_not_begun_is_told_from_one_of_zeros(tmp_path):
    """Its first gradient is not dampened, whether it was allocated early, copied, saved plainly or by DCP."""
    import torch.distributed.checkpoint as dcp

    hyper = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}

    def build():
        params = make_params(torch.float64)
        return params, offbeat.SGD(params, **hyper)

    params, lazy = build()
    run(lazy, params, range(3))
    results = []
    for how in ("early", "saved", "dcp", "zeros"):
        again, optimizer = build()
        optimizer.init_state()
        if how == "saved":
            other, optimizer2 = build()
            optimizer2.load_state_dict(optimizer.state_dict())
            again, optimizer = other, optimizer2
        elif how == "dcp":
            saved = {"state": {str(k): v for k, v in optimizer.state_dict()["state"].items()}}
            dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
            dcp.load(saved, checkpoint_id=tmp_path, no_dist=True)
        elif how == "zeros":  # a buffer that somebody has written has begun
            for p in again:
                optimizer.state[p]["momentum_buffer"].zero_()
        run(optimizer, again, range(3))
        results.append(all(torch.equal(p, q) for p, q in zip(params, again, strict=True)))
    assert results == [True, True, True, False]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_init_state_changes_nothing_when_the_learning_rate_changes_before_the_first_step(case):
    """A warm-up does; and a parameter's first gradient may come late."""
    results = []
    for early in (False, True):
        params = make_params(torch.float32)
        optimizer = case.ours(params, **{**case.hyper, "lr": 0.5})
        if early:
            optimizer.init_state()
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = case.ours(params, **{**case.hyper, "lr": 0.5})
            optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"] = 0.01
        run(optimizer, params, range(12))
        results.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_state_written_after_init_state_is_used(how):
    ours, theirs = make_params(torch.float64), make_params(torch.float64)
    a, b = offbeat.SGD(ours, lr=0.1, momentum=0.9), torch.optim.SGD(theirs, lr=0.1, momentum=0.9, foreach=False)
    a.init_state()
    for p, q in zip(ours, theirs, strict=True):
        if how == "in place":
            a.state[p]["momentum_buffer"].fill_(1)
        else:
            a.state[p]["momentum_buffer"] = torch.ones_like(p)
        b.state[q]["momentum_buffer"] = torch.ones_like(q)
    set_gradients(0, ours, theirs)
    a.step()
    b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-14, atol=1e-14)


def test_names_in_other_groups_do_not_mix_up_options():
    w, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    first = offbeat.Adam([{"params": [("w", w)], "lr": 0.1}, {"params": [("b", b)], "lr": 0.5}])
    second = offbeat.Adam([{"params": [("b", b)]}, {"params": [("w", w)]}])
    w.grad, b.grad = torch.ones(2), torch.ones(3)
    first.step()
    with pytest.raises(ValueError, match="of shape"):  # by position, and these do not fit
        second.load_state_dict(first.state_dict())


def test_state_of_another_kind_of_optimizer_is_refused():
    params = make_params(torch.float32)
    sgd = offbeat.SGD(params, lr=0.1, momentum=0.9)
    set_gradients(0, params)
    sgd.step()
    with pytest.raises(ValueError, match="another kind of optimizer"):
        offbeat.Adam(params).load_state_dict(sgd.state_dict())


def test_loading_shares_nothing_with_the_state_dict():
    params, twins = make_params(torch.float32), make_params(torch.float32)
    a, b = offbeat.AdamW(params), offbeat.AdamW(twins)
    set_gradients(0, params)
    a.step()
    saved = a.state_dict()
    b.load_state_dict(saved)
    for p, q in zip(params, twins, strict=True):
        for key in a.state[p]:
            if a.state[p][key].numel():
                assert a.state[p][key].data_ptr() != b.state[q][key].data_ptr()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tier", TIERS)
def test_state_keeps_its_dtype(tier, state_dtype):
    """Full-precision state for bfloat16 parameters (and any other pair) survives a load, and is used as it is."""
    params = make_params(torch.bfloat16)
    optimizer = offbeat.AdamW(params, **TIERS[tier])
    optimizer.init_state()
    for p in params:
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][key] = optimizer.state[p][key].to(state_dtype)
    set_gradients(0, params)
    optimizer.step()
    again = offbeat.AdamW(params, **TIERS[tier])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    set_gradients(1, params)
    again.step()
    for p in params:
        assert again.state[p]["exp_avg"].dtype == state_dtype
        assert again.state[p]["step"].dtype == torch.float32
        expected = 0.9 * optimizer.state[p]["exp_avg"].double() + 0.1 * p.grad.double()
        tolerance = torch.finfo(state_dtype).eps if state_dtype != torch.float64 else 1e-14
        torch.testing.assert_close(again.state[p]["exp_avg"].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", [c for c in ONE_A_RULE if c.name != "Lion"], ids=str)
def test_older_checkpoints_load(case):
    """Without the newer flags, and with counters that are plain numbers."""
    ours, theirs = make_params(torch.float64), make_params(torch.float64)
    a, b = case.ours(ours, **case.hyper), case.reference(theirs)
    for step in range(3):
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
    old = copy.deepcopy(b.state_dict())
    for group in old["param_groups"]:
        for flag in ("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            if flag != "decoupled_weight_decay" or not case.hyper.get(flag):
                group.pop(flag, None)
    for entry in old["state"].values():
        for key in ("step", "mu_product", "eta", "mu"):
            if key in entry:
                entry[key] = entry[key].item()
    c = case.ours(ours, **case.hyper)
    c.load_state_dict(old)
    for step in range(3, 6):
        set_gradients(step, ours, theirs)
        c.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    assert all(isinstance(v, torch.Tensor) for p in ours for v in c.state[p].values())


def broken_checkpoints(saved):
    groups = copy.deepcopy(saved)
    groups["param_groups"] *= 2
    sizes = copy.deepcopy(saved)
    sizes["param_groups"][0]["params"].pop()
    shapes = copy.deepcopy(saved)
    shapes["state"][0]["exp_avg"] = torch.zeros(99)
    return {
        "different number of parameter groups": groups,
        "match the size of optimizer's group": sizes,
        "exp_avg.* of shape": shapes,
    }


@pytest.mark.parametrize("message", ["different number of parameter groups", "match the size", "exp_avg.* of shape"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(message):
    params = make_params(torch.float32)
    optimizer = offbeat.Adam(params)
    set_gradients(0, params)
    optimizer.step()
    bad = next(v for k, v in broken_checkpoints(optimizer.state_dict()).items() if k.startswith(message))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for i, entry in before["state"].items():
        assert all(torch.equal(value, after["state"][i][key]) for key, value in entry.items())


def test_state_of_another_layout_is_laid_out_like_the_parameter():
    p = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    q = p.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    a, b = offbeat.AdamW([p], lr=0.1), offbeat.AdamW([q], lr=0.1)
    for step in range(6):
        g = torch.randn(2, 3, 4, 4)
        p.grad, q.grad = g.clone(), g
        a.step()
        b.step()
        if step == 2:
            saved_a, saved_b = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
            a.load_state_dict(saved_b)
            b.load_state_dict(saved_a)
            assert a.state[p]["exp_avg"].stride() == p.stride()
    assert torch.equal(p, q)


def test_distributed_checkpoint_round_trip(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        return model, offbeat.AdamW(model.parameters(), lr=0.1)

    def train(model, optimizer, steps):
        for step in steps:
            torch.manual_seed(100 + step)
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    train(model, optimizer, range(6))

    saved_model, saved = build()
    train(saved_model, saved, range(3))
    dcp.save({"optim": get_optimizer_state_dict(saved_model, saved)}, checkpoint_id=tmp_path, no_dist=True)
    again = offbeat.AdamW(saved_model.parameters(), lr=0.1)
    again.init_state()
    state = {"optim": get_optimizer_state_dict(saved_model, again)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(saved_model, again, state["optim"])
    train(saved_model, again, range(3, 6))
    for p, q in zip(model.parameters(), saved_model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_copy_made_between_init_state_and_the_first_step_changes_nothing(case, how):
    params = make_params(torch.float32)
    optimizer = case.ours(params, **case.hyper)
    optimizer.init_state()
    twins, twin = how((params, optimizer))
    run(optimizer, params, range(3))
    run(twin, twins, range(3))
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(
    ("name", "options"), [("Muon", {"ns_dtype": torch.float32}), ("AdamW", {"state_dtype": torch.bfloat16})]
)
def test_dtypes_among_options_go_through_full_state_dicts(name, options, flatten):
    """torch.distributed.checkpoint refuses a torch.dtype there."""
    from torch.distributed.checkpoint import state_dict as dcp

    model = torch.nn.Linear(4, 3, bias=False)
    model.weight.grad = torch.ones(3, 4)
    optimizer, other = (getattr(offbeat, name)(model.parameters(), **options) for _ in range(2))
    optimizer.step()
    optimizer.zero_grad()
    full = dcp.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flatten)
    saved = dcp.get_optimizer_state_dict(model, optimizer, options=full)
    plain = dcp.StateDictOptions(flatten_optimizer_state_dict=flatten)
    dcp.set_optimizer_state_dict(model, other, saved, options=plain)
    assert options.items() <= other.param_groups[0].items()
    for key, value in optimizer.state[model.weight].items():
        assert torch.equal(other.state[model.weight][key], value), key


@pytest.mark.parametrize("chained", [False, True])
def test_load_state_dict_keeps_by_reference_what_torch_does(chained):
    """A wrapper may keep parameters as keys, or an object that cannot be copied, beside the state of parameters."""

    class Uncopied:
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    def entries(make):
        params = make_params(torch.float32)
        optimizer = make(params)
        set_gradients(0, params)
        optimizer.step()
        state_dict = optimizer.state_dict()
        extra, thing, inside = {params[0]: torch.ones(2), "at": torch.zeros(1)}, Uncopied(), Uncopied()
        state_dict["state"]["trac"], state_dict["state"]["thing"] = extra, thing
        mine = [inside, {"a": inside, "t": torch.ones(1)}]
        state_dict["state"][0]["mine"] = mine
        optimizer.load_state_dict(state_dict)
        loaded = optimizer.state[params[0]]["mine"]
        return [
            optimizer.state["trac"] is extra,
            next(iter(optimizer.state["trac"])) is params[0],
            optimizer.state["thing"] is thing,
            loaded is mine,
            loaded[0] is inside,
            loaded[1] is mine[1],
            loaded[1]["a"] is inside,
        ]

    def ours(params):
        return offbeat.Chain([offbeat.Adam(params, lr=0.1)]) if chained else offbeat.Adam(params, lr=0.1)

    assert entries(ours) == entries(lambda params: torch.optim.Adam(params, lr=0.1))
