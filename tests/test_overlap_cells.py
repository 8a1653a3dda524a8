"""Every place and every feature: the loop with overlap gives the numbers of the loop without, on every rank.

The page on overlap lists these tests' names; a docs test holds it to them.
"""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from tests.overlap_loops import CELLS, OPTIMIZERS, Cell, train
from tests.ranks import run_ranks

# All cells of a place are run when the first is asked for, which takes a while where others need the cores too.
pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("overlap"), pytest.mark.timeout(420)]

#: Where norms of shards are added up in another order than torch does it.
TOLERANCE = 2e-6


#: torch's AdamW over distributed tensors takes most of a minute; its SGD shows the same.
def applies(cell: Cell, optimizer: str) -> bool:
    if optimizer == "shared":  # which needs the same gradients on all ranks
        return cell.where == "ddp" and not cell.feature.startswith("hook")
    return not (cell.where == "fsdp2" and optimizer == "torch.AdamW")


PAIRS = [(cell, name) for cell in CELLS for name in OPTIMIZERS if applies(cell, name)]


def inexact(cell: Cell) -> bool:
    return cell.where == "fsdp2" and "clip" in cell.feature


def both(cell: Cell, optimizer: str, rank: int, world: int) -> Any:
    try:
        make = OPTIMIZERS[optimizer]
        return train(cell, make, True, rank, world), train(cell, make, False, rank, world)
    except Exception:
        return traceback.format_exc()


def all_cells(rank: int, world: int, where: str) -> dict[tuple[str, str], Any]:
    return {(str(cell), name): both(cell, name, rank, world) for cell, name in PAIRS if cell.where == where}


@pytest.fixture(scope="module")
def runs():
    """All cells of a place in one set of processes, when the first of them is asked for."""
    done: dict[str, list[Any]] = {}

    def of(where: str) -> list[Any]:
        if where not in done:
            done[where] = []  # what fails or hangs is not tried again for every cell
            done[where] = [all_cells(0, 1, where)] if where == "plain" else run_ranks(all_cells, 2, where, seconds=400)
        assert done[where], "the processes failed; see the first test of this place"
        return done[where]

    return of


@pytest.mark.parametrize(("cell", "optimizer"), PAIRS, ids=str)
def test_same_numbers(cell, optimizer, runs):
    ranks = [run[str(cell), optimizer] for run in runs(cell.where)]
    for result in ranks:
        assert not isinstance(result, str), result
        ours, theirs = result
        assert len(ours["losses"]) >= 20
        waits = "scaler" in cell.feature or cell.feature.endswith("clip_exact")
        assert sum(theirs["early"]) == 0
        # Stepped during backward: most parameters, at every step (the first waits when it has no last norm to go by).
        # Matrices that ranks share wait where each rank knows only what it has used itself.
        unused = cell.feature.startswith(("find_unused", "static_graph"))
        least = 9 if optimizer == "shared" and unused else 15
        for early in ours["early"][cell.feature == "clip_previous" :]:
            assert early == 0 if waits else early >= least
        for key in ("params", "losses", "norms", "state"):
            assert len(ours[key]) == len(theirs[key])
            for a, b in zip(ours[key], theirs[key], strict=True):
                if inexact(cell):
                    torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)
                else:
                    assert torch.equal(a, b), f"{key} differ by {(a - b).abs().max()}"
        assert ours["scale"] == theirs["scale"]
    if cell.where != "plain" and cell.feature != "hook_post_local_sgd":
        for a, b in zip(ranks[0][0]["params"], ranks[1][0]["params"], strict=True):
            assert torch.equal(a, b), "ranks have drifted apart"
