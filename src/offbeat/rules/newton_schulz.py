r"""Matrices made orthogonal by a Newton-Schulz iteration: products of matrices alone, which any device is quick at.

.. math::
    X \leftarrow X / \max(\lVert X \rVert_F, \epsilon), \qquad
    X \leftarrow a X + b \, (X X^\top) X + c \, (X X^\top)^2 X

Each step applies an odd polynomial to the singular values of :math:`X`, and moves them towards 1. Products are those of
the shorter side: :math:`X (X^\top X)` is :math:`(X X^\top) X`. :math:`X X^\top` and its square are symmetric, so for
large matrices only blocks on and above the diagonal are computed; the others are their mirror images.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offbeat.rules.products import Products

__all__ = ["newton_schulz"]

#: From this size on, symmetric products are computed by halves on the CPU, in so many rows of blocks.
SYMMETRIC_FROM, BLOCKS = 640, 4

#: With so many multiplications a product, those of 16-bit numbers are computed in float32 on the CPU, and rounded.
#: torch's own are faster for a matrix below, where it does not call oneDNN, and above, where arithmetic takes longest.
IN_FLOAT32 = range(1 << 11, 1 << 19)

#: With fewer multiplications torch adds up a product of stacks in another order than one of single matrices.
ONE_FROM = 400

_HALF = (torch.bfloat16, torch.float16)


def newton_schulz(
    x: Tensor, factors: tuple[float, float, float], steps: int, eps: float, products: Products | None = None
) -> Tensor:
    r"""Moves the singular values of each matrix towards 1: an approximation of :math:`U V^\top` for :math:`U S V^\top`.

    In float32 and float64 the result for a matrix does not depend on how many are in the stack, as far as torch's
    products do not. In 16 bits it may differ in how products are rounded.

    Args:
        x: a stack of matrices; it is overwritten.
        factors: the coefficients :math:`a, b, c` of the polynomial.
        steps: the number of iterations.
        eps: matrices whose norm is smaller are divided by this instead.
        products: the engine's products, used where they are quick.
    """
    if x.numel() == 0:
        return x
    if products is not None and products.are_quick(x):
        if not x.is_contiguous() and x.mT.is_contiguous():
            return newton_schulz(x.mT, factors, steps, eps, products).mT
    else:
        products = None
    if products is None and len(x) == 1 and (x.dtype in _HALF or x.numel() * min(x.shape[-2:]) >= ONE_FROM):
        one = x[0]  # products without a stack cost less
        one.div_(torch.linalg.vector_norm(one).clamp_(min=eps))
        return _iterate(one, torch.mm, torch.addmm, factors, steps)[None]
    # Along memory, where a norm is quick, and has the bits of the norm of a single matrix.
    flat = (x if x.is_contiguous() else x.mT).flatten(1)
    norms = torch.linalg.vector_norm(flat, dim=1).clamp_(min=eps)
    if products is not None and x.is_contiguous():
        products.divide(x, norms)
        return _iterate_quickly(x, products, factors, steps)
    x.div_(norms.view(-1, 1, 1))
    return _iterate(x, torch.bmm, torch.baddbmm, factors, steps)


def _iterate_quickly(x: Tensor, products: Products, factors: tuple[float, float, float], steps: int) -> Tensor:
    """The iteration with products that are quicker than torch's; ``x`` is overwritten."""
    a, b, c = map(float, factors)  # of a tensor, a kernel would take the address
    rows, columns = x.shape[-2:]
    wide, side = rows <= columns, min(rows, columns)
    spare = torch.empty_like(x)
    gram, power = x.new_empty((2, len(x), side, side)).unbind()
    for _ in range(steps):
        products.symmetric(x if wide else x.mT, gram)
        if c == 0:
            torch.mul(gram, b, out=power)
        else:
            products.symmetric(gram, power, plus=gram, beta=b, alpha=c)
        products.add_product(x, *((power, x) if wide else (x, power)), a, out=spare)
        x, spare = spare, x
    return x


def _iterate(
    x: Tensor,
    multiply: Callable[..., Tensor],
    add_product: Callable[..., Tensor],
    factors: tuple[float, float, float],
    steps: int,
) -> Tensor:
    """The iteration, for one matrix or a stack of them; ``x`` is overwritten."""
    a, b, c = factors
    rows, columns = x.shape[-2:]
    wide, side, on_cpu = rows <= columns, min(rows, columns), x.device.type == "cpu"
    halves = on_cpu and x.dim() == 2 and side >= SYMMETRIC_FROM
    # torch adds up products of 16-bit numbers in float32 and rounds the sum. This does the same in two steps.
    work = x.numel() * side
    small = on_cpu and x.dtype in _HALF and (work in IN_FLOAT32 or (x.dim() > 2 and work < IN_FLOAT32.start))
    y = x.float() if small else x
    spare = torch.empty_like(y)
    gram, power = y.new_empty((2, *x.shape[:-2], side, side)).unbind()
    turned, spare_turned = y.mT, spare.mT
    rounded = x.new_empty(gram.shape) if small else None
    for _ in range(steps):
        long, short = (y, turned) if wide else (turned, y)
        if halves:
            _symmetric(long, gram, None, 0.0, 1.0)
        else:
            multiply(long, short, out=gram)
        if rounded is not None:
            gram.copy_(rounded.copy_(gram))
        if c == 0:  # a cubic: there is no square to compute (and torch's baddbmm on the CPU ignores alpha=0)
            torch.mul(gram, b, out=power)
        elif halves:
            _symmetric(gram, power, gram, b, c)
        else:
            add_product(gram, gram, gram, beta=b, alpha=c, out=power)
        if rounded is not None:
            power.copy_(rounded.copy_(power))
        left, right = (power, y) if wide else (y, power)
        add_product(y, left, right, beta=a, out=spare)
        if small:
            spare.copy_(x.copy_(spare))
        y, spare, turned, spare_turned = spare, y, spare_turned, turned
    return x if small else y


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
