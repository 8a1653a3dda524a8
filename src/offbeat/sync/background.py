r"""An average that runs in the background while training continues.

After step :math:`t` the replicas' parameters :math:`x_i(t)` are copied. A thread reduces the copies to
:math:`\bar x(t) = \sum_i w_i x_i(t)`. After step :math:`t + k` every rank adds the difference,

.. math:: x_i(t+k) \leftarrow x_i(t+k) + \bigl(\bar x(t) - x_i(t)\bigr),

which keeps the updates of the :math:`k` steps in between. With :math:`k = 0` this is :math:`\bar x(t)`.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.sync.agreement import Shares
from offbeat.sync.buckets import Bucket
from offbeat.sync.exchange import Exchange
from offbeat.sync.items import Item, local_part
from offbeat.sync.quiet import make_thread_quiet

__all__ = ["Flight", "Snapshot"]

#: How long the exit of the program waits for a background thread that is in a collective.
_SECONDS_AT_EXIT = 10.0
_flying: weakref.WeakSet[Flight] = weakref.WeakSet()


class Snapshot:
    """A copy of the items in one flat tensor per dtype and device. Its memory is reused.

    Args:
        device: where to store the copy; None is the device of each item.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.flats: list[tuple[str, bool, Tensor]] = []
        self.views: list[Tensor] = []
        self._key: Any = None

    def shape_like(self, items: Sequence[Item]) -> None:
        """Allocate memory for these items, unless it is there already."""
        parts = [local_part(item.tensor) for item in items]
        key = [(i.how, i.late, p.dtype, p.device, p.shape, p.stride()) for i, p in zip(items, parts, strict=True)]
        if key == self._key:
            return
        self.flats, self.views, self._key = [], [], None
        kinds: dict[Any, list[int]] = {}
        for index, (item, part) in enumerate(zip(items, parts, strict=True)):
            kinds.setdefault((item.how, item.late, part.dtype, part.device), []).append(index)
        views: dict[int, Tensor] = {}
        for (how, late, dtype, device), indices in kinds.items():
            target = device if self.device is None else self.device
            pin = target.type == "cpu" and device.type == "cuda"
            flat = torch.empty(sum(parts[i].numel() for i in indices), dtype=dtype, device=target, pin_memory=pin)
            self.flats.append((how, late, flat))
            start = 0
            for i in indices:
                piece = flat[start : start + parts[i].numel()]
                start += parts[i].numel()
                views[i] = _like(piece, parts[i])
        self.views = [views[i] for i in range(len(items))]
        self._key = key

    def take(self, items: Sequence[Item]) -> None:
        """Copy the items."""
        self.shape_like(items)
        _torch.foreach_copy_(self.views, [local_part(item.tensor) for item in items], non_blocking=True)


def _like(piece: Tensor, part: Tensor) -> Tensor:
    """A view of the flat piece with the shape of ``part``, and with its strides if these leave no gaps."""
    shape, strides = list(part.shape), list(part.stride())
    order = sorted(range(len(shape)), key=lambda i: (strides[i], shape[i]))
    expected = 1
    for i in order:
        if shape[i] > 1 and strides[i] != expected:
            return piece.view(shape)
        expected *= shape[i]
    return piece.as_strided(shape, strides, piece.storage_offset())


class Flight:
    """One delayed average, from its snapshot to the step that applies it.

    Args:
        items: the items to average.
        snapshot: memory for their copies, in use until the average has been applied.
        reach: called in the thread before the reduction; compares ranks and returns their weights.
    """

    def __init__(
        self, items: Sequence[Item], snapshot: Snapshot, exchange: Exchange, group: Any, reach: Callable[[], Shares]
    ) -> None:
        self.names = [item.name for item in items]
        self._snapshot = snapshot
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, Any] = {}
        snapshot.take(items)
        devices = {local_part(item.tensor).device for item in items}
        for device in devices:
            if device.type == "cuda":
                taken = torch.cuda.current_stream(device).record_event()
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._streams[device].wait_event(taken)
                if snapshot.device is not None:
                    taken.synchronize()
        home = next(iter(devices), torch.device("cpu"))
        travelling = home if snapshot.device is None or not _reduces(group, snapshot.device) else snapshot.device
        self._thread = threading.Thread(
            target=self._fly, args=(exchange, group, reach, travelling), name="offbeat-sync", daemon=True
        )
        _flying.add(self)
        self._thread.start()

    @staticmethod
    @torch.no_grad()
    def reduced(items: Sequence[Item], values: Sequence[Tensor], snapshot: Snapshot) -> Flight:
        """A flight from a checkpoint: reduced, but not applied yet."""
        flight = Flight.__new__(Flight)
        snapshot.shape_like(items)
        _torch.foreach_copy_(snapshot.views, list(values))
        flight.names = [item.name for item in items]
        flight._snapshot, flight._error, flight._thread, flight._streams = snapshot, None, None, {}
        return flight

    @property
    def is_over(self) -> bool:
        """Whether the reduction has finished or failed."""
        return self._thread is None

    def wait(self) -> None:
        """Wait for the reduction; raises its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def values(self) -> list[Tensor]:
        """For a checkpoint: the values that :meth:`land` will add or copy."""
        self.wait()
        self._settle()
        return [view.clone() for view in self._snapshot.views]

    @torch.no_grad()
    def land(self, items: Mapping[str, Item]) -> None:
        """Apply the average to the items, by name; items that no longer exist are skipped. Raises if it failed."""
        self.wait()
        self._settle()
        late: list[tuple[Tensor, Tensor]] = []
        other: list[tuple[Tensor, Tensor]] = []
        for name, view in zip(self.names, self._snapshot.views, strict=True):
            item = items.get(name)
            if item is not None:
                part = local_part(item.tensor)
                (late if item.late else other).append((part, view.to(part.device, non_blocking=True)))
        if late:
            _torch.foreach_add_([p for p, _ in late], [v for _, v in late])
        if other:
            _torch.foreach_copy_([p for p, _ in other], [v for _, v in other])

    def _settle(self) -> None:
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _fly(self, exchange: Exchange, group: Any, reach: Callable[[], Shares], device: torch.device) -> None:
        make_thread_quiet()
        try:
            with ExitStack() as streams:
                for stream in self._streams.values():
                    streams.enter_context(torch.cuda.stream(stream))
                self._reduce(exchange, group, reach(), device)
        except BaseException as error:
            self._error = error

    @torch.no_grad()
    def _reduce(self, exchange: Exchange, group: Any, shares: Shares, device: torch.device) -> None:
        buckets: list[Bucket] = []
        as_difference: dict[int, bool] = {}
        for how, late, flat in self._snapshot.flats:
            for bucket in exchange.cut_for_background(Item("a snapshot", flat, how), device):
                as_difference[id(bucket)] = late
                buckets.append(bucket)

        def commit(bucket: Bucket, reduced: Tensor, last: bool) -> None:
            (piece,) = bucket.pieces
            reduced = reduced.to(piece.device)
            if as_difference[id(bucket)]:
                torch.sub(reduced, piece, out=piece)
            else:
                piece.copy_(reduced)

        exchange.reduce(buckets, group, shares, commit)
        for stream in self._streams.values():
            stream.synchronize()


def _reduces(group: Any, device: torch.device) -> bool:
    """Whether a process group can reduce tensors on this device."""
    kinds = _torch.device_types(group)
    return not kinds or device.type in kinds


@atexit.register
def _wait_at_exit() -> None:
    for flight in list(_flying):
        thread = flight._thread
        if thread is not None:
            thread.join(_SECONDS_AT_EXIT)
