"""Edges of rounds: ends, loads, weights, numbers that are not finite, frozen parameters. Replicas in one process."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import offbeat
from offbeat.replicas.schedule import Entry, Schedule
from tests.harness import batch, flat, loss, make, sgd

MODELS = [make(seed) for seed in range(3)]  # made before there are threads, which share torch's generator
adam = functools.partial(offbeat.Adam, lr=0.05)
nesterov = functools.partial(offbeat.SGD, lr=0.7, momentum=0.9, nesterov=True)


def build(seed: int = 0) -> nn.Sequential:
    return copy.deepcopy(MODELS[seed])


def train(model: nn.Module, optimizer: Any, steps: Any, rank: int) -> None:
    for step in steps:
        loss(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def replicas(world: int, function: Any) -> list[Any]:
    return offbeat.Simulation(world, timeout=30).run(function)


def rounds(replica: Any) -> list[list[int]]:
    """How many rounds of each level and fragment have moved parameters."""
    return [[one["rounds"] for one in level] for level in replica.state_dict()["replica"][0]["tracks"]]


def anchors(replica: Any) -> torch.Tensor:
    return torch.cat([a.reshape(-1) for a in replica.anchors().values()])


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("every", [4, lambda step: 4])
def test_a_fragment_of_the_level_above_does_not_do_for_a_lower_level(every, delay):
    def run(rank, peers):
        model = build()
        levels = [
            offbeat.Level(every=every, phase=4, group=1),
            offbeat.Level(every=16, outer=nesterov, fragments=4, delay=delay),
        ]
        replica = offbeat.Replica(sgd(model.parameters()), model, levels, group=peers, subgroup=None)
        train(model, replica, range(32), rank)
        return rounds(replica)

    for (lower,), top in replicas(2, run):
        assert lower == 8
        assert sum(top) >= 7


def test_only_what_replaces_the_parameters_covers_lower_levels():
    def run(rank, peers):
        model = build()
        levels = [
            offbeat.Level(every=2, group=1),
            offbeat.Level(every=5, group=1),
            offbeat.Level(every=6, outer=nesterov, delay=3),
        ]
        replica = offbeat.Replica(sgd(model.parameters()), model, levels, group=peers, subgroup=None)
        train(model, replica, range(12), rank)
        return rounds(replica)

    # After 10 steps the second level covers the first; the third, which is late, covers nobody.
    assert all(found == [[5], [2], [1]] for found in replicas(2, run))


@pytest.mark.parametrize("options", [{}, {"delay": 2}, {"fragments": 2}, {"codec": "int8", "error_feedback": 1.0}])
@pytest.mark.parametrize("world", [1, 2])
def test_no_outer_step_without_a_step(options, world):
    """finish() and sync() right after a round, and again: momentum does not go on by itself."""

    def run(rank, peers):
        model = build()
        diloco = offbeat.DiLoCo(sgd(model.parameters()), model, every=4, group=peers, subgroup=None, **options)
        train(model, diloco, range(8), rank)
        diloco.finish()
        diloco.sync()
        before, moved = flat(model), anchors(diloco)
        for _ in range(2):
            diloco.finish()
            diloco.sync()
        assert torch.equal(flat(model), before)
        assert torch.equal(anchors(diloco), moved)
        return flat(model), moved

    found = replicas(world, run)
    assert all(torch.equal(model, found[0][1]) for model, _ in found)


def test_rounds_before_any_local_step_move_nothing():
    def run(rank, peers):
        model = build()
        diloco = offbeat.DiLoCo(sgd(model.parameters()), model, every=4, warmup=5, group=peers, subgroup=None)
        train(model, diloco, range(3), rank)
        before = flat(model)
        diloco.sync()  # in warm-up
        assert torch.allclose(flat(model), before, rtol=1e-12)
        train(model, diloco, range(3, 5), rank)
        before = flat(model)
        diloco.finish()  # after it, without a local step
        assert torch.allclose(flat(model), before, rtol=1e-12)
        other = build()
        diloco = offbeat.DiLoCo(sgd(other.parameters()), other, every=4, group=peers, subgroup=None)
        other.load_state_dict(build(seed=1).state_dict())  # weights that come after the optimizer
        before = flat(other)
        diloco.finish()
        assert torch.allclose(flat(other), before, rtol=1e-12)
        # Overlapped, the last step of warm-up is made in backward, and anchors are of the forward pass before it.
        other = build()
        inner = sgd(other.parameters())
        offbeat.overlap(inner, other)
        diloco = offbeat.DiLoCo(inner, other, every=4, group=peers, subgroup=None)
        loss(other, batch(0, 0)).backward()  # the same on both ranks, and a step without step()
        before = flat(other)
        diloco.finish()
        assert torch.allclose(flat(other), before, rtol=1e-12)

    replicas(2, run)


@pytest.mark.parametrize("policy", ["skip", "leave_out"])
@pytest.mark.parametrize("outer", [None, nesterov])
def test_a_round_that_was_skipped_is_saved_as_such(policy, outer):
    def run(rank, peers):
        finals = []
        for stop in (False, True):
            model = build()
            level = offbeat.Level(every=4, phase=4, delay=3, outer=outer, nonfinite=policy)
            build_replica = functools.partial(offbeat.Replica, levels=[level], group=peers, subgroup=None)
            replica = build_replica(sgd(model.parameters()), model)
            train(model, replica, range(3), rank)
            with torch.no_grad():
                if rank == 1:
                    model[0].bias[0] = float("nan")
            replica.optim.param_groups[0]["lr"] = 0.0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                replica.step()
                if stop:
                    saved = copy.deepcopy((model.state_dict(), replica.state_dict()))
                    model = build(seed=2)
                    replica = build_replica(sgd(model.parameters()), model)
                    model.load_state_dict(saved[0])
                    replica.load_state_dict(saved[1])
                for _ in range(3):
                    replica.step()
            finals.append(torch.cat([flat(model), anchors(replica) if outer else torch.zeros(1)]))
        assert torch.equal(finals[0].nan_to_num(7.0), finals[1].nan_to_num(7.0))
        return finals[1]

    found = replicas(2, run)
    assert found[0].isfinite().all()
    if policy == "leave_out":
        assert found[1].isfinite().all()


def test_steps_of_a_skipped_round_are_not_lost_in_a_checkpoint_after_which_nobody_steps():
    def run(rank, peers):
        made = []
        for _ in range(2):
            model = build()
            options = {"every": 4, "delay": 3, "nonfinite": "skip", "group": peers, "subgroup": None}
            made.append((model, offbeat.DiLoCo(sgd(model.parameters()), model, **options)))
        (model, replica), (other, there) = made
        train(model, replica, range(3), rank)
        old = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model[0].bias[0] += float("nan") if rank == 1 else 0.0
        replica.optim.param_groups[0]["lr"] = 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replica.step()
            model.load_state_dict(old)
            other.load_state_dict(old)
            there.load_state_dict(copy.deepcopy(replica.state_dict()))
            replica.finish()
            there.finish()
        return flat(model), flat(other), flat(build())

    for one, two, start in replicas(2, run):
        assert torch.equal(one, two)
        assert not torch.equal(one, start)


@pytest.mark.parametrize(("kind", "rate"), [("DiLoCo", 0.8), ("SlowMo", 1.0)])
def test_schedulers_and_state_of_the_outer_optimizer_after_a_load(kind, rate):
    def run(rank, peers):
        def make_one():
            model = build()
            return model, getattr(offbeat, kind)(sgd(model.parameters()), model, every=2, group=peers, subgroup=None)

        model, diloco = make_one()
        fresh = copy.deepcopy((model.state_dict(), diloco.state_dict()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(diloco.outer, 0.5)
        train(model, diloco, range(4), rank)
        saved = copy.deepcopy((model.state_dict(), diloco.state_dict()))
        outer = diloco.outer
        diloco.load_state_dict(saved[1])
        assert diloco.outer is outer
        scheduler.step()
        assert diloco.outer.param_groups[0]["lr"] == rate / 2
        # A checkpoint from before the first local step leaves nothing behind of what came after it.
        model.load_state_dict(fresh[0])
        diloco.load_state_dict(fresh[1])
        diloco.outer.param_groups[0]["lr"] = rate
        train(model, diloco, range(6), rank)
        other, again = make_one()
        train(other, again, range(6), rank)
        assert torch.equal(flat(model), flat(other))

    replicas(2, run)


def test_a_learning_rate_that_has_fallen_to_zero():
    def run(rank, peers):
        model = build()
        slowmo = offbeat.SlowMo(sgd(model.parameters()), model, every=4, slow_momentum=0.0, group=peers, subgroup=None)
        train(model, slowmo, range(6), rank)
        before = flat(model)
        slowmo.optim.param_groups[0]["lr"] = 0.0
        slowmo.finish()
        return before, flat(model)

    found = replicas(2, run)
    mean = (found[0][0] + found[1][0]) / 2
    for _, after in found:
        torch.testing.assert_close(after, mean, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cls", [offbeat.LocalSGD, offbeat.SlowMo, offbeat.DiLoCo])
def test_parameters_that_are_frozen_before_the_first_round(cls):
    """What replicas have trained by themselves is averaged; what they have not is everybody's already."""

    def run(rank, peers):
        model = build()
        groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2], model[4])]
        every = {3: None} if cls is offbeat.LocalSGD else 3
        replica = cls(sgd(groups), model, every=every, warmup=2, group=peers, subgroup=None)
        model[4].requires_grad_(False)  # never trained
        train(model, replica, range(3), rank)  # LocalSGD's first average comes after the first local step
        if cls is offbeat.LocalSGD:
            model[0].requires_grad_(False)
            train(model, replica, range(3, 6), rank)
        else:
            train(model, replica, range(3, 4), rank)
            model[2].requires_grad_(False)
            train(model, replica, range(4, 5), rank)
        assert torch.equal(model[4].weight, build()[4].weight)
        return flat(model)

    assert torch.equal(*replicas(2, run))


