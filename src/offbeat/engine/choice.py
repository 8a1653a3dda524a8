"""The one place that decides which tier updates a parameter, and why."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from offbeat._torch import is_traced
from offbeat.engine.cpu.compiler import warn_of_torch
from offbeat.engine.cpu.kernel import SUPPORTED, cpu_kernel
from offbeat.engine.cuda.capture import is_capturing
from offbeat.engine.cuda.kernel import is_interpreting, why_no_kernel
from offbeat.engine.cuda.source import Variant
from offbeat.engine.options import Options
from offbeat.engine.tensors import has_storage, has_values, is_dense, is_plain
from offbeat.engine.trace import Program, TypedProgram

#: Devices on which torch's own fused operators run.
_NATIVE_DEVICES = ("cpu", "cuda", "hpu", "mps", "mtia", "xpu")

_CAPTURING = "no step was made before the capture"


class Choice(NamedTuple):
    """A tier (``loop``, ``foreach``, ``fused`` or ``native``) and the reason it was chosen."""

    tier: str
    reason: str

    def __str__(self) -> str:
        return f"{self.tier} ({self.reason})"


#: The tier of tensors without values, and of steps in which torch must see every operation.
TRACED = Choice("loop", "the step is traced, so torch must see every operation")


def choose(options: Options, tensors: list[Tensor], program: Program | None = None) -> Choice:
    """The tier for one parameter.

    Args:
        options: the options of its group.
        tensors: p, g and the state.
        program: the maths, if it is not the rule's own.

    Raises:
        RuntimeError: ``fused=True`` is not possible.
    """
    p, h = tensors[0], options.h
    if h.differentiable:
        return Choice("loop", "differentiable=True")
    if h.fused and p.device.type not in _NATIVE_DEVICES:
        raise RuntimeError(
            "`fused=True` requires all the params to be floating point Tensors of supported devices: "
            f"{list(_NATIVE_DEVICES)}, but one is on {p.device}; leave fused out for this group"
        )
    if is_traced() or not all(map(has_values, tensors)):
        return TRACED
    if options.form and (h.fused is False or h.foreach is not None):
        return Choice("loop", f"fused={h.fused}, foreach={h.foreach}")
    if h.capturable and (h.fused or h.foreach is None) and h.fused is not False:
        why_not = _why_not_fused(options, tensors, program) or (_CAPTURING if is_capturing() else None)
        if why_not is None:
            return Choice("fused", "capturable=True: coefficients stay on the device")
        return Choice("loop", f"capturable=True, and {why_not}")
    if h.capturable:
        return Choice("loop", "capturable=True: coefficients stay on the device")
    if h.fused:
        return _fused(options, tensors, program)
    if h.foreach is False or (h.fused is False and h.foreach is None):
        return Choice("loop", "foreach=False" if h.foreach is False else "fused=False")
    if not all(map(is_plain, tensors)):
        return Choice("loop", f"{type(p).__name__} is not a plain tensor")
    if h.foreach:
        return Choice("foreach", "foreach=True")
    why_not = _why_not_fused(options, tensors, program)
    if why_not is None:
        return Choice("fused", "one kernel, compiled from the rule")
    # On other devices the counters are not where torch's operators expect them.
    if p.device.type == "cpu" and program is None and _why_not_native(options, tensors) is None:
        return Choice("native", f"torch's own operator, because {why_not}")
    return Choice("foreach" if not options.form and is_dense(p) and has_storage(p) else "loop", why_not)


def _fused(options: Options, tensors: list[Tensor], program: Program | None) -> Choice:
    p, rule = tensors[0], options.rule
    if not p.is_floating_point():
        raise RuntimeError(
            f"`fused=True` requires all the params to be floating point Tensors, but one is {p.dtype}; "
            "leave fused out for this group"
        )
    why_not = _why_not_fused(options, tensors, program)
    if why_not is None:
        return Choice("fused", "fused=True")
    if p.device.type == "cpu" and not is_dense(p) and not options.form:
        return Choice("loop", why_not)
    why_not_native = _why_not_native(options, tensors)
    if why_not_native is not None:
        raise RuntimeError(
            f"`fused=True` is not possible for {rule.name} here: {why_not}, and {why_not_native}. Leave fused out"
        )
    return Choice("native", f"torch's own operator, because {why_not}")


def _why_not_native(options: Options, tensors: list[Tensor]) -> str | None:
    """The reason torch's own fused operator cannot do this update, or None if it can."""
    surface, p = options.rule.surface, tensors[0]
    if surface.native is None:
        return "torch has no fused operator for it"
    if options.form or not p.is_floating_point() or len({t.dtype for t in tensors}) > 1:
        return "torch's operator needs parameters, gradients and state of one floating point dtype"
    if not is_dense(p) or not all(map(has_storage, tensors)):
        return "torch's operator needs dense tensors, without gaps in memory"
    if p.device.type == "cpu" and not surface.native_takes(p.dtype):
        return f"torch's operator is wrong for {p.dtype} on the CPU"
    return None


def uses_triton(choice: Choice, device: torch.device) -> bool:
    """Return whether a choice runs a Triton kernel."""
    return choice.tier == "fused" and (device.type != "cpu" or is_interpreting())


def _why_not_fused(options: Options, tensors: list[Tensor], program: Program | None) -> str | None:
    """The reason that offbeat has no kernel for these tensors, or None. Compiles the kernel to find out."""
    if not all(map(is_plain, tensors)):
        return "the parameter is not a plain tensor"
    for t in tensors:
        if t.dtype not in SUPPORTED and not options.form:
            return f"no kernel for {t.dtype}"
    if not is_dense(tensors[0]):
        return "the parameter has gaps in memory"
    if not all(map(has_storage, tensors)):
        return "a tensor has no memory of its own"
    # Compiled now, so that a failure is found before anything changes.
    kind = program, tuple(t.dtype for t in tensors), tensors[0].device
    if kind not in options.reasons:
        options.reasons[kind] = _compile(options, *kind)
    return options.reasons[kind]


def _compile(
    options: Options, program: Program | None, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> str | None:
    typed = options.typed(dtypes) if program is None else TypedProgram(program, dtypes)
    if device.type != "cpu" or is_interpreting():
        return why_no_kernel(typed, Variant(by_row=typed.compute != torch.float32), device)
    if options.form:
        return "compact forms have no kernel on the CPU"
    kernel = cpu_kernel(typed)
    if not isinstance(kernel, str):
        return None
    warn_of_torch(kernel)
    return kernel
