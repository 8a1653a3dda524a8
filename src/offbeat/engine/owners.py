"""Who works on which matrix: an owner for each, balanced by cost, and rounds of bounded size.

Pure functions of shapes: every rank computes the same result without asking the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["assign", "cost_of", "rounds"]


def cost_of(shape: Sequence[int]) -> int:
    """What a matrix, or a stack of them, costs: rows times columns times the shorter side."""
    count = 1
    for size in shape:
        count *= size
    return count * min(shape[-2:])


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """The owner of each matrix: the most expensive first, each to the rank that has the least to do so far.

    Example:
        >>> assign([8, 1, 4, 4, 1], 2)
        [0, 0, 1, 1, 1]
    """
    load = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        busy, rank = heapq.heappop(load)
        owners[i] = rank
        heapq.heappush(load, (busy + costs[i], rank))
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
