"""``Simulation.run(function, make=)``: replicas whose models are the same by design."""

from __future__ import annotations

import time

import torch
from torch import nn

import offbeat


def test_models_are_made_one_after_the_other_with_one_seed():
    """However slow making one is: threads share torch's generator."""
    making = []

    def make():
        assert not making, "two models were being made at the same time"
        making.append(1)
        model = nn.Linear(3, 2)
        time.sleep(0.01)
        model = nn.Sequential(model, nn.Linear(2, 2))
        making.pop()
        return model

    def parameters(rank, peers, model, offset, *, scale):
        return torch.cat([p.detach().flatten() for p in model.parameters()]) * scale + offset

    answers = offbeat.Simulation(6).run(parameters, 1.0, make=make, seed=3, scale=2.0)
    torch.manual_seed(3)
    expected = parameters(0, None, make(), 1.0, scale=2.0)
    assert all(torch.equal(answer, expected) for answer in answers)
    others = offbeat.Simulation(2).run(parameters, 1.0, make=make, seed=4, scale=2.0)
    assert not torch.equal(others[0], expected)


def test_making_models_leaves_the_generator_as_it_was():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    models = offbeat.Simulation(3).run(lambda rank, peers, model: model, make=lambda: nn.Linear(2, 2))
    assert torch.equal(torch.rand(3), expected)
    assert len({id(model) for model in models}) == 3  # each rank has its own
