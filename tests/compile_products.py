"""Compiles the kernels for products of matrices for a GPU that need not be there; run by test_products.py.

Prints one line for each kernel: its name, and ``ok`` or what went wrong.
"""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_for

from offbeat.engine.cuda import products
from tests.compile_kernels import outcome

TARGET = GPUTarget("cuda", 90, 32)


def described(*block):
    return f"tensordesc<bf16{[1, *block]}>".replace(" ", "")


def compile_kernel(name, kinds, constants, warps):
    from offbeat.engine.cuda import product_kernels

    function = getattr(product_kernels, name)
    others = dict.fromkeys(("x", "by", "plus", "out", "y"), "*bf16") | dict.fromkeys(("alpha", "beta"), "fp32")
    others |= dict.fromkeys(("m8", "n8", "k8", "numel8", "tiles", "down", "across", "blocks"), "i32")
    signature = {one: "constexpr" if one in constants else (others | kinds)[one] for one in function.arg_names}
    places = {(function.arg_names.index(one),): value for one, value in constants.items()}
    options = {"num_warps": warps, "num_stages": products.STAGES, **products.limits(name)}
    # As Triton finds out when it is given tensors that begin at multiples of 16 bytes.
    aligned = [i for i, one in enumerate(function.arg_names) if signature[one] == "*bf16"]
    source = ASTSource(function, signature, places, {(i,): [["tt.divisibility", 16]] for i in aligned})
    compiled = compile_for(source, target=TARGET, options=options)
    assert compiled.metadata.shared <= 227 << 10
    assert "st.global.b16" not in compiled.asm["ptx"]  # eight numbers are stored at once


if __name__ == "__main__":
    block, deep = products.BLOCK, products.DEEP
    for turned in (False, True):
        for plus in (False, True):
            kinds = {"x": described(deep, block) if turned else described(block, deep)}
            constants = {"PLUS": plus, "TURNED": turned, "BLOCK": block, "DEEP": deep}
            result = outcome(lambda: compile_kernel("symmetric", kinds, constants, products.WARPS))
            print(f"symmetric, turned {turned}, plus {plus}: {result}", flush=True)
    for columns, warps in ((block, 4), (2 * block, 8)):
        kinds = {"left": described(block, deep), "right": described(deep, columns)}
        constants = {"GROUP": products.GROUP, "ROWS": block, "COLUMNS": columns, "DEEP": deep}
        result = outcome(lambda: compile_kernel("add_product", kinds, constants, warps))
        print(f"add_product, {columns} columns: {result}", flush=True)
    result = outcome(lambda: compile_kernel("divide", {}, {"BLOCK": products.ELEMENTS}, 4))
    print(f"divide: {result}", flush=True)