@pytest.mark.parametrize(("phase", "first"), [(None, 3), (5, 5), (1, 1)])
def test_the_first_round_of_a_period_that_is_a_function(phase, first):
    def run(rank, peers):
        model = build()
        level = offbeat.Level(every=lambda step: 3, phase=phase, outer=adam)
        replica = offbeat.Replica(sgd(model.parameters()), model, [level], group=peers, subgroup=None)
        syncs = []
        for step in range(9):
            train(model, replica, range(step, step + 1), rank)
            syncs.append(replica.syncs)
        return [step + 1 for step, n in enumerate(syncs) if n > (syncs[step - 1] if step else 0)]

    assert all(found[:2] == [first, first + 3] for found in replicas(2, run))


def test_a_replica_that_was_left_out_recovers():
    def run(rank, peers):
        model = build()
        level = offbeat.Level(every=2, outer=nesterov, nonfinite="leave_out")
        inner = offbeat.AdamW(model.parameters(), lr=0.01)
        replica = offbeat.Replica(inner, model, [level], group=peers, subgroup=None)
        train(model, replica, range(3), rank)
        loss(model, batch(3, rank)).backward()
        if rank == 1:
            model[0].weight.grad[0, 0] = float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replica.step()
            replica.zero_grad()
            train(model, replica, range(4, 8), rank)
        return flat(model)

    found = replicas(2, run)
    assert found[0].isfinite().all()
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="cannot be used with fragments"):
        offbeat.Level(every=4, fragments=2, nonfinite="leave_out")


