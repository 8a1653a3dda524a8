"""Replicas that come and go: threads of this process, a lighthouse of this process, and real gloo connections."""

from __future__ import annotations

import socket
import struct
import threading
import time
import warnings

import pytest
import torch
from torch import nn

import offbeat
from offbeat.wire import elastic, transfer
from tests.fake_lighthouse import FakeLighthouse

EVERY = 4


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(model, step, seed):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + seed))
    (model(x) - x[:, :3]).square().mean().backward()


def flat(tensors):
    return torch.cat([t.detach().reshape(-1).clone() for t in tensors])


class Site:
    """One replica, in a thread of its own."""

    def __init__(self, lighthouse, seed, steps, model, *, kind="diloco", wait=0.0, stop_at=None, **options):
        self.seed, self.steps, self.model, self.kind, self.wait = seed, steps, model, kind, wait
        self.stop_at, self.options = stop_at, options
        self.anchors: dict[str, torch.Tensor] = {}  # by lineage: the same rounds have led to them
        self.began = self.error = self.optimizer = None
        self.weights: list[float] = []  # its own, of each round that it was in
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._train()
        except BaseException as error:
            self.error = error

    def _train(self):
        group = offbeat.Elastic("127.0.0.1:1", replica=f"site{self.seed}", patience=20, **self.options)
        inner = offbeat.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        if self.kind == "diloco":
            optimizer = offbeat.DiLoCo(inner, self.model, every=EVERY, outer_lr=0.7, group=group, deadline=10.0)
        else:
            optimizer = offbeat.LocalSGD(inner, self.model, every=EVERY, group=group, deadline=10.0)
        self.optimizer, self.began = optimizer, optimizer.steps
        membership = optimizer._memberships[0]

        def seen(report):
            if report.weights:
                self.weights.append(report.weights[membership.peers.rank])

        optimizer.register_round_hook(seen)
        while optimizer.steps < self.steps:
            if optimizer.steps == self.stop_at:
                optimizer._memberships[0].close()  # as if the process had been killed
                return
            backward(self.model, optimizer.steps, self.seed)
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.anchors():
                ((fragment,),) = optimizer._board.fragments
                self.anchors[fragment.lineage] = flat(optimizer.anchors().values())
            time.sleep(self.wait)
        optimizer.finish()

    def join(self, seconds=60):
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "a replica hangs"
        if self.error is not None:
            raise self.error
        return self


@pytest.fixture
def lighthouse(monkeypatch):
    fake = FakeLighthouse()
    monkeypatch.setattr(elastic, "TorchftLighthouse", fake)
    return fake


def check_same_anchors(sites):
    """Anchors are equal to the bit wherever the same rounds have led to them."""
    shared = 0
    for i, site in enumerate(sites):
        for other in sites[i + 1 :]:
            for lineage in site.anchors.keys() & other.anchors.keys():
                assert torch.equal(site.anchors[lineage], other.anchors[lineage])
                shared += 1
    assert shared > 0


