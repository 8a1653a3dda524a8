"""``Scratch``: buffers for messages that are used again.

New memory of the operating system costs a page fault for each 4 KB, which takes longer than encoding into it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

__all__ = ["Scratch"]

#: Free buffers that are kept: those of one exchange in flight and of the next.
KEPT = 8


class Scratch:
    """Buffers in CPU memory that are free. On other devices torch's own allocator does this."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, count: int, device: torch.device) -> Tensor:
        """A uint8 buffer of ``count`` elements with any content."""
        if device.type == "cpu":
            with self._lock:
                # One that is much larger is for larger messages.
                fits = [i for i, one in enumerate(self._free) if count <= one.numel() <= 2 * count]
                if fits:
                    return self._free.pop(min(fits, key=lambda i: self._free[i].numel()))[:count]
        return torch.empty(count, dtype=torch.uint8, device=device)

    def give(self, *buffers: Tensor) -> None:
        """Hand back buffers that nobody reads or writes any more."""
        with self._lock:
            for one in buffers:
                if one.device.type == "cpu":
                    whole = torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage())
                    self._free.append(whole)
            del self._free[:-KEPT]

    def __reduce__(self) -> Any:
        return Scratch, ()  # a copy has buffers of its own

    def clear(self) -> None:
        """Free the memory."""
        with self._lock:
            self._free.clear()
