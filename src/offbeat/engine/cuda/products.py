"""Products of stacks of matrices on a GPU: symmetric ones computed by half, sums without a pass of their own."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.engine.cuda.kernel import address, is_interpreting, launcher, why_no_triton
from offbeat.rules.products import Products

__all__ = ["TritonProducts", "products_for"]

#: Smaller matrices have too few tiles.
SMALLEST = 256
#: Rows and columns of a symmetric tile, numbers of a factor that are read at once, warps, and loads under way: the
#: quickest of twelve combinations on an H200.
BLOCK, DEEP, WARPS, STAGES = 128, 64, 8, 3
#: Registers of a thread of a symmetric product: with more, one block of threads would fill a processor of the GPU.
REGISTERS = 128
#: From this length of the shorter side on, tiles of a sum are twice as wide.
WIDE_FROM = 1024
#: Rows of tiles that run together.
GROUP = 8
#: Elements that a program divides.
ELEMENTS = 2048
#: The largest relative error of a product that counts as right; rounding to bfloat16 alone is 0.002.
TOLERANCE = 0.01
#: The kernels count the elements of a matrix in 32 bits, up to the end of the last program.
MOST = 2**31 - ELEMENTS


class TritonProducts(Products):
    """Products of 16-bit numbers by Triton kernels; by torch where the kernels' descriptors cannot read a matrix."""

    def are_quick(self, x: Tensor) -> bool:
        """Return whether the kernels are used for stacks of this shape."""
        return x.dim() == 3 and min(x.shape[-2:]) >= SMALLEST and _is_readable(x)

    def symmetric(
        self, x: Tensor, out: Tensor, plus: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
    ) -> None:
        """See :class:`~offbeat.rules.products.Products`."""
        if not (self.are_quick(x) and _is_readable(out) and (plus is None or _is_readable(plus))):
            super().symmetric(x, out, plus, beta, alpha)
            return
        count, n, k = x.shape
        turned = not x.is_contiguous()
        read = _described(x.mT, DEEP, BLOCK) if turned else _described(x, BLOCK, DEEP)
        down = -(-n // BLOCK)
        tiles = down * (down + 1) // 2
        arguments = (read, out if plus is None else plus, out, n // 8, _bound(k // 8), tiles, beta, alpha)
        constants = {"PLUS": plus is not None, "TURNED": turned, "BLOCK": BLOCK, "DEEP": DEEP}
        _start("symmetric", x, count * tiles, arguments, constants, WARPS)

    def add_product(self, y: Tensor, left: Tensor, right: Tensor, beta: float, out: Tensor) -> None:
        """See :class:`~offbeat.rules.products.Products`."""
        if not all(map(_is_readable, (y, left, right, out))):
            super().add_product(y, left, right, beta, out)
            return
        count, m, n = y.shape
        k = left.shape[-1]
        columns, warps = (2 * BLOCK, 8) if k >= WIDE_FROM else (BLOCK, 4)
        down, across = -(-m // BLOCK), -(-n // columns)
        factors = _described(left, BLOCK, DEEP), _described(right, DEEP, columns)
        arguments = (y, *factors, out, m // 8, n // 8, _bound(k // 8), down, across, beta)
        constants = {"GROUP": GROUP, "ROWS": BLOCK, "COLUMNS": columns, "DEEP": DEEP}
        _start("add_product", y, count * down * across, arguments, constants, warps)

    def divide(self, x: Tensor, by: Tensor) -> None:
        """See :class:`~offbeat.rules.products.Products`."""
        if not _is_readable(x):
            super().divide(x, by)
            return
        blocks = -(-x[0].numel() // ELEMENTS)
        arguments = (x, by, x[0].numel() // 8, blocks)
        _start("divide", x, len(x) * blocks, arguments, {"BLOCK": ELEMENTS}, 4)


def products_for(dtype: torch.dtype, device: torch.device) -> Products:
    """The quickest products for stacks of this dtype."""
    quick = dtype in (torch.bfloat16, torch.float16) and _has_descriptors(device)
    return _TRITON if quick and _are_right(dtype, device, is_interpreting()) else _TORCH


_TRITON, _TORCH = TritonProducts(), Products()


@functools.cache
def _are_right(dtype: torch.dtype, device: torch.device, interpreted: bool) -> bool:
    """Return whether all kernels compile and their results are those of torch; if not, a warning says why.

    A step finds this out before it has changed anything.
    """
    if interpreted:
        return dtype == torch.float16  # Triton's interpreter does not multiply bfloat16
    try:
        wrong = [name for name, error in _errors(dtype, device) if not error < TOLERANCE]
        problem = f"{', '.join(wrong)} differ from torch's" if wrong else None
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if problem is not None:
        message = f"offbeat uses torch's products of matrices, since Triton's do not work here ({problem})"
        warnings.warn(message, stacklevel=2)
    return problem is None


def _errors(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, float]]:
    """The relative errors of all kernels on small matrices."""
    generator = torch.Generator(device).manual_seed(0)
    for rows, columns in ((SMALLEST, WIDE_FROM + 8), (WIDE_FROM + 8, SMALLEST), (WIDE_FROM, WIDE_FROM)):
        x = torch.randn(2, rows, columns, generator=generator, device=device).to(dtype) / columns**0.5
        side = min(rows, columns)
        wide, gram, power = rows <= columns, x.new_empty(2, side, side), x.new_empty(2, side, side)
        out, exact = x.clone(), x.double()
        _TRITON.divide(out, x[:, 0, 0].contiguous())
        yield "quotients", _distance(out, exact / exact[:, :1, :1])
        flat = x if wide else x.mT
        _TRITON.symmetric(flat, gram)
        yield "symmetric products", _distance(gram, flat.double() @ flat.double().mT)
        _TRITON.symmetric(gram, power, plus=gram, beta=-4.0, alpha=2.0)
        yield "squares", _distance(power, 2 * gram.double() @ gram.double() - 4 * gram.double())
        factors = (power, x) if wide else (x, power)
        _TRITON.add_product(x, *factors, 3.0, out=out)
        yield "sums", _distance(out, 3 * exact + factors[0].double() @ factors[1].double())


def _distance(computed: Tensor, exact: Tensor) -> float:
    return float((computed.double() - exact).norm() / exact.norm())


def _has_descriptors(device: torch.device) -> bool:
    if device.type not in ("cuda", "cpu") or why_no_triton(device) is not None:
        return False
    return (is_interpreting() or _is_hopper(device)) and _can_describe()


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    # Without Hopper's copy engine these kernels have not been found quicker than torch's products.
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _can_describe() -> bool:
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


#: Only imported where Triton is installed, and then once.
_imported = functools.cache(importlib.import_module)
KERNELS = "offbeat.engine.cuda.product_kernels"


def _is_readable(x: Tensor) -> bool:
    # Rows, whichever way the matrix is stored, must be whole groups of 16 bytes.
    rows, columns = x.shape[-2:]
    return rows % 8 == 0 == columns % 8 and rows * columns <= MOST and x.data_ptr() % 16 == 0


def _described(x: Tensor, *block: int) -> Any:
    return _imported("triton.tools.tensor_descriptor").TensorDescriptor(x, list(x.shape), list(x.stride()), [1, *block])


def _bound(k: int) -> Any:
    """The bound of a kernel's loop. Triton's interpreter cannot loop to a number that it has made a tensor."""
    if not is_interpreting():
        return k
    return _imported("triton.language").constexpr(k)


def _start(
    name: str, x: Tensor, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], warps: int
) -> None:
    """Run a kernel. What Triton does at every launch takes longer than many of these kernels, so it is done once."""
    if is_interpreting():
        getattr(_imported(KERNELS), name)[(programs,)](*arguments, **constants)
        return
    device = x.device
    with torch.cuda.device(device) if device.index != torch.cuda.current_device() else nullcontext():
        key = (name, x.dtype, device, *constants.values())
        if key not in _launches:
            function = getattr(_imported(KERNELS), name)
            options = {"num_warps": warps, "num_stages": STAGES, **limits(name)}
            _launches[key] = launcher(function.warmup(*arguments, **constants, grid=(1,), **options))
        _launches[key](programs, _torch.raw_stream(device.index), *map(address, arguments), *constants.values())


def limits(name: str) -> dict[str, int]:
    """Further options for the compiler of a kernel."""
    return {"maxnreg": REGISTERS} if name == "symmetric" else {}


#: How compiled kernels are launched, by name, dtype, device and constants. Their code depends on nothing else.
_launches: dict[Any, Any] = {}
