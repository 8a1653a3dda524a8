"""Rounds that fail, or end, on some ranks only: what is split is found and mended, and ranks meet again."""

from __future__ import annotations

import functools
import io
import random
import threading
import time
import warnings
from collections import Counter
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat
from offbeat.sync import copies, rounds
from offbeat.wire import peers
from offbeat.wire.limit import within
from tests.ranks import run_ranks
from tests.sync_reference import flat

MAKING = threading.Lock()  # torch's generator is shared by the threads of a simulation
nesterov = functools.partial(offbeat.SGD, lr=0.7, momentum=0.5, nesterov=True)


def make():
    with MAKING:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(model, step, rank):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    (model(x) - x[:, :3]).square().mean().backward()


def train_step(optimizer, model, step, rank):
    """The error of this step, if there was one."""
    backward(model, step, rank)
    error = None
    try:
        optimizer.step()
    except (offbeat.ExchangeError, offbeat.NotFinite) as caught:
        error = caught
    optimizer.zero_grad()
    return error


@pytest.fixture
def break_vote(monkeypatch):
    """A vote that has succeeded on all ranks does not arrive on one: ``break_vote(rank, which)``, counted from 1.

    ``closes`` closes the connection too, as it does in real processes, so that the others fail in their next exchange.
    """

    def install(rank, which, closes=False):
        real, made = rounds.vote, Counter()

        def vote(peers):
            real(peers)
            me = peers.ranks[peers.rank]
            made[me] += 1
            if (me, made[me]) == (rank, which):
                if closes:
                    peers.close()
                raise offbeat.ExchangeError("the connection broke in the middle of the vote")

        monkeypatch.setattr(rounds, "vote", vote)

    return install


def simulate(function, world=2):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return offbeat.Simulation(world, timeout=20).run(function)


def anchors_of(optimizer, level):
    return torch.cat([a.reshape(-1).clone() for a in optimizer.anchors(level).values()])


def momentum_of(optimizer, level):
    state = optimizer.outers[level].state
    return torch.cat([state[a]["momentum_buffer"].reshape(-1).clone() for a in optimizer.anchors(level).values()])


@pytest.mark.parametrize("make_outer", [nesterov, functools.partial(torch.optim.SGD, lr=0.7, momentum=0.5)])
@pytest.mark.parametrize("delay", [0, 2])
def test_lower_anchors_are_equal_again_after_a_vote_above_that_one_rank_missed(break_vote, make_outer, delay):
    break_vote(1, 3)  # lower rounds after steps 3 and 7, and then the first upper one

    def replica(rank, peers):
        model = make()
        low = offbeat.Level(every=4, outer=make_outer)
        top = offbeat.Level(every=8, delay=delay, outer=make_outer)
        optimizer = offbeat.Replica(
            offbeat.SGD(model.parameters(), lr=0.05), model, [low, top], group=peers, subgroup=None
        )
        errors = [train_step(optimizer, model, step, rank) for step in range(36)]
        parts = [f(optimizer, level) for level in (0, 1) for f in (anchors_of, momentum_of)]
        return [step for step, error in enumerate(errors) if error], parts

    first, second = simulate(replica)
    assert first[0] == []
    assert second[0] == [7 + delay]
    assert all(map(torch.equal, first[1], second[1]))


def test_lower_anchors_are_equal_again_after_a_mean_above_that_one_rank_missed(break_vote):
    break_vote(1, 3)

    def replica(rank, peers):
        model = make()
        levels = [offbeat.Level(every=4, group=2, outer=nesterov), offbeat.Level(every=8)]
        optimizer = offbeat.Replica(offbeat.SGD(model.parameters(), lr=0.05), model, levels, group=peers, subgroup=None)
        errors = [train_step(optimizer, model, step, rank) for step in range(24)]
        assert [step for step, error in enumerate(errors) if error] == ([7] if rank == 1 else [])
        return anchors_of(optimizer, 0), momentum_of(optimizer, 0), flat(model)

    answers = simulate(replica, 4)
    for one, other in ((0, 1), (2, 3)):
        assert all(map(torch.equal, answers[one], answers[other]))
    assert all(torch.equal(answer[2], answers[0][2]) for answer in answers)


