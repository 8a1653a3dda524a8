"""Random configurations of replicas against a plain implementation, over a simulated network.

More of them: ``python -m tests.test_against_plain_model FIRST NUMBER``.
"""

from __future__ import annotations

import random
import sys
import warnings

import pytest
import torch
from torch import Tensor

import offbeat
from tests.plain_model import Case, draw, simulate, train


def check_alike(case: Case, found: list) -> None:
    """After finish() and sync() all ranks are equal, and so are the anchors of a group."""
    for rank, (rows, anchors) in enumerate(found):
        assert torch.equal(rows[-6], found[0][0][-6]), case  # four more steps and a sync() come after finish()
        assert torch.equal(rows[-1], found[0][0][-1]), case
        for i, one in enumerate(case.levels):
            first = rank // one.size * one.size
            assert torch.equal(anchors[i], found[first][1][i])


def check(seed: int, *, any_delays: bool) -> None:
    case, rnd = draw(seed, any_delays=any_delays), random.Random(seed)

    def run(**how):
        return offbeat.Simulation(case.ranks, timeout=30).run(train, case, **how)

    found = run()
    check_alike(case, found)
    saves = rnd.sample(range(1, case.steps), min(3, case.steps - 1))
    for (rows, anchors), (others, theirs) in zip(found, run(saves=saves), strict=True):
        assert all(map(same, rows, others)), f"saved before {saves}: {case}"
        assert all(map(torch.equal, anchors, theirs))
    if not case.warmup and case.infinite is None:
        more = [rnd.randint(0, 7) for _ in range(case.ranks)]
        check_alike(case, run(more=more))
    if not any_delays:
        history, end = simulate(case)
        for rank, (rows, _) in enumerate(found):
            for step in range(case.last(rank)):
                close(rows[step], history[step][rank], f"rank {rank} after step {step}", case)
            if end is not None:
                close(rows[-6], end[rank], f"rank {rank} at the end", case)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether these are equal, where they are finite."""
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def close(a: Tensor, b: Tensor, where: str, case: Case) -> None:
    assert torch.equal(a.isfinite(), b.isfinite()), f"{where}: {case}"
    a, b = (t.nan_to_num(0.0, 0.0, 0.0) for t in (a, b))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m: f"{where}: {m}\n{case}")


@pytest.mark.parametrize("seed", range(24))
def test_as_the_plain_implementation(seed):
    check(seed, any_delays=False)


@pytest.mark.parametrize("seed", range(8))
def test_delays_at_every_level(seed):
    """The order of landings has no plain form: ranks agree, and go on after a load as if nothing had happened."""
    check(seed, any_delays=True)


if __name__ == "__main__":
    first, number = map(int, sys.argv[1:])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for place in range(first, first + number):
        for anywhere in (False, True):
            print(place, anywhere, flush=True)
            check(place, any_delays=anywhere)
