"""Overlap on a plain module: what it promises beyond the cells, and what it refuses."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat.overlap import ReadsGradients
from offbeat.overlap.consumed import ConsumedGradient
from tests.cases import ONE_A_RULE

TINY = 1e-4  # a bucket for every parameter or two


def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(model, optimizer, steps=range(6), before_step=lambda: None, loss=lambda model, x: model(x).square().mean()):
    for step in steps:
        loss(model, batch(step, next(model.parameters()).dtype)).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


def assert_untouched(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    for p in model.parameters():
        assert not p._post_accumulate_grad_hooks


# What it does


@pytest.mark.parametrize("source", ["ours", "theirs"])
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_every_rule_steps_in_backward_with_the_same_bits(case, source):
    cls = getattr(case, source)
    a, b = make(dtype=torch.float64), make(dtype=torch.float64)
    opt_a, opt_b = cls(a.parameters(), **case.hyper), cls(b.parameters(), **case.hyper)
    offbeat.overlap(opt_a, a, bucket_cap_mb=TINY)
    train(a, opt_a, before_step=lambda: assert_all_used(a))
    train(b, opt_b)
    assert_same(a, b)


def assert_all_used(model: nn.Module) -> None:
    assert all(isinstance(p.grad, ConsumedGradient) for p in model.parameters())


@pytest.mark.parametrize("name", ["Adafactor", "SparseAdam", "Muon"])
def test_other_torch_optimizers_go_through_the_adapter(name):
    if name == "SparseAdam":
        a, b = (nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten()) for _ in range(2))
        b.load_state_dict(a.state_dict())
        loss = lambda model, x: model(x.abs().long()).square().mean()  # noqa: E731
    else:
        a, b = (nn.Sequential(nn.Linear(5, 6, bias=False), nn.Linear(6, 3, bias=False)) for _ in range(2))
        b.load_state_dict(a.state_dict())
        loss = lambda model, x: model(x).square().mean()  # noqa: E731
    cls = getattr(torch.optim, name)
    opt_a, opt_b = cls(a.parameters(), lr=0.01), cls(b.parameters(), lr=0.01)
    offbeat.overlap(opt_a, a, bucket_cap_mb=TINY)
    train(a, opt_a, loss=loss, before_step=lambda: assert_all_used(a))
    train(b, opt_b, loss=loss)
    assert_same(a, b)


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"lr": torch.tensor(0.01)}]
)
@pytest.mark.parametrize("library", [offbeat, torch.optim])
def test_every_implementation(library, options):
    a, b = make(), make()
    opts = [library.AdamW(m.parameters(), **{"lr": 0.01, **copy.deepcopy(options)}) for m in (a, b)]
    offbeat.overlap(opts[0], a, bucket_cap_mb=TINY)
    train(a, opts[0], before_step=lambda: assert_all_used(a))
    train(b, opts[1])
    assert_same(a, b)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_torchs_fused_operators_switch_an_attribute_at_their_first_step(name):
    a, b = make(), make()
    opts = [getattr(torch.optim, name)(m.parameters(), lr=0.01, fused=True) for m in (a, b)]
    offbeat.overlap(opts[0], a, bucket_cap_mb=TINY)
    train(a, opts[0], before_step=lambda: assert_all_used(a))
    train(b, opts[1])
    assert_same(a, b)


def test_gradients_are_freed_while_backward_goes_on():
    model = make()
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    alive: list[weakref.ref] = []
    most = 0

    def seen(p):
        nonlocal most
        alive.append(weakref.ref(p.grad))
        most = max(most, sum(ref() is not None for ref in alive))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(seen)
    offbeat.overlap(optimizer, model, bucket_cap_mb=1e-6)
    train(model, optimizer, range(2))
    assert most == 1


def test_step_hooks_run_once_and_schedulers_say_nothing():
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    first = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    offbeat.overlap(optimizer, model)
    second = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(2))
        first.step()
        second.step()
    assert calls == ["before", "after"] * 2


def test_zero_grad_may_come_before_backward():
    a, b = make(), make()
    opts = [offbeat.AdamW(m.parameters(), lr=0.1) for m in (a, b)]
    offbeat.overlap(opts[0], a)
    for step in range(4):
        for model, optimizer in zip((a, b), opts, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(batch(step)).square().mean().backward()
            optimizer.step()
    assert_same(a, b)


def test_gradients_set_by_hand_are_stepped_and_clipped():
    a, b = make(), make()
    opts = [offbeat.AdamW(m.parameters(), lr=0.1) for m in (a, b)]
    offbeat.overlap(opts[0], a, clip_norm=0.1)
    for model in (a, b):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.3)
    nn.utils.clip_grad_norm_(b.parameters(), 0.1)
    for optimizer in opts:
        optimizer.step()
    assert_same(a, b)


def test_fewer_passes_than_announced_still_make_a_step():
    a, b = make(), make()
    opts = [offbeat.AdamW(m.parameters(), lr=0.1) for m in (a, b)]
    handle = offbeat.overlap(opts[0], a, accumulate=3)
    for count in (3, 2, 3, 1):
        for model, optimizer in zip((a, b), opts, strict=True):
            for i in range(count):
                model(batch(i)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(a, b)
    handle.remove()


def test_layers_that_are_unfrozen_later_are_stepped_in_backward_too():
    a, b = make(), make()
    opts = [offbeat.AdamW(m.parameters(), lr=0.01) for m in (a, b)]
    for model in (a, b):
        model[:3].requires_grad_(False)
    offbeat.overlap(opts[0], a, bucket_cap_mb=TINY)
    for layer in (4, 2, 0):  # from the last to the first
        for model, optimizer in zip((a, b), opts, strict=True):
            model[layer].requires_grad_(True)
            train(model, optimizer, range(layer, layer + 1))
            check = layer == 0 and model is a
            train(model, optimizer, range(2), before_step=(lambda: assert_all_used(a)) if check else (lambda: None))
        assert_same(a, b)


def test_a_parameter_used_only_in_an_earlier_micro_batch():
    a, b = Either(), Either()
    opts = [offbeat.AdamW(m.parameters(), lr=0.1) for m in (a, b)]
    offbeat.overlap(opts[0], a, accumulate=2, clip_norm=0.5, clip="exact")
    for step in range(4):
        for model, optimizer in zip((a, b), opts, strict=True):
            for which in ("a", "b"):
                model(batch(step), which).square().mean().backward()
            if model is b:
                nn.utils.clip_grad_norm_(b.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(a, b)


def test_new_groups_and_learning_rates_take_effect_at_once():
    a, b = make(), make()
    opts = [offbeat.AdamW(m[0].parameters(), lr=0.1) for m in (a, b)]
    offbeat.overlap(opts[0], a)
    for step in range(6):
        for model, optimizer in zip((a, b), opts, strict=True):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.7
            if step == 1:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.03})
            if step == 3:  # between backward and step: what is new is stepped with the rest
                model(batch(9)).square().mean().backward()
                optimizer.add_param_group({"params": list(model[4].parameters())})
                optimizer.step()
                model.zero_grad()
    assert_same(a, b)
    a(batch(0)).sum().backward()
    assert_all_used(a)


def test_state_dicts_are_those_of_the_optimizer_without_overlap():
    a, b = make(), make()
    opt_a, opt_b = offbeat.AdamW(a.parameters(), lr=0.1), torch.optim.AdamW(b.parameters(), lr=0.1)
    offbeat.overlap(opt_a, a, bucket_cap_mb=TINY)
    train(a, opt_a, range(3))
    b.load_state_dict(a.state_dict())
    opt_b.load_state_dict(opt_a.state_dict())
    opt_c = offbeat.AdamW(a.parameters(), lr=0.1)
    opt_c.load_state_dict(opt_b.state_dict())
    for key, entry in opt_a.state_dict()["state"].items():
        for name, value in opt_c.state_dict()["state"][key].items():
            assert torch.equal(value, entry[name])
    saved = copy.deepcopy(opt_a.state_dict())
    weights = copy.deepcopy(a.state_dict())
    train(a, opt_a, range(3, 6))
    once = [p.clone() for p in a.parameters()]
    a.load_state_dict(weights)
    opt_a.load_state_dict(saved)  # in place, with the overlap standing
    train(a, opt_a, range(3, 6), before_step=lambda: assert_all_used(a))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), once, strict=True))


def test_the_last_norm_is_saved_for_clipping_by_it():
    runs = []
    for interrupt in (False, True):
        model = make()
        optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
        handle = offbeat.overlap(optimizer, model, clip_norm=0.01, clip="previous")
        train(model, optimizer, range(3))
        if interrupt:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
            model = make(1)
            optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
            handle = offbeat.overlap(optimizer, model, clip_norm=0.01, clip="previous")
            for one, state in zip((model, optimizer, handle), saved, strict=True):
                one.load_state_dict(state)
        train(model, optimizer, range(3, 6), before_step=lambda: assert_all_used(model))
        runs.append(model)
    assert_same(*runs)


@pytest.mark.parametrize("stepped", [0, 3])
def test_distributed_checkpoint(stepped, tmp_path):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    a, b = make(0), make(1)
    opts = [offbeat.AdamW(m.parameters(), lr=0.1) for m in (a, b)]
    for model, optimizer in zip((a, b), opts, strict=True):
        offbeat.overlap(optimizer, model, clip_norm=1.0, clip="previous")
    train(a, opts[0], range(stepped))
    weights, state = get_state_dict(a, opts[0])
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    weights, state = get_state_dict(b, opts[1])
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    set_state_dict(b, opts[1], model_state_dict=weights, optim_state_dict=state)
    assert_same(a, b)
    if stepped == 0:
        train(a, opts[0])
        train(b, opts[1])
        assert_same(a, b)


@pytest.mark.parametrize("clip", [None, "exact", "previous"])
def test_mixed_dtypes_and_complex_numbers(clip):
    """The norm has the bits of torch's, which adds up norms dtype by dtype."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(5, 5).double()
            self.low = nn.Linear(5, 5).bfloat16()
            self.high = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
            self.complex = nn.Parameter(torch.randn(5, dtype=torch.complex64))
            self.last = nn.Linear(5, 5).double()

        def forward(self, x):
            x = self.high(self.low(self.first(x.double()).bfloat16()).double())
            return self.last((x * self.complex).abs())

    torch.manual_seed(0)
    a = Mixed()
    b = copy.deepcopy(a)
    opts = [offbeat.AdamW(m.parameters(), lr=0.1) for m in (a, b)]
    handle = offbeat.overlap(opts[0], a, bucket_cap_mb=TINY, **({"clip_norm": 0.1, "clip": clip} if clip else {}))
    previous = None
    for step in range(5):
        for model, optimizer in zip((a, b), opts, strict=True):
            model(batch(step)).sum().backward()
            if clip and model is b:
                norm = nn.utils.get_total_norm([p.grad for p in b.parameters()])
                by = previous if clip == "previous" and previous is not None else norm
                nn.utils.clip_grads_with_norm_(b.parameters(), 0.1, by)
                previous = norm
            optimizer.step()
            optimizer.zero_grad()
    assert_same(a, b)
    assert previous is None or torch.equal(handle.last_norm, previous)


