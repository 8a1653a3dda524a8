"""How tensors lie in memory, as far as running over them element by element cares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["compute_dtype", "flat", "is_dense", "match_layout", "same_layout"]

_HALF = (torch.float16, torch.bfloat16)


def compute_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The precision the maths runs in: the widest of the operands, and never less than float32."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        if t.dtype != dtype:
            dtype = torch.promote_types(dtype, t.dtype)
    return torch.float32 if dtype in _HALF else dtype


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in whatever order of dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for size, stride in sorted(
        ((size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1), key=lambda x: x[1]
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether equal positions in memory are equal elements (dimensions of size 1 do not matter)."""
    if a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous()):
        return True
    return all(x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True) if size != 1)


def match_layout(t: Tensor, like: Tensor) -> Tensor:
    """``t`` itself if it is dense and laid out as ``like``, else a copy that is."""
    if is_dense(t) and same_layout(t, like):
        return t
    return torch.empty_like(like, dtype=t.dtype, memory_format=torch.preserve_format).copy_(t)


def flat(t: Tensor) -> Tensor:
    """A dense tensor's memory as one dimension; shares storage."""
    return t.as_strided((t.numel(),), (1,), t.storage_offset())
