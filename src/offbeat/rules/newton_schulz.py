r"""Matrices made orthogonal by a Newton-Schulz iteration: products of matrices alone, which any device is quick at.

.. math::
    X \leftarrow X / \max(\lVert X \rVert_F, \epsilon), \qquad
    X \leftarrow a X + b \, (X X^\top) X + c \, (X X^\top)^2 X

Each step applies an odd polynomial to the singular values of :math:`X`, and moves them towards 1. Products are those of
the shorter side: :math:`X (X^\top X)` is :math:`(X X^\top) X`. :math:`X X^\top` and its square are symmetric, so for
large matrices on the CPU only blocks on and above the diagonal are computed; the others are their mirror images.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["newton_schulz"]

#: From this size on, symmetric products are computed by halves on the CPU, in so many rows of blocks.
SYMMETRIC_FROM, BLOCKS = 512, 4


def newton_schulz(x: Tensor, factors: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    r"""Moves the singular values of each matrix towards 1: an approximation of :math:`U V^\top` for :math:`U S V^\top`.

    Args:
        x: a stack of matrices; it is overwritten.
        factors: the coefficients :math:`a, b, c` of the polynomial.
        steps: the number of iterations.
        eps: matrices whose norm is smaller are divided by this instead.
    """
    a, b, c = factors
    if x.numel() == 0:
        return x
    # In two steps, as a norm over two dimensions is slow; of the rounded numbers, as torch.optim has it.
    wide_dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1, dtype=wide_dtype), dim=-1)
    x.div_(norm.to(x.dtype).clamp(min=eps)[:, None, None])
    rows, columns = x.shape[-2:]
    wide, side = rows <= columns, min(rows, columns)
    by_halves = len(x) == 1 and side >= SYMMETRIC_FROM and x.device.type == "cpu"
    spare, gram = torch.empty_like(x), x.new_empty(len(x), side, side)
    power = torch.empty_like(gram)
    for _ in range(steps):
        long = x if wide else x.mT
        if by_halves:
            _symmetric(long[0], gram[0], None, 0.0, 1.0)
        else:
            torch.bmm(long, long.mT, out=gram)
        if c == 0:  # a cubic: there is no square to compute (and torch's baddbmm on the CPU ignores alpha=0)
            torch.mul(gram, b, out=power)
        elif by_halves:
            _symmetric(gram[0], power[0], gram[0], b, c)
        else:
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=power)
        left, right = (power, x) if wide else (x, power)
        torch.baddbmm(x, left, right, beta=a, out=spare)
        x, spare = spare, x
    return x


def _symmetric(x: Tensor, out: Tensor, plus: Tensor | None, beta: float, alpha: float) -> None:
    r""":math:`\beta P + \alpha X X^\top`, with the blocks below the diagonal mirrored; ``plus`` is symmetric."""
    size = -(-len(x) // BLOCKS)
    for start in range(0, len(x), size):
        end = min(start + size, len(x))
        mine, others = x[start:end], x[start:].mT
        if plus is None:
            block = torch.mm(mine, others)
        else:
            block = torch.addmm(plus[start:end, start:], mine, others, beta=beta, alpha=alpha)
        out[start:end, start:] = block
        out[end:, start:end] = block[:, end - start :].mT