@pytest.mark.parametrize("end", ["finish", "sync"])
@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}])
def test_replicas_agree_in_the_end_although_one_missed_the_vote_of_the_last_round(break_vote, end, options):
    break_vote(1, 4 if options else 2)

    def replica(rank, peers):
        model = make()
        optimizer = offbeat.DiLoCo(
            offbeat.SGD(model.parameters(), lr=0.05), model, every=4, group=peers, subgroup=None, **options
        )
        errors = [train_step(optimizer, model, step, rank) for step in range(9)]
        assert any(errors) == (rank == 1)
        getattr(optimizer, end)()
        assert optimizer.agreed
        return flat(model), anchors_of(optimizer, 0), momentum_of(optimizer, 0)

    first, second = simulate(replica)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(("options", "which"), [({}, 3), ({"fragments": 2}, 5), ({"fragments": 2}, 6)])
def test_finish_can_be_called_again_if_one_rank_missed_the_vote_of_its_last_round(break_vote, options, which):
    break_vote(1, which, closes=True)

    def replica(rank, peers):
        model = make()
        optimizer = offbeat.DiLoCo(
            offbeat.SGD(model.parameters(), lr=0.05), model, every=4, group=peers, subgroup=None, **options
        )
        for step in range(9):
            assert train_step(optimizer, model, step, rank) is None
        with pytest.raises(offbeat.ExchangeError):
            optimizer.finish()
        optimizer.finish()
        assert optimizer.agreed
        assert optimizer.steps == 9
        return flat(model), anchors_of(optimizer, 0), momentum_of(optimizer, 0)

    first, second = simulate(replica)
    assert all(map(torch.equal, first, second))


def test_steps_are_those_of_the_checkpoint_that_is_loaded_after_a_finish_that_failed():
    def replica(rank, peers):
        model = make()
        optimizer = offbeat.LocalSGD(
            offbeat.SGD(model.parameters(), lr=0.05), model, every=4, group=peers, subgroup=None
        )
        for step in range(4):
            train_step(optimizer, model, step, rank)
        optimizer.sync()
        weights, saved = {name: t.clone() for name, t in model.state_dict().items()}, optimizer.state_dict()
        for step in range(4, 14):
            train_step(optimizer, model, step, rank)
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
        with pytest.raises(offbeat.NotFinite):
            optimizer.finish()
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        optimizer.finish()
        return optimizer.steps

    assert simulate(replica) == [4, 4]


def test_no_two_rounds_meet_under_the_same_name(monkeypatch):
    """Also not after finish() has gone through steps that come again."""
    real, names = rounds.Round.__init__, Counter()

    def begin(self, *args, **options):
        real(self, *args, **options)
        names[self.track.place, self.track.peers.rank, self.meeting] += 1

    monkeypatch.setattr(rounds.Round, "__init__", begin)

    def replica(rank, peers):
        model = make()
        levels = [offbeat.Level(every=2, group=2), offbeat.Level(every=8)]
        optimizer = offbeat.Replica(offbeat.SGD(model.parameters(), lr=0.05), model, levels, group=peers, subgroup=None)
        for step in range(3):
            train_step(optimizer, model, step, rank)
        optimizer.finish()
        saved = optimizer.state_dict()
        for _ in range(2):
            for step in range(3, 9):
                train_step(optimizer, model, step, rank)
            optimizer.sync()
            optimizer.sync()
            optimizer.load_state_dict(saved)

    simulate(replica)
    assert len(names) > 20
    assert set(names.values()) == {1}