@pytest.mark.parametrize(("cls", "first"), [(offbeat.LocalSGD, 1), (offbeat.DiLoCo, 3)])
def test_replicas_have_not_agreed_if_the_last_round_was_skipped(cls, first):
    """Also on a rank that has made no step since the round before."""

    def run(rank, peers):
        model = build()
        replica = cls(sgd(model.parameters()), model, every=3, nonfinite="skip", group=peers, subgroup=None)
        train(model, replica, range(first), rank)  # a round comes after the last of them
        if rank == 1:
            train(model, replica, range(first, first + 1), rank)
            with torch.no_grad():
                model[0].bias[0] = float("nan")
        replica.finish()
        said = [replica.agreed]
        other = cls(sgd(model.parameters()), model, every=3, nonfinite="skip", group=peers, subgroup=None)
        other.load_state_dict(copy.deepcopy(replica.state_dict()))
        said.append(other.agreed)
        del other
        with torch.no_grad():
            model[0].bias.nan_to_num_(0.0)
        replica.finish()
        return flat(model), [*said, replica.agreed]

    with pytest.warns(UserWarning, match=r"on rank 1: 0\.bias\); this round was skipped"):
        (one, said), (two, also) = replicas(2, run)
    assert torch.equal(one, two)
    assert said == also == [False, False, True]


def test_one_replica_that_is_not_finite():
    def run(rank, peers):
        model = build()
        level = offbeat.Level(every=1, outer=nesterov, nonfinite="leave_out")
        replica = offbeat.Replica(
            torch.optim.SGD(model.parameters(), lr=0.0), model, [level], group=peers, subgroup=None
        )
        replica.step()
        with torch.no_grad():
            model[0].bias[0] = float("nan")
        with pytest.raises(offbeat.NotFinite):
            replica.step()
        assert anchors(replica).isfinite().all()

    replicas(1, run)


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        ({"codec": offbeat.TopK(0.05)}, {"codec": offbeat.TopK(0.9)}, "codec is not the same"),
        (
            {"level": {"anchor_dtype": torch.float32}},
            {"level": {"anchor_dtype": torch.bfloat16}},
            "anchor_dtype is not",
        ),
        ({"outer_lr": 0.5}, {"outer_lr": 0.6}, "outer is not the same"),
    ],
)
def test_options_are_compared(one, two, words):
    def run(rank, peers):
        model = build()
        with pytest.raises(offbeat.Disagreement, match=words):
            offbeat.DiLoCo(sgd(model.parameters()), model, group=peers, subgroup=None, **(two if rank else one))

    replicas(2, run)


