"""What parameters were before a sync, for as long as it may fail.

A sync that goes through bounded buckets overwrites the first parameters before the last are reduced. Should a later
collective fail, the earlier ones must go back, and their values can be had from nowhere but a record. On the CPU it is
an unlinked temporary file, so that no second model lies in memory; for parameters on a GPU it is host memory.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import warnings
from typing import Any

import torch
from torch import Tensor

__all__ = ["UNDO", "Undo"]

UNDO = ("auto", "disk", "memory", "off")


class Undo:
    """A record of flat tensors.

    Args:
        where: ``"disk"``, ``"memory"`` (the host's), ``"auto"`` (disk for CPU tensors, memory for others), ``"off"``.
    """

    def __init__(self, where: str = "auto") -> None:
        if where not in UNDO:
            raise ValueError(f"undo must be one of {', '.join(map(repr, UNDO))}, but got {where!r}")
        self.where = where
        self._file: Any = None
        self._records: list[Tensor | int] = []

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self.where != "off"

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, flat: Tensor) -> None:
        """Record a contiguous tensor."""
        on_disk = self.where == "disk" or (self.where == "auto" and flat.device.type == "cpu")
        saved: Tensor | int | None = self._write(flat) if on_disk else None
        self._records.append(flat.to("cpu", copy=True) if saved is None else saved)

    def recall(self, index: int, into: Tensor) -> None:
        """Read a record."""
        saved = self._records[index]
        if isinstance(saved, Tensor):
            into.copy_(saved)
        else:
            was = torch.empty(into.shape, dtype=into.dtype)
            _read(self._file.fileno(), _memory(was), saved)
            into.copy_(was)

    def clear(self) -> None:
        """Forget; the file's pages are given back, so what lived for one sync hardly ever reaches a disk."""
        if self._records and self._file is not None:
            try:
                self._file.truncate(0)
                self._file.seek(0)
            except OSError:
                self._file = None
        self._records = []

    def _write(self, flat: Tensor) -> int | None:
        """Append to the file; returns where, or None if it cannot be written."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            start = int(self._file.tell())
            flat = flat.cpu()
            left = _memory(flat)
            while left:
                left = left[self._file.write(left) :]
            return start
        except OSError as error:
            # Raising here would leave other ranks waiting in the next collective.
            self.where = "memory"
            warnings.warn(
                f"what parameters were before a sync cannot be written to {tempfile.gettempdir()} ({error}) and is "
                "kept in memory from now on; give undo='memory' to do so always, or undo='off'",
                stacklevel=2,
            )
            return None


def _memory(tensor: Tensor) -> memoryview:
    """A tensor's bytes; the tensor must outlive them."""
    size = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _read(file: int, into: memoryview, start: int) -> None:
    while into:
        got = os.preadv(file, [into], start)
        if got == 0:
            raise OSError("the record of parameters before the sync is shorter than what was written to it")
        into, start = into[got:], start + got
