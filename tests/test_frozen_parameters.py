"""Parameters whose ``requires_grad`` changes under an outer optimizer: switched off and on, or trained only now."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import offbeat
from tests.harness import batch, flat, loss, make, sgd, write

OPTIONS: list[dict[str, Any]] = [{}, {"delay": 1}, {"fragments": 2}, {"delay": 2, "fragments": 2}]


def toggle(model: Any, step: int) -> None:
    """Train the first layer and the others in turn, as a GAN does and Lightning's ``toggle_optimizer``."""
    for number in (0, 2, 4):
        model[number].requires_grad_((number == 0) == (step % 2 == 0))


def one_step(model: Any, optimizer: Any, step: int, rank: int) -> None:
    toggle(model, step)
    loss(model, batch(step, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.requires_grad_(True)


@pytest.mark.parametrize("options", [{}, {"codec": "bf16"}])
def test_switching_off_and_on_is_like_a_plain_loop(options):
    """What is frozen in a step keeps its value, and is averaged all the same."""

    def run(rank, peers, model):
        diloco = offbeat.DiLoCo(sgd(model.parameters()), model, every=3, group=peers, subgroup=None, **options)
        rows = []
        for step in range(10):
            one_step(model, diloco, step, rank)
            rows.append(flat(model))
        diloco.finish()
        return rows, flat(model)

    models = [make(), make()]
    inners = [sgd(model.parameters()) for model in models]
    anchor = flat(models[0])
    outer = torch.optim.SGD([anchor], lr=0.8, momentum=0.6, nesterov=True)
    found = offbeat.Simulation(2).run(run, make=make)
    close = {"rtol": 1e-11, "atol": 1e-12} if not options else {"rtol": 0.05, "atol": 0.01}
    for step in range(10):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            one_step(model, inner, step, rank)
        if (step + 1) % 3 == 0:
            anchor.grad = anchor - sum(map(flat, models)) / 2
            outer.step()
            for model in models:
                write(model, anchor)
        for rank, model in enumerate(models):
            torch.testing.assert_close(found[rank][0][step], flat(model), **close)
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("options", OPTIONS)
def test_switching_off_and_on_survives_a_checkpoint(options):
    """Also where it is saved or loaded while parameters are frozen."""

    def two() -> Any:
        return make(), make()

    def run(rank, peers, models):
        model, other = models
        how = {"every": 4, "group": peers, "subgroup": None, **options}
        diloco = offbeat.DiLoCo(sgd(model.parameters()), model, **how)
        loaded = offbeat.DiLoCo(sgd(other.parameters()), other, **how)
        for step in range(5):
            one_step(model, diloco, step, rank)
        toggle(model, 5)
        toggle(other, 6)
        saved = copy.deepcopy((model.state_dict(), diloco.state_dict()))
        other.load_state_dict(saved[0])
        loaded.load_state_dict(saved[1])
        for step in range(5, 12):
            one_step(model, diloco, step, rank)
            one_step(other, loaded, step, rank)
        diloco.finish()
        loaded.finish()
        return flat(model), flat(other)

    (one, again), (two_, also) = offbeat.Simulation(2).run(run, make=two)
    assert torch.equal(one, two_)
    assert torch.equal(one, again)
    assert torch.equal(one, also)


@pytest.mark.parametrize("kind", [offbeat.DiLoCo, offbeat.SlowMo])
@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_parameters_trained_for_the_first_time_raise_before_anything_moves(kind, how):
    """And the way out that the error names works: a new optimizer loads the old one's state, and goes on equal."""

    def run(rank, peers, model):
        def make_one(params):
            return kind(torch.optim.SGD(params, lr=0.1), model, every=3, group=peers, subgroup=None)

        model[4].requires_grad_(False)
        first = [*model[0].parameters(), *model[2].parameters()]
        replica = make_one(model.parameters() if how == "unfrozen" else first)
        for step in range(4):
            loss(model, batch(step, rank)).backward()
            replica.step()
            replica.zero_grad()
        model[4].requires_grad_(True)
        if how == "added":
            replica.add_param_group({"params": list(model[4].parameters())})
        loss(model, batch(4, rank)).backward()
        before, anchors = flat(model), copy.deepcopy(replica.anchors())
        with pytest.raises(RuntimeError, match=r"'4\.weight' and 1 more began to train .* nothing was changed\. Make"):
            replica.step()
        assert torch.equal(flat(model), before)
        assert replica.steps == 4
        new = make_one([{"params": [p for g in replica.param_groups for p in g["params"]]}])
        old = replica.state_dict()
        if how == "added":  # its groups are others'
            new = make_one([{"params": first}, {"params": list(model[4].parameters())}])
        new.load_state_dict(old)
        assert new.steps == 4
        assert all(torch.equal(new.anchors()[name], anchor) for name, anchor in anchors.items())
        assert torch.equal(new.anchors()["4.weight"], model[4].weight)
        new.step()
        new.zero_grad()
        for step in range(5, 8):
            loss(model, batch(step, rank)).backward()
            new.step()
            new.zero_grad()
        new.finish()
        assert not torch.equal(model[4].weight, before[-24:-3].view(3, 7))
        return flat(model)

    one, two = offbeat.Simulation(2).run(run, make=make)
    assert torch.equal(one, two)


def test_without_an_outer_optimizer_new_parameters_are_averaged():
    def run(rank, peers, model):
        model[4].requires_grad_(False)
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every=2, group=peers, subgroup=None)
        for step in range(7):
            if step == 3:
                model[4].requires_grad_(True)
            loss(model, batch(step, rank)).backward()
            local.step()
            local.zero_grad()
        local.finish()
        return flat(model)

    assert torch.equal(*offbeat.Simulation(2).run(run, make=make))
