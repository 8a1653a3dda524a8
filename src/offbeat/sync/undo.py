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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["UNDO", "Undo"]

UNDO = ("auto", "disk", "memory", "off")


class Undo:
    """A record of overwritten pieces.

    Args:
        where: ``"disk"``, ``"memory"`` (the host's), ``"auto"`` (disk for CPU tensors, memory for others), ``"off"``.
    """

    def __init__(self, where: str = "auto") -> None:
        if where not in UNDO:
            raise ValueError(f"undo must be one of {', '.join(map(repr, UNDO))}, but got {where!r}")
        self.where = where
        self._file: Any = None
        self._records: list[tuple[Tensor, Tensor | int]] = []

    def keep(self, pieces: Sequence[Tensor]) -> None:
        """Remember what these hold now."""
        if self.where == "off":
            return
        for piece in pieces:
            on_disk = piece.device.type == "cpu" and self.where != "memory"
            saved: Tensor | int | None = self._write(piece) if on_disk else None
            if saved is None:
                saved = torch.empty(piece.shape, dtype=piece.dtype, device="cpu").copy_(piece)
            self._records.append((piece, saved))

    def restore(self) -> None:
        """Bring everything back."""
        for piece, saved in reversed(self._records):
            if isinstance(saved, int):
                was = torch.empty(piece.shape, dtype=piece.dtype)
                _read(self._file.fileno(), _memory(was), saved)
                piece.copy_(was)
            else:
                piece.copy_(saved)

    def clear(self) -> None:
        """Forget; the file's pages are given back, so what lived for one sync hardly ever reaches a disk."""
        self._records = []
        if self._file is not None:
            try:
                self._file.truncate(0)
                self._file.seek(0)
            except OSError:
                self._file = None

    def _write(self, piece: Tensor) -> int | None:
        """Append to the file; returns where, or None if it cannot be written."""
        if self.where == "memory":
            return None
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            start = int(self._file.seek(0, os.SEEK_END))
            dense = piece.contiguous()
            left = _memory(dense)
            while left:
                left = left[self._file.write(left) :]
            return start
        except OSError as error:
            # Raising here would leave other ranks waiting in the next collective.
            self.where = "memory" if self.where == "auto" else self.where
            warnings.warn(
                f"what parameters were before a sync cannot be written to {tempfile.gettempdir()} ({error}) and is "
                "kept in memory instead; give undo='memory' to do so always, or undo='off'",
                stacklevel=2,
            )
            return None


def _memory(tensor: Tensor) -> memoryview:
    size = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _read(file: int, into: memoryview, start: int) -> None:
    while into:
        got = os.preadv(file, [into], start)
        if got == 0:
            raise OSError("the record of parameters before the sync is shorter than what was written to it")
        into, start = into[got:], start + got
