"""Checkpoints of other makes: which they are, and how to get from them to one of ours."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offbeat._torch import unwrapped_name
from offbeat.checkpoint.errors import CheckpointError, CheckpointMismatch
from offbeat.checkpoint.names import Names, inner_module
from offbeat.engine.tensors import is_dtensor

__all__ = ["import_torch_save", "refuse"]

_MODEL = ("model", "model_state_dict", "state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict")
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


def refuse(path: Path) -> None:
    """Raise if this is a checkpoint of another make, and say how to convert it."""
    if path.is_file():
        raise CheckpointError(f"{path} is a file, and a checkpoint is a folder. {_how(path)}")
    if (path / ".metadata").exists():
        raise CheckpointError(
            f"{path} is a checkpoint of torch.distributed.checkpoint, whose metadata would have to be unpickled. If "
            f"you trust it, convert it with 'python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} "
            "file.pt', and load that with offbeat.checkpoint.import_torch_save('file.pt', ...)"
        )
    files = sorted(path.iterdir()) if path.is_dir() else []
    for file in files:
        if file.is_file() and (file.suffix in _SUFFIXES or file.suffix == ".safetensors"):
            raise CheckpointError(f"{path} has no checkpoint of offbeat's, but the file {file.name}. {_how(file)}")


def _how(file: Path) -> str:
    if file.suffix == ".safetensors":
        return "Load it with model.load_state_dict(safetensors.torch.load_file(...))"
    return f"If torch.save has written it, load it with offbeat.checkpoint.import_torch_save({str(file)!r}, ...)"


def import_torch_save(
    file: str | os.PathLike[str], *, model: nn.Module | None = None, optimizer: Any = None
) -> dict[str, Any]:
    """Load a file that ``torch.save({"model": ..., "optimizer": ..., ...}, file)`` has written; runs no code in it.

    The keys may also be ``model_state_dict``, ``state_dict`` and ``optimizer_state_dict``. For sharded parameters,
    import into a model that is not sharded, call :func:`offbeat.save_checkpoint`, and load that.

    Args:
        file: the file.
        model: the model to load into, or None.
        optimizer: the optimizer to load into, or None.

    Returns:
        Everything else in the file.

    Raises:
        CheckpointError: the file holds something else than tensors and plain values, or lacks what is asked for.
        CheckpointMismatch: it is of another model.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be loaded with weights_only=True: {str(error).splitlines()[0]}. Save it again as plain "
            "dicts, numbers, strings and tensors"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file} holds a {type(content).__name__}, and a dict with 'model' and 'optimizer' is needed"
        )
    names = Names(model)
    if any(is_dtensor(p) for p in names.params.values()):
        raise CheckpointError(
            "a file of torch.save cannot be imported into a sharded model; import it into one that is not sharded, "
            "save that with offbeat.save_checkpoint, and load the checkpoint into the sharded model"
        )
    module, state = inner_module(model), None
    if module is not None:
        saved = {unwrapped_name(k).removeprefix("module."): v for k, v in _pop(content, _MODEL, file).items()}
        here = {unwrapped_name(key): key for key in module.state_dict()}
        missing, unexpected = sorted(here.keys() - saved), sorted(saved.keys() - here)
        there = module.state_dict()
        shapes = [name for name, key in here.items() if name in saved and _shape(there[key]) != _shape(saved[name])]
        if missing or unexpected or shapes:
            raise CheckpointMismatch(
                f"{file} is of another model: missing {missing}, unexpected {unexpected}, other shapes {shapes}; "
                "nothing was changed",
                missing,
                unexpected,
            )
        state = {here[name]: value for name, value in saved.items()}
    if optimizer is not None:
        optimizer.load_state_dict(_pop(content, _OPTIMIZER, file))
    if module is not None and state is not None:
        module.load_state_dict(state)
    return content


def _pop(content: dict[str, Any], keys: tuple[str, ...], file: Any) -> dict[str, Any]:
    for key in keys:
        if isinstance(content.get(key), dict):
            value: dict[str, Any] = content.pop(key)
            return value
    raise CheckpointError(f"{file} has none of the keys {', '.join(map(repr, keys))}; it has {list(content)[:8]}")


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)
