"""What an optimizer remembers between steps of an unchanged group: tables of addresses for the fused kernel.

A plan is trusted only as far as it can be checked. At every step each tensor is asked again where it lies and whether
it has kept dtype, shape and layout, before anything changes; any change of the state's entries, the group's
parameters or the shape of the maths discards the plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat.optim.gradients import local_parts
from offbeat.optim.native import NativePlan, make_native_plan
from offbeat.optim.scalars import Scalars, coefficient_rows, move_on
from offbeat.optim.settings import Settings, kernel_shape
from offbeat.optim.state import State
from offbeat.optim.update import Update
from offbeat.rules.rule import Rule
from offbeat.tiers.addresses import AddressBook
from offbeat.tiers.fused import cpu_kernel
from offbeat.tiers.layout import compute_dtype

__all__ = ["Plan", "PlannedUpdate", "make_plan"]


class _Table:
    """The members of one kernel call: tensors of one combination of dtypes."""

    def __init__(self, update: Update, index: list[int], positions: list[int]) -> None:
        assert update.program is not None
        members = [update.members[i] for i in index]
        self.positions = positions  # in the group's list of parameters
        self.params = [m.param for m in members]
        self.shards = [m.columns[0] for m in members]  # the parameters themselves unless they are distributed
        state = [[m.columns[c] for m in members] for c in range(2, len(members[0].columns))]
        self.counters = [Scalars([m.scalars[i] for m in members]) for i in range(len(update.scalar_keys))]
        self.book = AddressBook([self.shards, *state], [counter.tensors for counter in self.counters])
        self.program = update.program
        dtypes = tuple(t.dtype for t in members[0].columns)
        self.kernel = cpu_kernel(update.program, dtypes, compute_dtype(members[0].columns))
        self.numel = array("q", [p.numel() for p in self.shards])
        self.elements = sum(self.numel)
        self.same_row = array("q", bytes(8 * len(members)))


class Plan:
    """The tables of one group or of a part of it. Get one from :func:`make_plan`, ask :meth:`prepare` at every step."""

    def __init__(self, rule: Rule, size: int, state: State, update: Update, tables: list[_Table]) -> None:
        self.rule = rule
        self.size = size
        self.state = state
        self.clock = state.clock[0]
        self.shape = kernel_shape(rule, update.h)
        self.tables = tables
        self.scalar_keys = update.scalar_keys
        self.late = any(slot.late for slot in update.slots)
        self.distributed = update.members[0].distributed
        self.whole = len(tables) == 1 and tables[0].positions == list(range(self.size))
        planned = {i for table in tables for i in table.positions}
        self.outside = [i for i in range(self.size) if i not in planned]

    def prepare(
        self, settings: Settings, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None, state: State
    ) -> PlannedUpdate | None:
        """The step for these gradients (None: those in ``.grad``), or None if the plan does not fit any more."""
        if self.state is not state or self.clock != state.clock[0] or len(params) != self.size:
            return None
        h = settings.h
        if self.shape != settings.shape:
            return None
        if any((params[i].grad if grads is None else grads[i]) is not None for i in self.outside):
            return None
        parts = []
        for table in self.tables:
            mine = params if self.whole else [params[i] for i in table.positions]
            given = grads if self.whole or grads is None else [grads[i] for i in table.positions]
            if self.distributed:
                unwrapped = local_parts(mine, given)
                if unwrapped is None or not all(map(is_, mine, table.params)):
                    return None
                mine, given = unwrapped
            count = table.book.read(mine, given)
            if count is None:
                return None
            # A counter wound back to 0 begins anew, and what depends on that is not in the tables.
            if self.late and 0.0 in table.counters[self.scalar_keys.index("step")].read():
                return None
            parts.append((table, count, coefficient_rows(self.rule, h, self.scalar_keys, table.counters, None)))
        return PlannedUpdate(self, parts)


class PlannedUpdate:
    """A step by a plan; the fast counterpart of :class:`~offbeat.optim.update.Update`."""

    def __init__(self, plan: Plan, parts: list[tuple[_Table, int, Any]]) -> None:
        self.plan, self.parts = plan, parts

    def commit(self) -> None:
        """There is no new state."""

    def run(self) -> None:
        """Change the parameters and their state."""
        for table, count, (rows, coefficients, advanced) in self.parts:
            if not count:
                continue
            active, elements = None, table.elements
            if count < len(table.params):
                active = [i for i, address in enumerate(table.book.tables[1]) if address]
                elements = sum(table.numel[i] for i in active)
            flat = array("d", [row[name] for row in coefficients for name in table.program.coefficients])
            which = table.same_row if rows is None else array("q", rows)
            table.book.bump(active)
            if self.plan.distributed:
                increment_version(table.params if active is None else [table.params[i] for i in active])
            table.kernel(table.book.tables, table.numel, which, flat, elements)
            move_on(self.plan.scalar_keys, table.counters, rows, advanced, active)


def make_plan(rule: Rule, params: Sequence[Tensor], state: State, update: Update) -> Plan | NativePlan | None:
    """A plan for these parameters after ``update``, if all of them are plain tensors of one tier that has such."""
    members = update.members
    if members and members[0].choice.tier == "native":
        return make_native_plan(rule, params, state, update)
    if not members or any(m.choice.tier != "fused" or not m.simple or m.rows is not None for m in members):
        return None
    if len({m.distributed for m in members}) > 1:
        return None
    position = {id(p): i for i, p in enumerate(params)}
    if len(position) != len(params):
        return None
    batches: dict[Any, list[int]] = {}
    for i, member in enumerate(members):
        batches.setdefault(tuple(t.dtype for t in member.columns), []).append(i)
    tables = [_Table(update, index, [position[id(members[i].param)] for i in index]) for index in batches.values()]
    return Plan(rule, len(params), state, update, tables)