def test_norms_of_several_dtypes_are_added_up_as_torch_does_it():
    """By device and dtype, which differs from the order of the parameters in the last bit."""
    generator = torch.Generator().manual_seed(0)
    kinds = [torch.float64, torch.float32, torch.bfloat16] * 7
    module = nn.ParameterList([torch.randn(9, generator=generator).to(kind) for kind in kinds])
    optimizer = offbeat.SGD(module.parameters(), lr=0.01)
    handle = offbeat.overlap(optimizer, module, clip_norm=float("inf"))
    for _ in range(5):
        sum((p.double() ** 3).sum() for p in module).backward()
        norm = nn.utils.get_total_norm([p.grad for p in module])
        assert torch.equal(handle.norm(), norm)
        optimizer.step()
        assert torch.equal(handle.last_norm, norm)
        optimizer.zero_grad()


# Checkpointing and compilation


class Tied(nn.Module):
    """A weight that is used inside and outside of a checkpoint, and a block that is checkpointed twice."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head, self.reentrant = nn.Linear(5, 5), nn.Linear(5, 5), reentrant

    def forward(self, x):
        x = x.requires_grad_()

        def block(x):
            return torch.tanh(self.inner(x)) @ self.head.weight

        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.reentrant is not None else block(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:checkpoint.use_reentrant=True")
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}, {"clip_norm": 0.1, "clip": "previous"}])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, clip):
    a, b = Tied(reentrant), Tied(reentrant)
    opts = [offbeat.AdamW(m.parameters(), lr=0.1) for m in (a, b)]
    offbeat.overlap(opts[0], a, bucket_cap_mb=1e-6, **clip)
    previous = None
    for step in range(5):
        for model, optimizer in zip((a, b), opts, strict=True):
            model(batch(step)).square().mean().backward()
            if model is a and not reentrant and not clip:
                assert_all_used(a)
            if model is b and clip:
                norm = nn.utils.get_total_norm([p.grad for p in b.parameters()])
                by = previous if clip.get("clip") and previous is not None else norm
                nn.utils.clip_grads_with_norm_(b.parameters(), 0.1, by)
                previous = norm
            optimizer.step()
            optimizer.zero_grad()
    assert_same(a, b)


@pytest.mark.filterwarnings("ignore:checkpoint.use_reentrant=True")
def test_accumulating_under_reentrant_checkpointing():
    a, b = Tied(True), Tied(True)
    opts = [offbeat.AdamW(m.parameters(), lr=0.1) for m in (a, b)]
    offbeat.overlap(opts[0], a, accumulate=2)
    for step in range(3):
        for model, optimizer in zip((a, b), opts, strict=True):
            for i in range(2):
                model(batch(2 * step + i)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(a, b)


def test_a_checkpoint_that_could_not_be_seen_is_told():
    """Called past forward(), the module cannot be looked at; an update that came too early must not go unnoticed."""
    model = Tied(True)
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model, bucket_cap_mb=1e-6)
    with pytest.raises(RuntimeError, match=r"parameter 'head\.weight'.*use_reentrant=False"):
        model.forward(batch(0)).square().mean().backward()


@pytest.mark.parametrize("how", ["around", "in place", "inside"])
def test_compiled_modules(how):
    torch._dynamo.reset()
    a, b = make(), make()
    called = {"around": lambda: torch.compile(a, backend="aot_eager"), "in place": lambda: a, "inside": lambda: a}[
        how
    ]()
    if how == "in place":
        a.compile(backend="aot_eager")
        b.compile(backend="aot_eager")
    if how == "inside":
        for model in (a, b):
            model[2].compile(backend="aot_eager")
    reference = torch.compile(b, backend="aot_eager") if how == "around" else b
    opts = [offbeat.AdamW(m.parameters(), lr=0.1) for m in (a, b)]
    offbeat.overlap(opts[0], called, bucket_cap_mb=TINY)
    train(called, opts[0], before_step=lambda: assert_all_used(a))
    train(reference, opts[1])
    assert_same(a, b)


# Clipping and scaling


def test_clip_grad_norm_called_by_the_user_raises():
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    model(batch(0)).sum().backward()
    for clip in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: model[0].weight.grad.norm(),
    ):
        with pytest.raises(RuntimeError, match="clip_norm="):
            clip()
    optimizer.step()


def test_clip_grad_norm_called_by_the_user_is_right_where_gradients_wait():
    a, b = make(), make()
    opts = [offbeat.SGD(m.parameters(), lr=0.1) for m in (a, b)]
    handle = offbeat.overlap(opts[0], a, clip_norm=0.2)
    for step in range(3):
        for model, optimizer in zip((a, b), opts, strict=True):
            model(batch(step)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(a, b)
    assert handle.last_norm <= 0.1


def test_the_norm_can_be_read_without_clipping():
    model, other = make(), make()
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model, clip_norm=float("inf"), clip="bucket")
    assert handle.last_norm is None
    train(model, optimizer, range(1))
    other(batch(0)).square().mean().backward()
    torch.testing.assert_close(handle.last_norm, nn.utils.get_total_norm([p.grad for p in other.parameters()]))


def test_a_scaler_that_overlap_does_not_know_is_refused():
    for fused in (None, True):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        offbeat.overlap(optimizer, model)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(batch(0)).sum()).backward()
        with pytest.raises(RuntimeError, match="scaler="):
            scaler.step(optimizer)


@pytest.mark.parametrize("library", [offbeat, torch.optim])
@pytest.mark.parametrize("explicit", [False, True])
def test_fused_optimizers_under_a_scaler(library, explicit):
    a, b = make(), make()
    opts = [library.AdamW(m.parameters(), lr=0.1, fused=True) for m in (a, b)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    handle = offbeat.overlap(opts[0], a, scaler=scalers[0])
    for step in range(8):
        for model, optimizer, scaler in zip((a, b), opts, scalers, strict=True):
            loss = model(batch(step)).square().mean() * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            if explicit:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        # Fused steps unscale with the true scale, we with its float32 reciprocal; both are powers of two here.
        assert torch.equal(p, q)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    handle.remove()
    assert opts[0]._step_supports_amp_scaling
    assert "unscale_" not in vars(scalers[0])
    scalers[0].scale(a(batch(0)).sum()).backward()
    scalers[0].step(opts[0])


@pytest.mark.parametrize("how", ["fewer passes than announced", "a reentrant checkpoint"])
@pytest.mark.parametrize("library", [offbeat, torch.optim])
def test_fused_optimizers_under_a_scaler_when_no_bucket_is_handed_on(library, how):
    a, b = make(), make()
    opts = [library.AdamW(m.parameters(), lr=0.1, fused=True) for m in (a, b)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    options = {"accumulate": 2} if how.startswith("fewer") else {}
    offbeat.overlap(opts[0], a, scaler=scalers[0], **options)
    for step in range(5):
        for model, optimizer, scaler in zip((a, b), opts, scalers, strict=True):
            x = batch(step).requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = model(x) if options else checkpoint(model, x, use_reentrant=True)
                loss = out.square().mean() * (float("inf") if step == 3 else 1.0)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(a, b)
    assert scalers[0].get_scale() == scalers[1].get_scale()


def test_a_scaler_must_be_used_as_ever():
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    offbeat.overlap(optimizer, model, scaler=scaler)
    with pytest.raises(RuntimeError, match=r"scaler\.scale"):
        model(batch(0)).sum().backward()
    optimizer.zero_grad()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"scaler\.step"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_disabled_scaler_is_none():
    a, b = make(), make()
    opts = [offbeat.AdamW(m.parameters(), lr=0.1) for m in (a, b)]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    offbeat.overlap(opts[0], a, scaler=scaler)
    for step in range(3):
        scaler.scale(a(batch(step)).square().mean()).backward()
        assert_all_used(a)
        scaler.step(opts[0])
        scaler.update()
        opts[0].zero_grad()
    train(b, opts[1], range(3))
    assert_same(a, b)


# What it refuses


def refused(match, call, error=ValueError):
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=match):
        call(model, optimizer)
    assert_untouched(model, optimizer)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())


def test_bad_options_change_nothing():
    refused("'exact', 'previous', 'bucket'.*'precise'", lambda m, o: offbeat.overlap(o, m, clip_norm=1, clip="precise"))
    refused("give clip_norm", lambda m, o: offbeat.overlap(o, m, clip="bucket"))
    refused("positive.*-1", lambda m, o: offbeat.overlap(o, m, clip_norm=-1))
    refused("number.*'1'", lambda m, o: offbeat.overlap(o, m, clip_norm="1"), TypeError)
    refused("at least 1.*0", lambda m, o: offbeat.overlap(o, m, accumulate=0))
    refused("number of backward passes.*2.5", lambda m, o: offbeat.overlap(o, m, accumulate=2.5), TypeError)
    refused("GradScaler.*object", lambda m, o: offbeat.overlap(o, m, scaler=object()), TypeError)
    refused("DistributedDataParallel.*Sequential", lambda m, o: offbeat.overlap(o, m, comm_hook=print))
    refused("comm_hook", lambda m, o: offbeat.overlap(o, m, comm_state=1))
    refused("callable", lambda m, o: offbeat.overlap(o, m, comm_hook=1), TypeError)
    refused("bucket_cap_mb.*0", lambda m, o: offbeat.overlap(o, m, bucket_cap_mb=0))
    refused("Module.*list", lambda m, o: offbeat.overlap(o, [m]), TypeError)
    refused("Optimizer", lambda m, o: offbeat.overlap(m, m), TypeError)
    refused(r"shape \(7, 5\).*not in the module", lambda m, o: offbeat.overlap(o, make(1)))
    refused(r"shape \(7, 5\).*not in the module", lambda m, o: offbeat.overlap(o, m[2]))


def test_optimizers_that_cannot_be_taken_apart():
    model = make()
    with pytest.raises(TypeError, match="LBFGS"):
        offbeat.overlap(torch.optim.LBFGS(model.parameters()), model)
    with pytest.raises(ValueError, match="differentiable"):
        offbeat.overlap(offbeat.SGD(model.parameters(), lr=0.1, differentiable=True), model)
    half = make(dtype=torch.float16)
    with pytest.raises(ValueError, match="float16"):
        offbeat.overlap(offbeat.SGD(half.parameters(), lr=0.1), half, scaler=torch.amp.GradScaler("cpu"))


def test_parameters_have_one_overlap():
    model = make()
    first = offbeat.AdamW(model.parameters(), lr=0.1)
    second = offbeat.SGD(model[2].parameters(), lr=0.1)
    handle = offbeat.overlap(first, model)
    for optimizer in (first, second):
        with pytest.raises(ValueError, match=r"'(0|2)\.weight' is overlapped"):
            offbeat.overlap(optimizer, model)
    handle.remove()
    handle.remove()
    offbeat.overlap(second, model)
    with pytest.raises(ValueError, match=r"'2\.weight' is overlapped"):
        offbeat.overlap(first, model)


@pytest.mark.parametrize("asked", [{"clip": 0.5}, {"clip": torch.tensor(0.0)}, {"zero_grad": True}], ids=str)
def test_what_a_step_would_do_with_gradients_is_refused(asked):
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    model(batch(0)).sum().backward()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=rf"step\({next(iter(asked))}=\) cannot be overlapped"):
        optimizer.step(**asked)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.step(clip=None, zero_grad=False)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_a_backward_that_was_not_announced(zero, options):
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model, **options)
    for _ in range(options.get("accumulate", 1)):
        model(batch(0)).sum().backward()
    before = [p.clone() for p in model.parameters()]
    for _ in range(2):
        if zero:
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="accumulate"):
            model(batch(1)).sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    if zero:  # gradients of the refused pass lie about
        with pytest.raises(RuntimeError, match=r"handle\.reset\(\)"):
            optimizer.step()
    handle.reset()
    assert all(p.grad is None for p in model.parameters())
    twin = copy.deepcopy(model)
    other = offbeat.AdamW(twin.parameters(), lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    count = options.get("accumulate", 1)
    for one, opt in ((model, optimizer), (twin, other)):
        for step in range(2 * count):
            one(batch(step)).square().mean().backward()
            if step % count == count - 1:
                opt.step()
                opt.zero_grad()
    assert_same(model, twin)


def test_options_changed_too_late():
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    model(batch(0)).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(RuntimeError, match=r"\(lr\) changed between"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()


def test_a_graph_of_gradients_is_refused():
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="create_graph"):
        model(batch(0)).square().sum().backward(create_graph=True)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    model.zero_grad()


def test_copies_of_an_overlapped_module_are_free_of_it(tmp_path):
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    train(model, optimizer, range(2))
    copied = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    other = copy.deepcopy(optimizer)
    for one in (copied, loaded):
        one(batch(0)).sum().backward()
        assert not any(isinstance(p.grad, ConsumedGradient) for p in one.parameters())
        assert_same(one, model)
    assert not other._optimizer_step_pre_hooks
    train(model, optimizer, range(2), before_step=lambda: assert_all_used(model))


def test_a_parameter_taken_out_by_hand_is_left_alone_at_once():
    a, b = make(), make()
    opts = [offbeat.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (a, b)]
    offbeat.overlap(opts[0], a)
    for step in range(5):
        for model, optimizer in zip((a, b), opts, strict=True):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
            if step == 2:
                optimizer.param_groups[0]["params"] = list(model.parameters())[2:]
    assert_same(a, b)


# Taking it away


def test_remove_leaves_no_trace_and_no_reference():
    model, other = make(), make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model, clip_norm=1.0)
    train(model, optimizer, range(2))
    handle.remove()
    assert_untouched(model, optimizer)
    with pytest.raises(RuntimeError, match="removed"), handle.accumulate():
        pass
    model(batch(0)).sum().backward()
    other.load_state_dict(model.state_dict())
    other(batch(0)).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    optimizer.step()
    refs = [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
    gc.disable()  # not even by way of cycles
    try:
        del model, optimizer
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()
    assert handle.last_norm is None


@pytest.mark.parametrize("library", [offbeat, torch.optim])
def test_nothing_is_kept_alive_without_remove_either(library):
    model = make()
    optimizer = library.AdamW(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model, clip_norm=1.0, scaler=torch.amp.GradScaler("cpu", enabled=False))
    train(model, optimizer, range(2))
    refs = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(handle), *map(weakref.ref, model.parameters())]
    del model, optimizer, handle
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_the_handle_need_not_be_kept():
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    gc.collect()
    model(batch(0)).sum().backward()
    assert_all_used(model)
    optimizer.step()


def test_remove_between_backward_and_step():
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model)
    model(batch(0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) first"):
        handle.remove()
    optimizer.step()
    handle.remove()
    assert_untouched(model, optimizer)


class Gate(torch.autograd.Function):
    """Holds backward up until it is told to go on."""

    @staticmethod
    def forward(ctx, x, reached, go_on):
        ctx.reached, ctx.go_on = reached, go_on
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.reached.set()
        assert ctx.go_on.wait(20)
        return grad, None, None


@pytest.mark.parametrize("place", [0, 1])
def test_remove_while_a_backward_runs_in_a_thread(place):
    """Either remove() refuses, or that backward is an ordinary one; a part of it is never both."""
    model, other = make(), make()
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model, bucket_cap_mb=1e-6)
    reached, go_on = threading.Event(), threading.Event()
    x = batch(0)
    if place == 0:  # before the first gradient
        loss = Gate.apply(model(x), reached, go_on).square().mean()
    else:
        loss = model[4](Gate.apply(model[:4](x), reached, go_on)).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    assert reached.wait(20)
    if place == 0:
        handle.remove()
    else:
        with pytest.raises(RuntimeError, match="remove"):
            handle.remove()
    go_on.set()
    thread.join(20)
    assert not thread.is_alive()
    other(x).square().mean().backward()
    if place == 0:
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    else:
        assert_all_used(model)
    optimizer.step()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_hook_that_fires_after_remove_raises():
    model = make()
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model)
    source = handle._source
    handle.remove()
    before = model[0].weight.clone()
    model[0].weight.grad = torch.ones_like(before)
    with pytest.raises(RuntimeError, match=r"after handle\.remove"):
        source.arrived(model[0].weight)
    assert torch.equal(model[0].weight, before)


# The registry


def test_a_class_says_how_it_steps_a_bucket_and_its_subclasses_inherit_that():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.buckets = []

        def update(self, params, grads):
            self.buckets.append(len(params))
            for p, g in zip(params, grads, strict=True):
                p.sub_(g, alpha=self.param_groups[0]["lr"])

        @torch.no_grad()
        def step(self, closure=None):
            left = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            self.update(left, [p.grad for p in left])

    class Derived(Plain):
        pass

    @offbeat.register_overlapped(Plain)
    class OverlappedPlain(offbeat.OverlappedOptimizer):
        def step_bucket(self, params, grads):
            self.optimizer.update(params, grads)

    assert issubclass(OverlappedPlain, offbeat.OverlappedOptimizer)
    a, b = make(), make()
    optimizer = Derived(a.parameters())
    offbeat.overlap(optimizer, a, bucket_cap_mb=TINY)
    train(a, optimizer)
    train(b, torch.optim.SGD(b.parameters(), lr=0.1, foreach=False))
    assert_same(a, b)
    assert sum(optimizer.buckets) == 6 * 6
    assert max(optimizer.buckets) < 6

    with pytest.raises(ValueError, match="Plain has been registered with OverlappedPlain"):
        offbeat.register_overlapped(Plain)(OverlappedPlain)
    with pytest.raises(TypeError, match="step_bucket"):
        offbeat.register_overlapped(Derived)(dict)
    with pytest.raises(TypeError, match="Optimizer"):
        offbeat.register_overlapped(dict)


def test_an_optimizer_class_may_be_decorated_itself():
    @offbeat.register_overlapped
    class Own(torch.optim.SGD):
        def step_bucket(self, params, grads):
            for p, g in zip(params, grads, strict=True):
                p.sub_(g, alpha=2 * self.param_groups[0]["lr"])

    a, b = make(), make()
    optimizer = Own(a.parameters(), lr=0.05)
    offbeat.overlap(optimizer, a)
    train(a, optimizer)
    train(b, torch.optim.SGD(b.parameters(), lr=0.1, foreach=False))
    assert_same(a, b)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.05, "clip": "bucket"}], ids=str)
def test_a_registered_class_needs_only_step_bucket(options):
    class Plain(torch.optim.SGD):
        pass

    @offbeat.register_overlapped(Plain)
    class Stepper:
        def __init__(self, optimizer):
            self.groups = optimizer.param_groups

        def step_bucket(self, params, grads):
            for p, g in zip(params, grads, strict=True):
                p.sub_(g, alpha=self.groups[0]["lr"])

    a, b = make(), make()
    opts = [Plain(a.parameters(), lr=0.1), torch.optim.SGD(b.parameters(), lr=0.1, foreach=False)]
    for model, optimizer in zip((a, b), opts, strict=True):
        offbeat.overlap(optimizer, model, bucket_cap_mb=TINY, **options)
        train(model, optimizer)
    assert_same(a, b)


def test_a_step_hook_that_needs_gradients_can_say_so():
    class Logger:
        reads_gradients: str | None = "Logger reads gradients in step(); register it on tensors instead"

        def __call__(self, optimizer, args, kwargs):
            pass

    assert isinstance(Logger(), ReadsGradients)
    model, hook = make(), Logger()
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(hook)
    with pytest.raises(ValueError, match="Logger reads gradients"):
        offbeat.overlap(optimizer, model)
    hook.reads_gradients = None
    offbeat.overlap(optimizer, model)


def test_parameters_that_come_and_go_have_one_overlap_too():
    model = make()
    first, second = (offbeat.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2]))
    offbeat.overlap(first, model)
    first.add_param_group({"params": list(model[2].parameters())})
    train(model, first, range(2))
    with pytest.raises(ValueError, match=r"'2\.weight' is overlapped"):
        offbeat.overlap(second, model)
    del first.param_groups[1]
    train(model, first, range(1))
    offbeat.overlap(second, model)


# Odd uses


@pytest.mark.parametrize("meddle", ["none", "replace", "zero_grad", "zero", "reading"])
def test_a_used_gradient_cannot_be_changed_any_more(meddle):
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model)
    model(batch(0)).sum().backward()
    p = model[4].weight
    if meddle == "none":
        p.grad = None
    elif meddle == "replace":
        p.grad = torch.ones_like(p)
    elif meddle == "zero_grad":
        optimizer.zero_grad()
    elif meddle == "zero":
        optimizer.zero_grad(set_to_none=False)
    else:
        with pytest.raises(RuntimeError, match="used and freed"):
            p.grad.abs()
        optimizer.step()
        return
    with pytest.raises(RuntimeError, match="replaced or cleared between"):
        optimizer.step()
    handle.reset()
    train(model, optimizer, range(2))


def test_a_forgotten_zero_grad_is_told():
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model)
    model(batch(0)).sum().backward()
    optimizer.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="zero_grad"):
            optimizer.step()
        model(batch(1)).sum().backward()
    handle.reset()
    train(model, optimizer, range(2))


class Either(nn.Module):
    """One of two layers is used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, which):
        return getattr(self, which)(x)


