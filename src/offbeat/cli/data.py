"""The demo's text: the source files of Python's own standard library, so that nothing has to be downloaded."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Corpus", "fixed_windows", "random_windows", "read_corpus"]

#: At most this many bytes are read; the demo's steps would not see more.
MOST_BYTES = 4_000_000
#: Every tenth file is held out, as a whole, so that no held-out line has a neighbour in the training text.
HOLD_OUT_EVERY = 10
LEAST_BYTES = 100_000


class Corpus(NamedTuple):
    """The bytes to train on, the bytes held out, and the number of files they are from."""

    train: Tensor
    held_out: Tensor
    files: int


def read_corpus(*, directory: Path | None = None) -> Corpus:
    """Read the library's top-level files in order of their names, which gives the same bytes in every process.

    Raises:
        FileNotFoundError: if the installation has too little source, for example only compiled files.
    """
    directory = directory or Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    files = 0
    for path in sorted(directory.glob("*.py"), key=lambda path: path.name):
        parts[files % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1].extend(path.read_bytes())
        files += 1
        if sum(map(len, parts)) >= MOST_BYTES:
            break
    train, held_out = parts
    if min(len(train), len(held_out) * HOLD_OUT_EVERY) < LEAST_BYTES:
        raise FileNotFoundError(
            f"{directory} holds {len(train) + len(held_out)} bytes of Python source in {files} files, but the demo "
            f"needs {LEAST_BYTES}; run it with a Python that has the source files of its standard library"
        )
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8), files)


def random_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``count`` random windows of ``length`` bytes, and for each byte the one that follows it."""
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return _windows(text, starts, length)


def fixed_windows(text: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """``count`` evenly spaced windows, always the same, to compare losses before and after training."""
    starts = torch.arange(count) * ((len(text) - length - 1) // count)
    return _windows(text, starts, length)


def _windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = text.unfold(0, length + 1, 1)[starts].long()
    return windows[:, :-1], windows[:, 1:]
