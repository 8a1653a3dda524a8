"""Products of stacks of matrices as Triton kernels: of a matrix with its own transpose, and one added to a matrix.

Factors are read through descriptors, which Hopper's copy engine follows. Sums are in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_product", "divide", "symmetric"]


@triton.jit(do_not_specialize=["numel8", "blocks"])
def divide(x, by, numel8, blocks, BLOCK: tl.constexpr):
    """Divide each part of x, of 8 * numel8 elements, by its number."""
    which = tl.program_id(0) // blocks
    places = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = places < numel8 * 8
    here = x + which.to(tl.int64) * (numel8 * 8) + places
    quotient = tl.load(here, mask=inside).to(tl.float32) / tl.load(by + which).to(tl.float32)
    tl.store(here, quotient.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _pair(tile):
    """Row and column of a tile on or above the diagonal; tiles are counted down the columns, from left to right."""
    # The root of a float may be off by one.
    column = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    column = tl.where((column + 1) * (column + 2) // 2 <= tile, column + 1, column)
    column = tl.where(column * (column + 1) // 2 > tile, column - 1, column)
    return tile - column * (column + 1) // 2, column


@triton.jit(do_not_specialize=["n8", "k8", "tiles"])
def symmetric(
    x, plus, out, n8, k8, tiles, beta, alpha,
    PLUS: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """beta * plus + alpha * x x^T for each matrix of a stack; ``plus`` is symmetric.

    TURNED: x is stored as (k, n). Sides are passed as numbers of groups of 8.
    """
    program = tl.program_id(0)
    which = program // tiles
    row, column = _pair(program % tiles)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, k8 * 8, DEEP):
        if TURNED:
            left = x.load([which, start, row * BLOCK]).reshape(DEEP, BLOCK)
            right = x.load([which, start, column * BLOCK]).reshape(DEEP, BLOCK)
            total = tl.dot(tl.trans(left), right, total)
        else:
            left = x.load([which, row * BLOCK, start]).reshape(BLOCK, DEEP)
            right = x.load([which, column * BLOCK, start]).reshape(BLOCK, DEEP)
            total = tl.dot(left, tl.trans(right), total)
    n = n8 * 8
    rows = row * BLOCK + tl.arange(0, BLOCK)
    columns = column * BLOCK + tl.arange(0, BLOCK)
    matrix = which.to(tl.int64) * n * n
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    place = matrix + rows[:, None] * n + columns[None, :]
    total = total * alpha
    if PLUS:
        total += beta * tl.load(plus + place, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    if row == column:
        # The lower half is the mirror image of the upper one, so that the result is symmetric to the bit.
        rounded = tl.where(rows[:, None] <= columns[None, :], rounded, tl.trans(rounded))
    else:
        # Built anew and not turned: stores must be known to lie side by side.
        mirrored = matrix + columns[:, None] * n + rows[None, :]
        tl.store(out + mirrored, tl.trans(rounded), mask=(columns[:, None] < n) & (rows[None, :] < n))
    tl.store(out + place, rounded, mask=inside)


@triton.jit(do_not_specialize=["m8", "n8", "k8", "down", "across"])
def add_product(
    y, left, right, out, m8, n8, k8, down, across, beta,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """beta * y + left @ right for each matrix of a stack: (m, n) = (m, k) @ (k, n)."""
    program = tl.program_id(0)
    which = program // (down * across)
    tile = program % (down * across)
    # Tiles that run together share rows and columns, which then come from the cache.
    first = tile // (GROUP * across) * GROUP
    group = tl.minimum(down - first, GROUP)
    row = first + tile % (GROUP * across) % group
    column = tile % (GROUP * across) // group
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k8 * 8, DEEP):
        a = left.load([which, row * ROWS, start]).reshape(ROWS, DEEP)
        b = right.load([which, start, column * COLUMNS]).reshape(DEEP, COLUMNS)
        total = tl.dot(a, b, total)
    m, n = m8 * 8, n8 * 8
    rows = row * ROWS + tl.arange(0, ROWS)[:, None]
    columns = column * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    place = which.to(tl.int64) * m * n + rows * n + columns
    inside = (rows < m) & (columns < n)
    total += beta * tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
