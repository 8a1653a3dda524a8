"""``LocalSGD(mixing=...)``: only a part of the difference from the mean is added."""

from __future__ import annotations

import pytest
import torch

import offbeat
from tests.harness import batch, flat, loss, make

pytestmark = pytest.mark.xdist_group("simulation")

EVERY, STEPS, REPLICAS = 4, 11, 3


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@torch.no_grad()
def write(model, vector):
    start = 0
    for p in model.parameters():
        p.copy_(vector[start : start + p.numel()].view_as(p))
        start += p.numel()


def two_models():
    return make(), make()


def expected(delay, mixing):
    """The formula, in a loop over replicas."""
    models = [make() for _ in range(REPLICAS)]
    optimizers = [sgd(model) for model in models]
    taken = None
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss(model, batch(step, rank, torch.float64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if taken is not None and step == taken[0] + delay:
            land(models, taken[1], mixing)
            taken = None
        if step % EVERY == 0:
            taken = (step, [flat(model) for model in models])
            if delay == 0:
                land(models, taken[1], mixing)
                taken = None
    return [flat(model) for model in models]


def land(models, old, mixing):
    mean = torch.stack(old).mean(0)
    for model, before in zip(models, old, strict=True):
        write(model, flat(model) + (1 - mixing) * (mean - before))


@pytest.mark.parametrize(("delay", "mixing"), [(0, 0.25), (1, 0.5), (3, 0.5), (3, 0.0), (4, 0.75)])
def test_a_part_of_the_difference(delay, mixing):
    def replica(rank, peers, models, *, stop=None):
        model, spare = models
        optimizer = offbeat.LocalSGD(
            sgd(model), model, every=EVERY, delay=delay, mixing=mixing, group=peers, subgroup=None
        )
        for step in range(STEPS):
            if step == stop:  # in the middle of everything: save, and go on with other objects
                saved = (optimizer.state_dict(), {name: t.clone() for name, t in model.state_dict().items()})
                model = spare
                model.load_state_dict(saved[1])
                optimizer = offbeat.LocalSGD(
                    sgd(model), model, every=EVERY, delay=delay, mixing=mixing, group=peers, subgroup=None
                )
                optimizer.load_state_dict(saved[0])
            loss(model, batch(step, rank, torch.float64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = flat(model)
        optimizer.finish()
        return before, flat(model)

    found = offbeat.Simulation(REPLICAS).run(replica, make=two_models)
    for (mine, _), reference in zip(found, expected(delay, mixing), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)
    for _, finished in found:
        assert torch.equal(finished, found[0][1])
    again = offbeat.Simulation(REPLICAS).run(replica, make=two_models, stop=6)
    for (mine, _), (other, _) in zip(found, again, strict=True):
        assert torch.equal(mine, other)


def test_mixing_is_checked():
    with pytest.raises(ValueError, match=r"mixing must be at least 0 and less than 1, but got 1\.5"):
        offbeat.Level(every=4, mixing=1.5)
    assert offbeat.Level(every=4, delay=3).kept == 0.0


@pytest.mark.parametrize("delay", [0, 2])
def test_counters_of_buffers_are_whole(delay):
    """BatchNorm's number of batches goes on counting; only numbers with a fraction are mixed."""

    def replica(rank, peers, model):
        optimizer = offbeat.LocalSGD(sgd(model), model, every=3, delay=delay, mixing=0.5, group=peers, subgroup=None)
        for step in range(8):
            model(
                torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            ).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return int(model[1].num_batches_tracked), model[1].running_mean.clone()

    def normalised():
        return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))

    (one, a), (two, b) = offbeat.Simulation(2).run(replica, make=normalised)
    assert one == two == 8
    assert not torch.equal(a, b)
