"""``state=``: what a round does to the inner optimizer's state."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

import offbeat
from offbeat.rules.rule import Slot, Surface
from tests.harness import (
    adamw,
    batch,
    everyone,
    flat,
    loss,
    make,
    ranks,
    simulated,
    train,
)

pytestmark = pytest.mark.xdist_group("state_policy")


@ranks(2)
def test_state_policies(rank, world):
    def after(policy: Any, library: Any, name: str = "AdamW", **options: Any) -> Any:
        model = make()
        inner = getattr(library, name)(model.parameters(), lr=0.01, **options)
        local = offbeat.LocalSGD(inner, model, every=4, state=policy, subgroup=None)
        train(model, local, range(4), rank)
        before = [{k: v.clone() for k, v in inner.state[p].items()} for p in model.parameters()]
        loss(model, batch(4, rank)).backward()
        local.step()
        return before, [inner.state.get(p, {}) for p in model.parameters()], local, model

    for library in (torch.optim, offbeat):
        _, state, *_ = after("keep", library)
        for one in state:
            assert not torch.equal(*everyone(one["exp_avg"]))
        _, state, *_ = after("average", library)
        for one in state:
            assert torch.equal(*everyone(one["exp_avg"]))
            assert torch.equal(*everyone(one["exp_avg_sq"]))
            assert one["step"].item() == 5
        _, state, local, model = after("reset", library)
        assert not any(state)
        train(model, local, range(5, 7), rank)
        assert all(int(local.state[p]["step"]) == 2 for p in model.parameters())
        _, state, *_ = after({"exp_avg": "average", "exp_avg_sq": "keep"}, library)
        for one in state:
            assert torch.equal(*everyone(one["exp_avg"]))
            assert not torch.equal(*everyone(one["exp_avg_sq"]))
        _, state, local, model = after({"momentum_buffer": "reset"}, library, "SGD", momentum=0.9)
        assert all(not one["momentum_buffer"].any() for one in state)
        train(model, local, range(5, 6), rank)
        assert all(local.state[p]["momentum_buffer"].any() for p in model.parameters())
    # The mean is the mean: after one step a moment is a tenth of the gradient.
    model = make()
    local = offbeat.LocalSGD(adamw(model.parameters()), model, state="average", subgroup=None)
    loss(model, batch(0, rank)).backward()
    means = [sum(everyone(0.1 * p.grad)) / 2 for p in model.parameters()]
    local.step()
    for p, mean in zip(model.parameters(), means, strict=True):
        torch.testing.assert_close(local.state[p]["exp_avg"], mean, rtol=1e-12, atol=1e-14)
    for policy, words in (("mean", "must be one of"), ({"exp_avg": "zero"}, r"state\['exp_avg'\] must be one of")):
        with pytest.raises(ValueError, match=words):
            offbeat.LocalSGD(adamw(model.parameters()), model, state=policy)
    with pytest.raises(ValueError, match="negative"):
        offbeat.LocalSGD(adamw(model.parameters()), model, state="average", delay=2)


class Odd(torch.optim.Optimizer):
    """An optimizer nobody knows, with a momentum, a count and a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state.setdefault("velocity", torch.zeros_like(p)).add_(p.grad)
                state["count"] = state.get("count", 0) + 1
                state.setdefault("history", []).append(state["count"])
                p -= 0.1 * state["velocity"]


