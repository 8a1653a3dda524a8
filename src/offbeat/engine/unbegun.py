"""State that is allocated but has not seen a step.

A rule without a step counter whose first step differs (SGD with dampening) cannot tell such state from state that
happens to be zero. It is therefore filled with the smallest normal number, which acts as zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.engine.tensors import has_values


def mark_unbegun(t: Tensor) -> None:
    """Mark a state tensor as one that has not seen a step."""
    t.fill_(_mark(t.dtype))


def is_unbegun(t: Tensor) -> bool:
    """Whether :meth:`mark_unbegun` was the last to write to the tensor."""
    return t.numel() > 0 and has_values(t) and bool((t == _mark(t.dtype)).all())


def _mark(dtype: torch.dtype) -> float:
    return 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny
