"""Which connection a level exchanges over. A thread never uses a second communicator of a backend such as NCCL."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat import _torch
from offbeat.wire import connect, routes
from offbeat.wire.peers import Traffic
from tests.harness import adamw, everyone, flat, make, train
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("replica")]

mean = functools.partial(offbeat.SGD, lr=1.0)


def route(rank: int, world: int, another: bool, store: bool) -> Any:
    """The kinds of connections, for a group whose backend is gloo or said to be another."""
    if another:
        connect.is_gloo = routes.is_gloo = lambda group: False
    if not store:
        _torch.has_store = lambda: False
    everyone_here, traffic = routes.peers_of(None), Traffic()
    some = [routes.Route(None, 2, None, background=False), routes.Route(None, 4, None, background=True)]
    found = []
    for membership in routes.memberships(some, everyone_here, everyone_here, None, "token", traffic):
        # A connection of our own is no process group that torch.distributed knows.
        known = membership.peers.group in dist.distributed_c10d._world.pg_map
        found.append(dist.get_backend(membership.peers.group) if known else "own")
        assert membership.peers.device == torch.device("cpu")
    model = make()
    levels = [offbeat.Level(every=2), offbeat.Level(every=4, outer=mean, delay=2)]
    replica = offbeat.Replica(adamw(model.parameters()), model, levels, subgroup=None)
    train(model, replica, range(9), rank)
    replica.finish()
    assert all(torch.equal(one, flat(model)) for one in everyone(flat(model)))
    return found


@pytest.mark.parametrize(
    ("another", "store", "expected"),
    [
        (False, True, ["own", "own"]),
        # The blocking level uses the group's backend, the delayed one a connection of gloo's.
        (True, True, ["gloo", "own"]),
        (True, False, ["gloo", "gloo"]),
    ],
)
def test_a_thread_has_a_connection_of_its_own(another, store, expected):
    assert run_ranks(route, 2, another, store) == [expected, expected]


class _Asked(Exception):
    """A process group was asked for."""


@pytest.mark.parametrize(("background", "backend"), [(True, "gloo"), (False, "cuda:nccl")])
def test_the_backend_of_a_new_group(monkeypatch, background, backend):
    """Without a store, a thread's group is made with gloo whatever the backend of the group is."""

    def new_group(ranks: Any, **options: Any) -> Any:
        raise _Asked(options["backend"])

    def connector() -> Any:
        return connect.GroupConnector(dist.group.WORLD, [[0]], "name", timeout=None, quiet=False, background=background)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "new_group", new_group)
        monkeypatch.setattr(
            dist, "get_backend_config", lambda group=None: "cuda:nccl" if group else "cpu:gloo,cuda:nccl"
        )
        monkeypatch.setattr(_torch, "has_store", lambda: False)
        with pytest.raises(_Asked, match=backend):
            connector().connect()
        monkeypatch.setattr(_torch, "has_store", lambda: True)
        assert connector().renews is background
        if not background:
            with pytest.raises(_Asked, match=backend):
                connector().connect()
    finally:
        dist.destroy_process_group()
