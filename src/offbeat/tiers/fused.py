"""The fused tier: the whole update of many tensors in one pass over memory.

On the CPU the traced rule is compiled to a kernel that reads a table of pointers. The one for GPUs, made from the same
program, is in :mod:`offbeat.tiers.triton_kernel`.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from offbeat.tiers.c_source import SUPPORTED, kernel_source
from offbeat.tiers.compiler import CompilerError, load, why_no_compiler
from offbeat.tiers.trace import Program

__all__ = ["SUPPORTED", "CompilerError", "CpuKernel", "cpu_kernel", "why_no_compiler"]

#: Below this many elements a second thread costs more than it brings.
ELEMENTS_A_THREAD = 1 << 15
#: Elements a thread takes at once: small enough to share evenly, large enough to stream.
CHUNK = 1 << 16


class CpuKernel:
    """A compiled update for one combination of dtypes.

    Call it with the tables: for each column (p, g, then the state) the tensors' addresses, then sizes, the row of
    coefficients each tensor uses, those rows, and the number of elements. A tensor whose gradient address is 0 is
    left alone.
    """

    def __init__(self, program: Program, dtypes: tuple[torch.dtype, ...], compute: torch.dtype) -> None:
        library = load(kernel_source(program, dtypes, compute))
        library.offbeat_step.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        library.offbeat_step.restype = None
        self._step = library.offbeat_step

    def __call__(
        self,
        columns: Sequence[array[int]],
        numel: array[int],
        rows: array[int],
        coefficients: array[float],
        elements: int,
    ) -> None:
        """Run it; see the class."""
        threads = max(1, min(torch.get_num_threads(), elements // ELEMENTS_A_THREAD))
        job = array("q", (len(numel), elements, CHUNK, 0))
        tables: list[array[Any]] = [numel, rows, coefficients, *columns]
        job.extend(table.buffer_info()[0] for table in tables)
        self._step(job.buffer_info()[0], threads)


@functools.lru_cache(maxsize=1024)
def cpu_kernel(program: Program, dtypes: tuple[torch.dtype, ...], compute: torch.dtype) -> CpuKernel:
    """The kernel for these dtypes, compiled on first use. Raises :class:`CompilerError`."""
    return CpuKernel(program, dtypes, compute)