def test_a_rank_without_data_counts_a_round_that_failed():
    def replica(rank, peers):
        model = make()
        optimizer = offbeat.LocalSGD(
            offbeat.SGD(model.parameters(), lr=0.05), model, every=4, group=peers, subgroup=None
        )
        good = [p.detach().clone() for p in model.parameters()]
        for step in range(2 if rank else 21):
            if rank == 0 and step == 8:
                with torch.no_grad():
                    model[0].weight[0, 0] = float("nan")
            error = train_step(optimizer, model, step, rank)
            assert isinstance(error, offbeat.NotFinite) == (step == 8)
            if error:  # as a program would: go back
                with torch.no_grad():
                    for p, value in zip(model.parameters(), good, strict=True):
                        p.copy_(value)
        if rank:
            with pytest.raises(offbeat.NotFinite):
                optimizer.finish()
        optimizer.finish()
        return flat(model), optimizer.steps

    (a, steps), (b, others) = simulate(replica)
    assert torch.equal(a, b)
    assert steps == others == 21


def late_once(rank, world):
    model = make()
    optimizer = offbeat.LocalSGD(offbeat.SGD(model.parameters(), lr=0.05), model, every=4, subgroup=None, deadline=1.0)
    errors = []
    for step in range(2 if rank else 18):
        if rank == 0 and step == 8:
            time.sleep(3)
        errors.append(train_step(optimizer, model, step, rank))
    if rank:
        with pytest.raises(offbeat.ExchangeError):
            optimizer.finish()
    optimizer.finish()
    return flat(model), [step for step, error in enumerate(errors) if error], optimizer.steps


@pytest.mark.ranks
@pytest.mark.xdist_group("sync_one_sided")
def test_a_rank_without_data_meets_one_that_was_late():
    (a, failed, steps), (b, _, others) = run_ranks(late_once, 2)
    assert torch.equal(a, b)
    assert failed == [8]
    assert steps == others == 18


def miss_the_second_vote(rank):
    """In a process of its own: the second vote, which has succeeded everywhere, does not arrive on rank 1."""
    real, made = rounds.vote, [0]

    def vote(peers):
        real(peers)
        made[0] += 1
        if rank == 1 and made[0] == 2:
            peers.close()
            raise offbeat.ExchangeError("the connection broke in the middle of the vote")

    rounds.vote = vote


def sync_fails(rank, world):
    miss_the_second_vote(rank)
    model = make()
    optimizer = offbeat.LocalSGD(
        offbeat.SGD(model.parameters(), lr=0.05), model, every=4, delay=2, subgroup=None, deadline=2.0
    )
    for step in range(5):  # rounds begin after steps 0 and 4
        assert train_step(optimizer, model, step, rank) is None
    with pytest.raises(offbeat.ExchangeError):
        optimizer.sync()
    return [step for step in range(5, 22) if train_step(optimizer, model, step, rank)]


@pytest.mark.ranks
@pytest.mark.xdist_group("sync_one_sided")
def test_ranks_meet_again_after_a_sync_that_one_rank_has_not_begun():
    assert run_ranks(sync_fails, 2) == [[], []]


def test_a_round_that_failed_below_does_not_keep_the_one_above_from_landing(monkeypatch):
    real = copies.OnCopy._exchange

    def exchange(self, shares, peers):
        if self.track.place == 0 and self.step == 7 and peers.ranks[peers.rank] < 2:
            raise offbeat.ExchangeError("the link of this site was cut")
        return real(self, shares, peers)

    monkeypatch.setattr(copies.OnCopy, "_exchange", exchange)

    def replica(rank, peers):
        model = make()
        low = offbeat.Level(every=2, group=2, delay=2, outer=nesterov)
        top = offbeat.Level(every=4, delay=1, outer=nesterov)
        optimizer = offbeat.Replica(
            offbeat.SGD(model.parameters(), lr=0.05), model, [low, top], group=peers, subgroup=None
        )
        errors, anchors = [], []
        for step in range(20):
            errors.append(train_step(optimizer, model, step, rank))
            anchors.append(anchors_of(optimizer, 1))
        return [step for step, error in enumerate(errors) if error], anchors

    answers = simulate(replica, 4)
    assert [failed for failed, _ in answers] == [[8], [8], [], []]
    for _, anchors in answers[1:]:
        assert all(map(torch.equal, anchors, answers[0][1]))


