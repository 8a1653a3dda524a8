"""The one place that decides which tier updates a parameter, and why."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat._torch import is_traced
from offbeat.engine.cpu.kernel import CpuKernel, kernel_or_reason
from offbeat.engine.cpu.source import SUPPORTED
from offbeat.engine.cuda.kernel import TritonError, is_interpreting, triton_kernel, why_no_triton
from offbeat.engine.cuda.source import Variant
from offbeat.engine.tensors import compute_dtype, has_storage, has_values, is_dense, is_plain
from offbeat.engine.trace import Program
from offbeat.rules.rule import Rule, Values

__all__ = ["Choice", "choose", "is_capturing", "is_traced", "uses_triton"]

#: Devices on which torch's own fused operators run.
_NATIVE_DEVICES = ("cpu", "cuda", "hpu", "mps", "mtia", "xpu")

_CAPTURING = "no step was made before the capture to prepare for it"


class Choice(NamedTuple):
    """A tier (``loop``, ``foreach``, ``fused`` or ``native``) and the reason it was chosen."""

    tier: str
    reason: str

    def __str__(self) -> str:
        return f"{self.tier} ({self.reason})"


def choose(
    rule: Rule, h: Values, program: Program | None, tensors: list[Tensor], formats: tuple[str, ...] = ()
) -> Choice:
    """The tier for one parameter.

    Args:
        program: the traced update; None if there is none.
        tensors: p, g and the state tensors.
        formats: the forms in which they are stored, if not all are plain.

    Raises:
        RuntimeError: ``fused=True`` is not possible.
    """
    p = tensors[0]
    if h.differentiable:
        return Choice("loop", "differentiable=True")
    if h.fused and p.device.type not in _NATIVE_DEVICES:
        raise RuntimeError(
            "`fused=True` requires all the params to be floating point Tensors of supported devices: "
            f"{list(_NATIVE_DEVICES)}, but one is on {p.device}; leave fused out for this group"
        )
    if is_traced() or not all(map(has_values, tensors)):
        return Choice("loop", "the tensors are traced: every operation is one that torch sees")
    if formats:
        return _compact(h, program, tensors, formats)
    if h.capturable and (h.fused or h.foreach is None) and h.fused is not False:
        why_not = _why_not_fused(program, tensors) or (_CAPTURING if is_capturing() else None)
        if why_not is None:
            return Choice("fused", "capturable=True: every number stays on the device")
        return Choice("loop", f"capturable=True, and {why_not}")
    if h.capturable:
        return Choice("loop", "capturable=True: every number stays on the device")
    if h.fused:
        return _fused(rule, program, tensors)
    if h.foreach is False or (h.fused is False and h.foreach is None):
        return Choice("loop", "foreach=False" if h.foreach is False else "fused=False")
    if program is None or not all(map(is_plain, tensors)):
        return Choice("loop", f"{type(p).__name__} is not a plain tensor")
    if h.foreach:
        return Choice("foreach", "foreach=True")
    why_not = _why_not_fused(program, tensors)
    if why_not is None:
        return Choice("fused", "the fastest for these tensors")
    return Choice("foreach" if is_dense(p) and has_storage(p) else "loop", why_not)


def _compact(h: Values, program: Program | None, tensors: list[Tensor], formats: tuple[str, ...]) -> Choice:
    """The tier for numbers in compact forms: a kernel, or the loop."""
    p = tensors[0]
    if h.fused is False or h.foreach is not None:
        return Choice("loop", f"fused={h.fused}, foreach={h.foreach}")
    if program is None or not all(map(is_plain, tensors)):
        why_not: str | None = "the parameter is not a plain tensor"
    elif not is_dense(p) or not all(map(has_storage, tensors)):
        why_not = "the parameter does not fill one piece of memory"
    elif p.device.type == "cpu" and not is_interpreting():
        why_not = "compact forms have no kernel on the CPU"
    elif h.capturable and is_capturing():
        why_not = _CAPTURING
    else:
        why_not = _why_not_triton(program, tensors, formats)
    if why_not is None:
        return Choice("fused", "the fastest for these tensors")
    if h.fused:
        raise RuntimeError(f"`fused=True` is not possible here: {why_not}. Leave fused out")
    return Choice("loop", why_not)


def _fused(rule: Rule, program: Program | None, tensors: list[Tensor]) -> Choice:
    p = tensors[0]
    if not p.is_floating_point():
        raise RuntimeError(
            f"`fused=True` requires all the params to be floating point Tensors, but one is {p.dtype}; "
            "leave fused out for this group"
        )
    why_not = _why_not_fused(program, tensors)
    if why_not is None:
        return Choice("fused", "fused=True")
    if p.device.type == "cpu" and not is_dense(p):
        return Choice("loop", why_not)
    if rule.surface.native is None or len({t.dtype for t in tensors}) > 1:
        raise RuntimeError(f"`fused=True` is not possible for {rule.name} here: {why_not}. Leave fused out")
    return Choice("native", f"torch's own operator, because {why_not}")


def is_capturing() -> bool:
    """Whether a graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def uses_triton(choice: Choice, device: torch.device) -> bool:
    """Whether a choice means a Triton kernel."""
    return choice.tier == "fused" and (device.type != "cpu" or is_interpreting())


def _why_not_fused(program: Program | None, tensors: list[Tensor]) -> str | None:
    """The reason there is no kernel of ours for these tensors; compiles it to find out."""
    if program is None or not all(map(is_plain, tensors)):
        return "the parameter is not a plain tensor"
    for t in tensors:
        if t.dtype not in SUPPORTED:
            return f"no kernel for {t.dtype}"
    if not is_dense(tensors[0]):
        return "the parameter has gaps in memory"
    if not all(map(has_storage, tensors)):
        return "a tensor has no memory of its own"
    if tensors[0].device.type != "cpu" or is_interpreting():
        return _why_not_triton(program, tensors)
    kernel = kernel_or_reason(program, tuple(t.dtype for t in tensors), compute_dtype(tensors))
    return None if isinstance(kernel, CpuKernel) else kernel


def _why_not_triton(program: Program, tensors: list[Tensor], formats: tuple[str, ...] = ()) -> str | None:
    device, dtypes = tensors[0].device, tuple(t.dtype for t in tensors)
    return _why_no_triton_kernel(program, dtypes, compute_dtype(tensors), device, why_no_triton(device), formats)


@functools.lru_cache(maxsize=4096)
def _why_no_triton_kernel(
    program: Program,
    dtypes: tuple[torch.dtype, ...],
    compute: torch.dtype,
    device: torch.device,
    no_triton: str | None,
    formats: tuple[str, ...],
) -> str | None:
    # Compiled now, so that a failure is found before anything changes.
    if no_triton:
        return no_triton
    try:
        variant = Variant(by_row=compute != torch.float32)
        triton_kernel(program, dtypes, compute, formats).compile(variant, device)
    except TritonError as error:
        return str(error)
    return None
