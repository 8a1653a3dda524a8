"""Connections that are made again after a failure, and ranks that are at different steps without one."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

import offbeat
from offbeat.wire import connect
from offbeat.wire.connect import Connector
from offbeat.wire.membership import StaticMembership
from offbeat.wire.peers import Traffic
from offbeat.wire.routes import Route, memberships, peers_of
from offbeat.wire.simulated import SimulatedConnector
from tests.harness import failing_reduce, flat, make, miss_vote, simulated, train_step, wait_for_flight
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("membership")


def local_sgd(model, **options):
    return offbeat.LocalSGD(offbeat.SGD(model.parameters(), lr=0.05), model, subgroup=None, **options)


def failures(optimizer, model, steps, rank):
    """After which steps a round has failed, and how."""
    errors = {step: train_step(optimizer, model, step, rank) for step in steps}
    return {step: type(error).__name__ for step, error in errors.items() if error}


def stalls_for_a_round(rank, world):
    """Rank 1 stops for longer than the deadline, so that rank 0 gives up its rounds and trains on."""
    model = make()
    local = local_sgd(model, every=4, deadline=1.0)
    failed = {}
    for step in range(33):
        if rank == 1 and step == 8:
            time.sleep(3)
        failed.update(failures(local, model, range(step, step + 1), rank))
    local.sync()
    return failed, flat(model)


@pytest.mark.ranks
def test_a_rank_that_others_gave_up_on_comes_back_at_a_later_round():
    (first, parameters), (second, others) = run_ranks(stalls_for_a_round, 2)
    assert first.keys() == {8}  # rank 0 gave up waiting; at its next round both connect again
    assert set(second) <= {8}
    assert set(first.values()) | set(second.values()) == {"ExchangeError"}
    assert torch.equal(parameters, others)


def fails_several_times(rank, world, delay):
    """Rank 1's network fails in the rounds after steps 4, 8 and 12; those after 0, 16 and 20 are fine."""
    model = make()
    local = local_sgd(model, every=4, delay=delay, deadline=2.0)
    failed = {}
    for step in range(23):
        if rank == 1 and step in (4, 8, 12):
            with failing_reduce(1, error=RuntimeError("cut")):
                failed.update(tried(local, model, step, rank))
                wait_for_flight(local)
        else:
            failed.update(tried(local, model, step, rank))
    local.finish()
    assert local.agreed
    return failed, flat(model), local.syncs


def tried(local, model, step, rank):
    try:
        error = train_step(local, model, step, rank)
    except RuntimeError as caught:  # of rank 1 itself
        local.zero_grad()
        error = caught
    return {step: type(error).__name__} if error else {}


@pytest.mark.ranks
@pytest.mark.parametrize("delay", [0, 2])
def test_several_failures_in_a_row(delay):
    """Each round that failed is used nowhere; each next one connects again, under a name of its own."""
    (first, parameters, _), (second, others, _) = run_ranks(fails_several_times, 2, delay)
    failed = {4 + delay, 8 + delay, 12 + delay}
    assert first == dict.fromkeys(failed, "ExchangeError")
    assert second == dict.fromkeys(failed, "RuntimeError")
    assert torch.equal(parameters, others)


def one_of_three_misses_votes(rank, world):
    """Votes 2 and 3 do not arrive on rank 1, whose connections close; all three meet again each time."""
    model = make()
    inner = offbeat.SGD(model.parameters(), lr=0.05)
    diloco = offbeat.DiLoCo(inner, model, every=2, subgroup=None, deadline=2.0)
    with miss_vote(1, 2, 3, closes=True):
        failed = failures(diloco, model, range(20), rank)
    diloco.finish()
    return failed, flat(model), torch.cat([a.flatten() for a in diloco.anchors().values()])


@pytest.mark.ranks
def test_three_ranks_of_which_one_misses_two_votes():
    answers = run_ranks(one_of_three_misses_votes, 3)
    assert answers[1][0]
    assert all(set(failed) <= {3, 5, 7, 9} for failed, *_ in answers), [failed for failed, *_ in answers]
    for _, parameters, anchors in answers:
        assert torch.equal(parameters, answers[0][1])
        assert torch.equal(anchors, answers[0][2])


def steps_that_differ(rank, world):
    """No failure came before: somebody has made another number of steps, and waiting would hide it."""
    model = make()
    local = local_sgd(model, every=lambda step: 4 if rank == 0 else 2, deadline=5.0)
    with pytest.raises(offbeat.Disagreement) as error:
        failures(local, model, range(5), rank)
    return local.steps, str(error.value)


@pytest.mark.ranks
def test_steps_that_differ_without_a_failure_are_a_disagreement():
    (steps, words), (others_steps, others) = run_ranks(steps_that_differ, 2)
    assert (steps, others_steps) == (5, 3)  # the step itself was made
    assert words == others
    assert "rank 0 at step 4, rank 1 at step 2" in words


def test_steps_that_differ_in_a_simulation():
    def replica(rank, peers, model):
        local = offbeat.LocalSGD(
            offbeat.SGD(model.parameters(), lr=0.05), model, every=lambda step: 2 + rank, group=peers, subgroup=None
        )
        with pytest.raises(offbeat.Disagreement, match="rank 0 at step 2, rank 1 at step 3"):
            failures(local, model, range(4), rank)
        return local.steps

    assert simulated(replica) == [3, 4]


# Without a model: who meets whom


def hello(step):
    return {"round": [step, 0, 0]}


def test_whoever_is_behind_after_a_failure_withdraws_and_the_others_wait_for_it():
    """Rank 1 is at the round after step 4 when all have connected again, and the others at the one after step 8."""

    def replica(rank, peers):
        membership = StaticMembership(connector_of(rank, peers))
        membership.meet(hello(0))
        membership.close()
        if rank == 1:
            with pytest.raises(offbeat.ExchangeError, match="this round was missed"):
                membership.meet(hello(4))
        return [rows[0]["round"][0] for rows in membership.meet(hello(8)).hellos]

    assert offbeat.Simulation(3, timeout=20).run(replica) == [[8, 8, 8]] * 3


def connector_of(rank, peers) -> Connector:
    return SimulatedConnector(peers.simulation, rank, [list(peers.ranks)], "test")


def connections_have_names_of_their_own(rank, world):
    """What a store keeps of an attempt that came to nothing is in nobody's way."""
    made = []
    real = connect.GroupConnector._open

    def spy(self, name, ranks):
        made.append(name)
        return real(self, name, ranks)

    connect.GroupConnector._open = spy
    everyone = peers_of(None)
    (membership,) = memberships([Route(None, 4, 30.0, False)], everyone, everyone, None, "token", Traffic())
    for turn in range(3):
        membership.meet(hello(turn))
        membership.close()
        if turn == 1:  # rank 0 tries by itself first, in vain
            if rank == 0:
                longest, connect.LONGEST = connect.LONGEST, timedelta(seconds=1)
                with pytest.raises(offbeat.ExchangeError, match="could not connect again"):
                    membership.meet(hello(turn))
                connect.LONGEST = longest
            torch.distributed.barrier()
    membership.meet(hello(9))
    assert membership.peers.ranks == [0, 1]
    connect.GroupConnector._open = real
    return made


@pytest.mark.ranks
def test_names_of_connections_are_never_used_twice():
    first, second = run_ranks(connections_have_names_of_their_own, 2)
    assert first == second
    assert len(set(first)) == len(first) == 4
