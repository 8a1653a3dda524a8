"""Optimizers and modules that training frameworks hand out in place of one's own, and what is inside of them.

No framework is imported: its wrappers are known by the package of their class, and by the attribute that holds what is
inside. Those of Accelerate (``AcceleratedOptimizer``), Lightning (``LightningOptimizer``) and Fabric
(``_FabricOptimizer``, ``_FabricModule``) decide when and how the optimizer inside is stepped, and change nothing of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["DDP_IN_FRAMEWORKS", "inner_module", "inner_optimizer", "is_wrapped", "refuse_wrapped"]

_PACKAGES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")

#: The end of errors that ask for the DDP module.
DDP_IN_FRAMEWORKS = (
    "inside Lightning that is trainer.strategy.model, inside Transformers trainer.model_wrapped, with Accelerate what "
    "prepare() returned"
)


def _is_of_framework(one: Any) -> bool:
    return any(cls.__module__.partition(".")[0] in _PACKAGES for cls in type(one).__mro__)


def is_wrapped(optimizer: Any) -> bool:
    """Whether this is a framework's wrapper around an optimizer."""
    return _is_of_framework(optimizer) and isinstance(getattr(optimizer, "optimizer", None), Optimizer)


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a framework's wrapper; any other itself."""
    while is_wrapped(optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def refuse_wrapped(optimizer: Any, me: str) -> None:
    """Raise if an optimizer is a framework's wrapper: whoever steps it from inside would go past the framework.

    Args:
        me: the name of the class that was given the optimizer.
    """
    if is_wrapped(optimizer):
        inside = type(inner_optimizer(optimizer)).__name__
        raise TypeError(
            f"{type(optimizer).__name__} is a framework's wrapper around an {inside}: it decides when the optimizer "
            f"steps (accumulation, loss scaling), and {me} around it would go past that. Give {me} the {inside} "
            f"inside, which is its attribute .optimizer, and give the framework the {me}, so that it wraps that "
            "instead; offbeat.integrations does it in one line"
        )


def inner_module(module: Any) -> Any:
    """The module inside that of a framework; any other itself."""
    while _is_of_framework(module) and isinstance(getattr(module, "_forward_module", None), torch.nn.Module):
        module = module._forward_module
    return module
