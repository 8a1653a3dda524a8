r"""A round whose differences from the anchor are encoded.

Every rank sends :math:`C(w_i (a - x_i) + \lambda e_i)`, where :math:`C` encodes, :math:`w_i` is its weight and
:math:`e_i` what encoding has lost so far (error feedback, with decay :math:`\lambda`). The decoded sum is the outer
optimizer's pseudo-gradient, the same on every rank to the bit. The new :math:`e_i` is kept only after the vote. A rank
of weight 0 keeps its :math:`e_i`, except that of the part of the sum that it owns, which it adds to that part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat.sync.agreement import Shares
from offbeat.sync.copies import CopyRound
from offbeat.sync.items import Item, local_part
from offbeat.sync.meeting import not_finite
from offbeat.wire.coded import CodedMean
from offbeat.wire.peers import Peers

if TYPE_CHECKING:
    from offbeat.sync.track import Track

__all__ = ["Coded", "sizes_of"]

#: Elements that are encoded and sent at once are a multiple of this, so that codes do not depend on the bucket's size.
ALIGN = 1 << 16


class Coded(CopyRound):
    """Encodes differences from the anchor, in float32."""

    def __init__(self, track: Track, step: int, *, done: bool = False, now: bool = False) -> None:
        super().__init__(track, step, done=done, now=now)
        assert track.codec is not None
        # What the owner of a sum loses in encoding it is fed back too.
        decay = track.level.error_feedback
        self._mean = CodedMean(track.codec, return_sum_error=decay is not None, decay=1.0 if decay is None else decay)
        self._lost: Tensor | None = None
        self._lost_of: list[tuple[str, int]] = []
        self._flat: Tensor | None = None
        params = set(self.names)
        self._buffers = [item for item in self.items if item.name not in params]
        self._params = [item for item in self.items if item.name in params]

    @torch.no_grad()
    def take(self) -> None:
        """Compute the differences."""
        assert self.track.outer is not None
        anchors, device = self.track.outer.anchors, self.track.peers.device
        self._lost_of = sizes_of(self._params)
        self._flat = torch.empty(sum(size for _, size in self._lost_of), dtype=torch.float32, device=device)
        for item, view in self._views():
            part, anchor = local_part(item.tensor), anchors[item.name]
            if part.device == anchor.device == device and part.dtype == anchor.dtype == torch.float32:
                torch.sub(anchor, part, out=view)
            else:
                wide = torch.promote_types(torch.promote_types(anchor.dtype, part.dtype), torch.float32)
                view.copy_(anchor.to(wide) - part.to(device=anchor.device, dtype=wide))
        self._copy(self._buffers)

    def _views(self) -> list[tuple[Item, Tensor]]:
        assert self._flat is not None
        start, found = 0, []
        for item in self._params:
            part = local_part(item.tensor)
            found.append((item, self._flat[start : start + part.numel()].view(part.shape)))
            start += part.numel()
        return found

    def not_finite(self) -> list[str]:
        """See :class:`~offbeat.sync.rounds.Round`."""
        buffers = zip(self._buffers, self.track.snapshot.views, strict=True)
        tensors = [(item.name, view) for item, view in [*self._views(), *buffers]]
        return not_finite(tensors, self.track.contents.masks)

    @torch.no_grad()
    def _exchange(self, shares: Shares, peers: Peers) -> None:
        track, flat = self.track, self._flat
        assert flat is not None
        if self._buffers:
            # As the codes are: the round then has the same bits over any backend, and in a simulation.
            self._reduce_copy(shares, peers, ordered=True)
        decay = track.level.error_feedback
        lost = torch.zeros_like(flat) if decay is not None else None
        old = track.residual_for(self._lost_of)
        if shares.factor:
            flat.mul_(shares.factor)
            if decay is not None and old is not None:
                flat.add_(old, alpha=decay)
        elif lost is not None and old is not None:
            lost.copy_(old)  # it keeps what it has lost, but for the part of the sum that it owns
        size = max(ALIGN, track.exchange.bucket_bytes // 16 // ALIGN * ALIGN)
        for start in range(0, flat.numel(), size):
            piece = flat[start : start + size]
            left = None if lost is None else lost[start : start + size]
            self._mean.reduce(piece, peers, shares.factor, residual=left, out=piece)
            track.exchange.bytes_sent += self._mean.bytes_sent(piece.numel(), peers.size)
        self._lost = lost
        self._vote()

    def _land(self, params: dict[str, Tensor]) -> None:
        track = self.track
        if track.level.error_feedback is not None:
            track.residual, track.residual_of = self._lost, self._lost_of
        views = [(item, view) for item, view in self._views() if item.name in params]
        names = [item.name for item, _ in views]
        gradients = [view for _, view in views]
        self._move(params, names, lambda outer: outer.move(names, gradients))
        self._land_copy(self._buffers)

    def _copied(self) -> list[Item]:
        return self._buffers

    def values(self) -> dict[str, Any]:
        """For a checkpoint: what :meth:`land` will use."""
        assert self._flat is not None
        lost = None if self._lost is None else self._lost.clone()
        values = self._copy_values(self._buffers)
        return {"flat": self._flat.clone(), "lost": lost, "lost_of": list(self._lost_of), "values": values}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`values`."""
        self._flat = state["flat"].clone()
        self._lost = None if state["lost"] is None else state["lost"].clone()
        self._lost_of = [(str(name), int(size)) for name, size in state["lost_of"]]
        self.names = [name for name, _ in self._lost_of]  # without those that were unfrozen or added since
        params = {item.name: item for item in self._params}
        self._params = [params[name] for name in self.names]
        self._restore_copy(self._buffers, state["values"])


def sizes_of(items: Sequence[Item]) -> list[tuple[str, int]]:
    """The names of items and the numbers of their elements, in the order in which they are encoded."""
    return [(item.name, local_part(item.tensor).numel()) for item in items]
