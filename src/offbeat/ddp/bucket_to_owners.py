"""One bucket of a DDP module: matrices are reduced to their owners, and the rest is all-reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from offbeat._torch import foreach_copy_, foreach_zero_

__all__ = ["bucket_to_owners"]


def bucket_to_owners(bucket: Any, owners: Sequence[int | None], group: Any) -> Future[Any]:
    """Reduce matrices to their owners and all-reduce the rest.

    One all-to-all brings the parts of each matrix to its owner, which adds them up in the order of ranks. The bucket
    then has zeros where another rank is the owner.
    """
    buffer, ranks, me = bucket.buffer(), dist.get_world_size(group), dist.get_rank(group)
    start = buffer.storage_offset()
    # A gradient's numbers lie together in the bucket, whatever its layout.
    pieces = [buffer.narrow(0, g.storage_offset() - start, g.numel()) for g in bucket.gradients()]
    rest = [piece for piece, owner in zip(pieces, owners, strict=True) if owner is None]
    by_owner = [[piece for piece, owner in zip(pieces, owners, strict=True) if owner == r] for r in range(ranks)]
    mine, others = by_owner[me], [piece for r, some in enumerate(by_owner) if r != me for piece in some]
    sizes = [sum(piece.numel() for piece in some) for some in by_owner]
    wide = buffer.dtype in (torch.float32, torch.float64)
    sent = _packed([piece for some in by_owner for piece in some], buffer)
    shared = _packed(rest, buffer)
    if not wide:  # sums could overflow
        sent.mul_(1 / ranks)
        shared.mul_(1 / ranks)
    arrived = buffer.new_empty(ranks * sizes[me])
    width = buffer.element_size()
    underway = [
        dist.all_to_all_single(
            arrived.view(torch.uint8), sent.view(torch.uint8), [width * sizes[me]] * ranks,
            [width * size for size in sizes], group=group, async_op=True,
        ).get_future()
    ]  # fmt: skip
    if rest:
        underway.append(dist.all_reduce(shared, group=group, async_op=True).get_future())

    def unpack(done: Future[Any]) -> Any:
        for one in done.value():
            one.value()  # raises if it has failed
        total, *more = torch.split(arrived, sizes[me]) if sizes[me] else [arrived]
        for part in more:
            total.add_(part)
        if wide:
            total.mul_(1 / ranks)
            shared.mul_(1 / ranks)
        _unpack(total, mine)
        _unpack(shared, rest)
        if others:
            foreach_zero_(others)
        return buffer

    return collect_all(underway).then(unpack)


def _packed(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(pieces) if pieces else like.new_empty(0)


def _unpack(flat: Tensor, pieces: list[Tensor]) -> None:
    if pieces:
        foreach_copy_(pieces, list(torch.split(flat, [piece.numel() for piece in pieces])))
