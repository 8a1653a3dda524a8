"""Compiles kernels for a GPU that need not be there; run by test_triton_compiles.py in a process of its own.

Prints one line for each kernel: its name, and ``ok`` or what went wrong.
"""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_for

import offbeat
from offbeat.engine.cuda import kernel as triton_kernel
from offbeat.engine.cuda.numbers import DeviceNumbers
from offbeat.engine.cuda.source import Variant, is_rough, triton_source
from offbeat.engine.cuda.table import BLOCK
from offbeat.engine.options import Options

TARGET = GPUTarget("cuda", 90, 32)
RULES = ["SGD", "Adam", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Lion"]
EVERYTHING = Variant(scaled=True, guarded=True, clipped=True, zeroed=True)
COMPACT = [
    {"state_dtype": "8bit"},
    {"state_dtype": torch.bfloat16, "rounding": "stochastic"},
    {"state_dtype": "8bit", "rounding": "kahan"},
]


def compile_source(source: str, fusion: bool, **types: str) -> None:
    function = triton_kernel._function(source)
    kinds = {"blocks": "*i64", "table": "*i64", "words": "*i64", "tensors": "i32", "count": "i32", "clip": "*fp64"}
    kinds |= {"scale": "*fp32", "found_inf": "*fp32", "BLOCK": "constexpr", **types}
    signature = {name: kinds.get(name, "fp32") for name in function.arg_names}
    block = {(len(signature) - 1,): 128 if "words" in signature else BLOCK}
    compile_for(ASTSource(function, signature, block), target=TARGET, options={"enable_fp_fusion": fusion})


def update_kernel(cls: type, dtype: torch.dtype, variant: Variant, **options: object) -> None:
    optimizer = cls([torch.ones(3, dtype=dtype, requires_grad=True)], **options)
    group = Options(cls.rule, optimizer.param_groups[0])
    state = [slot.dtype or dtype for slot in group.slots if slot.key in group.tensor_keys]
    typed = group.typed((dtype, dtype, *state))
    rows = "*fp64" if typed.compute == torch.float64 else "*fp32"
    compile_source(triton_source(typed, variant), is_rough(typed), rows=rows)


def number_kernel(cls: type, lr: object) -> None:
    optimizer = cls([torch.ones(3, requires_grad=True)])
    group = Options(cls.rule, optimizer.param_groups[0])
    group.h.lr = lr
    dtypes = dict.fromkeys(group.scalar_keys, torch.float32)
    names = group.device_program.coefficients
    numbers = DeviceNumbers(group, dtypes, names, torch.empty(1, len(names)), 2 + len(group.slots), False)
    compile_source(numbers.source(True), False, rows="*fp32", t0="*fp32")


def kernels():
    for name in RULES:
        cls = getattr(offbeat, name)
        yield f"{name} float32", lambda cls=cls: update_kernel(cls, torch.float32, Variant())
        yield f"{name} numbers", lambda cls=cls: number_kernel(cls, torch.tensor(0.1) if name == "Adam" else 0.1)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        by_row = Variant(True, True, True, True, True)
        yield f"AdamW {dtype}, all at once", lambda dtype=dtype: update_kernel(offbeat.AdamW, dtype, by_row)
    for options in COMPACT:
        for name in ("AdamW", "Lion"):
            yield (
                f"{name} {options}",
                lambda name=name, o=options: update_kernel(getattr(offbeat, name), torch.bfloat16, EVERYTHING, **o),
            )


def outcome(make) -> str:
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    return "ok"


if __name__ == "__main__":
    for label, make in kernels():
        print(f"{label}: {outcome(make)}", flush=True)
