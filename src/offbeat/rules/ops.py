"""The operations a rule's maths may use: one table, with one entry for each operation.

A rule's update is written once. The loop tier calls it with tensors, and the other tiers trace it with symbolic
values. The numbers that change at every step are computed from Python numbers, 0-d tensors or symbols. An entry
defines its operation for all of these, so adding an operation means adding one entry::

    sqrt(x), sign(x), maximum(a, b), minimum(a, b), where(condition, a, b)      # functions
    a + b, a - b, a * b, a / b, -a, abs(a), a > b, a >= b, a == b, ...          # operators
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["OPERATIONS", "Operation", "maximum", "minimum", "sign", "sqrt", "where"]


@dataclass(frozen=True)
class Operation:
    """One operation, in every form in which it is executed. Call it with numbers, tensors or symbols.

    Args:
        name: its name in a traced program.
        number: the operation on Python numbers.
        tensor: the operation on tensors, elementwise.
        c: a C expression of the operands ``{0}``, ``{1}``, ...; ``{f}`` is the suffix of a float's functions.
        triton: a Triton expression of the operands, in float32 and rounded as IEEE 754 requires.
        triton_wide: the expression for float64, if it differs.
        triton_rough: the expression where the last bits of a float32 do not matter, if it differs.
        foreach: the suffix of torch's multi-tensor operator; None calls ``tensor`` for each tensor.
        python: the special method of a Python operator (``__add__``); None for functions.
        compares: whether the result is a condition.
    """

    name: str
    number: Callable[..., Any]
    tensor: Callable[..., Any]
    c: str
    triton: str
    triton_wide: str | None = None
    triton_rough: str | None = None
    foreach: str | None = None
    python: str | None = None
    compares: bool = False

    def __call__(self, *operands: Any) -> Any:
        """The result, of the kind of the operands: a number, a tensor, or a symbol."""
        function = self.number
        for x in operands:
            if isinstance(x, (float, int)):
                continue
            if isinstance(x, Tensor):
                function = self.tensor
            elif hasattr(x, "emit"):
                return x.emit(self.name, *operands)
        return function(*operands)


OPERATIONS: dict[str, Operation] = {}


def _operation(name: str, number: Any, tensor: Any, c: str, triton: str | None = None, **more: Any) -> Operation:
    made = OPERATIONS[name] = Operation(name, number, tensor, c, triton or c, **more)
    return made


def _like(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For operators of torch that take tensors only: a number becomes a tensor like the other operand."""

    def both(a: Any, b: Any) -> Tensor:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return function(a, b)
        like = a if isinstance(a, Tensor) else b
        a, b = (x if isinstance(x, Tensor) else torch.full((), x, dtype=like.dtype, device=like.device) for x in (a, b))
        return function(a, b)

    return both


def _where_tensor(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return a if condition else b
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = torch.full((), a, dtype=torch.float64, device=condition.device)
    return torch.where(condition, a, b)


def _sign(x: float) -> float:
    return float((x > 0) - (x < 0))


_operation("add", operator.add, torch.add, "{0} + {1}", foreach="add", python="__add__")
_operation("sub", operator.sub, torch.sub, "{0} - {1}", foreach="sub", python="__sub__")
_operation("mul", operator.mul, torch.mul, "{0} * {1}", foreach="mul", python="__mul__")
_operation(
    "div", operator.truediv, torch.div, "{0} / {1}", "tl.div_rn({0}, {1})",
    triton_wide="{0} / {1}", triton_rough="quotient({0}, {1})", foreach="div", python="__truediv__",
)  # fmt: skip
_operation("neg", operator.neg, torch.neg, "-{0}", foreach="neg", python="__neg__")
_operation("abs", abs, torch.abs, "__builtin_fabs{f}({0})", "tl.abs({0})", foreach="abs", python="__abs__")
_operation("gt", operator.gt, _like(torch.gt), "{0} > {1}", python="__gt__", compares=True)
_operation("ge", operator.ge, _like(torch.ge), "{0} >= {1}", python="__ge__", compares=True)
_operation("lt", operator.lt, _like(torch.lt), "{0} < {1}", python="__lt__", compares=True)
_operation("le", operator.le, _like(torch.le), "{0} <= {1}", python="__le__", compares=True)
_operation("eq", operator.eq, _like(torch.eq), "{0} == {1}", python="__eq__", compares=True)
_operation("ne", operator.ne, _like(torch.ne), "{0} != {1}", python="__ne__", compares=True)

sqrt = _operation(
    "sqrt", math.sqrt, torch.sqrt, "__builtin_sqrt{f}({0})", "tl.sqrt_rn({0})",
    triton_wide="tl.sqrt({0})", triton_rough="tl.sqrt({0})", foreach="sqrt",
)  # fmt: skip
#: -1, 0 or 1, the sign of a number; 0 for NaN, like :func:`torch.sign`.
sign = _operation(
    "sign", _sign, torch.sign, "(C)(({0} > 0) - ({0} < 0))",
    "tl.where({0} > 0, one, tl.where({0} < 0, -one, one - one))", foreach="sign",
)  # fmt: skip
#: The larger of the two; NaN if either is NaN, like :func:`torch.maximum`.
maximum = _operation(
    "max", max, _like(torch.maximum), "{0} > {1} || {0} != {0} ? {0} : {1}",
    "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})", foreach="maximum",
)  # fmt: skip
#: The smaller of the two; NaN if either is NaN, like :func:`torch.minimum`.
minimum = _operation(
    "min", min, _like(torch.minimum), "{0} < {1} || {0} != {0} ? {0} : {1}",
    "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})", foreach="minimum",
)  # fmt: skip
# Only for coefficients, not for updates: a power with a base of at least 0, and rounding to float32.
_operation("pow", operator.pow, torch.pow, "__builtin_pow{f}({0}, {1})", "tl.exp2({1} * tl.log2({0}))")
_operation("round", float, lambda x: x.float().to(x.dtype), "(C)(float){0}", "{0}.to(tl.float32).to(tl.float64)")

#: ``where(condition, a, b)``: ``a`` where the condition holds, ``b`` elsewhere.
where = _operation(
    "where", lambda condition, a, b: a if condition else b, _where_tensor, "{0} ? {1} : {2}", "tl.where({0}, {1}, {2})"
)
