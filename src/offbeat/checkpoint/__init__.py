"""Checkpoints that survive anything: atomic, checked, without pickle, for every optimizer and any number of ranks."""

from offbeat.checkpoint.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint
from offbeat.checkpoint.foreign import import_torch_save
from offbeat.checkpoint.load import LoadedCheckpoint, load_checkpoint
from offbeat.checkpoint.manifest import CheckpointInfo, list_checkpoints
from offbeat.checkpoint.save import SavedCheckpoint, save_checkpoint

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointMismatch",
    "DamagedCheckpoint",
    "LoadedCheckpoint",
    "SavedCheckpoint",
    "import_torch_save",
    "list_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
]
