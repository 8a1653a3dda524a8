"""From an optimizer class, ours or torch.optim's, to the class made from the same rule."""

from __future__ import annotations

from typing import Any

import torch

from offbeat.optim import optimizers
from offbeat.optim.base import RuleOptimizer

__all__ = ["rule_class"]


def rule_class(optim_cls: Any) -> type[RuleOptimizer]:
    """The class itself if it is made from a rule, else offbeat's class for this torch.optim class.

    A subclass of torch.optim's may do anything in its ``step``, so only the classes themselves are replaced.
    """
    if isinstance(optim_cls, type) and issubclass(optim_cls, RuleOptimizer) and hasattr(optim_cls, "rule"):
        return optim_cls
    for name in optimizers.__all__:
        if optim_cls is getattr(torch.optim, name, None):
            return getattr(optimizers, name)  # type: ignore[no-any-return]
    if isinstance(optim_cls, torch.optim.Optimizer):
        name = type(optim_cls).__name__
        raise TypeError(f"an optimizer class is needed, but got an instance of {name}; pass the class itself")
    shown = getattr(optim_cls, "__qualname__", repr(optim_cls))
    raise TypeError(
        f"{shown} is not made from an update rule: pass one of offbeat's optimizer classes or the torch.optim class "
        f"of the same name ({', '.join(optimizers.__all__)}), or write a rule for it"
    )
