"""The addresses of many tensors, as a table on their device that a kernel reads."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.engine.cuda.capture import free_later

#: Elements in one block of work.
BLOCK = 1024
#: How many graphs can be captured in a row, without a step outside of them.
SPARES = 4


class DeviceTable:
    """Addresses of columns of tensors, their sizes and the sets of coefficients they use. Only changes are sent.

    Args:
        columns: how many columns of addresses there are.
        numel: the size of each tensor.
        more: further columns, which never change.
        tail: how many numbers in double precision follow the columns.

    Attributes:
        words: the columns of addresses, then sizes, sets in use, further columns and the tail.
        blocks: for every block of work, its tensor and its position in it: ``tensor << 32 | block``.
    """

    def __init__(
        self,
        columns: int,
        numel: Sequence[int],
        device: torch.device,
        more: Sequence[array[int]] = (),
        tail: int = 0,
    ) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []
        self.device = device
        self.tensors = len(numel)
        self.programs, self.blocks = _cut(numel, device)
        width = columns + 2 + len(more)
        self.words = torch.empty(width * self.tensors + tail, dtype=torch.int64, device=device)
        self._spares: list[tuple[Tensor, Tensor]] = []
        self._sent: list[array[int] | None] = [None] * width
        self._rows = columns + 1
        self._tail: array[float] | None = array("d") if not tail else None
        rows = array("q", bytes(8 * self.tensors))
        for column, words in enumerate([array("q", numel), rows, *more], start=columns):
            self._send(column, words)

    def send(
        self, addresses: Sequence[array[int]], rows: array[int] | None = None, tail: array[float] | None = None
    ) -> None:
        """Update the table: the addresses of each column, the sets in use and the tail (None: unchanged)."""
        for column, words in enumerate(addresses):
            if words != self._sent[column]:
                self._send(column, words)
        if rows is not None and rows != self._sent[self._rows]:
            self._send(self._rows, rows)
        if tail is not None and tail != self._tail:
            copy_from_host(tail, self.words[len(self._sent) * self.tensors :].view(torch.float64))
            self._tail = tail[:]

    def __del__(self) -> None:
        if self._kept:  # a captured copy has read this memory
            free_later(self._kept)

    def prepare_captures(self) -> None:
        """Allocate the memory that :meth:`freeze` uses, because none can be allocated during a capture."""
        while len(self._spares) < SPARES:
            staged = torch.empty(len(self.words), dtype=torch.int64, pin_memory=True)
            self._spares.append((staged, torch.empty_like(self.words)))

    @property
    def can_freeze(self) -> bool:
        """Return whether a captured launch can have a table of its own."""
        return bool(self._spares)

    def freeze(self, addresses: Sequence[array[int]], rows: array[int], tail: array[float]) -> Tensor:
        """A copy of the table that never changes, for the launches of a graph that is being captured.

        Later steps outside the graph may send other addresses to :attr:`words`; replays must not see them.
        """
        staged, words = self._spares.pop()
        self._kept.append((staged, words))
        columns = list(self._sent)
        columns[: len(addresses)] = addresses
        columns[self._rows] = rows
        start = staged.data_ptr()
        for numbers in (*columns, tail):
            assert numbers is not None
            ctypes.memmove(start, numbers.buffer_info()[0], 8 * len(numbers))
            start += 8 * len(numbers)
        return words.copy_(staged, non_blocking=True)

    def _send(self, column: int, words: array[int]) -> None:
        start = column * self.tensors
        copy_from_host(words, self.words[start : start + self.tensors])
        self._sent[column] = words[:]


def copy_from_host(numbers: array[int] | array[float], into: Tensor) -> None:
    """Copy without waiting; ``numbers`` may change as soon as this returns."""
    # torch keeps this memory until the copy is done, even if the tensor is freed.
    staged = torch.empty(len(numbers), dtype=into.dtype, pin_memory=into.device.type == "cuda")
    ctypes.memmove(staged.data_ptr(), numbers.buffer_info()[0], numbers.itemsize * len(numbers))
    into.copy_(staged, non_blocking=True)


def _cut(numel: Sequence[int], device: torch.device) -> tuple[int, Tensor]:
    """The blocks of all tensors, in order."""
    counts = [-(-n // BLOCK) for n in numel]
    total = sum(counts)
    if not total:
        return 0, torch.empty(0, dtype=torch.int64, device=device)
    each = torch.tensor(counts, dtype=torch.int64, device=device)
    tensor = torch.repeat_interleave(each, output_size=total)
    first = (each.cumsum(0) - each)[tensor]
    return total, (tensor << 32) + torch.arange(total, device=device) - first
