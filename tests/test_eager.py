"""Eager outer steps, against the published algorithm in plain torch."""

from __future__ import annotations

import functools
import io
import threading
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from tests.ranks import run_ranks
from tests.sync_reference import adamw, batch, close, flat, loss, make, train, write
from tests.test_replica import fragments_of

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("eager")]

#: Ranks in one process share torch's generator.
SEEDING = threading.Lock()

nesterov = functools.partial(torch.optim.SGD, lr=0.6, momentum=0.9, nesterov=True)
LEVEL = {"ordered": True}


def build(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with SEEDING:
        return make(dtype=dtype)


def published(world: int, steps: int, every: int, parts: int = 1) -> list[list[torch.Tensor]]:
    """Every rank's parameters after every step: each rank has an outer optimizer of its own (arXiv 2502.12996)."""
    models = [build() for _ in range(world)]
    inners = [adamw(model.parameters()) for model in models]
    places = fragments_of(models[0], parts)
    starts = [[flat(model)[place].clone() for place in places] for model in models]
    outers = [[nesterov([start]) for start in row] for row in starts]
    last = [[torch.zeros(world, len(place), dtype=torch.float64)] for place in places]
    history = []
    for step in range(steps):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.zero_grad()
            loss(model, batch(step, rank)).backward()
            inner.step()
        for part, place in enumerate(places):
            offset = every * (part + 1) // parts
            if step + 1 < offset or (step + 1 - offset) % every:
                continue
            now = torch.stack([starts[rank][part] - flat(models[rank])[place] for rank in range(world)])
            before, last[part] = last[part][0], [now]
            for rank, model in enumerate(models):
                starts[rank][part].grad = (now[rank] - before[rank]) / world + before.mean(0)
                outers[rank][part].step()
                vector = flat(model)
                vector[place] = starts[rank][part]
                write(model, vector)
        history.append([flat(model) for model in models])
    return history


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("every", "parts"), [(4, 1), (6, 3)])
def test_eager_steps_are_the_published_ones(world, every, parts):
    steps = 5 * every + 2
    expected = published(world, steps, every, parts)

    def run(rank, peers):
        model = build()
        replica = offbeat.DiLoCo(
            adamw(model.parameters()), model, every=every, fragments=parts, eager=True, outer_lr=0.6, group=peers,
            subgroup=None,
        )  # fmt: skip
        close(train(model, replica, range(steps), rank), expected, rank)
        shared = torch.cat([a.reshape(-1) for a in replica.anchors().values()])
        replica.finish()
        return shared, flat(model)

    found = offbeat.Simulation(world).run(run)
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))


def test_a_shorter_delay_corrects_earlier():
    """The eager step, and its correction k steps later: a plain simulation whose ranks share one anchor."""
    world, every, delay, steps = 3, 5, 2, 23

    def run(rank, peers):
        model = build()
        replica = offbeat.DiLoCo(
            adamw(model.parameters()), model, every=every, delay=delay, eager=True, outer_lr=0.6, group=peers,
            subgroup=None,
        )  # fmt: skip
        return train(model, replica, range(steps), rank)

    models = [build() for _ in range(world)]
    inners = [adamw(model.parameters()) for model in models]
    anchor = flat(models[0]).clone()
    outer, own = nesterov([anchor]), [torch.zeros_like(anchor) for _ in models]
    owners = [nesterov([d]) for d in own]
    mean, expected = None, []
    for step in range(steps):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.zero_grad()
            loss(model, batch(step, rank)).backward()
            inner.step()
        if mean is not None and (step + 1) % every == delay:
            was = anchor.clone()
            anchor.grad = mean
            outer.step()
            for model, d in zip(models, own, strict=True):
                write(model, flat(model) + (anchor - was) - d)
        if (step + 1) % every == 0:
            deltas = [anchor - flat(model) for model in models]
            mean = sum(deltas) / world
            for model, d, delta, owner in zip(models, own, deltas, owners, strict=True):
                d.zero_()
                d.grad = delta / world
                owner.step()
                write(model, anchor + d)
        expected.append([flat(model) for model in models])
    for rank, ours in enumerate(offbeat.Simulation(world).run(run)):
        close(ours, expected, rank)


