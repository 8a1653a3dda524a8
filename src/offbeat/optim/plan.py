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

from offbeat.optim.scalars import Scalars, coefficient_rows, move_on
from offbeat.optim.state import State
from offbeat.optim.update import Update, hyperparameters
from offbeat.rules.rule import Rule, Values
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
        self.shape = _shape(rule, update.h)
        self.tables = tables
        self.scalar_keys = update.scalar_keys
        self.late = any(slot.late for slot in update.slots)
        self.distributed = update.members[0].distributed
        self.whole = len(tables) == 1 and tables[0].positions == list(range(self.size))
        planned = {i for table in tables for i in table.positions}
        self.outside = [i for i in range(self.size) if i not in planned]

    def prepare(
        self, group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor | None] | None, state: State
    ) -> PlannedUpdate | None:
        """The step for these gradients (None: those in ``.grad``), or None if the plan does not fit any more."""
        if self.state is not state or self.clock != state.clock[0] or len(params) != self.size:
            return None
        h = hyperparameters(group)
        if self.shape != _shape(self.rule, h):
            return None
        if any((params[i].grad if grads is None else grads[i]) is not None for i in self.outside):
            return None
        parts = []
        for table in self.tables:
            mine = params if self.whole else [params[i] for i in table.positions]
            given = grads if self.whole or grads is None else [grads[i] for i in table.positions]
            if self.distributed:
                unwrapped = _shards(mine, given)
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


def _shards(params: Sequence[Any], grads: Sequence[Any] | None) -> tuple[list[Tensor], list[Tensor | None]] | None:
    """The local parts of distributed parameters and gradients, or None where they are not cut alike."""
    local: list[Tensor | None] = []
    for p, g in zip(params, [p.grad for p in params] if grads is None else grads, strict=True):
        if g is None:
            local.append(None)
        elif type(g) is Tensor or getattr(g, "_spec", None) is None or g._spec.placements != p._spec.placements:
            return None
        else:
            local.append(g._local_tensor)
    return [p._local_tensor for p in params], local


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


def _shape(rule: Rule, h: Values) -> tuple[Any, ...]:
    """Everything about a group that decides which kernel runs."""
    flags = (h.foreach, h.fused, h.differentiable, h.capturable)
    return flags, rule.structure(h), [slot.key for slot in rule.slots(h)]


def make_plan(rule: Rule, params: Sequence[Tensor], state: State, update: Update) -> Plan | None:
    """A plan for these parameters after ``update``, if all of them are plain tensors in the fused tier."""
    members = update.members
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
