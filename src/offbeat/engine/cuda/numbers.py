"""Coefficients computed on a device, by a kernel made from the rule's own functions."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.engine.cuda.kernel import bind, compile_source
from offbeat.engine.cuda.source import SUPPORTED, update_source
from offbeat.engine.options import Options
from offbeat.engine.scalars import work_out
from offbeat.engine.trace import Program, Tracer, TypedProgram, Value
from offbeat.rules.ops import OPERATIONS
from offbeat.rules.rule import Rule, Values

#: Parameters whose coefficients one block computes.
BLOCK = 128


class NotTraceable(Exception):
    """The rule's functions cannot be traced, for example because they branch on a number."""


class DeviceNumbers:
    """Computes the coefficients of many parameters on their device, and stores the new scalars there.

    If the rule's functions can be traced that way, all hyperparameters are inputs of the kernel. If they branch on one,
    only the learning rate and tensors are inputs, and a change of the others needs another kernel. Raises
    :class:`NotTraceable` if the functions cannot be traced at all.

    Args:
        dtypes: the dtypes of the stored scalars, by key.
        names: the coefficients.
        rows: where they are written, one row for each parameter.
        before: how many columns of addresses the table has before those of the stored scalars.
        first: whether all parameters are at their first step, for rules that do not count steps.
    """

    def __init__(
        self,
        options: Options,
        dtypes: Mapping[str, torch.dtype],
        names: tuple[str, ...],
        rows: Tensor,
        before: int,
        first: bool,
    ) -> None:
        self._options, self._dtypes, self._names = options, dtypes, names
        self._rows, self._before, self._first = rows, before, first
        values = _every_hyper(options.rule, options.h)
        numeric = [n for n, v in values.items() if isinstance(v, (int, float, Tensor)) and not isinstance(v, bool)]
        needed = [name for name in numeric if name == "lr" or isinstance(values[name], Tensor)]
        if not all(dtype in (torch.float32, torch.float64) for dtype in dtypes.values()):
            raise NotTraceable("a stored scalar is neither float32 nor float64")
        try:
            inputs, (self._program, self._outputs) = numeric, self._trace(numeric)
        except NotTraceable:
            inputs, (self._program, self._outputs) = needed, self._trace(needed)
        self._tensors = {name: values[name].dtype for name in inputs if isinstance(values[name], Tensor)}
        self._numbers = [name for name in inputs if name not in self._tensors]
        self._fixed = {name: value for name, value in values.items() if name not in inputs}

    def _trace(self, inputs: list[str]) -> tuple[Program, tuple[str, ...]]:
        """Coefficients, and stored scalars after the step, as functions of stored scalars and these hyperparameters."""
        options = self._options

        def store(key: str, value: Any) -> Any:
            if self._dtypes[key] == torch.float64:
                return value
            return value.narrowed() if isinstance(value, _Number) else torch.tensor(value, dtype=torch.float32).item()

        def widen(value: Any) -> Any:
            return _Number(value.tracer, value.number) if isinstance(value, _Number) else value

        def function(values: Mapping[str, _Number]) -> dict[str, Any]:
            h = _with_inputs(options.h, inputs, values)
            before = {key: values[f"s.{key}"] for key in self._dtypes}
            numbers = work_out(options.rule, h, options.slots, before, store, widen, first=self._first)
            return numbers.for_kernel(options.slots, h) | {f"s.{key}": value for key, value in numbers.stored.items()}

        return _trace_numbers((*(f"s.{key}" for key in self._dtypes), *inputs), function)

    def fits(self, h: Values, first: bool) -> bool:
        """Return whether the kernel fits these hyperparameters."""
        if first != self._first or any(isinstance(_get(h, name), Tensor) for name in self._numbers):
            return False
        if any(isinstance(now := _get(h, name), Tensor) or now != value for name, value in self._fixed.items()):
            return False
        tensors = [(_get(h, name), dtype) for name, dtype in self._tensors.items()]
        return all(isinstance(t, Tensor) and t.dtype == dtype for t, dtype in tensors)

    def tail(self, h: Values) -> array[float]:
        """The inputs from the host."""
        return array("d", [_get(h, name) for name in self._numbers])

    def tensors(self, h: Values) -> list[Tensor]:
        """The inputs from tensors."""
        return [_get(h, name).to(self._rows.device) for name in self._tensors]

    def source(self, guarded: bool) -> str:
        """The source of ``kernel(words, rows, count, tensors..., [found_inf], BLOCK)``: one lane for each parameter.

        ``words`` is the content of a :class:`~offbeat.engine.cuda.table.DeviceTable`: after the addresses of columns,
        the sizes and the sets in use come the addresses of each parameter's stored scalars, then the other inputs as
        float64. If ``guarded``, nothing is stored unless ``found_inf`` is zero.
        """
        tensors, numbers, stored = list(self._tensors), self._numbers, list(self._dtypes)
        arguments = ["words", "rows", "count", *(f"t{i}" for i in range(len(tensors)))]
        arguments += [*(["found_inf"] if guarded else []), "BLOCK: tl.constexpr"]
        body = ["i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "mask = i < count"]
        body.append("zero = tl.full([BLOCK], 0.0, tl.float64)")
        body.append("live = mask & (tl.load(words + count + i, mask, other=0) != 0)")
        if guarded:
            body.append("live = live & (tl.load(found_inf + i * 0, mask, other=1.0) == 0)")
        for i, key in enumerate(stored):
            place = f"tl.load(words + count * {self._before + 2 + i} + i, mask, other=0)"
            body.append(f"a{i} = {place}.to(tl.pointer_type({SUPPORTED[self._dtypes[key]]}))")
            body.append(f"v{i} = tl.load(a{i}, mask, other=1.0).to(tl.float64)")
        for i, name in enumerate(self._program.tensors[len(stored) :], start=len(stored)):
            if name in tensors:
                body.append(f"v{i} = tl.load(t{tensors.index(name)}).to(tl.float64)")
            else:
                place = f"words + count * {self._before + 2 + len(stored)} + {numbers.index(name)}"
                body.append(f"v{i} = tl.load({place}).to(tl.float64, bitcast=True)")
        if self._outputs:
            outputs = ", ".join(f"n{i}" for i in range(len(self._outputs)))
            body.append(f"{outputs} = update({', '.join(f'v{i}' for i in range(len(self._program.tensors)))})")
        for i, name in enumerate(self._outputs):
            if name in self._names:
                at = f"rows + i * {len(self._names)} + {self._names.index(name)}"
                body.append(f"tl.store({at}, (n{i} + zero).to({SUPPORTED[self._rows.dtype]}), mask)")
            if (key := name.removeprefix("s.")) != name:
                kind = SUPPORTED[self._dtypes[key]]
                body.append(f"tl.store(a{stored.index(key)}, (n{i} + zero).to({kind}), live)")
        typed = TypedProgram(self._program, (torch.float64,) * len(self._program.tensors))
        lines = ["import triton", "import triton.language as tl", "", *update_source(typed, rough=False), "", ""]
        lines += ['@triton.jit(do_not_specialize=["count"])', f"def kernel({', '.join(arguments)}):"]
        return "\n".join([*lines, *("    " + line for line in body), ""])

    def bind(self, words: Tensor, guarded: bool) -> Callable[..., None]:
        """The launch: call it with the tensors, then with ``found_inf`` if guarded. Raises :class:`TritonError`."""
        rows, guards = self._rows, [torch.float32] if guarded else []
        types = (torch.int64, rows.dtype, 2, *self._tensors.values(), *guards)
        compiled = compile_source(self.source(guarded), types, BLOCK, rows.device)
        return bind(compiled, -(-len(rows) // BLOCK), rows.device, (words, rows, len(rows)), BLOCK)


def _every_hyper(rule: Rule, h: Values) -> dict[str, Any]:
    """All hyperparameters. Those in tuples are named by their position (``betas.0``)."""
    hypers: dict[str, Any] = {}
    for hyper in rule.hyper:
        value = getattr(h, hyper.name)
        if isinstance(value, tuple):
            hypers |= {f"{hyper.name}.{i}": part for i, part in enumerate(value)}
        else:
            hypers[hyper.name] = value
    return hypers


def _get(h: Values, name: str) -> Any:
    name, _, position = name.partition(".")
    value = getattr(h, name)
    return value[int(position)] if position else value


def _with_inputs(h: Values, inputs: Sequence[str], values: Mapping[str, _Number]) -> Values:
    changed = dict(vars(h))
    for name in inputs:
        base, _, position = name.partition(".")
        if position:
            parts = list(changed[base])
            parts[int(position)] = values[name]
            changed[base] = tuple(parts)
        else:
            changed[base] = values[name]
    return Values(**changed)


class _Number(Value):
    """A symbolic number, which can also be raised to a power.

    Attributes:
        is_narrow: whether it represents a float32 tensor, so that arithmetic with it is in float32.
    """

    __slots__ = ("is_narrow",)

    def __init__(self, tracer: Tracer, number: int) -> None:
        super().__init__(tracer, number)
        self.is_narrow = False

    def __pow__(self, other: Any) -> Any:
        is_root = not isinstance(other, Value) and other == 0.5
        return self.emit("sqrt", self) if is_root else self.emit("pow", self, other)

    def __rpow__(self, other: Any) -> Any:
        return self.emit("pow", other, self)

    def narrowed(self) -> _Number:
        rounded: _Number = self.emit("round", self)
        rounded.is_narrow = True
        return rounded


class _NumberTracer(Tracer):
    kind = _Number
    combines_numbers = True

    def emit(self, op: str, *operands: Any) -> Any:
        if op == "round" or not any(isinstance(a, _Number) and a.is_narrow for a in operands):
            return super().emit(op, *operands)
        # An operation on float32 numbers in double precision, rounded afterwards, is that operation in float32.
        rounded = [self._narrow(a) if op != "where" or i else a for i, a in enumerate(operands)]
        result = super().emit(op, *rounded)
        return result if OPERATIONS[op].compares else result.narrowed()

    def _narrow(self, a: Any) -> Any:
        return a if isinstance(a, _Number) and a.is_narrow else super().emit("round", a)


def _trace_numbers(
    inputs: tuple[str, ...], function: Callable[[Mapping[str, _Number]], Mapping[str, Any]]
) -> tuple[Program, tuple[str, ...]]:
    """Trace a function of named numbers that returns named numbers: the program, and the names of its outputs.

    Raises :class:`NotTraceable`.
    """
    tracer = _NumberTracer()
    values: dict[str, Any] = {name: tracer.input("tensor", name) for name in inputs}
    try:
        results = function(values)
        outputs = [value if isinstance(value, Value) else tracer.emit("add", value, 0.0) for value in results.values()]
    except (TypeError, AttributeError, ValueError) as error:
        raise NotTraceable(str(error)) from error
    return Program(inputs, (), tuple(tracer.instructions), tuple(value.number for value in outputs)), tuple(results)
