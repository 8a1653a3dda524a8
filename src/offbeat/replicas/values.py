"""The values of a round: items as flat tensors, and their reduction over replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.replicas.contents import FIRST, Item, local_part
from offbeat.replicas.hello import Verdict
from offbeat.wire.ordered import ordered_sum
from offbeat.wire.peers import Peers

__all__ = ["Flat", "Reduction", "Values", "bytes_of_buckets"]

_ALIGN = 64
#: Slots of a bucket: two are in flight while the third is filled or emptied. As much again as one is left to the
#: backend: gloo allocates half as much as is in flight.
SLOTS = 3

_TRAVELS = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
}


@dataclass(frozen=True)
class Flat:
    """Items of one kind in one flat tensor.

    Attributes:
        how: the mean, or the first replica's value; see :class:`Item`.
        late: see :class:`Item`.
        tensor: all their elements, one item after the other.
        views: the items by name, in their own shapes.
    """

    how: str
    late: bool
    tensor: Tensor
    views: dict[str, Tensor]


class Values:
    """A copy of items, in one flat tensor for each kind, dtype and device.

    Args:
        items: what to make room for.
        device: where; None is each item's own device.
        are_differences: whether these will be differences to add to what has moved on since, where that is possible.
    """

    def __init__(
        self, items: Sequence[Item], device: torch.device | None = None, *, are_differences: bool = False
    ) -> None:
        self.are_differences = are_differences
        kinds: dict[Any, list[tuple[str, Tensor]]] = {}
        for item in items:
            part = local_part(item.tensor)
            if part.dtype not in _TRAVELS and item.how != FIRST:
                raise TypeError(
                    f"{item.name} is {part.dtype}, which cannot be reduced; use another dtype, or buffers='keep' for a "
                    "buffer"
                )
            kinds.setdefault((item.how, item.late, part.dtype, part.device), []).append((item.name, part))
        self.flats = [_allocate(kind, parts, device) for kind, parts in kinds.items()]
        self.kind = _kind_of(items, device)
        self._views = {name: view for flat in self.flats for name, view in flat.views.items()}

    @torch.no_grad()
    def copy(self, items: Sequence[Item]) -> None:
        """Copy the items' present values."""
        if items:
            targets = [self._views[item.name] for item in items]
            _torch.foreach_copy_(targets, [local_part(item.tensor) for item in items], non_blocking=True)

    def fits(self, items: Sequence[Item], device: torch.device | None) -> bool:
        """Whether there is room for exactly these items."""
        return bool(self.kind == _kind_of(items, device))

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __contains__(self, name: str) -> bool:
        return name in self._views

    @property
    def devices(self) -> set[torch.device]:
        """Where the values are."""
        return {flat.tensor.device for flat in self.flats}

    def clone(self) -> dict[str, Tensor]:
        """The values by name, in memory of their own."""
        return {name: view.clone() for name, view in self._views.items()}

    @staticmethod
    def restored(items: Sequence[Item], saved: Mapping[str, Tensor], device: torch.device | None) -> Values:
        """Values of a checkpoint, for those of these items that it has."""
        present = [item for item in items if item.name in saved]
        values = Values(present, device, are_differences=True)
        for item in present:
            values[item.name].copy_(saved[item.name])
        return values


def _kind_of(items: Sequence[Item], device: torch.device | None) -> Any:
    parts = [local_part(item.tensor) for item in items]
    return device, [
        (item.name, item.how, item.late, part.dtype, part.device, part.shape, part.stride())
        for item, part in zip(items, parts, strict=True)
    ]


def _allocate(kind: Any, parts: Sequence[tuple[str, Tensor]], device: torch.device | None) -> Flat:
    how, late, dtype, home = kind
    target = home if device is None else device
    pin = target.type == "cpu" and home.type == "cuda"
    flat = torch.empty(sum(part.numel() for _, part in parts), dtype=dtype, device=target, pin_memory=pin)
    views, start = {}, 0
    for name, part in parts:
        views[name] = _view_like(flat[start : start + part.numel()], part)
        start += part.numel()
    return Flat(how, late, flat, views)


def _view_like(piece: Tensor, part: Tensor) -> Tensor:
    """A view of the flat piece with the shape of ``part``, and with its strides if these leave no gaps."""
    shape, strides = list(part.shape), list(part.stride())
    order = sorted(range(len(shape)), key=lambda i: (strides[i], shape[i]))
    expected = 1
    for i in order:
        if shape[i] > 1 and strides[i] != expected:
            return piece.view(shape)
        expected *= shape[i]
    return piece.as_strided(shape, strides, piece.storage_offset())


