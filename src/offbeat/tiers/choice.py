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

__all__ = ["Choice", "choose"]

_PLAIN = (Tensor, torch.nn.Parameter)


class Choice(NamedTuple):
    """A tier (``loop``, ``foreach``, ``fused`` or ``native``) and the reason it was chosen."""

    tier: str
    reason: str

    def __str__(self) -> str:
        return f"{self.tier} ({self.reason})"


def choose(rule: Rule, h: Values, program: Program | None, tensors: list[Tensor]) -> Choice:
    """The tier for one parameter: ``tensors`` are p, g and the state; a symbolic form exists if ``program`` does.

    Raises RuntimeError where ``fused=True`` asks for what cannot be.
    """
    p = tensors[0]
    if h.differentiable:
        return Choice("loop", "differentiable=True")
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
    if p.device.type != "cpu":
        return Choice("foreach", f"the fused kernel for {p.device.type} is not written yet")
    why_not = _why_not_compiled(program, tensors)
    if why_not is None:
        return Choice("fused", "the fastest for these tensors")
    if not is_dense(p) or not _has_storage(p):
        return Choice("loop", why_not)
    return Choice("foreach", why_not)


def _fused(rule: Rule, program: Program | None, tensors: list[Tensor]) -> Choice:
    p = tensors[0]
    if not p.is_floating_point():
        raise RuntimeError(
            f"`fused=True` requires all the params to be floating point Tensors, but one is {p.dtype}; "
            "leave fused out for this group"
        )
    if p.device.type == "cpu":
        why_not = _why_not_compiled(program, tensors) if program is not None else "the parameter is not a plain tensor"
        if why_not is None:
            return Choice("fused", "fused=True")
        if not is_dense(p):
            return Choice("loop", why_not)
    else:
        why_not = f"the fused kernel for {p.device.type} is not written yet"
    if rule.native is None or len({t.dtype for t in tensors}) > 1:
        raise RuntimeError(f"`fused=True` is not possible for {rule.name} here: {why_not}. Leave fused out")
    return Choice("native", f"torch's own operator, because {why_not}")


def _why_not_compiled(program: Program, tensors: list[Tensor]) -> str | None:
    for t in tensors:
        if t.dtype not in SUPPORTED:
            return f"no kernel for {t.dtype}"
    if not is_dense(tensors[0]):
        return "the parameter has gaps in memory"
    if not all(map(_has_storage, tensors)):
        return "a tensor has no memory of its own"
    dtypes = tuple(t.dtype for t in tensors)
    kernel = _kernel_or_reason(program, dtypes, compute_dtype(tensors), why_no_compiler())
    return None if isinstance(kernel, CpuKernel) else kernel


def _has_storage(t: Tensor) -> bool:
    try:
        return t.data_ptr() != 0 or t.numel() == 0
    except RuntimeError:  # one of functorch's, say
        return False


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
