"""Compiles the codecs' kernels for a GPU that need not be there; run by test_wire_triton.py in a process of its own.

Prints one line for each kernel: its name, and ``ok`` or what went wrong.
"""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_for

from offbeat.wire.gpu import launch, topk_constants
from tests.compile_kernels import outcome
from tests.wire_cases import CODECS

TARGET = GPUTarget("cuda", 90, 32)


def compile_kernel(codec, encode, option):
    from offbeat.wire import triton_kernels  # whoever only looks at this file must not decide how Triton runs

    if codec.kernel == "topk":
        name = "encode_topk" if encode else "decode_topk"
        constants = topk_constants(codec, codec.layout(codec.block), encode, option)
    else:
        name, constants, _ = launch(codec, encode, option)
    function = getattr(triton_kernels, name)
    code = "*i16" if codec.kernel in ("bf16", "fp16") else "*u8"
    kinds = {"x": "*fp32", "residual": "*fp32", "flag": "*i32", "numel": "i32", "data": code, "words": "*i32"}
    kinds |= dict.fromkeys(("width", "k", "low", "unary", "word_count", "record_bytes"), "i32")
    kinds["out"] = code if encode else "*fp32"
    signature = {name: kinds.get(name, "constexpr") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    compile_for(ASTSource(function, signature, places), target=TARGET, options={"enable_fp_fusion": False})


if __name__ == "__main__":
    for codec in CODECS:
        for encode in (True, False):
            result = outcome(lambda: compile_kernel(codec, encode, True))
            print(f"{codec.name} {'encode' if encode else 'decode'}: {result}", flush=True)