@ranks(2)
def test_state_keys_are_checked(rank, world):
    """A misspelt key raises on every rank: at once where a rule knows the keys, else when a rank has state."""
    model = make()
    cases = [
        (offbeat.AdamW, {}, "exp_avgg", "'exp_avg', 'exp_avg_sq', 'step'"),
        (torch.optim.AdamW, {}, "exp_avgg", "'exp_avg', 'exp_avg_sq', 'step'"),
        (offbeat.AdamW, {"state_dtype": "8bit"}, "exp_avg_8bit", "'exp_avg', 'exp_avg_sq', 'step'"),
        (offbeat.AdamW, {}, "max_exp_avg_sq", "'exp_avg', 'exp_avg_sq', 'step'"),
        (offbeat.SGD, {}, "momentum_buffer", "its hyperparameters need none"),
    ]
    for cls, options, key, there in cases:
        for policy in ("reset", "keep", "average"):
            with pytest.raises(ValueError, match=rf"state\['{key}'\] .* {cls.__name__} does not have: .*{there}"):
                offbeat.LocalSGD(cls(model.parameters(), **options), model, state={key: policy})
    for policy in ("average", {"exp_avg": "average"}):
        with pytest.raises(TypeError, match="'exp_avg' of AdamW is stored as 8-bit codes"):
            offbeat.LocalSGD(offbeat.AdamW(make().parameters(), state_dtype="8bit"), model, state=policy)

    class MyAdagrad(torch.optim.Adagrad):
        """Known to start from its parent's values, but it may have keys of its own."""

    for cls, key, words in (
        (Odd, "velocityy", r"Odd does not have: it has 'count', 'history', 'velocity'"),
        (MyAdagrad, "summ", r"MyAdagrad does not have: it has 'step', 'sum'"),
        (Odd, "history", r"'history' of Odd is neither a tensor nor a number"),
    ):
        for delay in (0, 1):
            model = make()
            local = offbeat.LocalSGD(cls(model.parameters()), model, subgroup=None, delay=delay, state={key: "reset"})
            if rank == 0:  # the other rank has no state yet, and raises the same
                loss(model, batch(0, rank)).backward()
            before = flat(model)
            if delay:
                local.step()
                local.zero_grad()
            with pytest.raises((ValueError, TypeError), match=words):
                local.step()
            assert rank == 0 or torch.equal(flat(model), before)
    # Nobody has state: nothing is known, and nothing is wrong.
    local = offbeat.LocalSGD(Odd(model.parameters()), model, subgroup=None, state={"velocity": "reset"})
    local.step()


