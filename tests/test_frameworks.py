"""What training frameworks do to optimizers and modules. The frameworks themselves run in the tests of integrations.

The stand-ins here have the form of Accelerate 1.15's ``AcceleratedOptimizer``, Lightning 2.6's ``LightningOptimizer``,
and Fabric's module.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.ranks import run_ranks


class AcceleratedOptimizer(torch.optim.Optimizer):
    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer, scaler=None):
        self.optimizer, self.scaler, self._is_overflow = optimizer, scaler, False
        self._accelerate_step_called = False
        self._original = self.optimizer.step

        def patched(*args, _method=self.optimizer.step, **kwargs):
            self._accelerate_step_called = True
            return _method(*args, **kwargs)

        self._patched = patched
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # as it does to move state to a device

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)
    step_was_skipped = property(lambda self: self._is_overflow)

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        if self.scaler is None:
            self.optimizer.step(closure)
            return
        self.optimizer.step = self._patched
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self._is_overflow = not self._accelerate_step_called
        self.optimizer.step = self._original
        self._accelerate_step_called = False


class LightningOptimizer:
    __module__ = "lightning.pytorch.core.optimizer"

    def __init__(self, optimizer):
        self._optimizer = optimizer
        made = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})
        made.__module__ = self.__module__
        self.__class__ = made

    optimizer = property(lambda self: self._optimizer)

    def step(self, closure=None):
        return self._optimizer.step(closure=closure or (lambda: None))

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class FabricModule(nn.Module):
    __module__ = "lightning.fabric.wrappers"

    def __init__(self, module):
        super().__init__()
        self._forward_module = module

    def forward(self, x):
        return self._forward_module(x)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def train(module: nn.Module, optimizer: Any, rank: int = 0, steps: int = 4) -> None:
    for step in range(steps):
        module(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("wrapper", [AcceleratedOptimizer, LightningOptimizer])
def test_overlap_takes_the_optimizer_inside(wrapper):
    a, b = make(), make()
    inner = torch.optim.AdamW(a.parameters(), lr=0.05)
    given = wrapper(inner)
    handle = offbeat.overlap(given, FabricModule(a))
    assert type(given).__name__ in repr(handle)
    train(FabricModule(a), given)
    assert handle.has_updated is False
    train(b, torch.optim.AdamW(b.parameters(), lr=0.05))
    assert same(a, b)
    handle.remove()
    given = AcceleratedOptimizer(inner, torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"scaler=accelerator\.scaler"):
        offbeat.overlap(given, a)
    offbeat.overlap(given, a, scaler=given.scaler)


def test_other_wrappers_are_refused_with_the_order():
    class Lookahead(torch.optim.SGD):
        def __init__(self, inner):
            super().__init__([p for group in inner.param_groups for p in group["params"]])
            self.inside = inner

    model = make()
    with pytest.raises(TypeError, match="call overlap\\(\\) first, with the AdamW, then make the Lookahead around it"):
        offbeat.overlap(Lookahead(torch.optim.AdamW(model.parameters())), model)
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer .*, but got int"):
        offbeat.overlap(3, model)


def wrapped_later(rank: int, world: int) -> list[str]:
    said = []
    # DDP, FSDP2 and LocalSGD's own error where the module is in DDP already.
    for how in ("DistributedDataParallel", "fully_shard", "before"):
        model = make()
        inner = offbeat.SGD(model.parameters(), lr=0.1)
        if how == "before":
            ddp = DistributedDataParallel(model)
            try:
                offbeat.LocalSGD(inner, model, every=4, subgroup=None)
            except ValueError as error:
                said.append(str(error))
            del ddp
            continue
        local = offbeat.DiLoCo(inner, model, every=4, subgroup=None)
        before = [p.detach().clone() for p in model.parameters()]
        if how == "fully_shard":
            from torch.distributed.fsdp import fully_shard

            module = fully_shard(model)
            inner.param_groups[0]["params"] = list(module.parameters())  # as Accelerate does
        else:
            module = DistributedDataParallel(model)
        module(batch(0, rank)).sum().backward()
        try:
            local.step()
        except RuntimeError as error:
            said.append(str(error))
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
        assert all(torch.equal(p, q) for p, q in zip(whole, before, strict=True))
    return said


@pytest.mark.ranks
@pytest.mark.xdist_group("frameworks")
def test_a_module_wrapped_after_the_optimizer_is_found_at_the_first_step():
    ranks = run_ranks(wrapped_later, 2)
    assert ranks[0] == ranks[1]
    ddp, sharded, before = ranks[0]
    assert "is wrapped in DistributedDataParallel, but DiLoCo was made" in ddp
    assert "trainer.strategy.model" in ddp
    assert "trainer.model_wrapped" in ddp
    assert "is wrapped in fully_shard, but DiLoCo was made" in sharded
    assert "trainer.strategy.model" in before


def scaled(rank: int, world: int) -> list[Any]:
    """An overflow on rank 1 only, at step 2, after warm-up; and on both at step 0. With and without Accelerate."""
    found: list[Any] = []
    for fused in (False, True):
        logs = []
        for accelerate in (True, False):
            model = make()
            ddp = DistributedDataParallel(model)
            inner = offbeat.AdamW(model.parameters(), lr=0.05, fused=fused or None)
            local = offbeat.LocalSGD(inner, ddp, every=2, warmup=1, subgroup=None)
            assert local._step_supports_amp_scaling is fused  # what Lightning asks before it clips
            calls: list[str] = []
            local.register_step_post_hook(lambda *_, calls=calls: calls.append("step"))
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            given = AcceleratedOptimizer(local, scaler) if accelerate else local
            log = []
            for step in range(5):
                loss = ddp(batch(step, rank)).square().mean()
                if step == 0 or (step == 2 and rank == 1):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                if accelerate:
                    given.step()
                    assert given.step_was_skipped is local.step_was_skipped
                else:
                    scaler.step(local)
                    scaler.update()
                log.append(local.step_was_skipped)
                local.zero_grad()
            assert calls == ["step"] * 5
            assert local.steps == 5
            logs.append((log, scaler.get_scale(), [p.detach().clone() for p in model.parameters()]))
        assert logs[0][:2] == logs[1][:2]
        assert all(torch.equal(p, q) for p, q in zip(logs[0][2], logs[1][2], strict=True))
        found.append(logs[0][0])
    return found


@pytest.mark.ranks
@pytest.mark.xdist_group("frameworks")
def test_a_skipped_step_is_one_to_accelerate_too():
    everyone, alone = [True, False, False, False, False], [True, False, True, False, False]
    assert run_ranks(scaled, 2) == [[everyone] * 2, [alone] * 2]


def test_a_scheduler_around_the_step_counts_the_steps_made(one_rank):
    model = make()
    local = offbeat.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scheduler = torch.optim.lr_scheduler.StepLR(local, 1)
    scaler = torch.amp.GradScaler("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            scaler.scale(model(batch(step)).square().mean()).backward()
            scaler.step(local)
            scaler.update()
            scheduler.step()
            local.zero_grad()
    assert local.steps == 3


@pytest.mark.parametrize("wrapper", [AcceleratedOptimizer, LightningOptimizer])
def test_replicas_do_not_go_past_a_framework(one_rank, wrapper):
    model = make()
    given = wrapper(torch.optim.AdamW(model.parameters()))
    averager = offbeat.PeriodicModelAverager(period=2)
    for build, name in (
        (lambda: offbeat.LocalSGD(given, model), "LocalSGD"),
        (lambda: offbeat.PostLocalSGDOptimizer(given, averager), "PostLocalSGDOptimizer"),
    ):
        with pytest.raises(TypeError, match=rf"framework's wrapper around an AdamW.*Give {name} the AdamW"):
            build()
    local = offbeat.LocalSGD(given.optimizer, FabricModule(torch.compile(model, backend="eager")))
    outside = wrapper(local)  # what the framework makes of it then
    train(model, outside, steps=3)
    assert local.steps == 3
    assert isinstance(outside, torch.optim.Optimizer)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_modules_without_anything_to_train(one_rank):
    model = make().requires_grad_(False)
    optimizer = offbeat.AdamW(model.parameters())
    with pytest.raises(ValueError, match="none of the optimizer's parameters has requires_grad"):
        offbeat.LocalSGD(optimizer, model)
    handle = offbeat.overlap(optimizer, model, clip_norm=1.0)
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    assert handle.last_norm is None
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# State dicts in the wrong hands


@pytest.mark.parametrize("name", ["LocalSGD", "DiLoCo", "SlowMo"])
def test_a_state_dict_of_replicas_is_refused_by_other_optimizers(one_rank, name):
    model = make()
    inner = torch.optim.AdamW(model.parameters())
    local = getattr(offbeat, name)(inner, model, every=3, warmup=2)
    train(model, local)
    saved = local.state_dict()
    split = list(make().parameters())
    others = [
        offbeat.AdamW(make().parameters()),
        offbeat.Chain([offbeat.AdamW(split)]),
        offbeat.LBFGS(make().parameters()),
        offbeat.as_functional(offbeat.AdamW, make().parameters()),
        inner,  # torch's own, while it is inside
    ]
    for other in others:
        before = other.state_dict()
        with pytest.raises(ValueError, match=rf"the state dict of a {name} around the optimizer"):
            other.load_state_dict(saved)
        assert other.state_dict()["param_groups"] == before["param_groups"]
    del local
    inner.load_state_dict(saved)  # nobody is there to notice any more
    offbeat.AdamW(make().parameters()).load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    again = offbeat.LocalSGD(inner, model, every=3, warmup=2)
    again.load_state_dict(saved)
    assert again.steps == 4


def agreement(rank: int, world: int) -> dict[str, Any]:
    """Where replicas agree, compared with their parameters; and what one rank's state says on the other."""
    found: dict[str, Any] = {}
    kinds = {
        "local": functools.partial(offbeat.LocalSGD, every=3, warmup=2),
        "delayed": functools.partial(offbeat.LocalSGD, every=3, warmup=2, delay=2),
        "fragments": functools.partial(offbeat.DiLoCo, every=4, fragments=2, warmup=2),
        "mixing": functools.partial(offbeat.DiLoCo, every=3, mixing=0.5, warmup=2),
    }
    for name, kind in kinds.items():
        model = make()
        ddp = DistributedDataParallel(model)
        local = kind(torch.optim.SGD(model.parameters(), lr=0.1), ddp, subgroup=None)
        for step in range(8):
            ddp(batch(step, rank)).square().mean().backward()
            local.step()
            local.zero_grad()
            assert local.agreed == (_spread(model) == 0), (name, step, local.agreed, _spread(model))
        saved = [None, None]
        torch.distributed.all_gather_object(saved, (local.agreed, local.state_dict()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            local.load_state_dict(saved[0][1])
        found[name] = saved[0][0], [str(one.message) for one in caught]
        local.sync()
        assert local.agreed
        assert _spread(model) == 0
        torch.distributed.all_gather_object(saved, local.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            local.load_state_dict(saved[0])
        assert local.agreed
    return found


def _spread(model: nn.Module) -> float:
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(both, mine)
    return (both[0] - both[1]).abs().max().item()


@pytest.mark.ranks
@pytest.mark.xdist_group("frameworks")
def test_one_ranks_state_between_rounds_on_all_ranks_is_noticed():
    first, second = run_ranks(agreement, 2)
    for name in first:
        assert first[name] == (False, [])
        agreed, [message] = second[name]
        assert agreed is False
        assert "saved by replica 0 of 2 after step 8, between two rounds" in message
        assert "loaded on replica 1" in message
