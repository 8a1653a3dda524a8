"""Which connection a level exchanges over. A thread never uses a second communicator of a backend such as NCCL."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.sync import members
from offbeat.wire import peers
from tests.harness import adamw, everyone, flat, make, train
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("replica")]

mean = functools.partial(offbeat.SGD, lr=1.0)


def route(rank: int, world: int, another: bool, store: bool) -> Any:
    """The kinds of connections, for a group whose backend is gloo or said to be another."""
    if another:
        peers.is_gloo = members.is_gloo = lambda group: False
    if not store:
        peers._torch.has_store = lambda: False
    model = make()
    levels = [offbeat.Level(every=2), offbeat.Level(every=4, outer=mean, delay=2)]
    replica = offbeat.Replica(adamw(model.parameters()), model, levels, subgroup=None)
    found = [(one._name is not None, dist.get_backend(one.group) if one._name is None else None)
             for one in (*replica._tracks._peers, members.connect_all(members.peers_of(None), levels))]  # fmt: skip
    assert replica._tracks._peers[1].device == torch.device("cpu")
    train(model, replica, range(9), rank)
    replica.finish()
    assert all(torch.equal(one, flat(model)) for one in everyone(flat(model)))
    return found


@pytest.mark.parametrize(
    ("another", "store", "expected"),
    [
        (False, True, [(True, None)] * 3),
        # The blocking level uses the group's backend; the delayed one, and the vote of shards, a connection of gloo's.
        (True, True, [(False, "gloo"), (True, None), (True, None)]),
        (True, False, [(False, "gloo")] * 3),
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

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "new_group", new_group)
        monkeypatch.setattr(
            dist, "get_backend_config", lambda group=None: "cuda:nccl" if group else "cpu:gloo,cuda:nccl"
        )
        monkeypatch.setattr(peers._torch, "has_store", lambda: False)
        with pytest.raises(_Asked, match=backend):
            peers.connect(dist.group.WORLD, token="t", background=background)
        monkeypatch.setattr(peers._torch, "has_store", lambda: True)
        if background:
            assert peers.connect(dist.group.WORLD, token="t", background=True)._name is not None
        else:
            with pytest.raises(_Asked, match=backend):
                peers.connect(dist.group.WORLD, token="t")
    finally:
        dist.destroy_process_group()