def test_other_fragments_and_codecs_after_a_load():
    def run(rank, peers):
        def make_one(**options):
            model = build()
            return model, offbeat.DiLoCo(sgd(model.parameters()), model, every=4, group=peers, subgroup=None, **options)

        model, diloco = make_one()
        train(model, diloco, range(4), rank)
        saved = copy.deepcopy(diloco.state_dict())
        _, other = make_one(fragments=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other.load_state_dict(saved)
        assert torch.equal(anchors(other), anchors(diloco))
        assert len(other.outer.state) == len(list(model.parameters()))
        model, diloco = make_one(delay=3, codec="int8")
        train(model, diloco, range(5), rank)
        saved = copy.deepcopy(diloco.state_dict())
        _, plain = make_one(delay=3)
        with pytest.raises(ValueError, match="codec it was saved with"):
            plain.load_state_dict(saved)
        assert plain.steps == 0

    replicas(2, run)


@pytest.mark.parametrize(("saved", "here"), [(offbeat.DiLoCo, offbeat.SlowMo), (offbeat.SlowMo, offbeat.DiLoCo)])
def test_state_of_another_outer_optimizer_changes_nothing(saved, here):
    def run(rank, peers):
        model = build()
        replica = saved(sgd(model.parameters()), model, every=2, group=peers, subgroup=None)
        train(model, replica, range(3), rank)
        other = build()
        there = here(sgd(other.parameters()), other, every=2, group=peers, subgroup=None)
        train(other, there, range(4), rank)
        before = repr(there.state_dict())
        with pytest.raises(ValueError, match=r"state of another outer optimizer, .* nothing was changed"):
            there.load_state_dict(replica.state_dict())
        assert repr(there.state_dict()) == before

    replicas(2, run)


def test_outer_momentum_that_was_switched_on_later_is_loaded():
    def run(rank, peers):
        made = []
        for _ in range(2):
            model = build()
            made.append((model, offbeat.DiLoCo(sgd(model.parameters()), model, every=2, outer_momentum=0, group=peers)))
        (model, replica), (other, there) = made
        replica.outer.param_groups[0]["momentum"] = 0.5
        train(model, replica, range(4), rank)
        other.load_state_dict(model.state_dict())
        there.load_state_dict(copy.deepcopy(replica.state_dict()))
        for one in made:
            train(*one, range(4, 8), rank)
        assert torch.equal(flat(model), flat(other))

    replicas(2, run)


def test_weights():
    def run(rank, peers):
        model = build()
        level = offbeat.Level(every=2, phase=1, delay=1, nonfinite="skip")
        replica = offbeat.Replica(
            torch.optim.SGD(model.parameters(), lr=0.0), model, [level], group=peers, subgroup=None, weighted=True
        )
        with torch.no_grad():
            model[0].bias[0] = float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replica.seen(100)
            replica.step()
            replica.seen(100)
            replica.step()
        ((fragment,),) = replica.state_dict()["replica"][0]["tracks"]
        assert fragment["seen"] == 200  # a round that was skipped has used nothing up
        with torch.no_grad():
            model[0].bias[0] = 0.0
        replica.step()
        replica.step()
        replica.sync()  # right after a round nobody has a weight, and all are equal
        return flat(model)

    assert torch.equal(*replicas(2, run))


def test_tied_weights_have_their_first_name():
    def run(rank, peers):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Linear(4, 4)
                self.head = nn.Linear(4, 4)
                self.head.weight = self.embedding.weight

        model = Tied()
        names = [name for name, _ in model.named_parameters()]
        parts = [names[:1], names[1:]]
        diloco = offbeat.DiLoCo(sgd(model.parameters()), model, every=4, fragments=parts, group=peers, subgroup=None)
        assert set(diloco.anchors()) == set(names)

    replicas(2, run)


def test_delayed_averages_in_a_wider_dtype_are_not_rounded_in_between():
    """With three ranks: thirds are not exact in bfloat16."""

    def run(rank, peers):
        model = nn.Linear(50, 40).bfloat16()
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        local = offbeat.LocalSGD(
            torch.optim.SGD(model.parameters(), lr=0.0), model, every=4, delay=1, group=peers, subgroup=None,
            reduce_dtype=torch.float32,
        )  # fmt: skip
        before = flat(model)
        local.step()
        local.step()
        return before, flat(model)

    found = replicas(3, run)
    mean = sum(before.float() / 3 for before, _ in found)
    for before, after in found:
        assert torch.equal(after, before + (mean - before.float()).bfloat16())


@pytest.mark.parametrize("outer", [None, functools.partial(offbeat.SGD, lr=0.7)])
@pytest.mark.parametrize("options", [{"delay": 2}, {"delay": 0}])
def test_a_rank_without_a_weight_and_with_nan_gets_the_result(outer, options):
    """Whether parameters are mixed, or a difference is added to them."""

    def run(rank, peers):
        model = build()
        levels = [offbeat.Level(every=3, outer=outer, mixing=None if outer is None else 0.25, **options)]
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = offbeat.Replica(inner, model, levels, weighted=True, group=peers, subgroup=None)
        for step in range(7):
            if rank == 0:
                replica.seen(5)
            if rank == 1 and step == 2:
                with torch.no_grad():
                    model[2].weight[0] = float("nan")
            train(model, replica, [step], rank)
        return flat(model), [t for state in inner.state.values() for t in state.values()]

    for model, state in replicas(2, run):
        assert model.isfinite().all()
        assert all(t.isfinite().all() for t in state)


def test_nobody_spreads_nan_without_weights():
    """sync() before anybody has seen anything: ranks that are finite count."""

    def run(rank, peers):
        model = build()
        replica = offbeat.LocalSGD(sgd(model.parameters()), model, every=9, weighted=True, group=peers, subgroup=None)
        replica.seen(1)
        train(model, replica, [0], rank)
        train(model, replica, [1], rank)
        if rank == 1:
            with torch.no_grad():
                model[0].bias.fill_(float("inf"))
        replica.sync()
        return flat(model)

    one, two = replicas(2, run)
    assert torch.equal(one, two)
    assert one.isfinite().all()


def test_nothing_finite_is_left_to_agree_on():
    """sync() without weights when no replica is finite: all ranks raise, and replicas are not said to agree."""

    def run(rank, peers):
        model = build()
        replica = offbeat.LocalSGD(sgd(model.parameters()), model, every=9, weighted=True, group=peers, subgroup=None)
        replica.seen(1)
        train(model, replica, [0, 1], rank)
        with torch.no_grad():
            model[0].bias.fill_(float("nan"))
        with pytest.raises(offbeat.NotFinite, match="nothing to agree on"):
            replica.sync()
        return replica.agreed

    assert replicas(2, run) == [False, False]


def test_fragments_may_name_frozen_parameters():
    """A whole fragment of them, which travels as nothing."""

    def run(rank, peers, codec):
        model = build()
        names = [name for name, _ in model.named_parameters()]
        model[0].requires_grad_(False)
        replica = offbeat.DiLoCo(
            sgd(model.parameters()), model, every=3, fragments=[names[:2], names[2:4], names[4:]], codec=codec,
            group=peers, subgroup=None,
        )  # fmt: skip
        train(model, replica, range(9), rank)
        replica.finish()
        assert torch.equal(model[0].weight, build()[0].weight)
        with pytest.raises(ValueError, match="no such parameter"):
            offbeat.DiLoCo(sgd(model.parameters()), model, fragments=[["0.wieght"], names], group=peers, subgroup=None)
        return flat(model)

    for codec in (None, "int8"):
        one, two = offbeat.Simulation(2).run(run, codec)
        assert torch.equal(one, two)


@pytest.mark.parametrize("counts", [(5, 0), (0, 7, 2), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 3}, {"codec": "int8", "error_feedback": 1.0}])
def test_a_rank_without_any_data(counts, options):
    """It takes part from the first round on, and again in the next epoch."""

    def run(rank, peers):
        model = build()
        replica = offbeat.DiLoCo(sgd(model.parameters()), model, every=4, group=peers, subgroup=None, **options)
        for _ in range(2):
            train(model, replica, range(counts[rank]), rank)
            replica.finish()
        return flat(model), replica.steps

    found = replicas(len(counts), run)
    assert all(torch.equal(model, found[0][0]) for model, _ in found)
    assert all(steps == 2 * max(counts) for _, steps in found)


def test_a_period_that_does_not_come():
    """The end of training is found without counting up to it."""

    def run(rank, peers):
        finals = []
        for levels in (
            [offbeat.Level(every=10**12)],
            [offbeat.Level(every=10**10, group=1), offbeat.Level(every=10**12, outer=nesterov, fragments=3, delay=5)],
        ):
            model = build()
            replica = offbeat.Replica(sgd(model.parameters()), model, levels, warmup=2, group=peers, subgroup=None)
            train(model, replica, range(4 + rank), rank)
            replica.finish()
            assert replica.steps == 5
            finals.append(flat(model))
        return finals

    one, two = replicas(2, run)
    assert all(map(torch.equal, one, two))


def test_going_to_the_next_round_is_counting():
    """Whatever the periods, phases and fragments are."""
    for every, phase, parts, second in itertools.product((1, 3, 7), (None, 1, 2, 11), (1, 3), (1, 4, 9)):
        if parts > every:
            continue
        entries = [Entry(every, phase, parts), Entry(second * every + 1, phase)]
        for warmup in (0, 4):
            counting, jumping = Schedule(entries, warmup), Schedule(entries, warmup)
            counting.step = jumping.step = warmup
            for _ in range(12):
                while True:
                    counting.advance()
                    if counting.due():
                        break
                jumping.advance_to_due()
                assert jumping.step == counting.step
                assert jumping.due() == counting.due()


