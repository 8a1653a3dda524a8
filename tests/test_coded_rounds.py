"""Rounds with a codec: ranks without a weight, and buffers."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import offbeat
from tests.harness import flat, simulated, train_step
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("coded_rounds")


CHUNK = 4096


def drift(rank, peers, how, size, delay):
    """How far everything moves, and by how much on average the replicas with data have moved."""
    generator = torch.Generator().manual_seed(rank)
    weight = nn.Parameter(torch.zeros(size * CHUNK))
    replica = offbeat.DiLoCo(
        torch.optim.SGD([weight], lr=0.01), nn.ParameterList([weight]), every=2, delay=delay, mixing=0.0,
        outer=functools.partial(offbeat.SGD, lr=1.0), codec=offbeat.TopK(0.03), error_feedback=1.0,
        weighted=how == "seen", group=peers, subgroup=None,
    )  # fmt: skip
    absent = rank == size - 1 and how != "none"
    for step in range(60):
        if absent and how == "finish" and step == 2:
            break
        weight.grad = torch.randn(weight.shape, generator=generator) - 1.0
        if how == "seen":
            replica.seen(0 if absent else 1)
        replica.step()
        replica.zero_grad()
    replica.finish()
    return weight.detach().clone()


@pytest.mark.parametrize("how", ["none", "seen", "finish"])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_all_parts_move_alike_if_a_rank_has_no_weight(how, delay, size):
    """Also the part whose sums that rank encodes: what it loses of them is fed back."""
    found = offbeat.Simulation(size).run(drift, how, size, delay)
    assert all(torch.equal(other, found[0]) for other in found)
    moved = [part.mean().item() for part in found[0].split(CHUNK)]
    assert min(moved) > 0.75 * max(moved), moved


class WithBuffers(nn.Module):
    """Batch norm has buffers that are averaged, and one that counts."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))

    def forward(self, x):
        return self.net(x)


def with_buffers(rank, group, model):
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    replica = offbeat.DiLoCo(inner, model, every=2, codec="int8", buffers="average", group=group, subgroup=None)
    for step in range(6):
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(31 * step + rank)) * (rank + 1)
        model(x).square().mean().backward()
        replica.step()
        replica.zero_grad()
    return [t.clone() for t in model.state_dict().values()]


def real(rank, world):
    torch.manual_seed(3)
    return with_buffers(rank, None, WithBuffers())


@pytest.mark.parametrize("world", [3, 5])
def test_buffers_have_the_same_bits_in_a_simulation(world):
    """They are summed in rank order, as the codes are."""
    expected = run_ranks(real, world)
    found = offbeat.Simulation(world).run(with_buffers, make=WithBuffers, seed=3)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_weights_whose_sum_overflows():
    """They would give every rank the share 0."""

    def run(rank, peers):
        weight = nn.Parameter(torch.full((5,), rank + 1.0))
        replica = offbeat.LocalSGD(
            torch.optim.SGD([weight], lr=0.0), nn.ParameterList([weight]), every=1, weighted=True, group=peers,
            subgroup=None,
        )  # fmt: skip
        replica.seen([1e308, 1.1e308][rank])
        with pytest.raises(ValueError, match=r"\(1e\+308, 1.1e\+308\) add up to inf.* smaller units") as error:
            replica.step()
        assert torch.equal(weight, torch.full((5,), rank + 1.0))
        return str(error.value)

    first, second = offbeat.Simulation(2, timeout=20).run(run)
    assert first == second


def test_error_feedback_true_is_a_whole_one():
    def replica(rank, peers, model, feedback):
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        replica = offbeat.DiLoCo(
            inner, model, every=2, codec="int4", error_feedback=feedback, group=peers, subgroup=None
        )
        for step in range(8):
            train_step(replica, model, step, rank)
        return flat(model)

    as_bool, as_number, without = (simulated(replica, feedback=feedback)[0] for feedback in (True, 1.0, None))
    assert torch.equal(as_bool, as_number)
    assert not torch.equal(as_bool, without)