OPTIONS: list[dict[str, Any]] = [
    {"level": LEVEL},
    {"fragments": 2, "delay": 3, "level": LEVEL},
    {"codec": "int8", "error_feedback": 0.9},
    {"level": {**LEVEL, "anchor": "cpu", "anchor_dtype": torch.float64}},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_save_and_load_at_any_step(options):
    def run(rank, peers):
        def replica_of(model):
            return offbeat.DiLoCo(
                adamw(model.parameters()), model, every=4, eager=True, group=peers, subgroup=None, **options
            )

        model = build(torch.float32)
        replica = replica_of(model)
        saved = []
        for step in range(14):
            buffer = io.BytesIO()
            torch.save((model.state_dict(), replica.state_dict()), buffer)
            saved.append(buffer)
            loss(model, batch(step, rank, torch.float32)).backward()
            replica.step()
            replica.zero_grad()
        replica.finish()
        for start, buffer in enumerate(saved):
            buffer.seek(0)
            weights, state = torch.load(buffer, weights_only=True)
            other = build(torch.float32)
            other.load_state_dict(weights)
            again = replica_of(other)
            again.load_state_dict(state)
            for step in range(start, 14):
                loss(other, batch(step, rank, torch.float32)).backward()
                again.step()
                again.zero_grad()
            again.finish()
            assert torch.equal(flat(other), flat(model)), start

    offbeat.Simulation(2).run(run)


def fails(rank: int, world: int) -> Any:
    """A round that fails on one rank only; everything is as it would be had no eager step been taken."""
    from offbeat.sync import rounds

    found = {}
    for saves in (False, True):
        model = build()
        replica = offbeat.DiLoCo(adamw(model.parameters()), model, every=3, eager=True, subgroup=None, level=LEVEL)
        train(model, replica, range(3), rank)  # the first round is under way, and its eager step taken
        replica._tracks._driver.wait(replica._tracks._tracks[0][0].flight)
        train(model, replica, range(3, 5), rank)
        real = rounds.vote
        if rank == 1:

            def fail(peers):
                raise RuntimeError("a fault of this rank alone")

            rounds.vote = fail
        try:
            train(model, replica, range(5, 6), rank)  # lands the first round, and begins the second, which fails
            replica._tracks._driver.wait(replica._tracks._tracks[0][0].flight)
        finally:
            rounds.vote = real
        anchor = torch.cat([a.reshape(-1) for a in replica.anchors().values()])
        (eager,) = replica._anchors.eagers
        given_back = torch.cat([(eager.gradients[n] + eager.own.anchors[n]).reshape(-1) for n in eager.gradients])
        if saves:
            weights, state = model.state_dict(), replica.state_dict()
            model, old = build(), replica
            model.load_state_dict(weights)
            replica = offbeat.DiLoCo(adamw(model.parameters()), model, every=3, eager=True, subgroup=None, level=LEVEL)
            replica.load_state_dict(state)
            del old
        train(model, replica, range(6, 8), rank)
        before = flat(model)
        failed = False
        try:
            replica._tracks.land()
        except RuntimeError:
            failed = True
        assert failed != saves  # the error belongs to the round; a checkpoint holds none
        torch.testing.assert_close(flat(model), before - given_back, rtol=1e-12, atol=1e-12)
        now = torch.cat([a.reshape(-1) for a in replica.anchors().values()])
        assert torch.equal(now, anchor)
        found[saves] = flat(model)
        train(model, replica, range(8, 13), rank)
        replica.finish()
        found[saves, "end"] = flat(model)
    assert torch.equal(found[False], found[True])
    return found[False, "end"], found[True, "end"]


def test_a_round_that_fails_takes_its_eager_step_back():
    (one, two), (three, four) = run_ranks(fails, 2)
    assert torch.equal(one, three)
    assert torch.equal(two, four)


def test_a_replica_that_is_left_out():
    """It gets the others' result, and its own momentum starts again."""

    def run(rank, peers):
        model = build()
        replica = offbeat.DiLoCo(
            torch.optim.SGD(model.parameters(), lr=0.1), model, every=2, eager=True, group=peers, subgroup=None,
            level={"nonfinite": "leave_out"},
        )  # fmt: skip
        train(model, replica, range(1), rank)
        if rank == 1:
            write(model, flat(model) * float("nan"))
        train(model, replica, range(1, 2), rank)
        train(model, replica, range(2, 7), rank)
        replica.finish()
        return flat(model)

    with pytest.warns(UserWarning, match="did not count"):
        one, two = offbeat.Simulation(2).run(run)
    assert torch.equal(one, two)
    assert one.isfinite().all()


def test_slow_momentum_can_be_eager():
    def run(rank, peers):
        model = build()
        replica = offbeat.SlowMo(
            torch.optim.SGD(model.parameters(), lr=0.1), model, every=3, slow_momentum=0.6, group=peers, subgroup=None,
            level={"eager": True},
        )  # fmt: skip
        other = build()  # with a constant inner rate slow momentum is SGD with momentum, at a rate of 1
        plain = offbeat.DiLoCo(
            torch.optim.SGD(other.parameters(), lr=0.1), other, every=3, eager=True, group=peers, subgroup=None,
            outer=functools.partial(offbeat.SGD, lr=1.0, momentum=0.6),
        )  # fmt: skip
        close(train(model, replica, range(14), rank), [[one] * 2 for one in train(other, plain, range(14), rank)], rank)

    offbeat.Simulation(2).run(run)


def test_parameters_that_are_unfrozen_later():
    def run(rank, peers):
        model = build()
        model[0].weight.requires_grad_(False)
        replica = offbeat.DiLoCo(
            adamw(model.parameters()), model, every=2, eager=True, group=peers, subgroup=None, level=LEVEL
        )
        train(model, replica, range(3), rank)
        model[0].weight.requires_grad_(True)
        train(model, replica, range(3, 9), rank)
        replica.finish()
        return flat(model)

    one, two = offbeat.Simulation(2).run(run)
    assert torch.equal(one, two)


def test_one_replica_makes_plain_outer_steps():
    finals = []
    for eager in (False, True):

        def run(rank, peers, eager=eager):
            model = build()
            replica = offbeat.DiLoCo(adamw(model.parameters()), model, every=3, eager=eager, group=peers, subgroup=None)
            train(model, replica, range(8), rank)
            return flat(model)

        finals += offbeat.Simulation(1).run(run)
    assert torch.equal(*finals)


def test_the_delay_is_a_period():
    assert offbeat.Level(every=7, outer=nesterov, eager=True).delay == 7
    assert offbeat.Level(every=7, outer=nesterov, eager=True, delay=3).delay == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"outer": None}, "eager=True needs an outer optimizer"),
        ({"mixing": 0.5}, "mixing=0.5 cannot be used with eager=True"),
        ({"every": lambda step: 3}, "needs a delay"),
        ({"delay": 9}, "longer than"),
    ],
)
def test_options_that_cannot_work(options, words):
    with pytest.raises(ValueError, match=words):
        offbeat.Level(**{"every": 4, "outer": nesterov, "eager": True, **options})