@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}, {"clip_norm": 0.1, "clip": "previous"}])
@pytest.mark.parametrize("where", ["after", "before"])
def test_gradients_set_to_zero_instead_of_none(where, clip, flags):
    """An unused layer then has a gradient of zero, and weight decay and momentum act on it.

    With some flags torch sets all gradients to zero by one operator.
    """
    a, b = Either(), Either()
    opts = [offbeat.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, **flags) for m in (a, b)]
    offbeat.overlap(opts[0], a, bucket_cap_mb=1e-6, **clip)
    previous = None
    for step in range(8):
        for model, optimizer in zip((a, b), opts, strict=True):
            if where == "before":
                optimizer.zero_grad(set_to_none=False)
            model(batch(step), "a" if step % 3 else "b").square().mean().backward()
            if model is b and clip:
                norm = nn.utils.get_total_norm([p.grad for p in b.parameters() if p.grad is not None])
                by = previous if clip.get("clip") and previous is not None else norm
                nn.utils.clip_grads_with_norm_(b.parameters(), 0.1, by)
                previous = norm
            optimizer.step()
            if where == "after":
                optimizer.zero_grad(set_to_none=False)
    assert_same(a, b)


@pytest.mark.parametrize("make_optimizer", [
    lambda params: offbeat.SGD(params, lr=0.1), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: offbeat.Adagrad(params, lr=0.1), lambda params: offbeat.SparseAdam(params, lr=0.1),
])  # fmt: skip
def test_sparse_gradients_set_to_zero_instead_of_none(make_optimizer):
    """A row that was in no batch must not be touched by what acts on dense gradients only."""
    models = [nn.ModuleList([nn.Embedding(7, 3, sparse=True), nn.Embedding(7, 3, sparse=True)]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    opts = [make_optimizer(m.parameters()) for m in models]
    offbeat.overlap(opts[0], models[0], bucket_cap_mb=1e-6, accumulate=2)
    for step in range(6):
        for model, optimizer in zip(models, opts, strict=True):
            for part in range(2):
                ids = torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(10 * step + part))
                out = model[0](ids) if step % 3 else model[0](ids) + model[1](ids)
                out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert_same(*models)


@pytest.mark.parametrize("options", [{"clip_norm": 0.05}, {"scaler": True}])
def test_a_group_added_at_the_last_moment_is_clipped_and_unscaled(options):
    a, b = make(), make()
    opts = [offbeat.SGD(m[0].parameters(), lr=0.1) for m in (a, b)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaler" in options) for _ in range(2)]
    offbeat.overlap(opts[0], a, **{**options, **({"scaler": scalers[0]} if "scaler" in options else {})})
    for step in range(4):
        for model, optimizer, scaler in zip((a, b), opts, scalers, strict=True):
            scaler.scale(model(batch(step)).square().mean()).backward()
            if step == 1:
                optimizer.add_param_group({"params": list(model[2:].parameters())})
            if model is b and "clip_norm" in options:
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
    assert_same(a, b)


def test_step_hooks_see_gradients_clipped_or_not_at_all():
    a, b = make(), make()
    opts = [offbeat.SGD(m.parameters(), lr=0.1) for m in (a, b)]

    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    opts[0].register_step_pre_hook(halve)
    offbeat.overlap(opts[0], a, clip_norm=0.05)
    opts[0].register_step_pre_hook(halve)
    for step in range(3):
        for model, optimizer in zip((a, b), opts, strict=True):
            model(batch(step)).square().mean().backward()
            if model is b:
                nn.utils.clip_grad_norm_(b.parameters(), 0.05)
                halve(optimizer, (), {})
                halve(optimizer, (), {})
            optimizer.step()
            optimizer.zero_grad()
    assert_same(a, b)
    for before in (True, False):
        model = make()
        optimizer = offbeat.SGD(model.parameters(), lr=0.1)
        if before:
            optimizer.register_step_pre_hook(halve)
        offbeat.overlap(optimizer, model)
        if not before:
            optimizer.register_step_pre_hook(halve)
        model(batch(0)).sum().backward()
        with pytest.raises(RuntimeError, match="used and freed"):
            optimizer.step()


def test_gradients_changed_before_unscaling_are_told():
    model = make()
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    handle = offbeat.overlap(optimizer, model, scaler=scaler)
    scaler.scale(model(batch(0)).sum()).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="unscales gradients during backward"):
        scaler.step(optimizer)
    handle.reset()
    for _ in range(2):
        scaler.scale(model(batch(0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_an_error_in_the_middle_of_backward_has_a_way_out():
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise MemoryError("too much")

    for scaled in (False, True):
        model = make()
        optimizer = offbeat.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        handle = offbeat.overlap(optimizer, model, bucket_cap_mb=1e-6, scaler=scaler)
        for _ in range(2):
            with pytest.raises(MemoryError):
                scaler.scale(model[2:](Fail.apply(model[:2](batch(0)))).sum()).backward()
            handle.reset()
        for step in range(2):
            scaler.scale(model(batch(step)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        handle.remove()


def test_a_step_that_calls_its_parents_step():
    class Child(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # torch hooks the parent's step now
    a, b = make(), make()
    opts = [Child(m.parameters(), lr=0.1, momentum=0.9) for m in (a, b)]
    handle = offbeat.overlap(opts[0], a, bucket_cap_mb=TINY, clip_norm=0.05, clip="previous")
    previous = None
    for step in range(6):
        for model, optimizer in zip((a, b), opts, strict=True):
            model(batch(step)).square().mean().backward()
            if model is b:
                norm = nn.utils.get_total_norm([p.grad for p in b.parameters()])
                nn.utils.clip_grads_with_norm_(b.parameters(), 0.05, norm if previous is None else previous)
                previous = norm
            optimizer.step()
            optimizer.zero_grad()
    assert_same(a, b)
    assert torch.equal(handle.last_norm, previous)


def test_optimizers_that_are_more_than_the_sum_of_their_parameters():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, inner.defaults)

        def step(self, closure=None):
            self.inner.step()

    model = make()
    with pytest.raises(TypeError, match="Wrapper wraps another optimizer"):
        offbeat.overlap(Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)), model)
    with pytest.warns(UserWarning, match="duplicate"):
        twice = offbeat.SGD([model[0].weight, model[0].weight], lr=0.1)
    with pytest.raises(ValueError, match="twice"):
        offbeat.overlap(twice, make())
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="no shape yet"):
        offbeat.overlap(torch.optim.SGD(lazy.parameters(), lr=0.1), lazy)


def test_a_backward_that_is_not_the_optimizers_own():
    """A generator's loss goes through the discriminator; its gradients there are thrown away."""
    models = [(make(1), nn.Linear(3, 1)) for _ in range(2)]
    models[1][0].load_state_dict(models[0][0].state_dict())
    models[1][1].load_state_dict(models[0][1].state_dict())
    opts = [[offbeat.SGD(part.parameters(), lr=0.1) for part in pair] for pair in models]
    handles = [offbeat.overlap(opt, part) for opt, part in zip(opts[0], models[0], strict=True)]
    for step in range(4):
        for k, (pair, (opt_g, opt_d)) in enumerate(zip(models, opts, strict=True)):
            generator, discriminator = pair
            discriminator(generator(batch(step)).detach()).square().mean().backward()
            opt_d.step()
            opt_d.zero_grad()
            if k == 0:
                with handles[1].accumulate():
                    discriminator(generator(batch(step))).mean().backward()
            else:
                discriminator(generator(batch(step))).mean().backward()
            opt_g.step()
            opt_g.zero_grad()
            opt_d.zero_grad()
    for one, other in zip(*models, strict=True):
        assert_same(one, other)


@pytest.mark.filterwarnings("ignore:checkpoint.use_reentrant=True")
def test_the_last_norm_when_everything_is_in_one_reentrant_checkpoint():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make()

        def forward(self, x):
            return checkpoint(self.body, x.requires_grad_(), use_reentrant=True)

    model = Whole()
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model, clip_norm=0.05, clip="previous")
    train(model, optimizer, range(2))
    assert handle.last_norm is not None


def test_a_subclass_whose_step_does_more_than_the_rule():
    class Bounded(offbeat.SGD):
        def step(self, closure=None):
            result = super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.clamp_(-0.3, 0.3)
            return result

    a, b = make(), make()
    opts = [Bounded(m.parameters(), lr=0.1) for m in (a, b)]
    handle = offbeat.overlap(opts[0], a, bucket_cap_mb=TINY)
    train(a, opts[0], before_step=lambda: assert_all_used(a))
    train(b, opts[1])
    assert_same(a, b)
    handle.remove()
    train(a, opts[0], range(2))
    train(b, opts[1], range(2))
    assert_same(a, b)


def test_a_step_that_fails_does_not_swallow_the_next():
    a, b = make(), make()
    opts = [offbeat.SGD(m.parameters(), lr=0.1) for m in (a, b)]
    handle = offbeat.overlap(opts[0], a)
    a(batch(0)).square().mean().backward()
    opts[0]._check_capture = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        opts[0].step()
    del opts[0]._check_capture
    opts[0].zero_grad()
    handle.remove()
    train(b, opts[1], range(1))
    train(a, opts[0], range(1, 3))
    train(b, opts[1], range(1, 3))
    assert_same(a, b)


def test_a_parameter_exchanged_between_backward_and_step_is_not_forgotten():
    """As many parameters as before, but not the same ones."""
    a, b = make(), make()
    opts = [offbeat.SGD(m[:4].parameters(), lr=0.1) for m in (a, b)]
    offbeat.overlap(opts[0], a)
    for model, optimizer in zip((a, b), opts, strict=True):
        model(batch(0)).square().mean().backward()
        params = optimizer.param_groups[0]["params"]
        if model is b:  # has been updated by the time it leaves
            with torch.no_grad():
                params[0].sub_(params[0].grad, alpha=0.1)
        optimizer.param_groups[0]["params"] = [*params[1:], model[4].weight]
        optimizer.step()
    assert_same(a, b)
