"""Marks state that is allocated but has not seen a step.

SGD with dampening has no step counter, but its first step differs. It cannot tell new state from state that happens
to be zero. New state is therefore filled with the smallest normal number, which has the effect of zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.engine.tensors import has_values


def mark_before_first_step(t: Tensor) -> None:
    """Mark a state tensor as one that has not seen a step."""
    t.fill_(_mark(t.dtype))


def is_before_first_step(t: Tensor) -> bool:
    """Return whether the tensor still has the values that :func:`mark_before_first_step` wrote."""
    return t.numel() > 0 and has_values(t) and bool((t == _mark(t.dtype)).all())


def _mark(dtype: torch.dtype) -> float:
    return 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny
