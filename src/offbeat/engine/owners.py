"""Assigns an owner to each matrix, balanced by cost, and divides the work into rounds of bounded size.

These are pure functions of shapes: every rank computes the same result without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from torch import Tensor

from offbeat._torch import weak_table

__all__ = ["Owners", "assign", "cost_of", "rounds"]


def cost_of(shape: Sequence[int]) -> int:
    """The cost of a matrix or of a stack of matrices: rows times columns times the shorter side."""
    count = 1
    for size in shape:
        count *= size
    return count * min(shape[-2:])


def assign(costs: Sequence[float], ranks: int, busy: Sequence[float] | None = None) -> list[int]:
    """The owner of each matrix: the most expensive come first, each goes to the rank with the least work so far.

    Args:
        busy: the work that each rank already has; None for none.

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
    """Indices of matrices in rounds. In a round, each rank has one matrix, or several of at most ``limit`` in total.

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
    """The owners of an optimizer's matrices. They never change, because the owner has the state of a matrix.

    Attributes:
        rank: the rank of this process.
        stale: whether steps have changed state on the owners since all ranks last had all state.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        self.rank, self.stale = rank, False
        self._busy = [0.0] * ranks
        self._of = weak_table()

    def add(self, params: Iterable[Tensor]) -> None:
        """Assign an owner to each of these matrices that has none. Every rank must add the same matrices."""
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