def bytes_of_buckets(bucket_mb: float) -> int:
    """``bucket_mb`` in bytes. Raises if it is not a positive number."""
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not 0 < bucket_mb < float("inf"):
        raise ValueError(f"bucket_mb must be a positive number of megabytes, but got {bucket_mb!r}")
    return max((SLOTS + 1) * _ALIGN, int(bucket_mb * 2**20))


class Reduction:
    """Reduces values over replicas, in bounded memory: while one bucket is in flight, another is filled or emptied.

    Args:
        bucket_bytes: the memory for buckets.
        dtype: the dtype to reduce floating-point numbers in, if it is wider than their own.
        ordered: sum in rank order, so that the result does not depend on the backend.
    """

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None = None, *, ordered: bool = False) -> None:
        self.bucket_bytes, self.dtype, self.ordered = bucket_bytes, dtype, ordered
        self.slot_bytes = max(_ALIGN, bucket_bytes // (SLOTS + 1) // _ALIGN * _ALIGN)
        self._memory: dict[torch.device, list[Tensor]] = {}

    @torch.no_grad()
    def run(
        self,
        flats: Sequence[Flat],
        peers: Peers,
        verdict: Verdict,
        *,
        differences: Sequence[bool] = (),
        ordered: bool = False,
    ) -> None:
        """Replace each flat tensor by its mean over the replicas.

        Args:
            flats: what to reduce; their memory is our own.
            peers: one rank of each replica.
            verdict: their weights.
            differences: for each flat tensor, whether to replace it by the mean minus itself instead.
            ordered: sum these in rank order, also if this object does not otherwise.
        """
        waiting: deque[tuple[Tensor, Tensor, Any, bool]] = deque()

        def land() -> None:
            values, slot, work, is_difference = waiting.popleft()
            work.wait()
            if slot is not values:
                result = slot.to(values.device)
                torch.sub(result, values, out=values) if is_difference else values.copy_(result)

        try:
            for number, (flat, values, is_difference) in enumerate(self._pieces(flats, differences)):
                if len(waiting) == SLOTS - 1:
                    land()
                slot = self._slot(number, values, peers, is_difference)
                _fill(slot, values, flat.how, peers.rank, verdict)
                work = ordered_sum(peers, slot) if self.ordered or ordered else peers.all_reduce(slot)
                waiting.append((values, slot, work, is_difference))
            while waiting:
                land()
        except BaseException:
            self._memory = {}  # a collective that failed may still write to it
            waiting.clear()  # what is under way would keep the connection open
            raise

    def _pieces(self, flats: Sequence[Flat], differences: Sequence[bool]) -> Iterator[tuple[Flat, Tensor, bool]]:
        for i, flat in enumerate(flats):
            tensor = flat.tensor if flat.tensor.dtype in _TRAVELS else flat.tensor.view(torch.uint8)
            length = max(1, self.slot_bytes // self._dtype_of(tensor).itemsize)
            for piece in torch.split(tensor, length) if tensor.numel() else ():
                yield flat, piece, bool(differences) and differences[i]

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The dtype that values travel in: never narrower than their own, which would round parameters."""
        wider = self.dtype is not None and tensor.dtype.is_floating_point
        return torch.promote_types(self.dtype, tensor.dtype) if wider and self.dtype is not None else tensor.dtype

    def _slot(self, number: int, values: Tensor, peers: Peers, is_difference: bool) -> Tensor:
        """Where to reduce a piece: in its own memory if nothing else needs the values."""
        device = values.device if peers.can_exchange(values.device) else peers.device
        dtype = self._dtype_of(values)
        if not is_difference and device == values.device and dtype == values.dtype:
            return values
        slots = self._memory.setdefault(device, [torch.empty(0, dtype=torch.uint8)] * SLOTS)
        needed = values.numel() * dtype.itemsize
        if slots[number % SLOTS].numel() < needed:
            slots[number % SLOTS] = torch.empty(0, dtype=torch.uint8)
            slots[number % SLOTS] = torch.empty(needed, dtype=torch.uint8, device=device)
        return slots[number % SLOTS][:needed].view(dtype)


def _fill(slot: Tensor, values: Tensor, how: str, me: int, verdict: Verdict) -> None:
    """Write this replica's part of the sum."""
    if how == FIRST:
        if not verdict.is_first(me):
            slot.zero_()
        elif slot is not values:
            slot.copy_(values)
        return
    share = verdict.share(me)
    if share == 0:
        slot.zero_()  # not multiplied by 0: a replica without a weight may hold infinity or NaN
        return
    source = values
    if slot is not values and (slot.dtype, slot.device) != (values.dtype, values.device):
        source = slot.copy_(values)  # scaled in the wider dtype
    divisor = verdict.divisor
    torch.div(source, divisor, out=slot) if divisor is not None else torch.mul(source, share, out=slot)