def test_what_cannot_be_eager():
    def run(rank, peers):
        model = build()
        inner = adamw(model.parameters())
        with pytest.raises(TypeError, match="eager must be True or False"):
            offbeat.DiLoCo(inner, model, eager=1, group=peers, subgroup=None)
        for outer in (functools.partial(offbeat.Adam, lr=0.1), functools.partial(nesterov, weight_decay=0.1)):
            with pytest.raises(ValueError, match="linear in the pseudo-gradient"):
                offbeat.DiLoCo(inner, model, eager=True, outer=outer, group=peers, subgroup=None)
        levels = [offbeat.Level(every=2), offbeat.Level(every=4, outer=nesterov, eager=True)]
        with pytest.raises(ValueError, match="several levels"):
            offbeat.Replica(inner, model, levels, group=peers, subgroup=None)

    offbeat.Simulation(2).run(run)


def test_a_round_in_flight_is_not_loaded_without_its_eager_step():
    def run(rank, peers):
        saved = {}
        for eager in (True, False):
            model = build()
            replica = offbeat.DiLoCo(
                adamw(model.parameters()), model, every=2, delay=2, eager=eager, group=peers, subgroup=None
            )
            train(model, replica, range(3), rank)
            saved[eager] = replica.state_dict()
        with pytest.raises(ValueError, match="eager step has been taken"):
            replica.load_state_dict(saved[True])
        replica.load_state_dict(saved[False])

    offbeat.Simulation(2).run(run)
