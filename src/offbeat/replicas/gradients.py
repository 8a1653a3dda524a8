"""Averaging the gradients of modules without DDP, just before the step, and the losses of closures."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.replicas.compare import Disagreement, check_same_options, name_difference
from offbeat.replicas.contents import CachedDigest, Item, local_part
from offbeat.replicas.hello import Verdict
from offbeat.replicas.values import Reduction, Values
from offbeat.wire.peers import Peers

__all__ = ["GradientMean", "check_same_closure", "mean_loss"]

#: What a closure has returned.
_NONE, _NUMBER, _ELSE = 0, 1, 2
_KINDS = ("None", "a number", "neither a number nor None")


class GradientMean:
    """For modules that nobody reduces gradients for: averages ``.grad`` just before the step.

    What a backward pass adds to averaged gradients is averaged with the next call, and so is a gradient that was
    assigned; the rest is the same on all ranks and stays as it is.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._reduction = Reduction(bucket_bytes)
        self._digest = CachedDigest()
        self._hooks: dict[int, Any] = {}
        self._is_new = False
        self._seen: dict[int, Tensor | None] = {}

    def watch(self, params: Mapping[str, Tensor]) -> None:
        """Take note of gradients that arrive for these parameters."""
        me = weakref.ref(self)

        def arrived(p: Tensor) -> None:
            found = me()
            if found is not None:
                found._is_new = True

        for p in params.values():
            if id(p) not in self._hooks and p.requires_grad:
                self._hooks[id(p)] = p.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
                self._is_new = self._is_new or p.grad is not None

    def remove(self) -> None:
        """Take no more notice."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    @torch.no_grad()
    def average(
        self,
        params: Mapping[str, Tensor],
        peers: Peers,
        *,
        found: bool = False,
        again: bool = False,
        in_closure: bool = False,
    ) -> bool:
        """Average gradients of these parameters over all peers.

        A rank that has none for a parameter counts as zero; what no rank has stays None.

        Args:
            found: whether this rank's gradients are not finite.
            again: whether gradients have been averaged for this step before. Then they are averaged only if a rank has
                got new ones since; a program may have clipped them in between.
            in_closure: whether ``step(closure)`` asks for it, which must be the same on every rank.

        Returns:
            Whether a rank's gradients are not finite.
        """
        self.watch(params)
        device = peers.device
        items = [Item(name, p) for name, p in params.items()]
        digest = int(self._digest.of(items)[:31], 16)
        bits = digest >> 62, digest & (2**62 - 1)
        # Of the same size on every rank, whatever ranks are about to do: the largest of all, and of all negated.
        is_new = not again or self._is_new or any(self._seen.get(id(p)) is not p.grad for p in params.values())
        same = (*bits, int(in_closure))
        news = [int(found), int(is_new), *same, *(-number - 1 for number in same)]
        header = torch.tensor(news, dtype=torch.int64, device=device)
        peers.all_reduce(header, "max").wait()
        any_found, any_new, *most = header.tolist()
        if most[:3] != [-number - 1 for number in most[3:]]:
            check_same_closure(in_closure, peers)
            name_difference(items, peers)
        self._is_new = False
        if not any_new:
            return bool(any_found)
        every = list(params.values())
        used = torch.tensor([int(p.grad is not None) for p in every], dtype=torch.uint8, device=device)
        peers.all_reduce(used, "max").wait()
        grads, with_gradient = [], []
        for p, wanted in zip(every, used.tolist(), strict=True):
            if not wanted:
                continue
            with_gradient.append(p)
            if p.grad is None:
                p.grad = torch.zeros_like(p)
                grads.append(p.grad)
            elif p.grad.layout != torch.strided:
                raise TypeError(
                    f"a sparse gradient (of a parameter of shape {tuple(p.shape)}) cannot be averaged here; "
                    "wrap the module in DistributedDataParallel"
                )
            else:
                grads.append(p.grad)
        verdict = Verdict(weights=(1.0,) * peers.size)
        reduced = [_in_layout_of(p, g) for p, g in zip(with_gradient, grads, strict=True)]
        for bucket in _buckets(reduced, self._reduction.bucket_bytes):
            items = [Item(str(i), g) for i, g in enumerate(bucket)]
            values = Values(items)
            values.copy(items)
            self._reduction.run(values.flats, peers, verdict)
            for item in items:
                local_part(item.tensor).copy_(values[item.name])
        for g, mean in zip(grads, reduced, strict=True):
            if mean is not g:
                g.copy_(mean)
        return bool(any_found)

    def keep_in_mind(self, params: Mapping[str, Tensor]) -> None:
        """Take note of gradients that have been averaged, until :meth:`forget`."""
        self._seen = {id(p): p.grad for p in params.values()}

    def forget(self) -> None:
        """After a step: keep no gradient alive."""
        self._seen = {}


def _buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Runs of tensors of about ``limit`` bytes at most."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(other.nbytes for other in bucket) + tensor.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _in_layout_of(p: Tensor, g: Tensor) -> Tensor:
    """The gradient, with its numbers in an order that is the same on all ranks: that of the parameter in memory.

    Autograd gives a gradient this layout, unless the parameter has gaps; a program can give it any.
    """
    has_gaps = _flat_view(local_part(p)) is None
    if g.is_contiguous() if has_gaps else g.stride() == p.stride():
        return g
    return torch.empty_like(p, memory_format=torch.contiguous_format if has_gaps else torch.preserve_format).copy_(g)


def check_same_closure(is_given: bool, peers: Peers) -> None:
    """Raise on every rank unless all ranks have called ``step(closure)``, or all ``step()``.

    With a closure ranks average its loss, too, and would wait for those that have none.
    """
    check_same_options({"whether step() is called with a closure": is_given}, peers)


def mean_loss(loss: Any, peers: Peers) -> Any:
    """The mean over all peers of the loss that a closure has returned, so that LBFGS decides the same on every rank.

    A number and a tensor of one element are averaged, None and anything else stay as they are.
    """
    kind, value = _ELSE, 0.0
    if loss is None:
        kind = _NONE
    elif isinstance(loss, Tensor) and loss.numel() == 1:
        kind, value = _NUMBER, loss.detach().item()
    elif isinstance(loss, numbers.Real):
        kind, value = _NUMBER, float(loss)
    mine = torch.tensor([kind, value], dtype=torch.float64, device=peers.device)
    rows = torch.empty(2 * peers.size, dtype=torch.float64, device=peers.device)
    peers.all_gather(rows, mine).wait()  # always, so that nobody waits for a rank that has nothing to average
    table = rows.view(-1, 2).tolist()
    if len({found for found, _ in table}) > 1:
        where = ", ".join(
            f"rank {rank}: {_KINDS[int(found)]}" for rank, (found, _) in zip(peers.ranks, table, strict=True)
        )
        raise Disagreement(
            f"the closure has not returned the same kind of loss on every rank ({where}), so that it cannot be "
            "averaged; nothing was changed. Return the loss on every rank, or None on every rank"
        )
    if kind != _NUMBER:
        return loss
    mean = sum(number for _, number in table) / peers.size
    return torch.full_like(loss, mean, requires_grad=False) if isinstance(loss, Tensor) else mean


def _flat_view(part: Tensor) -> Tensor | None:
    """The tensor as a flat view in memory order, or None if it has gaps or overlaps."""
    if part.is_contiguous():
        return part.view(-1)
    strides = sorted((stride, size) for stride, size in zip(part.stride(), part.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return None
        expected *= size
    return part.as_strided((part.numel(),), (1,))
