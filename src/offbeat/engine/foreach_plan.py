"""How a traced update runs over lists of tensors: which operator computes what, and where its result is stored.

A plan is made once for each program and each outcome of its choices by coefficients. It leaves out what the outcome
does not need, computes what occurs twice once, and joins operations where torch has one operator for both. A result
overwrites an operand that nothing else needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat._torch import FOREACH
from offbeat.engine.trace import Constant, Instruction, Program
from offbeat.rules.ops import OPERATIONS

_GRADIENT = 1
_COMMUTES = ("add", "mul")
_ARITHMETIC = ("add", "sub", "mul", "div")

#: ``plan(*columns, numbers=, dtype=)`` runs a program over lists of tensors. ``numbers`` are the values of its scalar
#: instructions by their numbers, ``dtype`` is that of the tensors. It returns the new parameters and state: lists, the
#: given lists if they were overwritten, or numbers.
Plan = Callable[..., tuple[Any, ...]]


class Numbers(NamedTuple):
    """The instructions of a program whose value is one number for all tensors.

    Attributes:
        maths: those that compute something, with their numbers.
        conditions: those that decide a choice between tensors.
        every: the numbers of all of them.
    """

    maths: tuple[tuple[int, Instruction], ...]
    conditions: tuple[int, ...]
    every: frozenset[int]


@functools.lru_cache(maxsize=1024)
def numbers_of(program: Program) -> Numbers:
    """The instructions whose value is one number for all tensors."""
    every = {number for number, instruction in enumerate(program.instructions) if instruction.op == "scalar"}
    maths = []
    for number, instruction in program.maths:
        if all(isinstance(a, Constant) or a in every for a in instruction.args):
            every.add(number)
            maths.append((number, instruction))
    choices = [(n, instruction.args[0]) for n, instruction in program.maths if instruction.op == "where"]
    conditions = tuple(condition for n, condition in choices if n not in every and condition in every)
    return Numbers(tuple(maths), conditions, frozenset(every))


@functools.lru_cache(maxsize=1024)
def make_plan(program: Program, decided: tuple[bool, ...], own_gradients: bool, on_cpu: bool) -> Plan:
    """The plan for a program.

    Args:
        decided: the values of the conditions that :func:`numbers_of` names.
        own_gradients: whether gradients are copies that may be overwritten.
        on_cpu: whether the tensors are on the CPU.
    """
    planner = _Planner(program, decided, own_gradients, on_cpu)
    source = planner.source()
    exec(source, planner.names)
    plan: Plan = planner.names["plan"]
    return plan


class _Sum(NamedTuple):
    """An addition that computes its second operand too: one operator instead of two or three.

    Attributes:
        op: the operator: ``add`` for ``base ± scale * a``, ``addcmul`` for ``base ± scale * (a * b)``, ``addcdiv`` for
            ``base ± scale * (a / b)``, ``lerp`` for ``base + scale * (a - base)``.
        tensors: ``a`` and ``b``.
        inner: the instructions that are computed inside.
    """

    op: str
    base: int
    tensors: tuple[int, ...]
    scale: Any
    sign: float
    inner: tuple[int, ...]


class _Planner:
    """Writes a plan as a Python function: lists of tensors are ``x0``, ``x1``, ..., one line is one operator."""

    def __init__(self, program: Program, decided: tuple[bool, ...], own_gradients: bool, on_cpu: bool) -> None:
        self._program, self._numbers, self._on_cpu = program, set(numbers_of(program).every), on_cpu
        self._instructions: dict[int, Instruction] = {}  # what is left to compute
        self._outputs = self._simplify(dict(zip(numbers_of(program).conditions, decided, strict=True)))
        self._drop_unused()
        self._uses = [a for instruction in self._instructions.values() for a in instruction.args if isinstance(a, int)]
        self._sums: dict[int, _Sum] = {}
        for number, instruction in self._instructions.items():
            if (weighted_sum := self._sum(instruction)) is not None:
                self._sums[number] = weighted_sum
        # The list in which each value is stored: a result that overwrites an operand is stored in that operand's.
        self._home = {number: number for number in range(len(program.tensors))}
        self._kept = () if own_gradients else (_GRADIENT,)
        self._last_use = self._last_uses()
        #: What the names in the source stand for.
        self.names: dict[str, Any] = {"tensor": _tensor, "on_cpu": _on_cpu, "move": _move, "repeat": repeat}

    def source(self) -> str:
        inside = {inner for sum in self._sums.values() for inner in sum.inner}
        inputs = [f"x{i}" for i in range(len(self._program.tensors))]
        lines = [f"def plan({', '.join(inputs)}, numbers, dtype):", "count = len(x0)"]
        for number, instruction in self._instructions.items():
            if number not in inside:
                weighted_sum = self._sums.get(number)
                line = (
                    self._line(number, instruction) if weighted_sum is None else self._add_product(number, weighted_sum)
                )
                lines.append(line)
                # Memory that is free is used for the next result, and is still in the cache.
                dead = {self._home[a] for a, last in self._last_use.items() if last == number}
                lines += [f"x{a} = None" for a in sorted(dead - {self._home.get(number)} - set(range(len(inputs))))]
        lines.append(f"return ({', '.join(map(self._name, self._outputs))},)")
        return "\n    ".join(lines) + "\n"

    def _simplify(self, decided: dict[int, bool]) -> list[Any]:
        """Make the choices that are decided, and compute what occurs twice once. Returns the outputs."""
        same: dict[int, Any] = {}
        seen: dict[str, int] = {}
        for number, instruction in self._program.maths:
            if number in self._numbers:
                continue
            args = tuple(same.get(a, a) if isinstance(a, int) else a for a in instruction.args)
            if instruction.op == "where" and args[0] in decided:
                same[number] = args[1] if decided[args[0]] else args[2]
            elif instruction.op in ("mul", "div") and args[1] == Constant(1.0):
                same[number] = args[0]
            else:
                instruction = Instruction(instruction.op, args)
                first = seen.setdefault(repr(instruction), number)  # unlike ==, it tells 0.0 from -0.0
                if first != number:
                    same[number] = first
                    continue
                self._instructions[number] = instruction
                if not any(map(self._is_list, args)):  # a choice has left numbers alone
                    self._numbers.add(number)
        return [same.get(output, output) for output in self._program.outputs]

    def _drop_unused(self) -> None:
        needed = {a for a in self._outputs if isinstance(a, int)}
        for number in reversed(list(self._instructions)):
            if number in needed:
                needed |= {a for a in self._instructions[number].args if isinstance(a, int)}
            else:
                del self._instructions[number]

    def _is_list(self, a: Any) -> bool:
        return isinstance(a, int) and a not in self._numbers

    def _is_inner(self, a: Any) -> bool:
        """Return whether a value is computed here and needed once."""
        return a in self._instructions and a not in self._sums and a not in self._outputs and self._uses.count(a) == 1

    def _sum(self, instruction: Instruction) -> _Sum | None:
        """An addition together with the product or quotient that nothing else needs, if there is such a one."""
        orders = {"add": (instruction.args, instruction.args[::-1]), "sub": (instruction.args,)}.get(instruction.op, ())
        sign = -1.0 if instruction.op == "sub" else 1.0
        for base, term in orders:
            if not self._is_list(base) or not self._is_inner(term):
                continue
            product = self._instructions[term]
            if product.op not in ("mul", "div"):
                continue
            lists, scales = _split(product.args, self._is_list)
            if len(lists) == 2:
                return _Sum(f"addc{product.op}", base, product.args, Constant(1.0), sign, (term,))
            if product.op == "div" or not lists:
                continue
            last = self._instructions.get(lists[0])
            if last is not None and self._is_inner(lists[0]) and all(map(self._is_list, last.args)):
                if last.op in ("mul", "div"):
                    return _Sum(f"addc{last.op}", base, last.args, scales[0], sign, (term, lists[0]))
                if last.op == "sub" and last.args[1] == base and instruction.op == "add":
                    return _Sum("lerp", base, last.args[:1], scales[0], sign, (term, lists[0]))
            return _Sum("add", base, (lists[0],), scales[0], sign, (term,))
        return None

    def _last_uses(self) -> dict[int, int]:
        """For each value in a list, the number of the last instruction that reads it."""
        last = {a: n for n, instruction in self._instructions.items() for a in instruction.args if self._is_list(a)}
        # What is computed inside an addition keeps its operands alive until then.
        for number, sum in self._sums.items():
            for a in sum.tensors:
                last[a] = max(last[a], number)
            for inner in sum.inner:
                del last[inner]
        return last | {a: len(self._program.instructions) for a in self._outputs if self._is_list(a)}

    def _is_free(self, a: Any, number: int) -> bool:
        """Return whether the list of ``a`` may be overwritten by the instruction ``number``, the last that reads it."""
        return (
            self._is_list(a)
            and self._last_use[a] == number
            and self._home[a] not in self._kept
            and not (a in self._instructions and OPERATIONS[self._instructions[a].op].compares)
        )

    def _name(self, a: Any) -> str:
        """An operand as it is written in the source."""
        if self._is_list(a):
            return f"x{self._home[a]}"
        if a in self._instructions:  # a number that this plan computes
            return f"x{a}"
        return f"numbers[{a}]" if isinstance(a, int) else self._known(f"k{len(self.names)}", a.value)

    def _known(self, name: str, value: Any) -> str:
        """Have a name stand for a value in the source."""
        self.names[name] = value
        return name

    def _foreach(self, name: str) -> str:
        return self._known(f"foreach_{name}", FOREACH[name])

    def _result(self, number: int, whole: Any, in_place: bool) -> str:
        """The left side of a line: nothing if it overwrites the list ``whole``."""
        self._home[number] = self._home[whole] if in_place else number
        return "" if in_place else f"x{number} = "

    def _add_product(self, number: int, sum: _Sum) -> str:
        in_place = self._is_free(sum.base, number) and sum.base not in sum.tensors
        operands = ", ".join(map(self._name, (sum.base, *sum.tensors)))
        scale = ("-" if sum.sign < 0 else "") + self._name(sum.scale)
        result = self._result(number, sum.base, in_place)
        if sum.op == "lerp" and in_place:
            return f"move({operands}, {scale})"
        keyword = {"add": "alpha", "lerp": "weight"}.get(sum.op, "value")
        return f"{result}{self._foreach(sum.op + '_' * in_place)}({operands}, {keyword}={scale})"

    def _line(self, number: int, instruction: Instruction) -> str:
        args, operation = instruction.args, OPERATIONS[instruction.op]
        if number in self._numbers:
            operator = self._known(f"number_{instruction.op}", operation.number)
            return f"x{number} = {operator}({', '.join(map(self._name, args))})"
        if operation.foreach is None:
            operands = [self._name(a) if self._is_list(a) else f"repeat({self._tensor(a)})" for a in args]
            operator = self._known(f"each_{instruction.op}", operation.tensor)
            return f"{self._result(number, None, False)}list(map({operator}, {', '.join(operands)}))"
        first_stays = self._is_list(args[0]) and not self._is_free(args[-1], number)
        if instruction.op in _COMMUTES and not self._is_free(args[0], number) and not first_stays:
            args = args[::-1]
        whole = args[0] if self._is_list(args[0]) else args[1]
        in_place = self._is_free(whole, number) and args.count(whole) == 1
        name, operands = self._name(whole), [self._operand(instruction.op, a) for a in args]
        result = self._result(number, whole, in_place)
        if self._is_list(args[0]) or instruction.op not in ("sub", "div"):
            # A number comes second in torch's multi-tensor operators.
            operands = operands if self._is_list(args[0]) else operands[::-1]
            return f"{result}{self._foreach(operation.foreach + '_' * in_place)}({', '.join(operands)})"
        turn = self._foreach(("neg" if instruction.op == "sub" else "reciprocal") + "_" * in_place)
        then = self._foreach("add_" if instruction.op == "sub" else "mul_")
        return f"{result}{turn}({name}); {then}(x{self._home[number]}, {operands[0]})"

    def _operand(self, op: str, a: Any) -> str:
        if self._is_list(a) or op not in _ARITHMETIC or not self._on_cpu:
            return self._name(a)
        # Of a number, torch would make a tensor for each of the list.
        return f"[on_cpu({self._name(a)}, dtype)] * count"

    def _tensor(self, a: Any) -> str:
        return f"tensor({self._name(a)}, dtype, x0[0].device)"


def _split(args: Sequence[Any], first: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    return [a for a in args if first(a)], [a for a in args if not first(a)]


def _tensor(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor, which may be kept: do not write to it."""
    if device.type == "cpu":
        return _on_cpu(value, dtype)
    # Not kept: it may belong to a graph that is captured.
    return torch.full((), value, dtype=torch.bool if isinstance(value, bool) else dtype, device=device)


def _on_cpu(value: float, dtype: torch.dtype) -> Tensor:
    if value and not isinstance(value, bool):  # the cache cannot tell False from 0.0, and 0.0 from -0.0
        return _kept_tensor(value, dtype)
    return torch.full((), value, dtype=torch.bool if isinstance(value, bool) else dtype, device="cpu")


@functools.lru_cache(maxsize=256)
def _kept_tensor(value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((), value, dtype=dtype, device="cpu")


def _move(base: Sequence[Tensor], end: Sequence[Tensor], weight: float) -> None:
    """``base + weight * (end - base)``, in place."""
    FOREACH["lerp_"](base, end, weight=weight)
