"""The training step that ``offbeat bench`` times: a GPT of a chosen size, or the user's own model."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.cli.bench_probe import Loss
from offbeat.cli.data import random_windows
from offbeat.cli.model import VOCABULARY, ByteGPT

__all__ = ["ModelError", "load_model", "make_gpt"]

LAYERS, CONTEXT, BATCH = 4, 64, 4
#: Parameters of a layer, in units of the width squared.
PER_LAYER = 12


class ModelError(ValueError):
    """``--model`` does not name a function that makes a model; the message says why."""


def load_model(path: str) -> tuple[nn.Module, Loss]:
    """Call the function that ``--model module:function`` names. It returns a module and a function of it: its loss."""
    name, colon, function = path.partition(":")
    if not (name and colon and function):
        raise ModelError(f"{path!r} is not of the form module:function, such as train:make_model")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        raise ModelError(
            f"there is no module {error.name!r}; run this in the folder that has it, or set PYTHONPATH"
        ) from error
    if not callable(make := getattr(module, function, None)):
        raise ModelError(f"module {name!r} has no function {function!r}; define one that returns (module, loss)")
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ModelError(
            f"{path} must return a torch.nn.Module and a function that takes it and returns its loss, but it returned "
            f"{_shape(made)}"
        )
    return made


def _shape(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return f"a {type(made).__name__}"


def make_gpt(params: float) -> tuple[nn.Module, Loss]:
    """A GPT over bytes of about so many parameters, and its loss on random bytes."""
    width = max(16, round((params / (LAYERS * PER_LAYER)) ** 0.5 / 4) * 4)
    torch.manual_seed(0)
    model = ByteGPT(layers=LAYERS, width=width, context=CONTEXT)
    text = torch.randint(VOCABULARY, (10_000,), dtype=torch.uint8)
    x, target = random_windows(text, BATCH, CONTEXT, torch.Generator().manual_seed(0))

    def loss(module: nn.Module) -> Tensor:
        device = next(module.parameters()).device
        found: Tensor = module(x.to(device), target.to(device))
        return found

    return model, loss
