"""While a round of a fragment is in flight, no other round changes its anchors, outer state, version or weights."""

from __future__ import annotations

import functools

import pytest
import torch

import offbeat
from offbeat.replicas.board import Board
from tests.harness import batch, flat, loss, make, sgd

nesterov = functools.partial(offbeat.SGD, lr=0.7, momentum=0.9, nesterov=True)
adam = functools.partial(offbeat.Adam, lr=0.05)

LEVELS = {
    "fragments": [offbeat.Level(every=6, outer=nesterov, fragments=3, delay=5)],
    "coded fragments": [offbeat.Level(every=6, outer=nesterov, fragments=3, delay=5, codec="int8")],
    "outer above outer": [
        offbeat.Level(every=2, group=2, outer=adam, delay=1),
        offbeat.Level(every=5, outer=nesterov, fragments=2, delay=4),
    ],
    "late outer above late outer": [
        offbeat.Level(every=4, group=2, outer=nesterov, delay=3),
        offbeat.Level(every=6, outer=adam, delay=2),
    ],
    "blocking outer above late outer": [
        offbeat.Level(every=4, group=2, outer=nesterov, delay=3),
        offbeat.Level(every=6, outer=adam),
    ],
    "outer above means": [
        offbeat.Level(every=1, group=2),
        offbeat.Level(every=5, outer=nesterov, fragments=("strided", 2), delay=5),
    ],
}


def digest(fragment):
    """What a round in flight relies on."""
    outer, names = fragment.outer, fragment.names()
    values = [] if outer is None else [outer.anchors[name] for name in names]
    if outer is not None:
        for name in names:
            values += [t for t in outer.optimizer.state.get(outer.anchors[name], {}).values() if torch.is_tensor(t)]
    return [t.clone() for t in values], fragment.version, fragment.lineage


@pytest.mark.parametrize("ends", [(14, 14, 14, 14), (14, 9, 11, 5)], ids=["together", "apart"])
@pytest.mark.parametrize("name", LEVELS)
def test_nobody_changes_what_a_round_in_flight_relies_on(name, ends, monkeypatch):
    begun, ended = {}, []
    launch, finish, take_part = Board._launch, Board._finish_round, Board.take_part

    def note(board):
        for (place, number), flight in board.flights.items():
            begun.setdefault(id(flight), (flight, digest(board.fragments[place][number])))

    def launched(self, *args, **options):
        launch(self, *args, **options)
        note(self)

    def taken_part(self, *args, **options):
        outcome = take_part(self, *args, **options)
        note(self)
        return outcome

    def finished(self, fragment, outcome, flight, **options):
        if flight is not None:
            (tensors, *counters), (now, *others) = begun.pop(id(flight))[1], digest(fragment)
            assert len(tensors) == len(now)
            assert all(map(torch.equal, tensors, now)), (name, fragment.place, fragment.number)
            assert counters == others
            ended.append(fragment)
        finish(self, fragment, outcome, flight, **options)

    monkeypatch.setattr(Board, "_launch", launched)
    monkeypatch.setattr(Board, "take_part", taken_part)
    monkeypatch.setattr(Board, "_finish_round", finished)

    def run(rank, peers, model):
        replica = offbeat.Replica(sgd(model.parameters()), model, LEVELS[name], group=peers, subgroup=None)
        for step in range(ends[rank]):
            loss(model, batch(step, rank)).backward()
            replica.step()
            replica.zero_grad()
        replica.finish()
        return flat(model)

    found = offbeat.Simulation(4).run(run, make=make)
    assert all(torch.equal(one, found[0]) for one in found)
    assert ended
