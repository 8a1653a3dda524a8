"""Assigns an owner to each matrix, balanced by cost, and divides the work into rounds of bounded size.

These are pure functions of shapes: every rank computes the same result without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["assign", "cost_of", "rounds"]


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
    rounds_so_far = []
    while any(queues):
        now: list[int] = []
        for queue in queues:
            total = 0
            while queue and (total == 0 or total + sizes[queue[0]] <= limit):
                total += max(1, sizes[queue[0]])
                now.append(queue.pop(0))
        rounds_so_far.append(sorted(now))
    return rounds_so_far