@ranks(2)
def test_state_is_reset_to_its_initial_values(rank, world):
    """The rule says what they are, also for torch's classes; of others, tensors and numbers become zero."""

    def after(cls: Any, policy: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
        model = make(dtype=dtype)
        inner = cls(model.parameters(), **options)
        local = offbeat.LocalSGD(inner, model, every=3, state=policy, subgroup=None)
        for step in range(4):
            local.zero_grad()
            loss(model, batch(step, rank, dtype)).backward()
            local.step()
        return model, inner, local

    for library in (torch.optim, offbeat):
        for name, options, initial in (
            ("Adagrad", {"initial_accumulator_value": 0.5}, {"sum": 0.5, "step": 0}),
            ("Rprop", {"lr": 0.03}, {"step_size": 0.03, "prev": 0}),
            ("NAdam", {}, {"mu_product": 1, "exp_avg": 0}),
            ("ASGD", {"lr": 0.02}, {"eta": 0.02, "mu": 1, "ax": 0}),
        ):
            _, inner, _ = after(getattr(library, name), dict.fromkeys(initial, "reset"), **options)
            for entry in inner.state.values():
                for key, value in initial.items():
                    want = torch.full_like(torch.as_tensor(entry[key]), value)
                    torch.testing.assert_close(torch.as_tensor(entry[key]), want, rtol=1e-6, atol=0)
        # A reset as a whole is a new optimizer, also where state is made when the optimizer is.
        for name in ("Adagrad", "AdamW", "Rprop"):
            model, _, local = after(getattr(library, name), "reset", lr=0.01)
            fresh = copy.deepcopy(model)
            other = getattr(library, name)(fresh.parameters(), lr=0.01)
            for module, optimizer in ((model, local), (fresh, other)):
                optimizer.zero_grad()
                loss(module, batch(9, rank)).backward()
                optimizer.step()
            torch.testing.assert_close(flat(model), flat(fresh), rtol=0, atol=0)
    _, inner, _ = after(Odd, {"velocity": "reset", "count": "reset"})
    for entry in inner.state.values():
        assert not entry["velocity"].any()
        assert entry["count"] == 0

    # A rule of the user's own, whose state starts at one.
    rule = dataclasses.replace(
        offbeat.SGD.rule, name="Ones", slots=lambda h: (Slot("momentum_buffer", init=1.0),), surface=Surface()
    )

    class Ones(offbeat.RuleOptimizer, rule=rule):
        pass

    _, inner, _ = after(Ones, {"momentum_buffer": "reset"}, momentum=0.9)
    assert all(torch.equal(e["momentum_buffer"], torch.ones_like(e["momentum_buffer"])) for e in inner.state.values())

    # 8-bit state under its plain name: codes and scales both.
    _, inner, _ = after(
        offbeat.AdamW, {"exp_avg": "reset", "exp_avg_sq": "keep"}, torch.float32, lr=0.01, state_dtype="8bit"
    )
    for entry in inner.state.values():
        assert not entry["exp_avg_8bit"].any()
        assert not entry["exp_avg_scale"].any()
        assert entry["exp_avg_sq_8bit"].any()
        assert entry["exp_avg_sq_scale"].all()


@ranks(2)
def test_a_momentum_that_was_reset_begins_anew(rank, world):
    """With dampening SGD's first step differs; after a reset the next step is a first step."""
    for cls, options, dtype in (
        (torch.optim.SGD, {}, torch.float64),
        (torch.optim.SGD, {"foreach": False}, torch.float64),
        (offbeat.SGD, {}, torch.float64),
        (offbeat.SGD, {"foreach": False}, torch.float64),
        (offbeat.SGD, {"state_dtype": "8bit"}, torch.float32),
    ):
        model = make(dtype=dtype)
        inner = cls(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, **options)
        local = offbeat.LocalSGD(inner, model, every=3, subgroup=None, state={"momentum_buffer": "reset"})
        for step in range(4):  # averaged after steps 0 and 3
            local.zero_grad()
            loss(model, batch(step, rank, dtype)).backward()
            local.step()
        local.zero_grad()
        loss(model, batch(4, rank, dtype)).backward()
        before, gradient = flat(model), torch.cat([p.grad.flatten() for p in model.parameters()])
        local.step()
        torch.testing.assert_close(flat(model), before - 0.1 * gradient)


@ranks(2)
def test_state_in_codes(rank, world):
    """They cannot be averaged; kept or reset they are as good as numbers."""
    for policy in ("average", "keep", "reset"):
        model = make(dtype=torch.float32)
        inner = offbeat.AdamW(model.parameters(), lr=0.01, state_dtype=None if policy == "average" else "8bit")
        local = offbeat.LocalSGD(inner, model, every=2, subgroup=None, state=policy)
        loss(model, batch(0, rank).float()).backward()
        if policy == "average":
            inner.param_groups[0]["state_dtype"] = "8bit"  # after LocalSGD has looked
            with pytest.raises(TypeError, match="stored as 8-bit codes, which cannot be averaged"):
                local.step()
            continue
        local.step()
        codes = [entry["exp_avg_8bit"] for entry in inner.state.values()]
        assert (policy == "keep") == any(t.any() for t in codes)
        assert torch.equal(*everyone(flat(model)))


@pytest.mark.parametrize("policy", ["raise", "skip", "leave_out"])
def test_optimizer_state_that_is_not_finite_is_not_averaged(policy):
    def replica(rank, peers, model):
        level = {"nonfinite": policy}
        optimizer = offbeat.LocalSGD(
            torch.optim.Adam(model.parameters(), lr=0.01), model, every=4, state="average", group=peers, subgroup=None,
            **level,
        )  # fmt: skip
        errors = []
        for step in range(5):
            loss(model, batch(step, rank, torch.float32)).backward()
            if rank == 1 and step == 2:
                model[0].weight.grad[0, 0] = 1e21  # its square is infinite, and the parameter stays finite
            try:
                optimizer.step()
            except offbeat.NotFinite as error:
                errors.append(str(error))
            optimizer.zero_grad()
        state = optimizer.state[model[0].weight]["exp_avg_sq"]
        return errors, bool(state.isfinite().all())

    (errors, fine), (others, bad) = simulated(replica)
    assert fine
    assert bad == (policy == "leave_out")  # then it has the others' state
    assert len(errors) == len(others) == (policy == "raise")
    assert all("exp_avg_sq" in error and "rank 1" in error for error in errors)