@pytest.mark.parametrize(
    "options",
    [
        {"every": 4},
        {"every": 5, "delay": 3},
        {"every": 6, "delay": 6, "fragments": 3, "mixing": 0.25},
        {"every": 4, "delay": 2, "outer": functools.partial(offbeat.SGD, lr=1.0)},
        {"every": 5, "warmup": 2, "delay": 4},
    ],
)
def test_one_replica_is_like_several_that_see_the_same(options):
    """It has nobody to wait for, but its outer steps come as late, and the last one at the end."""
    how = {"outer": nesterov, **options}

    def run(rank, peers):
        model = build()
        replica = offbeat.DiLoCo(sgd(model.parameters()), model, group=peers, subgroup=None, **how)
        rows = []
        for step in range(15):
            train(model, replica, [step], 0)
            rows.append(flat(model))
            if step == 8:  # with a round in flight
                saved = copy.deepcopy(replica.state_dict())
                replica = offbeat.DiLoCo(sgd(model.parameters()), model, group=peers, subgroup=None, **how)
                replica.load_state_dict(saved)
        replica.finish()
        return torch.stack([*rows, flat(model)])

    (alone,), several = replicas(1, run), replicas(2, run)
    for one in several:
        torch.testing.assert_close(alone, one, rtol=1e-12, atol=1e-12)


class Masked(nn.Module):
    """A buffer with infinities, as models of language have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        self.register_buffer("running", torch.ones(2))

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"codec": "int8"}, {"codec": "int8", "delay": 1}])
def test_masks_are_infinite_and_no_sign_of_trouble(options):
    def run(rank, peers):
        model = Masked()
        replica = offbeat.DiLoCo(sgd(model.parameters()), model, every=2, group=peers, subgroup=None, **options)
        train(model, replica, range(5), rank)
        replica.finish()
        assert torch.equal(model.mask, torch.full((3, 3), float("-inf")).triu(1))
        again = offbeat.DiLoCo(sgd(model.parameters()), model, every=2, group=peers, subgroup=None, **options)
        again.load_state_dict(replica.state_dict())
        if rank == 1:
            model.running[1] = float("inf")  # this is one
        with pytest.raises(offbeat.NotFinite, match="on rank 1: buffer 'running'"):
            again.sync()
        if rank == 1:
            model.running[1], model.mask[0, 0] = 1.0, float("nan")
        with pytest.raises(offbeat.NotFinite, match="on rank 1: buffer 'mask'"):
            again.sync()

    replicas(2, run)


def test_differences_of_float64_are_taken_in_float64():
    """Far below what float32 can tell of the parameters themselves."""

    def run(rank, peers, codec):
        model = build()
        inner = torch.optim.SGD(model.parameters(), lr=1e-9)
        outer = functools.partial(offbeat.SGD, lr=1.0)
        replica = offbeat.DiLoCo(inner, model, every=2, codec=codec, outer=outer, group=peers, subgroup=None)
        before = flat(model)
        train(model, replica, range(2), rank)
        return flat(model) - before

    (dense, _), (coded, _) = (offbeat.Simulation(2).run(run, codec) for codec in (None, "bf16"))
    assert (coded - dense).abs().max() <= 2**-7 * dense.abs().max()
    assert dense.abs().max() > 0


def test_parameters_that_nobody_trains():
    """They are never averaged: replicas must start with the same, and sync_init=True takes the first rank's."""

    def make_model(rank):
        model = build(seed=rank)
        with torch.no_grad():  # what is trained is the same
            for p, q in zip(model[2:].parameters(), build()[2:].parameters(), strict=True):
                p.copy_(q)
        model[0].requires_grad_(False)
        return model

    def run(rank, peers):
        for given in (lambda model: model[2:].parameters(), lambda model: model.parameters()):
            model = make_model(rank)
            diloco = offbeat.DiLoCo(sgd(given(model)), model, every=2, group=peers, subgroup=None)
            with pytest.raises(offbeat.Disagreement, match=r"'0\.weight' of rank 1 differs"):
                train(model, diloco, range(1), rank)
            local = offbeat.LocalSGD(sgd(given(model)), model, every=2, warmup=1, group=peers, subgroup=None)
            with pytest.raises(offbeat.Disagreement, match=r"'0\.weight' of rank 1 differs"):
                train(model, local, range(1), rank)
            model = make_model(rank)
            diloco = offbeat.DiLoCo(sgd(given(model)), model, every=2, sync_init=True, group=peers, subgroup=None)
            assert torch.equal(flat(model), flat(build()))
            train(model, diloco, range(2), rank)
        return flat(model)

    assert torch.equal(*replicas(2, run))


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.flip(0),
        lambda weight: weight[:, [1, 0, *range(2, weight.shape[1])]],
        lambda weight: torch.cat([weight[2:4], weight[:2], weight[4:]]),
        lambda weight: weight.view(-1).roll(1).view_as(weight),
        lambda weight: torch.where(torch.arange(weight.numel()).view_as(weight) == 7, -weight, weight),
    ],
)
def test_parameters_with_the_same_numbers_in_other_places_differ(change):
    def run(rank, peers):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            model = build().to(dtype)
            with torch.no_grad():
                if rank == 1:
                    model[2].weight.copy_(change(model[2].weight).clone())
            diloco = offbeat.DiLoCo(sgd(model.parameters()), model, every=2, group=peers, subgroup=None)
            with pytest.raises(offbeat.Disagreement, match=r"'2\.weight' of rank 1 differs"):
                diloco.step()

    replicas(2, run)


def test_gradients_in_other_layouts():
    """Numbers meet those of the same place, however a rank's gradient lies in memory."""

    def run(rank, peers):
        w = nn.Parameter(torch.zeros(4, 6))
        gaps = nn.Parameter(torch.zeros(6, 8).t()[::2])
        model = nn.ParameterList([w, gaps])
        replica = offbeat.LocalSGD(
            torch.optim.SGD(model.parameters(), lr=1.0), model, every=9, warmup=9, group=peers, subgroup=None
        )
        for p in model.parameters():
            grad = torch.arange(24.0).view(4, 6)
            if rank == 1:
                grad = (10 * grad).t().contiguous().t()
            p.grad = grad
        replica.step()
        for p in model.parameters():
            assert torch.equal(p, torch.arange(24.0).view(4, 6) * -5.5)
        if rank == 0:
            gaps.grad = torch.arange(24.0).view(4, 6)
        else:
            gaps.grad = None
        replica.step()
        assert torch.equal(gaps, torch.arange(24.0).view(4, 6) * -6)

    replicas(2, run)


