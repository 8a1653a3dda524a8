"""Averaging the gradients of modules without DDP, just before the step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offbeat.sync.agreement import Shares, name_difference
from offbeat.sync.exchange import Exchange
from offbeat.sync.items import Digest, Item
from offbeat.wire.peers import Peers

__all__ = ["GradientMean"]


class GradientMean:
    """For modules that nobody reduces gradients for: averages ``.grad`` just before the step.

    What a backward pass adds to averaged gradients is averaged with the next call; the rest is the same on all ranks
    and stays as it is.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._exchange = Exchange(bucket_bytes, undo="off", remember=False)
        self._digest = Digest()
        self._hooks: dict[int, Any] = {}
        self._is_new = False

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
    def average(self, params: Mapping[str, Tensor], peers: Peers, *, found: bool = False, absent: bool = False) -> bool:
        """Average gradients of these parameters over all peers, if any rank has got new ones.

        A rank that has none for a parameter counts as zero; what no rank has stays None.

        Args:
            found: whether this rank's gradients are not finite.
            absent: this rank has no data: it takes part with zeros and keeps nothing.

        Returns:
            Whether a rank's gradients are not finite.
        """
        self.watch(params)
        device, ranks = peers.device, peers.size
        items = [Item(name, p) for name, p in params.items()]
        bits = self._digest.of(items)
        # Of the same size on every rank, whatever ranks are about to do: the largest of all, and of all negated.
        news = [int(found), int(self._is_new and not absent), *bits, *(-bit - 1 for bit in bits)]
        header = torch.tensor(news, dtype=torch.int64, device=device)
        peers.all_reduce(header, "max").wait()
        any_found, any_new, *most = header.tolist()
        if most[:2] != [-bit - 1 for bit in most[2:]]:
            name_difference(peers, items)
        self._is_new = False
        if not any_new:
            return bool(any_found)
        every = list(params.values())
        used = torch.tensor([0 if absent or p.grad is None else 1 for p in every], dtype=torch.uint8, device=device)
        peers.all_reduce(used, "max").wait()
        grads = []
        for p, wanted in zip(every, used.tolist(), strict=True):
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
        shares = Shares(1 / ranks, ranks, peers.rank == 0)
        self._exchange.average([Item(str(i), g) for i, g in enumerate(grads)], peers, shares)
        return bool(any_found)
