"""The states of random generators: torch's, Python's, and NumPy's if it has been imported."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["check_generators", "generator_states", "restore_generators"]


def generator_states() -> dict[str, Any]:
    """The states of the global generators of this process, and of its current CUDA device."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (str(kind), [int(key) for key in keys], *rest)
    return states


def check_generators(states: dict[str, Any]) -> None:
    """Raise, whatever it is, if these states cannot be restored. Changes nothing."""
    before = generator_states()
    try:
        restore_generators(states)
    finally:
        restore_generators(before)


def restore_generators(states: dict[str, Any]) -> None:
    """Continue from :func:`generator_states`. What was not saved, or is not there, stays as it is."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.set_state(states["numpy"])
