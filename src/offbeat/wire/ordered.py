"""A sum in rank order: the same bits with any backend, and in a simulation."""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.wire.peers import Peers, Work

__all__ = ["ordered_sum"]


def ordered_sum(peers: Peers, flat: Tensor) -> Work:
    """Replace a flat tensor by its sum over all peers, added up in rank order.

    Every peer adds up one part of the tensor, which takes as many bytes as a ring all-reduce. Two peers exchange the
    whole tensor instead, in one collective.
    """
    return _OrderedSum(peers, flat)


class _OrderedSum:
    """The exchange of parts is under way; sums are taken and gathered when it is waited for."""

    def __init__(self, peers: Peers, flat: Tensor) -> None:
        self._peers, self._flat, self._is_done = peers, flat, False
        size = peers.size
        if size <= 2:
            self._parts = flat.new_empty(size * flat.numel())
            self._work = peers.all_gather(self._parts, flat)
            return
        each = -(-flat.numel() // size)
        sizes = [max(0, min(each, flat.numel() - i * each)) for i in range(size)]
        self._each, mine = each, sizes[peers.rank]
        self._parts = flat.new_empty(size * mine)
        self._work = peers.all_to_all(self._parts, flat, [mine] * size, sizes)

    def wait(self) -> None:
        if self._is_done:  # a second time, the parts would be added again
            return
        self._work.wait()
        self._is_done = True
        peers, flat = self._peers, self._flat
        total, *others = self._parts.view(peers.size, -1).unbind()
        for part in others:
            total.add_(part)
        if peers.size <= 2:
            flat.copy_(total)
            return
        padded = torch.zeros(self._each, dtype=flat.dtype, device=flat.device)
        padded[: len(total)] = total
        every = flat.new_empty(peers.size * self._each)
        peers.all_gather(every, padded).wait()
        flat.copy_(every[: flat.numel()])