def test_options_of_an_outer_optimizer_that_would_not_be_used():
    def run(rank, peers):
        model = build()
        for options in ({"outer_lr": 0.5}, {"outer_momentum": 0.5}):
            with pytest.raises(ValueError, match="would not be used"):
                offbeat.DiLoCo(sgd(model.parameters()), model, outer=nesterov, group=peers, subgroup=None, **options)

    replicas(1, run)


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)


def test_slow_momentum_needs_a_learning_rate():
    def run(rank, peers):
        model = build()
        replica = offbeat.SlowMo(WithoutRate(model.parameters()), model, every=2, group=peers, subgroup=None)
        with pytest.raises(ValueError, match="no 'lr'"):
            train(model, replica, range(2), rank)
        diloco = offbeat.DiLoCo(WithoutRate(model.parameters()), model, every=2, group=peers, subgroup=None)
        train(model, diloco, range(2), rank)

    replicas(1, run)


def test_an_encoded_round_in_flight_is_for_the_same_parameters():
    """Its numbers lie one after the other, and go to parameters by their names."""

    def run(rank, peers):
        def make_replica(model, params):
            inner = torch.optim.SGD(params, lr=0.1)
            return offbeat.DiLoCo(inner, model, every=3, delay=2, codec="int8", group=peers, subgroup=None)

        model = build()
        replica = make_replica(model, model.parameters())
        train(model, replica, range(4), rank)
        saved = replica.state_dict()
        turned = build()
        turned.load_state_dict(model.state_dict())
        other = make_replica(turned, reversed(list(turned.parameters())))
        other.load_state_dict(saved)
        wider = build()
        wider[0] = nn.Linear(wider[0].in_features + 1, wider[0].out_features)
        third = make_replica(wider, wider.parameters())
        before = flat(wider)
        with pytest.raises(ValueError, match=r"elements of '0\.weight', where this model has \d+ in the same fragment"):
            third.load_state_dict(saved)
        assert third.steps == 0
        assert torch.equal(flat(wider), before)
        train(model, replica, range(4, 5), rank)  # the round lands
        train(turned, other, range(4, 5), rank)
        assert torch.equal(flat(turned), flat(model))
        replica.finish()

    replicas(2, run)


def test_mixing_above_an_outer_optimizer():
    """What such a level adds differs from rank to rank, and the anchors below it could not follow."""
    model = build()
    levels = [offbeat.Level(every=2, outer=nesterov), offbeat.Level(every=4, mixing=0.5)]
    with pytest.raises(ValueError, match="cannot be above one with an outer"):
        offbeat.Replica(sgd(model.parameters()), model, levels)


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_that_were_assigned_are_averaged_too(in_place):
    """Not only those that a backward pass has made, and at every step of warm-up."""

    def run(rank, peers):
        w = nn.Parameter(torch.zeros(3))
        model = nn.ParameterList([w])
        inner = torch.optim.SGD([w], lr=1.0)
        replica = offbeat.LocalSGD(inner, model, every=9, warmup=9, group=peers, subgroup=None)
        total = 0.0
        for step in range(1, 5):
            grad = torch.full((3,), float(step * rank))
            if in_place and w.grad is not None:
                w.grad.copy_(grad)
            else:
                w.grad = grad
            if step > 2:
                replica.average_gradients()
                assert torch.equal(w.grad, torch.full((3,), step / 2))
                w.grad.mul_(0.5)  # clipped: averaged once
                if step == 4 and rank == 0:
                    w.grad = w.grad + 1  # and new again
            replica.step()
            total -= step / 2 if step < 3 else step / 4 + (step == 4) / 2
            assert torch.equal(w, torch.full((3,), total)), step

    replicas(2, run)


@pytest.mark.parametrize("options", [{"mixing": 0.5}, {"delay": 3}, {"delay": 2, "fragments": 2, "codec": "int8"}])
def test_anchors_stay_together_while_some_ranks_are_done(options):
    """A rank without data takes over the result of the level above; anchors below that move as everybody's do."""

    def run(rank, peers):
        model = build()
        levels = [offbeat.Level(every=2, group=2, outer=nesterov), offbeat.Level(every=4, outer=nesterov, **options)]
        replica = offbeat.Replica(sgd(model.parameters()), model, levels, group=peers, subgroup=None)
        for steps in ((1, 9, 5, 14), (7, 3, 2, 6)):
            train(model, replica, range(steps[rank]), rank)
            replica.finish()
        state = replica.outers[0].state.values()  # made of pseudo-gradients, and these of anchors
        return flat(model), torch.cat([one["momentum_buffer"].reshape(-1) for one in state])

    found = replicas(4, run)
    assert all(torch.equal(model, found[0][0]) for model, _ in found)
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[2][1], found[3][1])


def test_a_replica_alone_at_a_level_above_an_outer_optimizer():
    """Anchors below follow a mean over one rank as they follow one over several."""

    def run(rank, peers):
        model = build()
        levels = [offbeat.Level(every=3, outer=nesterov), offbeat.Level(every=4)]
        replica = offbeat.Replica(sgd(model.parameters()), model, levels, group=peers, subgroup=None)
        train(model, replica, range(11), 0)
        return flat(model)

    (alone,), several = replicas(1, run), replicas(2, run)
    for one in several:
        torch.testing.assert_close(alone, one, rtol=1e-12, atol=1e-12)


