"""A compiled update on the CPU: called with tables of addresses, updates many tensors in one pass over memory."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from offbeat.engine.cpu.compiler import CompilerError, load, why_no_compiler
from offbeat.engine.cpu.source import kernel_source
from offbeat.engine.trace import TypedProgram

#: Below this many elements a second thread costs more than it gains.
ELEMENTS_A_THREAD = 1 << 15
#: Elements a thread takes at once: few enough to share evenly, enough to stream.
CHUNK = 1 << 16


class CpuKernel:
    """A compiled update for one combination of dtypes.

    Call it with tables: for each column (p, g, then the state) the addresses of the tensors, then their sizes, the
    set of coefficients each tensor uses, all sets, and the number of elements. A tensor whose gradient has the address
    0 is left alone.
    """

    def __init__(self, typed: TypedProgram) -> None:
        library = load(kernel_source(typed))
        library.offbeat_step.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        library.offbeat_step.restype = None
        self._step = library.offbeat_step

    def __call__(
        self,
        columns: Sequence[array[int]],
        numel: array[int],
        chosen: array[int],
        coefficients: array[float],
        elements: int,
    ) -> None:
        """Run it; see the class."""
        threads = max(1, min(torch.get_num_threads(), elements // ELEMENTS_A_THREAD))
        job = array("q", (len(numel), elements, CHUNK, 0))
        tables: list[array[Any]] = [numel, chosen, coefficients, *columns]
        job.extend(table.buffer_info()[0] for table in tables)
        self._step(job.buffer_info()[0], threads)


def cpu_kernel(typed: TypedProgram) -> CpuKernel | str:
    """The kernel, compiled on first use, or the reason there is none."""
    return why_no_compiler() or _compiled(typed)


@functools.lru_cache(maxsize=1024)
def _compiled(typed: TypedProgram) -> CpuKernel | str:
    # A failure is remembered, so that a compiler that cannot do it is asked once and not at every step.
    try:
        return CpuKernel(typed)
    except CompilerError as error:
        return str(error)
