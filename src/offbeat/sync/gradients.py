"""Whose gradients are averaged, step by step: all ranks' during warm-up, then a node's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from offbeat.sync.agreement import Shares
from offbeat.sync.exchange import Exchange
from offbeat.sync.groups import meeting_device
from offbeat.sync.items import Item

__all__ = ["GradientMean", "as_it_is", "bucket_hook", "mean_of_bucket"]


def as_it_is(bucket: Any) -> Future[Any]:
    """DDP's bucket, with this rank's own gradients."""
    done: Future[Any] = Future()
    done.set_result(bucket.buffer())
    return done


def mean_of_bucket(group: Any, bucket: Any) -> Future[Any]:
    """DDP's bucket, averaged over a group: divided first, so that half precision does not overflow."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return as_it_is(bucket)
    buffer = bucket.buffer()
    buffer.div_(ranks)
    work = dist.all_reduce(buffer, group=group, async_op=True)
    reduced: Future[Any] = work.get_future().then(lambda done: done.value()[0])
    return reduced


def bucket_hook(group_now: Callable[[], Any], reduce: Callable[[Any, Any], Any]) -> Any:
    """A DDP communication hook that asks for its group at every bucket; None leaves the bucket as it is.

    Args:
        reduce: called as ``reduce(group, bucket)``, as torch's hooks are whose state is a process group.
    """

    def local_sgd_hook(state: Any, bucket: Any) -> Future[Any]:
        group = group_now()
        if group is None:
            return as_it_is(bucket)
        return reduce(group, bucket)  # type: ignore[no-any-return]

    local_sgd_hook.__annotations__ = {}  # DDP wants the types themselves or none, and these are their names
    return local_sgd_hook


class GradientMean:
    """For modules that nobody reduces gradients for: averages ``.grad`` just before the step."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @torch.no_grad()
    def average(self, params: Sequence[Tensor], group: Any, *, absent: bool = False) -> None:
        """Average gradients of these parameters over a group.

        A rank that has none for a parameter counts as zero; what no rank has stays None.

        Args:
            absent: this rank has no data: it takes part with zeros and keeps nothing.
        """
        ranks = dist.get_world_size(group)
        used = torch.tensor(
            [0 if absent or p.grad is None else 1 for p in params], dtype=torch.uint8, device=meeting_device(group)
        )
        dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
        grads = []
        for p, wanted in zip(params, used.tolist(), strict=True):
            if not wanted:
                continue
            if absent or p.grad is None:
                grads.append(torch.zeros_like(p))
                if not absent:
                    p.grad = grads[-1]
            elif p.grad.layout != torch.strided:
                raise TypeError(
                    f"a sparse gradient (of a parameter of shape {tuple(p.shape)}) cannot be averaged here; "
                    "wrap the module in DistributedDataParallel"
                )
            else:
                grads.append(p.grad)
        items = [Item(str(i), g) for i, g in enumerate(grads)]
        self._exchange.average(items, group, Shares(1 / ranks, ranks, dist.get_rank(group) == 0))
