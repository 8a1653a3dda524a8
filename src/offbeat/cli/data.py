"""The demo's text: the source files of Python's own standard library, so that nothing has to be downloaded."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["random_windows", "read_text", "spaced_windows"]

MOST_BYTES = 2_000_000
LEAST_BYTES = 100_000
#: Every tenth file is held out, as a whole, so that no held-out line has a neighbour in the training text.
HOLD_OUT_EVERY = 10


def read_text(directory: Path | None = None) -> tuple[Tensor, Tensor]:
    """The bytes to train on and the bytes held out, the same in every process.

    Raises:
        FileNotFoundError: if the installation has too little source, for example only compiled files.
    """
    directory = directory or Path(sysconfig.get_paths()["stdlib"])
    train, held_out = bytearray(), bytearray()
    for number, path in enumerate(sorted(directory.glob("*.py"), key=lambda path: path.name)):
        (held_out if number % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1 else train).extend(path.read_bytes())
        if len(train) >= MOST_BYTES:
            break
    if min(len(train), len(held_out) * HOLD_OUT_EVERY) < LEAST_BYTES:
        raise FileNotFoundError(
            f"{directory} has only {len(train) + len(held_out)} bytes of Python source; "
            "run the demo with a Python that has the source files of its standard library"
        )
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def random_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``count`` random windows of ``length`` bytes, and for each byte the one that follows it."""
    return _windows(text, torch.randint(len(text) - length, (count,), generator=generator), length)


def spaced_windows(text: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """``count`` evenly spaced windows, always the same."""
    return _windows(text, torch.arange(count) * ((len(text) - length - 1) // count), length)


def _windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = text.unfold(0, length + 1, 1)[starts].long()
    return windows[:, :-1], windows[:, 1:]