@pytest.mark.parametrize("kind", ["diloco", "local"])
def test_replicas_that_stay_train_as_a_static_group_does(lighthouse, kind):
    sites = [Site(lighthouse, seed, 12, make(), kind=kind, min_replicas=2) for seed in (0, 1)]
    for site in sites:
        site.join()

    def replica(rank, peers, model):
        inner = offbeat.SGD(model.parameters(), lr=0.05, momentum=0.5)
        if kind == "diloco":
            optimizer = offbeat.DiLoCo(inner, model, every=EVERY, outer_lr=0.7, group=peers, subgroup=None)
        else:
            optimizer = offbeat.LocalSGD(inner, model, every=EVERY, group=peers, subgroup=None)
        for step in range(12):
            backward(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        return flat(model.parameters())

    # Names are drawn at random, so that the order of the sum may differ.
    expected = offbeat.Simulation(2).run(replica, make=make)
    for site in sites:
        torch.testing.assert_close(flat(site.model.parameters()), expected[0], rtol=1e-6, atol=1e-7)
    assert torch.equal(flat(sites[0].model.parameters()), flat(sites[1].model.parameters()))


@pytest.mark.parametrize("kind", ["diloco", "local"])
def test_a_newcomer_takes_over_everything_and_counts_from_its_second_round(lighthouse, kind):
    first = [Site(lighthouse, seed, 60, make(), kind=kind, wait=0.05, min_replicas=2) for seed in (0, 1)]
    while any(site.optimizer is None or site.optimizer.steps < 6 for site in first):
        assert not any(site.error for site in first), [site.error for site in first]
        time.sleep(0.05)
    torch.manual_seed(7)
    other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # its own beginning counts for nothing
    newcomer = Site(lighthouse, 2, 60, other, kind=kind, wait=0.05)
    sites = [site.join() for site in [*first, newcomer]]
    assert newcomer.began >= 6
    assert newcomer.weights[:2] == [0.0, 1.0]
    assert all(site.weights[0] == 1.0 for site in first)
    assert all(site.optimizer.steps >= 60 for site in sites)
    for site in sites[1:]:
        assert torch.equal(flat(site.model.parameters()), flat(sites[0].model.parameters()))
    if kind == "diloco":
        check_same_anchors(sites)


def test_a_replica_that_dies_costs_the_others_nothing_but_its_own_steps(lighthouse):
    sites = [
        Site(lighthouse, seed, 30, make(), wait=0.02, min_replicas=1 + (seed < 2), stop_at=10 if seed == 2 else None)
        for seed in (0, 1, 2)
    ]
    sites = [site.join() for site in sites]
    assert all(site.optimizer.steps >= 30 for site in sites[:2])
    assert torch.equal(flat(sites[0].model.parameters()), flat(sites[1].model.parameters()))
    check_same_anchors(sites)


def test_a_lighthouse_that_is_down_for_a_while_loses_nothing(lighthouse):
    sites = [Site(lighthouse, seed, 24, make(), wait=0.05, min_replicas=2) for seed in (0, 1)]
    while any(site.optimizer is None or site.optimizer.steps < 5 for site in sites):
        time.sleep(0.02)
    lighthouse.is_down = True
    time.sleep(2)
    lighthouse.is_down = False
    for site in sites:
        site.join()
    assert torch.equal(flat(sites[0].model.parameters()), flat(sites[1].model.parameters()))


def test_nobody_begins_again_at_step_0_beside_a_run(lighthouse):
    Site(lighthouse, 0, 8, make()).join().optimizer._memberships[0].close()
    time.sleep(lighthouse.gone + 0.5)
    with pytest.raises(RuntimeError, match="Load the newest checkpoint before the first step"):
        Site(lighthouse, 1, 8, make()).join()


def test_a_replica_of_another_model_is_refused_by_name(lighthouse):
    site = Site(lighthouse, 0, 200, make(), wait=0.05)
    while site.optimizer is None:
        time.sleep(0.02)
    with pytest.raises(offbeat.ExchangeError, match=r"'site0:.*trains something else"):
        _other_model()
    site.stop_at = site.optimizer.steps + 1


def _other_model():
    model = nn.Linear(3, 3)
    group = offbeat.Elastic("127.0.0.1:1", replica="stranger", patience=1)
    offbeat.DiLoCo(offbeat.SGD(model.parameters()), model, every=EVERY, outer_lr=0.7, group=group, deadline=10.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"address": "somewhere"}, "'host:port'"),
        ({"address": "a:1", "min_replicas": 0}, "at least 1"),
        ({"address": "a:1", "patience": 0}, "positive number of seconds"),
    ],
)
def test_options_are_checked(arguments, words):
    with pytest.raises(ValueError, match=words):
        offbeat.Elastic(**arguments)


def test_what_arrives_is_bounded_and_nothing_is_unpickled():
    server = transfer.StateServer("127.0.0.1", "a run")
    try:
        with pytest.raises(offbeat.ExchangeError, match="this is run 'a run'"):
            transfer.fetch(server.address, "another run")
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(struct.pack("<Q", 1 << 60))
            assert connection.recv(1) == b""  # refused without an answer
        state = {"t": torch.arange(5.0), 3: [True, None, "x", (1, 2.5)], "empty": torch.zeros(0, 2)}
        answer = []
        asking = threading.Thread(target=lambda: answer.append(transfer.fetch(server.address, "a run")))
        asking.start()
        while not server.is_wanted:
            time.sleep(0.01)
        server.publish(state)
        asking.join(10)
        (arrived,) = answer
        assert torch.equal(arrived["t"], state["t"])
        assert arrived["empty"].shape == (0, 2)
        assert arrived[3] == [True, None, "x", (1, 2.5)]
    finally:
        server.close()
