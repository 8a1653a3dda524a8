"""Captured graphs: whether one is being captured now, and memory that must not be freed meanwhile."""

from __future__ import annotations

from typing import Any

import torch

#: What :func:`free_later` keeps.
_kept: list[Any] = []


def is_capturing() -> bool:
    """Return whether a graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def free_later(pinned: Any) -> None:
    """Keep pinned memory that nobody needs any more until no graph is being captured.

    When pinned memory is freed, torch records an event in every stream that has read it. By default captures use the
    same stream. An event that is recorded during a later capture becomes part of that graph, and then the next request
    for pinned memory (``item()`` makes one) queries the event and raises.
    """
    if is_capturing():
        _kept.append(pinned)
    else:
        _kept.clear()
