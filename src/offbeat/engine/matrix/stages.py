"""The elementwise parts of a matrix rule: each is a rule of its own, traced and run by the tiers that any rule has.

The part before the matrices writes ``x`` in the place of a parameter; the part after them reads the transformed ``x``
as a gradient. So each makes one pass over memory, and converts to and from the dtype of ``x`` on its way.
"""

from __future__ import annotations

import functools
import inspect
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat.engine.choice import choose, uses_triton
from offbeat.engine.cpu.kernel import CpuKernel, cpu_kernel
from offbeat.engine.cuda.launch import Launches
from offbeat.engine.foreach import run_foreach
from offbeat.engine.grad_transforms import NO_TRANSFORMS
from offbeat.engine.loop import run_loop
from offbeat.engine.options import Options
from offbeat.engine.scalars import CoefficientSets
from offbeat.engine.tensors import is_dense, is_plain, same_layout
from offbeat.engine.trace import TypedProgram, trace
from offbeat.rules.rule import FLAGS, Rule, Surface, Values

__all__ = ["Stage", "stages"]


class Stage:
    """One elementwise part of a matrix rule, made into a rule.

    Args:
        rule: the rule.
        named: the function that names the state tensors that the part reads and writes.
    """

    def __init__(self, rule: Rule, named: Any) -> None:
        names = set(inspect.signature(named).parameters)
        keys = {slot.key for slot in _all_slots(rule) if not slot.scalar and slot.shape is None}
        self._rule, self._names = rule, names & keys

    def keys(self, present: Sequence[str]) -> tuple[str, ...]:
        """Return the names among ``present`` that this stage reads and writes."""
        return tuple(key for key in present if key in self._names)

    @staticmethod
    def names(coefficients: Mapping[str, Any]) -> tuple[str, ...]:
        """The coefficients that kernels take, in order."""
        return tuple(name for name in coefficients if name != "rounding_step")

    def kernel_for(
        self,
        keys: tuple[str, ...],
        names: tuple[str, ...],
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
        known: Mapping[Any, Any],
    ) -> tuple[TypedProgram, Any] | None:
        """The program that :meth:`run` has made a kernel from for columns of these dtypes, and the kernel if it is C.

        None if it has run no kernel.
        """
        entry = known.get((self, keys, names, dtypes, device))
        return None if entry is None or entry[1] != "fused" else (entry[0], entry[2])

    def run(
        self,
        options: Options,
        keys: Sequence[str],
        columns: Sequence[Sequence[Tensor]],
        coefficients: Mapping[str, Any],
        known: dict[Any, Any],
    ) -> None:
        """Update rows of equally shaped tensors.

        Args:
            keys: the names of the state tensors among the columns.
            columns: what is written, what is read, and the state tensors.
            coefficients: the coefficients that all rows share.
            known: choices, and launches for rows of these sizes, that are kept for the next step of a batch.
        """
        names = self.names(coefficients)
        first_row = [column[0] for column in columns]
        dtypes = tuple(t.dtype for t in first_row)
        kind = (self, keys, names, dtypes, first_row[0].device)
        if kind in known:
            typed, tier, kernel = known[kind]
        else:
            program = trace(self._rule, tuple(keys), names, tuple(sorted(options.structure.items())))
            choice = choose(options, first_row, program)
            typed, tier = TypedProgram(program, dtypes), choice.tier
            fused_here = tier == "fused" and not uses_triton(choice, first_row[0].device)
            kernel = cpu_kernel(typed) if fused_here else None
            if tier == "fused":  # which depends on nothing else, but for what is asked below
                known[kind] = typed, tier, kernel
        rows = list(zip(*columns, strict=True))
        if tier in ("fused", "foreach") and not all(map(_alike, rows)):
            tier = "loop"
        if tier == "fused":
            numel = array("q", [row[0].numel() for row in rows])
            tables = [array("q", [t.data_ptr() or 1 for t in column]) for column in columns]
            if kernel is None:
                key = (typed, numel.tobytes(), first_row[0].device)
                if key not in known:
                    known[key] = Launches(typed, numel, first_row[0].device)
                known[key].with_sets(tables, CoefficientSets(None, [dict(coefficients)]), NO_TRANSFORMS)
            else:
                flat = array("d", [coefficients[name] for name in names])
                assert isinstance(kernel, CpuKernel)
                kernel(tables, numel, array("q", bytes(8 * len(rows))), flat, sum(numel))
            # Kernels write without autograd's knowledge.
            increment_version([t for column in (columns[0], *columns[2:]) for t in column])
        elif tier == "foreach":
            run_foreach(typed, columns, dict(coefficients))
        else:
            scalars = {**coefficients, **options.structure}
            for row in rows:
                run_loop(self._rule, ("p", "g", *keys), row, scalars)


def _alike(row: Sequence[Tensor]) -> bool:
    return all(is_plain(t) and is_dense(t) and same_layout(t, row[0]) for t in row)


def _all_slots(rule: Rule) -> Any:
    """Return all slots that the rule can have, whatever its options."""
    options = {**FLAGS, **{h.name: h.default for h in rule.hyper}, **rule.surface.fixed}
    more = {**options, **{h.name: True for h in rule.hyper if h.default is False}}
    return (*rule.slots(Values(**options)), *rule.slots(Values(**more)))


@functools.lru_cache(maxsize=256)
def stages(rule: Rule) -> tuple[Stage | None, Stage]:
    """The elementwise parts of a matrix rule: before the matrices, if there is one, and after them."""
    assert rule.matrix is not None
    plain = Surface(flags=rule.surface.flags)
    before = rule.matrix.before
    after = Stage(replace(rule, matrix=None, surface=plain), rule.update)
    if before is None:
        return None, after

    def update(p: Any, g: Any, c: Any, **state: Any) -> tuple[Any, ...]:
        return before(g=g, **state, c=c)

    return Stage(replace(rule, update=update, matrix=None, surface=plain), before), after