def test_a_step_that_a_checkpoint_makes_is_not_counted():
    """torch.distributed.checkpoint steps optimizers without state, with gradients of zero, to see what they keep."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    def run(saves):
        def train_and_save(rank, peers):
            model = build()
            plain = torch.optim.SGD(model.parameters(), lr=0.1)  # never has any
            replica = offbeat.LocalSGD(plain, model, every=3, warmup=1, group=peers, subgroup=None)
            for step in range(6):
                if saves:
                    get_optimizer_state_dict(model, replica)
                train(model, replica, [step], rank)
            return flat(model), replica.steps, replica.syncs

        return replicas(2, train_and_save)

    for (found, *counts), (expected, *others) in zip(run(True), run(False), strict=True):
        assert counts == others == [6, 2]
        assert torch.equal(found, expected)


def test_infinity_on_one_rank_is_no_mask():
    def run(rank, peers):
        model = Masked()
        if rank == 1:
            model.running[1] = float("inf")
        replica = offbeat.DiLoCo(sgd(model.parameters()), model, every=2, group=peers, subgroup=None)
        with pytest.raises(offbeat.NotFinite, match="on rank 1: buffer 'running'"):
            replica.sync()

    replicas(2, run)


@pytest.mark.parametrize("options", [{}, {"codec": "int8"}])
def test_buffers_of_one_replica_alone_are_its_own(options):
    def run(rank, peers):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = offbeat.DiLoCo(inner, model, every=2, delay=1, group=peers, subgroup=None, **options)
        for step in range(9):
            if step == 4:  # a round is in flight
                saved = replica.state_dict()
                replica.load_state_dict(saved)
            model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            replica.step()
            replica.zero_grad()
            assert model[1].num_batches_tracked == step + 1
        replica.finish()
        assert model[1].num_batches_tracked == 9

    replicas(1, run)


def test_frozen_parameters_of_special_kinds_are_left_alone():
    def run(rank, peers):
        model = build()
        model.quantized = nn.Parameter(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), False)
        model.sparse = nn.Parameter(torch.eye(3).to_sparse(), False)
        model.meta = nn.Parameter(torch.empty(3, device="meta"), False)
        trained = [p for p in model.parameters() if p.requires_grad]
        for wrap in (offbeat.LocalSGD, offbeat.DiLoCo):
            inner = torch.optim.SGD(trained, lr=0.01)
            replica = wrap(inner, model, every=2, warmup=1, group=peers, subgroup=None, sync_init=True)
            train(model, replica, range(3), rank)
            replica.finish()
            del replica
        return flat(nn.ParameterList(trained))

    one, two = replicas(2, run)
    assert torch.equal(one, two)


@pytest.mark.parametrize("frozen", [0, -1])
def test_slow_momentum_takes_no_learning_rate_of_a_frozen_parameter(frozen):
    """One that was frozen in warm-up has the rate of that time; which parameter it is makes no difference."""

    def run(rank, peers):
        model = build()
        slowmo = offbeat.SlowMo(sgd(model.parameters()), model, every=2, warmup=3, group=peers, subgroup=None)
        for step in range(7):
            slowmo.param_groups[0]["lr"] = 0.1 * 0.5**step
            if step == 2:
                list(model.parameters())[frozen].requires_grad_(False)
            train(model, slowmo, [step], rank)
        return slowmo.outer.param_groups[0]["inner_lr"]

    assert replicas(2, run) == [0.1 * 0.5**6] * 2


def test_slow_momentum_is_loaded_where_the_learning_rate_is_zero():
    """The last rate that was not zero is of a step between the last round and the checkpoint."""

    def run(rank, peers):
        def steps(model, slowmo, some):
            for step in some:
                slowmo.param_groups[0]["lr"] = max(0.0, 0.1 - 0.02 * step)
                train(model, slowmo, [step], rank)

        def make_one():
            model = build()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            return model, offbeat.SlowMo(inner, model, every=3, slow_momentum=0.6, group=peers, subgroup=None)

        model, slowmo = make_one()
        steps(model, slowmo, range(7))
        other, loaded = make_one()
        other.load_state_dict(model.state_dict())
        loaded.load_state_dict(copy.deepcopy(slowmo.state_dict()))
        for one, replica in ((model, slowmo), (other, loaded)):
            steps(one, replica, range(7, 9))
        return flat(model), flat(other)

    assert all(torch.equal(*found) for found in replicas(2, run))


@pytest.mark.parametrize("options", [{}, {"delay": 2}, {"delay": 2, "fragments": 2, "codec": "int8"}])
@pytest.mark.parametrize("kind", ["outer", "inner"])
def test_a_rank_that_is_done_takes_the_options_of_those_that_train(kind, options):
    """Its schedules stand still: that of the outer optimizer, and that of the inner one, which SlowMo's steps need."""

    def run(rank, peers, *, stands_still):
        model = build()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "outer":
            replica = offbeat.DiLoCo(inner, model, every=4, group=peers, subgroup=None, **options)
        else:
            replica = offbeat.SlowMo(inner, model, every=4, group=peers, subgroup=None, level=options)
        scheduled = replica.outer if kind == "outer" else inner

        def step(numbers):
            for one in numbers:
                scheduled.param_groups[0]["lr"] = 0.2 * 0.9**one
                train(model, replica, [one], rank)

        step(range(18 if rank == 1 else 7))
        if rank == 0 and not stands_still:
            # Whatever else it has makes no difference.
            replica.outer.param_groups[0]["lr"] = 0.0
        replica.finish()
        assert replica.agreed
        return flat(model), anchors(replica)

    one, two = replicas(2, functools.partial(run, stands_still=True))
    for other in replicas(2, functools.partial(run, stands_still=False)):
        for found in (one, two):
            assert torch.equal(found[0], other[0])
            assert torch.equal(found[1], other[1])


def test_ranks_that_train_with_other_outer_options_raise():
    def run(rank, peers):
        model = build()
        diloco = offbeat.DiLoCo(sgd(model.parameters()), model, every=2, group=peers, subgroup=None)
        train(model, diloco, range(3), rank)
        diloco.outer.param_groups[0]["lr"] = 0.5 + 0.1 * (rank == 1)
        before = anchors(diloco)
        with pytest.raises(
            offbeat.Disagreement, match=r"'lr' of the outer optimizer .*: 0\.5 on ranks 0, 2, 0\.6 on rank 1"
        ):
            train(model, diloco, [3], rank)
        assert torch.equal(anchors(diloco), before)
        diloco.outer.param_groups[0]["lr"] = 0.5
        train(model, diloco, range(4, 6), rank)
        return anchors(diloco)

    found = replicas(3, run)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("level", [{}, {"delay": 1}])
