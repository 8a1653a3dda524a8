"""Warnings that name the line of the user's program."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

__all__ = ["warn"]

_INSIDE = (
    "offbeat",
    "torch",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "accelerate",
    "transformers",
    "contextlib",
)


def warn(message: str) -> None:
    """Warn of something that the nearest function outside of offbeat, torch and the frameworks has done.

    In a thread without such a function the warning names the first function of the thread.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_inside(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _INSIDE
