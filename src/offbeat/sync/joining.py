"""Ranks that run out of data, under ``torch.distributed.algorithms.Join``."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.join import JoinHook

__all__ = ["LocalSGDJoinHook"]


class LocalSGDJoinHook(JoinHook):
    """A rank without data does what the others' steps need of it, and does not count."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """One step of the others."""
        self._optimizer._shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All are done: average what was learnt since the last time."""
        self._optimizer._last_average()
