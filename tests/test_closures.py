"""``step(closure)`` of an overlapped optimizer: the closure runs once, with the numbers of the loop without it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.ranks import run_ranks


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def evaluate(module: nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    loss = module(batch(step, rank)).square().mean()
    loss.backward()
    return loss.detach()


def run(module: nn.Module, optimizer: Any, *, closure: bool, rank: int = 0, steps: int = 6) -> list[torch.Tensor]:
    """As trainers do it: gradients are cleared inside the closure, before backward."""
    losses = []
    for step in range(steps):

        def once(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            return evaluate(module, step, rank)

        with torch.no_grad():  # the closure runs with gradients all the same
            losses.append(optimizer.step(once) if closure else None)
        if not closure:
            losses[-1] = once()
            optimizer.step()
    return losses


CLIPS: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.05},
    {"clip_norm": 0.05, "clip": "previous"},
    {"clip_norm": 0.05, "clip": "bucket", "bucket_cap_mb": 0.0005},
]


@pytest.mark.parametrize("options", CLIPS, ids=str)
@pytest.mark.parametrize("library", [offbeat, torch.optim])
def test_the_numbers_are_those_without_a_closure(library, options):
    a, b = make(), make()
    opts = [library.AdamW(m.parameters(), lr=0.05) for m in (a, b)]
    handles = [offbeat.overlap(opt, m, **options) for opt, m in zip(opts, (a, b), strict=True)]
    losses = [run(m, opt, closure=m is a) for m, opt in zip((a, b), opts, strict=True)]
    assert losses[0] == losses[1]
    assert same(a, b)
    assert handles[0].last_norm == handles[1].last_norm
    if not options:  # and those of an optimizer that is not overlapped
        plain = make()
        run(plain, library.AdamW(plain.parameters(), lr=0.05), closure=True)
        assert same(a, plain)


def test_hooks_counters_and_schedulers():
    logs: list[list[Any]] = []
    for overlapped in (True, False):
        model, log = make(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_, log=log: log.append("before"))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        if overlapped:
            offbeat.overlap(optimizer, model)
        optimizer.register_step_pre_hook(lambda *_, log=log: log.append("before, late"))
        optimizer.register_step_post_hook(lambda *_, log=log: log.append("after"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):

                def closure(step=step, log=log, model=model, optimizer=optimizer):
                    log.append("closure")
                    optimizer.zero_grad()
                    return evaluate(model, step)

                log.append(optimizer.step(closure=closure))
                scheduler.step()
        logs.append([*log, optimizer.param_groups[0]["lr"], *(p.sum().item() for p in model.parameters())])
    assert logs[0] == logs[1]
    assert logs[0][:4] == ["before", "before, late", "closure", "after"]


def test_a_pre_hook_of_the_user_may_run_the_closure():
    """It strips the closure, as a workaround for optimizers that take none; registered before overlap() or after."""
    for before in (True, False):
        for options in CLIPS:
            a, b = make(), make()
            opts = [offbeat.AdamW(m.parameters(), lr=0.05) for m in (a, b)]

            def run_it(optimizer, args, kwargs):
                with torch.enable_grad():
                    args[1]()
                return args[:1], kwargs

            if before:
                opts[0].register_step_pre_hook(run_it)
            offbeat.overlap(opts[0], a, **options)
            if not before:
                opts[0].register_step_pre_hook(run_it)
            offbeat.overlap(opts[1], b, **options)
            for step in range(4):
                assert opts[0].step(lambda step=step, a=a: evaluate(a, step)) is None
                evaluate(b, step)
                opts[1].step()
                for optimizer in opts:
                    optimizer.zero_grad()
            assert same(a, b)


def test_a_hook_registered_at_the_last_moment_keeps_its_place():
    model = make()
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model)
    evaluate(model, 0)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    with pytest.raises(RuntimeError, match="used and freed"):  # with None in place of gradients it would say nothing
        optimizer.step()
    handle.reset()
    handle.remove()
    assert "register_step_pre_hook" not in vars(optimizer)


def test_a_backward_in_a_hook_after_clipping_is_told():
    model = make()
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model, clip_norm=0.1, accumulate=2)
    hook = optimizer.register_step_pre_hook(lambda *_: evaluate(model, 1) and None)
    evaluate(model, 0)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="in a step pre-hook has added to gradients that were clipped"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    hook.remove()
    handle.reset()
    evaluate(model, 0)
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_closure_without_backward_finishes_what_came_before():
    """Trainers with manual optimization call backward first, and then step() with a closure that does nothing."""
    a, b = make(), make()
    opts = [offbeat.AdamW(m.parameters(), lr=0.05) for m in (a, b)]
    for model, optimizer in zip((a, b), opts, strict=True):
        offbeat.overlap(optimizer, model, clip_norm=0.05)
        for step in range(4):
            evaluate(model, step)
            optimizer.step(*([lambda: None] if model is a else []))
            optimizer.zero_grad()
    assert same(a, b)


def test_optimizers_that_call_the_closure_again_raise():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            if closure is not None:
                with torch.enable_grad():
                    closure()
            return loss

    class Needs(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure):
            raise AssertionError

    model = make()
    with pytest.raises(TypeError, match=r"Needs\.step\(\) cannot do without a closure"):
        offbeat.overlap(Needs(model.parameters()), model)
    optimizer = Twice(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    calls: list[int] = []
    with pytest.raises(RuntimeError, match="called its closure more than once"):
        optimizer.step(lambda: calls.append(1) or evaluate(model, 0))
    assert calls == [1]


def test_what_cannot_be_is_refused_before_the_closure_is_called():
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    handle = offbeat.overlap(optimizer, model)
    before = [p.clone() for p in model.parameters()]

    def closure():
        raise AssertionError

    with pytest.raises(RuntimeError, match=r"step\(clip=\) cannot be overlapped"):
        optimizer.step(closure, clip=0.5)
    with pytest.raises(RuntimeError, match=r"step\(3\) cannot be overlapped"):
        optimizer.step(3)
    handle.remove()
    offbeat.overlap(optimizer, model, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="cannot be used with a GradScaler"):
        optimizer.step(closure)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def chain(params: Any) -> offbeat.Chain:
    params = list(params)
    matrices, rest = ([p for p in params if (p.dim() == 2) is wanted] for wanted in (True, False))
    return offbeat.Chain([offbeat.SGD(matrices, lr=0.05, momentum=0.9), offbeat.AdamW(rest, lr=0.01)])


#: What wraps, what is wrapped, the module, and whether it is overlapped.
REPLICAS = [
    ("LocalSGD", "chain", "ddp", True),
    ("LocalSGD", "torch", "plain", True),
    ("DiLoCo", "torch", "ddp", True),
    ("DiLoCo", "chain", "plain", True),
    ("DiLoCo", "chain", "ddp", False),
    ("SlowMo", "torch", "plain", True),
]


def replicas(rank: int, world: int) -> list[tuple[str, str, str, bool]]:
    """With a closure and without; returns where the two differ."""
    wrong = []
    for case in REPLICAS:
        name, kind, place, overlapped = case
        found = []
        for closure in (True, False):
            model = make()
            module = DistributedDataParallel(model) if place == "ddp" else model
            optimizer: Any = chain(model.parameters())
            if kind == "torch":
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if overlapped:
                offbeat.overlap(optimizer, module)
            warmup = 2 if place == "ddp" else 0
            wrapped = getattr(offbeat, name)(optimizer, module, every=3, warmup=warmup, subgroup=None)
            with torch.no_grad():  # as after loading a model: anchors are what the first local step starts from
                for p in model.parameters():
                    p.mul_(0.5)
            run(module, wrapped, closure=closure, rank=rank, steps=8)
            found.append(model)
            assert wrapped.steps == 8
        if not same(*found):
            wrong.append(case)
    return wrong


@pytest.mark.ranks
@pytest.mark.xdist_group("closures")
def test_replicas_take_closures_too():
    assert run_ranks(replicas, 2) == [[], []]