def sharded_levels(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    fully_shard(model, mesh=mesh["shard"])
    # Deadlines of their own, so that levels have connections of their own.
    low = offbeat.Level(every=1, deadline=5.0, phase=1)
    top = offbeat.Level(every=4, delay=3, deadline=6.0, fragments=2, outer=nesterov)
    optimizer = offbeat.Replica(torch.optim.SGD(model.parameters(), lr=0.05), model, [low, top])
    draw, real = random.Random(rank), rounds.Round.exchange

    def exchange(self, *args, **how):
        if threading.current_thread().name == "offbeat-rounds":  # as on a busy machine
            time.sleep(draw.uniform(0, 0.05))
        return real(self, *args, **how)

    rounds.Round.exchange = exchange
    return [train_step(optimizer, model, step, rank // 2) for step in range(20)]


@pytest.mark.ranks
@pytest.mark.xdist_group("sync_one_sided")
def test_levels_of_sharded_replicas_take_turns_with_the_connection_of_all_shards():
    assert run_ranks(sharded_levels, 4) == [[None] * 20] * 4


def sharded_and_one_sided(rank, world, end):
    miss_the_second_vote(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    fully_shard(model, mesh=mesh["shard"])
    level = offbeat.Level(every=4, outer=nesterov, deadline=3.0)
    optimizer = offbeat.Replica(torch.optim.SGD(model.parameters(), lr=0.05), model, [level])
    errors = [train_step(optimizer, model, step, rank // 2) for step in range(32 if end == "step" else 8)]
    failed = [step for step, error in enumerate(errors) if error]
    if end == "step":
        assert max(failed, default=7) <= 11, failed
    for _ in range(3):
        try:
            optimizer.sync() if end == "step" else getattr(optimizer, end)()
            break
        except offbeat.ExchangeError:
            continue
    else:
        raise AssertionError("they have not agreed")
    assert optimizer.agreed
    return [p._local_tensor for p in model.parameters()], list(optimizer.anchors().values())


@pytest.mark.ranks
@pytest.mark.xdist_group("sync_one_sided")
@pytest.mark.parametrize("end", ["sync", "finish", "step"])
def test_all_shards_find_that_one_rank_has_missed_a_vote(end):
    answers = run_ranks(sharded_and_one_sided, 4, end)
    for one, other in ((0, 2), (1, 3)):  # the same shards
        for mine, theirs in zip(answers[one], answers[other], strict=True):
            assert all(map(torch.equal, mine, theirs))


def test_what_takes_too_long_raises():
    assert within(20, lambda: 3, "that") == 3
    with pytest.raises(ZeroDivisionError):
        within(20, lambda: 1 / 0, "that")
    let_go = threading.Event()
    with pytest.raises(offbeat.ExchangeError, match=r"that: the store .* did not answer within 0.1 s"):
        within(0.1, lambda: let_go.wait(20), "that")
    let_go.set()


def slow_store(rank, world):
    model = make()
    optimizer = offbeat.LocalSGD(
        offbeat.SGD(model.parameters(), lr=0.05), model, every=4, delay=2, subgroup=None, deadline=0.5
    )
    for tracks in optimizer._tracks._tracks:
        for track in tracks:
            track.peers.close()
    let_go = threading.Event()
    peers._torch.default_store = lambda: let_go.wait(30)  # as if its host had stopped
    peers.SHORTEST, peers.SECONDS_BEYOND = timedelta(seconds=0.2), 0.2
    errors = [train_step(optimizer, model, step, rank) for step in range(3)]
    saved = optimizer.state_dict()["step"]
    let_go.set()
    return [type(error).__name__ for error in errors], saved


@pytest.mark.ranks
@pytest.mark.xdist_group("sync_one_sided")
def test_a_store_that_does_not_answer_is_not_waited_for_for_ever():
    for errors, saved in run_ranks(slow_store, 2):
        assert errors == ["NoneType", "NoneType", "ExchangeError"]
        assert saved == 3


@pytest.mark.parametrize("policy", ["raise", "skip", "leave_out"])
def test_optimizer_state_that_is_not_finite_is_not_averaged(policy):
    def replica(rank, peers):
        model = make()
        level = {"nonfinite": policy}
        optimizer = offbeat.LocalSGD(
            torch.optim.Adam(model.parameters(), lr=0.01), model, every=4, state="average", group=peers, subgroup=None,
            **level,
        )  # fmt: skip
        errors = []
        for step in range(5):
            backward(model, step, rank)
            if rank == 1 and step == 2:
                model[0].weight.grad[0, 0] = 1e21  # its square is infinite, and the parameter stays finite
            try:
                optimizer.step()
            except offbeat.NotFinite as error:
                errors.append(str(error))
            optimizer.zero_grad()
        state = optimizer.state[model[0].weight]["exp_avg_sq"]
        return errors, bool(state.isfinite().all())

    (errors, fine), (others, bad) = simulate(replica)
    assert fine
    assert bad == (policy == "leave_out")  # then it has the others' state
    assert len(errors) == len(others) == (policy == "raise")
    assert all("exp_avg_sq" in error and "rank 1" in error for error in errors)


def resumed(optimizer_of, train, save_after, steps):
    """Parameters at the end, without a stop and with one after a step."""

    def run(save, rank, peers):
        model, optimizer = optimizer_of(peers)
        for step in range(steps):
            train(model, optimizer, step, rank)
            if save and step == save_after:
                file = io.BytesIO()
                torch.save((model.state_dict(), optimizer.state_dict()), file)
                file.seek(0)
                model, optimizer = optimizer_of(peers, resumes=True)
                for one, state in zip((model, optimizer), torch.load(file, weights_only=True), strict=True):
                    one.load_state_dict(state)
        return flat(model)

    return [simulate(lambda rank, peers, save=save: run(save, rank, peers)) for save in (False, True)]


def test_a_replica_that_was_left_out_of_a_round_in_flight_is_so_after_loading():
    def optimizer_of(peers, resumes=False):
        model = make()
        inner = offbeat.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, offbeat.DiLoCo(inner, model, every=4, delay=2, nonfinite="leave_out", group=peers, subgroup=None)

    def train(model, optimizer, step, rank):
        backward(model, step, rank)
        if rank == 1 and step == 3:
            model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()
        optimizer.zero_grad()

    never, stopped = resumed(optimizer_of, train, save_after=4, steps=12)
    assert all(one.isfinite().all() for one in never)
    assert all(map(torch.equal, never, stopped))


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_parameters_that_come_while_a_round_is_in_flight_are_not_in_it(codec, how):
    def optimizer_of(peers, resumes=False):
        model = make()
        model.extra = nn.Parameter(torch.zeros(3))
        inner = offbeat.SGD([p for p in model.parameters() if p is not model.extra], lr=0.05)
        if how == "unfrozen":
            model[2].weight.requires_grad_(resumes)
        elif resumes:
            inner.add_param_group({"params": [model.extra], "lr": 0.01})
        return model, offbeat.DiLoCo(inner, model, every=4, delay=2, codec=codec, group=peers, subgroup=None)

    def train(model, optimizer, step, rank):
        backward(model, step, rank)
        model.extra.grad = torch.full((3,), float(rank))
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:  # a round has begun
            if how == "unfrozen":
                model[2].weight.requires_grad_(True)
            else:
                optimizer.add_param_group({"params": [model.extra], "lr": 0.01})

    never, stopped = resumed(optimizer_of, train, save_after=4, steps=14)
    assert all(map(torch.equal, never, stopped))


def test_a_round_that_had_failed_before_saving_is_told_of_after_loading():
    def replica(rank, peers):
        def of():
            model = make()
            inner = offbeat.SGD(model.parameters(), lr=0.05)
            return model, offbeat.DiLoCo(inner, model, every=4, delay=3, group=peers, subgroup=None)

        model, optimizer = of()
        for step in range(5):
            backward(model, step, rank)
            if step == 3:
                model[0].bias.grad[0] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        model, optimizer = of()
        optimizer.load_state_dict(state)
        for step in range(5, 7):
            backward(model, step, rank)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            optimizer.zero_grad()
        return [str(one.message) for one in caught]

    (told,) = offbeat.Simulation(1).run(replica)
    assert any("begun after step 3 had failed when this checkpoint was saved" in one for one in told)
    assert any("NaN or infinite" in one for one in told)
