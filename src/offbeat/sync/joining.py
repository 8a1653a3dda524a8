"""Support for ``torch.distributed.algorithms.Join``, for ranks with less data than others."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.join import JoinHook

__all__ = ["ReplicaJoinHook"]


class ReplicaJoinHook(JoinHook):
    """On a rank that has run out of data, takes part in the collectives of the others with a weight of zero."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Shadow one step of the other ranks."""
        self._optimizer._shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Average once more when all ranks are done."""
        self._optimizer._last_average()
