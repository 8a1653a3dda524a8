"""Who works on which matrix: an owner for each, balanced by cost, and rounds of bounded size.

Pure functions of shapes: every rank computes the same result without asking the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from torch import Tensor

from offbeat._torch import weak_table

__all__ = ["Owners", "assign", "cost_of", "rounds"]


def cost_of(shape: Sequence[int]) -> int:
    """What a matrix, or a stack of them, costs: rows times columns times the shorter side."""
    count = 1
    for size in shape:
        count *= size
    return count * min(shape[-2:])


def assign(costs: Sequence[float], ranks: int, busy: Sequence[float] | None = None) -> list[int]:
    """The owner of each matrix: the most expensive first, each to the rank that has the least to do so far.

    Args:
        busy: what each rank has to do already; None for nothing.

    Example:
        >>> assign([8, 1, 4, 4, 1], 2)
        [0, 0, 1, 1, 1]
    """
    load = [(float(cost), rank) for rank, cost in enumerate(busy or [0.0] * ranks)]
    heapq.heapify(load)
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cost, rank = heapq.heappop(load)
        owners[i] = rank
        heapq.heappush(load, (cost + costs[i], rank))
    return owners


def rounds(sizes: Sequence[int], owners: Sequence[int], ranks: int, limit: int) -> list[list[int]]:
    """Positions of matrices in rounds in which no rank has more than ``limit`` of ``sizes`` to work on, or just one.

    Example:
        >>> rounds([2, 2, 2, 5], [0, 0, 0, 1], 2, 4)
        [[0, 1, 3], [2]]
    """
    queues = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]
    found = []
    while any(queues):
        now: list[int] = []
        for queue in queues:
            total = 0
            while queue and (total == 0 or total + sizes[queue[0]] <= limit):
                total += max(1, sizes[queue[0]])
                now.append(queue.pop(0))
        found.append(sorted(now))
    return found


class Owners:
    """The owner of each of an optimizer's matrices, for as long as the optimizer lives: the owner has its state.

    Attributes:
        rank: the rank of this process.
        stale: whether steps have changed state on the owners alone, since all ranks had it last.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        self.rank, self.stale = rank, False
        self._busy = [0.0] * ranks
        self._of = weak_table()

    def add(self, params: Iterable[Tensor]) -> None:
        """Give each of these matrices that has no owner one. Every rank must add the same."""
        new = [p for p in params if p not in self._of]
        costs = [cost_of(p.shape) for p in new]
        for p, cost, owner in zip(new, costs, assign(costs, len(self._busy), self._busy), strict=True):
            self._of[p] = owner
            self._busy[owner] += cost

    def __contains__(self, p: object) -> bool:
        return p in self._of

    def of(self, p: Tensor) -> int:
        """The owner of a matrix."""
        if p not in self._of:
            raise RuntimeError(
                f"a matrix of shape {tuple(p.shape)} has no owner; add it to the optimizer with add_param_group, on "
                "every rank"
            )
        found: int = self._of[p]
        return found

    def has(self, p: Tensor) -> bool:
        """Whether this process owns a matrix."""
        return self.of(p) == self.rank
