"""Compiles the codecs' kernels for a GPU that need not be there; run by test_wire_triton.py in a process of its own.

Prints one line for each kernel: its name, and ``ok`` or what went wrong.
"""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_for

from offbeat.wire.codecs.triton_launch import launch_of, topk_constants
from tests.compile_kernels import outcome
from tests.wire_cases import BUILT_IN

TARGET = GPUTarget("cuda", 90, 32)


def compile_kernel(codec, way, option):
    from offbeat.wire.codecs import triton_kernels  # whoever only looks at this file must not decide how Triton runs

    if codec.kernel == "topk":
        name = f"{way}_topk"
        constants = topk_constants(codec, codec.layout(codec.block), way, option)
    else:
        name, constants = launch_of(codec, way, option)
    function = getattr(triton_kernels, name)
    code = "*i16" if codec.kernel in ("bf16", "fp16") else "*u8"
    kinds = {"x": "*fp32", "residual": "*fp32", "numel": "i32", "data": code, "words": "*i32"}
    kinds |= dict.fromkeys(("width", "k", "low", "unary", "word_count", "record_bytes"), "i32")
    kinds["out"] = code if way == "encode" else "*fp32"
    signature = {name: kinds.get(name, "constexpr") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    compile_for(ASTSource(function, signature, places), target=TARGET, options={"enable_fp_fusion": False})


if __name__ == "__main__":
    for codec in BUILT_IN:
        for way in ("encode", "decode"):
            result = outcome(lambda: compile_kernel(codec, way, True))
            print(f"{codec.name} {way}: {result}", flush=True)
