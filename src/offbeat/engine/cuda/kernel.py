"""Kernels that Triton compiles from a traced update, one for each combination of dtypes, and their launch."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import linecache
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.engine.cuda.source import (
    NEAREST,
    NEAREST_BY_BITS,
    PLAIN_QUOTIENT,
    QUOTIENT,
    Variant,
    is_rough,
    triton_source,
)
from offbeat.engine.cuda.table import BLOCK, DeviceTable
from offbeat.engine.eight_bit import scaled_columns
from offbeat.engine.trace import TypedProgram

#: Warps per block, which gives 8 elements per thread.
WARPS = 4
#: The largest number of registers per thread with 8-bit state. The code for the ends of tensors alone would use twice
#: as many, and then only half as many threads could hide the latency of memory.
REGISTERS = 48


class TritonError(RuntimeError):
    """A kernel could not be compiled; the message says why."""


def is_interpreting() -> bool:
    """Return whether Triton runs kernels in Python, on CPU tensors (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_no_triton(device: torch.device) -> str | None:
    """The reason there is no kernel for this device, or None if there is one."""
    if os.environ.get("OFFBEAT_NO_TRITON"):
        return "OFFBEAT_NO_TRITON is set"
    if is_interpreting() != (device.type == "cpu"):
        return f"Triton's interpreter does not run on {device.type}" if is_interpreting() else "Triton needs a GPU"
    if device.type not in ("cuda", "cpu"):
        return f"there is no fused kernel for {device.type}"
    if not _is_installed():
        return "Triton is not installed; install it with: pip install triton"
    return None


def compile_kernel(typed: TypedProgram, variant: Variant, device: torch.device) -> Any:
    """The compiled update. A tensor whose gradient has the address 0 is not updated. Raises :class:`TritonError`."""
    scalars = [typed.compute] if variant.by_row else [1.5] * len(typed.program.coefficients)
    transforms = (torch.float64 if name == "clip" else torch.float32 for name in variant.transforms)
    kinds = (torch.int64, torch.int64, 2, *scalars, *transforms)
    registers = REGISTERS if scaled_columns(typed.formats) else None
    return compile_source(triton_source(typed, variant), kinds, BLOCK, device, is_rough(typed), registers)


def why_no_kernel(typed: TypedProgram, variant: Variant, device: torch.device) -> str | None:
    """The reason there is no kernel for this, or None if there is one; compiles it to find out."""
    return why_no_triton(device) or _why_not_compiled(typed, variant, device)


@functools.lru_cache(maxsize=4096)
def _why_not_compiled(typed: TypedProgram, variant: Variant, device: torch.device) -> str | None:
    try:
        compile_kernel(typed, variant, device)
    except TritonError as error:
        return str(error)
    return None


def bind_kernel(typed: TypedProgram, variant: Variant, table: DeviceTable, words: Tensor) -> Callable[..., None]:
    """The launch for a table with this content: call it with the coefficients, then the transforms.

    Coefficients are numbers, or for a variant ``by_row`` a tensor of rows on the device. GradTransforms are the tensors
    that :attr:`Variant.transforms` names, each one number on the device: ``clip`` in float64, the others in float32.
    """
    if not table.programs:
        return lambda *numbers: None
    compiled = compile_kernel(typed, variant, table.device)
    return bind(compiled, table.programs, table.device, (table.blocks, words, table.tensors), BLOCK)


@functools.lru_cache(maxsize=4096)
def compile_source(
    source: str,
    arguments: tuple[Any, ...],
    block: int,
    device: torch.device,
    contract: bool = False,
    registers: int | None = None,
) -> Any:
    """A kernel compiled for arguments of these kinds, where a dtype stands for an address. Raises :class:`TritonError`.

    Args:
        contract: allow fused multiply-adds.
        registers: the largest number of registers per thread.
    """
    if is_interpreting() or torch.version.hip is not None:
        source = source.replace(QUOTIENT, PLAIN_QUOTIENT)
    if is_interpreting():
        return _function(source.replace(NEAREST, NEAREST_BY_BITS))
    function = _function(source)
    try:
        with torch.cuda.device(device):
            limit = {} if registers is None else {"maxnreg": registers}
            return function.warmup(*arguments, block, grid=(1,), num_warps=WARPS, enable_fp_fusion=contract, **limit)
    except Exception as error:
        words = f"{type(error).__name__}: {error}".splitlines()
        raise TritonError(f"Triton could not compile the kernel ({words[0][:200]})") from error


def bind(compiled: Any, programs: int, device: torch.device, fixed: tuple[Any, ...], block: int) -> Callable[..., None]:
    """A function that launches the kernel: its first arguments are fixed, call it with the others."""
    if is_interpreting():
        return lambda *more: compiled[(programs,)](*fixed, *more, block)
    index = device.index
    with torch.cuda.device(index):
        launch = functools.partial(launcher(compiled), programs)
    # Addresses are passed as numbers, because Triton would query the driver for every tensor.
    first = tuple(address(a) for a in fixed)
    stream_of = _torch.raw_stream

    def run(*more: Any) -> None:
        arguments = [address(a) for a in more]
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                launch(stream_of(index), *first, *arguments, block)
        else:
            launch(stream_of(index), *first, *arguments, block)

    return run


def launcher(compiled: Any) -> Callable[..., None]:
    """A function of the number of programs, a stream and the arguments, constants included.

    It skips the code for profilers while no profiler is active, if the form of such a launch is known. That is checked
    here, before any launch.
    """
    compiled[(1, 1, 1)]  # loads it
    known = _torch.triton_launch(compiled)
    if known is None:
        return lambda programs, stream, *arguments: compiled[(programs, 1, 1)](*arguments, stream=stream)
    run, function, metadata, before, after = known

    def launch(programs: int, stream: int, *arguments: Any) -> None:
        if before or after:
            compiled[(programs, 1, 1)](*arguments, stream=stream)
        else:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


def address(a: Any) -> Any:
    """Return the address of a tensor, and anything else unchanged."""
    return a.data_ptr() if isinstance(a, Tensor) else a


@functools.lru_cache(maxsize=1024)
def _function(source: str) -> Any:
    """The function ``kernel`` that the source defines. Triton reads the source again, through ``linecache``."""
    name = f"<offbeat kernel {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "offbeat.kernel"}
    exec(compile(source, name, "exec"), space)
    return space["kernel"]
