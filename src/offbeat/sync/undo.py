"""Keeps the old values of parameters during an average, to restore them if a collective fails.

With buckets of bounded size, the first parameters are overwritten before the last ones are reduced. For parameters in
CPU memory the old values are kept in an unlinked temporary file, to avoid a second copy of the model in memory; for
parameters on a GPU they are kept in CPU memory.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import warnings
import weakref
from typing import Any, get_args

import torch
from torch import Tensor

from offbeat.sync.options import Undo as Where

__all__ = ["UNDO", "Undo"]

UNDO: tuple[str, ...] = get_args(Where)


class Undo:
    """A list of saved flat tensors.

    Args:
        where: ``"disk"``, ``"memory"`` (of the CPU), ``"auto"`` (disk for CPU tensors, memory for others) or ``"off"``.
    """

    def __init__(self, where: str = "auto") -> None:
        if where not in UNDO:
            raise ValueError(f"undo must be one of {', '.join(map(repr, UNDO))}, but got {where!r}")
        self.where = where
        self._file: Any = None
        self._records: list[Tensor | int] = []

    @property
    def is_on(self) -> bool:
        """Whether values are saved at all."""
        return self.where != "off"

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, flat: Tensor) -> None:
        """Save a contiguous tensor."""
        on_disk = self.where == "disk" or (self.where == "auto" and flat.device.type == "cpu")
        saved: Tensor | int | None = self._write(flat) if on_disk else None
        self._records.append(flat.to("cpu", copy=True) if saved is None else saved)

    def recall(self, index: int, into: Tensor) -> None:
        """Copy a saved tensor into another one."""
        saved = self._records[index]
        if isinstance(saved, Tensor):
            into.copy_(saved)
        else:
            was = torch.empty(into.shape, dtype=into.dtype)
            _read(self._file.fileno(), _memory(was), saved)
            into.copy_(was)

    def clear(self) -> None:
        """Drop all saved tensors. The file is truncated, so that its pages are rarely written to disk."""
        if self._records and self._file is not None:
            try:
                self._file.truncate(0)
                self._file.seek(0)
            except OSError:
                self._file = None
        self._records = []

    def _write(self, flat: Tensor) -> int | None:
        """Append to the file; returns the offset, or None if it cannot be written."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            start = int(self._file.tell())
            flat = flat.cpu()
            left = _memory(flat)
            while left:
                left = left[self._file.write(left) :]
            return start
        except OSError as error:
            # Not raised: other ranks would wait in the next collective.
            self.where = "memory"
            warnings.warn(
                f"the old values of parameters cannot be written to {tempfile.gettempdir()} ({error}) and are kept in "
                "memory from now on; pass undo='memory' or undo='off' to avoid this warning",
                stacklevel=2,
            )
            return None


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, which must outlive them."""
    size = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _read(file: int, into: memoryview, start: int) -> None:
    while into:
        got = os.preadv(file, [into], start)
        if got == 0:
            raise OSError("the file with the old values of parameters is shorter than what was written to it")
        into, start = into[got:], start + got