def test_slow_momentum_where_a_rank_has_another_learning_rate(level):
    """A GradScaler may skip a step of the schedule on one of them. The first rank's rate does for all."""

    def run(rank, peers):
        model = build()
        slowmo = offbeat.SlowMo(sgd(model.parameters()), model, every=2, group=peers, subgroup=None, level=level)
        for step in range(5):
            slowmo.param_groups[0]["lr"] = 0.1 * 0.9 ** (step - (rank == 1 and step > 1))
            train(model, slowmo, [step], rank)
        return anchors(slowmo), torch.cat(
            [one["slow_momentum_buffer"].reshape(-1) for one in slowmo.outer.state.values()]
        )

    one, two = replicas(2, run)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


@pytest.mark.parametrize("options", [{}, {"codec": "int8"}])
def test_a_round_in_flight_keeps_the_options_it_began_with(options):
    """A schedule that goes on meanwhile is for the next one, also where the round is loaded from a checkpoint."""

    def run(rank, peers):
        def make_one():
            model = build()
            inner = torch.optim.SGD([{"params": model[i].parameters()} for i in (0, 2, 4)], lr=0.1)
            return model, offbeat.DiLoCo(inner, model, every=4, delay=2, group=peers, subgroup=None, **options)

        finals = []
        for change in (None, "in flight", "loaded"):
            model, diloco = make_one()
            train(model, diloco, range(5), rank)
            if change is not None:
                diloco.outer.param_groups[1]["lr"] = 0.01
            if change == "loaded":
                other, loaded = make_one()
                other.load_state_dict(model.state_dict())
                loaded.load_state_dict(copy.deepcopy(diloco.state_dict()))
                model, diloco = other, loaded
            train(model, diloco, [5], rank)
            assert diloco.outer.param_groups[1]["lr"] == (0.8 if change is None else 0.01)
            finals.append((flat(model), anchors(diloco)))
        return finals

    for first, *others in replicas(2, run):
        for other in others:
            assert torch.equal(first[0], other[0])
            assert torch.equal(first[1], other[1])


@pytest.mark.parametrize("end", ["rounds go on", "finish"])
@pytest.mark.parametrize("outer", [None, nesterov])
def test_what_a_skipped_round_had_taken_is_given_back_after_a_load(outer, end):
    """At lower levels too, and when the round would have landed: rounds below come before and after that."""

    def run(rank, peers):
        def make_one():
            model = build()
            top = offbeat.Level(every=8, phase=2, delay=5, nonfinite="skip", outer=outer)
            levels = [offbeat.Level(every=3, phase=3), top]
            options = {"group": peers, "subgroup": None, "weighted": True}
            return model, offbeat.Replica(torch.optim.SGD(model.parameters(), lr=0.1), model, levels, **options)

        def steps(model, replica, some):
            for step in some:
                replica.seen(1 if rank == 0 or step >= 2 else 9)
                train(model, replica, [step], rank)

        model, replica = make_one()
        steps(model, replica, [0])
        good = model[0].weight.detach()[0, 0].clone()
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan") if rank == 1 else good
        replica.param_groups[0]["lr"] = 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replica.seen(1 if rank == 0 else 9)
            replica.step()
            with torch.no_grad():
                model[0].weight[0, 0] = good
            replica.param_groups[0]["lr"] = 0.1
            other, loaded = make_one()
            other.load_state_dict(model.state_dict())
            loaded.load_state_dict(copy.deepcopy(replica.state_dict()))
            for one, there in ((model, replica), (other, loaded)):
                steps(one, there, range(2, 12 if end == "rounds go on" else 3))
                if end == "finish":
                    there.finish()
        return flat(model), flat(other), replica.agreed, loaded.agreed

    for one, two, agreed, also in replicas(2, run):
        assert torch.equal(one, two)
        assert agreed == also


def _diloco(**options):
    return functools.partial(offbeat.DiLoCo, every=4, subgroup=None, **options)


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        (
            _diloco(delay=2),
            functools.partial(offbeat.LocalSGD, every=4, delay=2, subgroup=None),
            "for an outer optimizer",
        ),
        (
            functools.partial(offbeat.LocalSGD, every=4, delay=2, subgroup=None),
            _diloco(delay=2),
            "for an outer optimizer",
        ),
        (_diloco(delay=2), _diloco(), "are not late"),
        (_diloco(delay=2, fragments=2), _diloco(delay=2, fragments=("strided", 2)), "another fragment"),
        (_diloco(delay=2, codec="int8"), _diloco(delay=2), "was encoded"),
    ],
)
def test_a_round_in_flight_that_could_not_land_changes_nothing(saved, here, words):
    def run(rank, peers):
        model = build()
        replica = saved(adam(model.parameters()), model, group=peers)
        train(model, replica, range(5), rank)
        other = build()
        other[0].requires_grad_(False)
        there = here(adam(other.parameters()), other, group=peers)
        train(other, there, range(2), rank)
        before = copy.deepcopy((there.state_dict(), other.state_dict()))
        with pytest.raises(ValueError, match=f"{words}.*nothing was changed"):
            there.load_state_dict(copy.deepcopy(replica.state_dict()))
        assert repr((there.state_dict(), other.state_dict())) == repr(before)
        train(other, there, range(2, 6), rank)
        replica.finish()
        there.finish()
        return flat(other)

    assert torch.equal(*replicas(2, run))


def test_replicas_are_refused_by_torchs_join():
    """finish() takes its place."""

    def run(rank, peers):
        for kind in (offbeat.LocalSGD, offbeat.SlowMo, offbeat.DiLoCo):
            model = build()
            replica = kind(sgd(model.parameters()), model, group=peers, subgroup=None)
            with pytest.raises(RuntimeError, match=f"{kind.__name__} cannot be used with .*Join; call finish"):
                Join([replica])

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replicas(1, run)
    finally:
        dist.destroy_process_group()
