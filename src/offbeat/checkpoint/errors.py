"""Errors of saving and loading."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CheckpointError", "CheckpointMismatch", "DamagedCheckpoint"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the model, the optimizer and older checkpoints are as before."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, cut off, changed or malformed. The message names the file."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint that is whole, but of another model or optimizer.

    Attributes:
        missing: what the model or the optimizer has and the checkpoint lacks.
        unexpected: what the checkpoint has and the model or the optimizer lacks.
    """

    def __init__(self, message: str, missing: Sequence[str] = (), unexpected: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing, self.unexpected = list(missing), list(unexpected)
