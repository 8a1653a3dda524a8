"""Which tier runs a set of tensors, and why."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.rules.rule import Rule, Values
from offbeat.tiers.fused import SUPPORTED, CompilerError, CpuKernel, cpu_kernel, why_no_compiler
from offbeat.tiers.layout import compute_dtype, is_dense
from offbeat.tiers.trace import Program
from offbeat.tiers.triton_kernel import TritonError, is_interpreting, triton_kernel, why_no_triton
from offbeat.tiers.triton_source import Variant

__all__ = ["Choice", "choose", "is_capturing", "uses_triton"]

_PLAIN = (Tensor, torch.nn.Parameter)


class Choice(NamedTuple):
    """A tier (``loop``, ``foreach``, ``fused`` or ``native``) and the reason it was chosen."""

    tier: str
    reason: str

    def __str__(self) -> str:
        return f"{self.tier} ({self.reason})"


def choose(
    rule: Rule, h: Values, program: Program | None, tensors: list[Tensor], formats: tuple[str, ...] = ()
) -> Choice:
    """The tier for one parameter: ``tensors`` are p, g and the state; a symbolic form exists if ``program`` does.

    ``formats`` says how they are stored if not all of them plainly.

    Raises RuntimeError where ``fused=True`` asks for what cannot be.
    """
    p = tensors[0]
    if h.differentiable:
        return Choice("loop", "differentiable=True")
    if formats:
        return _compact(h, program, tensors, formats)
    if h.capturable and (h.fused or h.foreach is None) and h.fused is not False:
        why_not = _why_no_plain_kernel(program, tensors)
        if why_not is None and is_capturing():
            why_not = "no step was made before the capture that could prepare for it"
        if why_not is None:
            return Choice("fused", "capturable=True: every number stays on the device")
        return Choice("loop", f"capturable=True, and {why_not}")
    if h.capturable:
        return Choice("loop", "capturable=True: every number stays on the device")
    if h.fused:
        return _fused(rule, program, tensors)
    if h.foreach is False or (h.fused is False and h.foreach is None):
        return Choice("loop", "foreach=False" if h.foreach is False else "fused=False")
    if program is None or any(type(t) not in _PLAIN for t in tensors):
        return Choice("loop", f"{type(p).__name__} is not a plain tensor")
    if h.foreach:
        return Choice("foreach", "foreach=True")
    why_not = _why_not_compiled(program, tensors)
    if why_not is None:
        return Choice("fused", "the fastest for these tensors")
    if not is_dense(p) or not _has_storage(p):
        return Choice("loop", why_not)
    return Choice("foreach", why_not)


def _compact(h: Values, program: Program | None, tensors: list[Tensor], formats: tuple[str, ...]) -> Choice:
    """The tier for numbers in compact forms: a kernel, or the loop."""
    p = tensors[0]
    if h.fused is False or h.foreach is not None:
        return Choice("loop", f"fused={h.fused}, foreach={h.foreach}")
    why_not = None
    if program is None or any(type(t) not in _PLAIN for t in tensors):
        why_not = "the parameter is not a plain tensor"
    elif not is_dense(p) or not all(map(_has_storage, tensors)):
        why_not = "the parameter does not lie in one piece of memory"
    elif p.device.type == "cpu" and not is_interpreting():
        why_not = "compact forms have no kernel on the CPU"
    elif h.capturable and is_capturing():
        why_not = "no step was made before the capture that could prepare for it"
    else:
        dtypes, compute = tuple(t.dtype for t in tensors), compute_dtype(tensors)
        why_not = _why_not_by_triton(program, dtypes, compute, p.device, why_no_triton(p.device), formats)
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
    why_not = _why_no_plain_kernel(program, tensors)
    if why_not is None:
        return Choice("fused", "fused=True")
    if p.device.type == "cpu" and not is_dense(p):
        return Choice("loop", why_not)
    if rule.native is None or len({t.dtype for t in tensors}) > 1:
        raise RuntimeError(f"`fused=True` is not possible for {rule.name} here: {why_not}. Leave fused out")
    return Choice("native", f"torch's own operator, because {why_not}")


def is_capturing() -> bool:
    """Whether a graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def uses_triton(choice: Choice, device: torch.device) -> bool:
    """Whether a choice means a kernel of Triton's."""
    return choice.tier == "fused" and (device.type != "cpu" or is_interpreting())


def _why_no_plain_kernel(program: Program | None, tensors: list[Tensor]) -> str | None:
    if program is None or any(type(t) not in _PLAIN for t in tensors):
        return "the parameter is not a plain tensor"
    return _why_not_compiled(program, tensors)


def _why_not_compiled(program: Program, tensors: list[Tensor]) -> str | None:
    for t in tensors:
        if t.dtype not in SUPPORTED:
            return f"no kernel for {t.dtype}"
    if not is_dense(tensors[0]):
        return "the parameter has gaps in memory"
    if not all(map(_has_storage, tensors)):
        return "a tensor has no memory of its own"
    dtypes, compute, device = tuple(t.dtype for t in tensors), compute_dtype(tensors), tensors[0].device
    if device.type != "cpu" or is_interpreting():
        return _why_not_by_triton(program, dtypes, compute, device, why_no_triton(device))
    kernel = _kernel_or_reason(program, dtypes, compute, why_no_compiler())
    return None if isinstance(kernel, CpuKernel) else kernel


def _has_storage(t: Tensor) -> bool:
    try:
        return t.data_ptr() != 0 or t.numel() == 0
    except RuntimeError:  # one of functorch's, say
        return False


@functools.lru_cache(maxsize=4096)
def _why_not_by_triton(
    program: Program,
    dtypes: tuple[torch.dtype, ...],
    compute: torch.dtype,
    device: torch.device,
    no_triton: str | None,
    formats: tuple[str, ...] = (),
) -> str | None:
    """Compiles the kernel, so that one that cannot be compiled is known before anything changes."""
    if no_triton:
        return no_triton
    try:
        variant = Variant(by_row=compute != torch.float32)
        triton_kernel(program, dtypes, compute, formats).compile(variant, device)
    except TritonError as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=4096)
def _kernel_or_reason(
    program: Program, dtypes: tuple[torch.dtype, ...], compute: torch.dtype, no_compiler: str | None
) -> CpuKernel | str:
    """A failure is remembered, so that a compiler that cannot do it is asked once and not at every step."""
    if no_compiler:
        return no_compiler
    try:
        return cpu_kernel(program, dtypes, compute)
    except CompilerError as error:
        return str(error)
