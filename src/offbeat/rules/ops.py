"""The vocabulary of a rule beyond ``+ - * /``: functions that work on whatever a tier hands in.

A rule's update is written once and executed on tensors (loop tier), on symbolic values that become
foreach calls or a compiled kernel (the other tiers), and, for the numbers that change each step, on
plain floats or 0-d tensors. These functions pick the right meaning from the kind of their argument.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["maximum", "minimum", "sign", "sqrt", "where"]


def sqrt(x: Any) -> Any:
    """Square root."""
    return math.sqrt(x) if isinstance(x, (float, int)) else x.sqrt()


def sign(x: Any) -> Any:
    """-1, 0 or 1 by the sign of ``x``; 0 for zeros and, as :func:`torch.sign` has it, for NaN."""
    return x.sign()


def maximum(a: Any, b: Any) -> Any:
    """The larger of the two; NaN if either is NaN, as :func:`torch.maximum`."""
    if isinstance(a, (float, int)) and isinstance(b, (float, int)):
        return max(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.maximum(*_tensors(a, b))
    return a.maximum(b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of the two; NaN if either is NaN, as :func:`torch.minimum`."""
    if isinstance(a, (float, int)) and isinstance(b, (float, int)):
        return min(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.minimum(*_tensors(a, b))
    return a.minimum(b)


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, ``b`` elsewhere."""
    if isinstance(condition, bool):
        return a if condition else b
    if isinstance(condition, Tensor):
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            a = torch.full((), a, dtype=torch.float64, device=condition.device)
        return torch.where(condition, a, b)
    return condition.select(a, b)


def _tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    like = a if isinstance(a, Tensor) else b
    a = a if isinstance(a, Tensor) else torch.full((), a, dtype=like.dtype, device=like.device)
    b = b if isinstance(b, Tensor) else torch.full((), b, dtype=like.dtype, device=like.device)
    return a, b
