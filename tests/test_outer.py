"""The outer optimizer: its own step is run, whatever its class is called."""

from __future__ import annotations

import functools

import pytest
import torch

import offbeat
from tests.harness import simulated


class Backwards:
    """A step of twice the pseudo-gradient, in a class that is given different names and parents."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= 2 * p.grad


def named(name, parent):
    return type(name, (Backwards, parent), {})


class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})


def anchor_after(rank, peers, model, outer, codec):
    """Rank r moves by r + 1 in one step and one round: the pseudo-gradient is 1.5."""
    optimizer = offbeat.DiLoCo(
        torch.optim.SGD(model.parameters(), lr=1.0), model, every=1, outer=outer, codec=codec, group=peers,
        subgroup=None,
    )  # fmt: skip
    model.weight.grad = torch.full_like(model.weight, rank + 1.0)
    optimizer.step()
    return model.weight.flatten().tolist()


def zeros():
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


@pytest.mark.parametrize("codec", [None, "bf16"])
@pytest.mark.parametrize(
    ("name", "parent"),
    [("SGD", Plain), ("SGD", torch.optim.SGD), ("SGD", offbeat.SGD), ("Backwards", torch.optim.SGD), ("AdamW", Plain)],
)
def test_a_users_class_is_run_whatever_its_name(name, parent, codec):
    outer = functools.partial(named(name, parent), lr=1.0)
    answers = simulated(anchor_after, make=zeros, outer=outer, codec=codec)
    assert answers == [[-3.0, -3.0]] * 2


@pytest.mark.parametrize("cls", [torch.optim.SGD, offbeat.SGD])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lr": 1.0}, -1.5),  # the mean
        ({"lr": 0.5}, -0.75),
        ({"lr": 1.0, "maximize": True}, 1.5),
        ({"lr": 1.0, "momentum": 0.9, "nesterov": True}, -1.5 * 1.9),
        ({"lr": 1.0, "weight_decay": 0.1}, -1.5),  # of an anchor of 0
    ],
)
def test_options_of_sgd_are_heeded(cls, options, expected):
    answers = simulated(anchor_after, make=zeros, outer=functools.partial(cls, **options), codec=None)
    assert answers[0] == answers[1] == pytest.approx([expected] * 2)
