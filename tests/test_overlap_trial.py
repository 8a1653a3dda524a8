"""Optimizers that overlap does not know: numbers that change once in a step, and what a trial finds."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import offbeat

TINY = 1e-4


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, steps: range = range(5), scheduler: Any = None) -> None:
    for step in steps:
        model(batch(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


class Counting(torch.optim.Optimizer):
    """Divides the learning rate by the number of steps, which it keeps where a subclass says."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def count(self, group: dict[str, Any]) -> float:
        group["k"] = group.get("k", 0) + 1
        return float(group["k"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            k = self.count(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / k)


class InTensor(Counting):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["k"] = torch.tensor(0)

    def count(self, group: dict[str, Any]) -> float:
        group["k"] += 1
        return float(group["k"])


class InList(Counting):
    def count(self, group: dict[str, Any]) -> float:
        group.setdefault("seen", [0])[0] += 1
        return float(group["seen"][0])


class InAttribute(Counting):
    t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.t += 1
        super().step()

    def count(self, group: dict[str, Any]) -> float:
        return self.t


class InState(Counting):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["k"] = self.state.get("k", 0) + 1
        super().step()

    def count(self, group: dict[str, Any]) -> float:
        return self.state["k"]


class OnlyWithParameters(Counting):
    """Counts only in groups that have something to do, as many do by skipping the others."""

    def count(self, group: dict[str, Any]) -> float:
        return super().count(group) if any(p.grad is not None for p in group["params"]) else 1.0


class FilledAtFirst(Counting):
    """Has its state from the beginning, and does not make it in a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            k = self.count(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.state[p]["sum"].add_(p.grad), alpha=0.05 / k)


class NeedsTrain(Counting):
    ready = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.ready:
            raise RuntimeError("call train() first")
        super().step()


def numbers(optimizer: Any) -> Any:
    groups = [{k: float(torch.as_tensor(v[0] if isinstance(v, list) else v)) for k, v in g.items() if k != "params"}
              for g in optimizer.param_groups]  # fmt: skip
    return groups, vars(optimizer).get("t"), optimizer.state.get("k")


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize(
    "cls", [Counting, InTensor, InList, InAttribute, InState, OnlyWithParameters, FilledAtFirst, NeedsTrain]
)
def test_numbers_of_all_parameters_change_once_in_a_step(cls, groups):
    models, opts = [make(), make()], []
    for model in models:
        split = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2:].parameters()}]
        opts.append(cls(split if groups else model.parameters()))
    handle = offbeat.overlap(opts[0], models[0], bucket_cap_mb=TINY)
    moved = []
    models[0][0].weight.register_post_accumulate_grad_hook(lambda p: moved.append(len(handle._step.stepped)))
    for model, optimizer in zip(models, opts, strict=True):
        optimizer.ready = True
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(model, optimizer, scheduler=scheduler)
        model[4].requires_grad_(False)
        train(model, optimizer, range(5, 8), scheduler)  # a group without a gradient for some of its parameters
    assert max(moved) > 2  # during backward
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)
    assert numbers(opts[0]) == numbers(opts[1])


def test_the_counter_is_in_the_state_dict_and_a_dropped_step_does_not_count():
    models = [make(), make()]
    opts = [Counting(model.parameters()) for model in models]
    handle = offbeat.overlap(opts[0], models[0], bucket_cap_mb=TINY)
    train(models[0], opts[0])
    models[0](batch(9)).sum().backward()
    handle.reset()
    assert opts[0].param_groups[0]["k"] == 5
    models[1].load_state_dict(models[0].state_dict())
    opts[1].load_state_dict(opts[0].state_dict())
    for model, optimizer in zip(models, opts, strict=True):
        train(model, optimizer, range(5, 8))
    assert opts[0].param_groups[0]["k"] == opts[1].param_groups[0]["k"] == 8
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)


class GlobalNorm(Counting):
    """As timm's LAMB: divides gradients by the norm of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(
            [p for g in self.param_groups for p in g["params"]], 0.1, nn.utils.get_total_norm(grads)
        )
        super().step()


class Estimate(Counting):
    """As Prodigy and D-Adaptation: a number of all gradients decides the rate."""

    def count(self, group: dict[str, Any]) -> float:
        total = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
        group["d"] = max(group.get("d", 1.0), total)
        return float(group["d"])


class OwnGenerator(Counting):
    """As timm's Kron."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rng = random.Random(0)

    def count(self, group: dict[str, Any]) -> float:
        return 1.0 + self.rng.random()


class Noise(Counting):
    def count(self, group: dict[str, Any]) -> float:
        return 1.0 + float(torch.rand(()))


class PythonNoise(Counting):
    def count(self, group: dict[str, Any]) -> float:
        return 1.0 + random.random()


class Large(Counting):
    """Keeps a tensor of several elements for all parameters, and changes it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.history = torch.zeros(8)

    def count(self, group: dict[str, Any]) -> float:
        self.history += 1
        return float(self.history[0])


class Schedule:
    k = 0


class InObject(Counting):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["schedule"] = Schedule()


class EmptyStep(Counting):
    """As optimi with foreach=True: cannot do a step without any gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch._foreach_mul_([p.grad for g in self.param_groups for p in g["params"] if p.grad is not None], 1.0)
        super().step()


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (GlobalNorm, "GlobalNorm cannot be overlapped: its update of a parameter depends on other parameters"),
        (Estimate, r"Estimate\.step\(\) changes 'd' of the optimizer by the gradients"),
        (OwnGenerator, "OwnGenerator cannot be overlapped: its 'rng' is a Random"),
        (Noise, "Noise cannot be overlapped: it draws random numbers"),
        (PythonNoise, "PythonNoise cannot be overlapped: it draws random numbers"),
        (Large, "Large cannot be overlapped: .*history"),
        (InObject, "InObject cannot be overlapped: its option 'schedule' of group 0 is a Schedule"),
    ],
)
def test_what_buckets_cannot_do_is_refused_at_once_and_nothing_changes(cls, says):
    model = make()
    optimizer = cls(model.parameters())
    torch.manual_seed(7)
    random.seed(7)
    before = [p.detach().clone() for p in model.parameters()], torch.get_rng_state(), random.getstate()
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    with pytest.raises(TypeError, match=says) as refused:
        offbeat.overlap(optimizer, model)
    assert "step after backward" in str(refused.value)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[0], strict=True))
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    assert not optimizer.state
    with pytest.raises(TypeError, match=says):  # in a chain too
        offbeat.overlap(offbeat.Chain([optimizer]), model)


@pytest.mark.parametrize("cls", [NeedsTrain, EmptyStep])
def test_an_optimizer_whose_trial_raises_is_refused_before_anything_moves(cls):
    model = make()
    optimizer = cls(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    offbeat.overlap(optimizer, model, bucket_cap_mb=TINY)  # train() may come later
    with pytest.raises(TypeError, match=f"{cls.__name__} cannot be overlapped: its step has raised in a trial"):
        model(batch(0)).sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_what_a_trial_has_not_seen_is_noticed_in_training():
    class Late(Estimate):
        """Begins to look at gradients in its sixth step."""

        def count(self, group: dict[str, Any]) -> float:
            group["n"] = group.get("n", 0) + 1
            return super().count(group) if group["n"] > 5 else 1.0

    model = make()
    optimizer = Late(model.parameters())
    offbeat.overlap(optimizer, model, bucket_cap_mb=TINY)
    train(model, optimizer)
    with pytest.raises(TypeError, match=r"Late\.step\(\) changes 'd'"):
        train(model, optimizer, range(5, 6))


def test_a_class_that_is_registered_is_not_tried():
    class Registered(GlobalNorm):
        pass

    @offbeat.register_overlapped(Registered)
    class Stepper(offbeat.OverlappedOptimizer):
        pass

    model = make()
    offbeat.overlap(Registered(model.parameters()), model)


def test_a_subclass_of_ours_that_does_more_is_tried():
    class Faster(offbeat.AdamW):
        def step(self, closure=None):
            for group in self.param_groups:
                group["calls"] = group.get("calls", 0) + 1
            return super().step(closure)

    models = [make(), make()]
    opts = [Faster(model.parameters(), lr=0.01) for model in models]
    offbeat.overlap(opts[0], models[0], bucket_cap_mb=TINY)
    for model, optimizer in zip(models, opts, strict=True):
        train(model, optimizer)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)
    assert opts[0].param_groups[0]["calls"] == 5
