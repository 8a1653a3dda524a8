"""``Fragment``: the parameters that travel together at a level, and what lasts of them from round to round."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.replicas.contents import Contents, Item, local_part
from offbeat.replicas.level import Level
from offbeat.replicas.outer import Outer
from offbeat.replicas.values import Reduction, Values
from offbeat.wire.codecs import make_codec
from offbeat.wire.membership import Membership
from offbeat.wire.sums import CodedMean

__all__ = ["Fragment"]


class Fragment:
    """One fragment of one level.

    Args:
        level: the options of the level.
        place: which level this is, counted from the lowest.
        number: which fragment of the level this is.
        contents: the tensors of the optimizer and its module.
        membership: who takes part in its rounds.
        reduction: averages dense tensors.
        outer: the anchors and the outer optimizer of the level, if it has one.
        copies: where copies for rounds in the background are kept; None is where the parameters are.

    Attributes:
        seen: the amount of data since the last round.
        moved: whether this rank has made a step since the last round.
        skipped: whether the last round was skipped, so that replicas still differ.
        is_new: whether this replica has joined since the last round, in which it has no weight.
        version: how many landings, of this level or a higher one, have moved the anchors; -1 without anchors.
        lineage: a hash of the run and all these landings.
        residual: what encoding has lost so far, for the parameters and sizes in ``residual_of``.
    """

    def __init__(
        self,
        level: Level,
        place: int,
        number: int,
        contents: Contents,
        membership: Membership,
        reduction: Reduction,
        outer: Outer | None,
        copies: torch.device | None,
    ) -> None:
        self.level, self.place, self.number = level, place, number
        self.contents, self.membership, self.reduction, self.outer = contents, membership, reduction, outer
        self.copies = copies
        self.codec = make_codec(level.codec)
        # What the owner of a sum loses in encoding it is fed back too.
        feedback: dict[str, Any] = {} if level.decay is None else {"return_sum_error": True, "decay": level.decay}
        self.coded_mean = None if self.codec is None else CodedMean(self.codec, **feedback)
        self.seen, self.moved, self.skipped, self.is_new = 0.0, False, False, False
        self.version, self.lineage = -1 if outer is not None else 0, ""
        self.residual: Tensor | None = None
        self.residual_of: list[tuple[str, int]] = []
        self._memory: Values | None = None
        self._cut: tuple[list[str], list[str]] = ([], [])

    def names(self) -> list[str]:
        """The parameters of this fragment."""
        params = self.contents.params()
        if self.level.parts == 1 and isinstance(self.level.fragments, (int, tuple)):
            return list(params)
        if list(params) != self._cut[0]:
            sizes = {name: p.numel() for name, p in params.items()}
            self._cut = (list(params), self.level.cut(sizes, self.contents.frozen())[self.number])
        return self._cut[1]

    def params(self) -> list[Item]:
        """The parameters of this fragment, as items."""
        params = self.contents.params()
        return [Item(name, params[name]) for name in self.names()]

    def buffers(self) -> list[Item]:
        """The module's buffers, which travel with the first fragment."""
        return self.contents.buffers() if self.number == 0 else []

    def covers(self, other: Fragment) -> bool:
        """Whether a round here makes one of a lower level needless: it exchanges all parameters of that."""
        return other.level is not self.level and set(other.names()) <= set(self.names())

    def overlaps(self, other: Fragment) -> bool:
        """Whether both have a parameter in common."""
        if self.level.parts == 1 or other.level.parts == 1:
            return True
        return not set(self.names()).isdisjoint(other.names())

    def copy(self, items: Sequence[Item]) -> Values:
        """A copy of items, in memory that this fragment's next round uses again."""
        if self._memory is None or not self._memory.fits(items, self.copies):
            self._memory = None
            self._memory = Values(items, self.copies, are_differences=True)
        self._memory.copy(items)
        return self._memory

    def landed(self, step: int, place: int, number: int) -> None:
        """Count a landing of some level after a step, which has moved the anchors."""
        self.version += 1
        text = f"{self.lineage} {step} {place} {number}"
        self.lineage = hashlib.sha256(text.encode()).hexdigest()[:16]

    def residual_for(self, sizes: list[tuple[str, int]], device: torch.device) -> Tensor | None:
        """What encoding has lost so far, for these parameters and sizes; zeros for those that are new."""
        if self.residual is None:
            return None
        residual = self.residual.to(device)
        if sizes == self.residual_of:
            return residual
        pieces = torch.split(residual, [size for _, size in self.residual_of])
        parts = dict(zip(self.residual_of, pieces, strict=True))
        return torch.cat([parts[key] if key in parts else residual.new_zeros(key[1]) for key in sizes])


def sizes_of(items: Sequence[Item]) -> list[tuple[str, int]]:
    """The names of items and the numbers of their elements, in the order in which they are encoded."""
    return [(item.name, local_part(item.tensor).numel()) for item in items]
