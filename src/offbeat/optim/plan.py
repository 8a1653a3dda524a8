"""What an optimizer remembers between steps of an unchanged group: tables of addresses for the fused kernel.

A plan is trusted only as far as it can be checked. At every step each tensor is asked again where it lies and whether
it has kept dtype, shape and layout, before anything changes; any change of the state's entries, the group's
parameters or the shape of the maths discards the plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from offbeat.optim.device import DeviceCounters, DeviceRun
from offbeat.optim.extras import NOTHING, Extras
from offbeat.optim.gradients import local
from offbeat.optim.members import Member
from offbeat.optim.native import NativePlan, make_native_plan
from offbeat.optim.scalars import Ahead, Scalars, move_on
from offbeat.optim.settings import Settings, kernel_shape, on_host
from offbeat.optim.state import State
from offbeat.optim.update import Update, program_for
from offbeat.rules.rule import Rule, Values
from offbeat.tiers.addresses import AddressBook
from offbeat.tiers.choice import is_capturing, uses_triton
from offbeat.tiers.fused import CpuKernel, cpu_kernel
from offbeat.tiers.layout import compute_dtype

__all__ = ["Plan", "PlannedUpdate", "make_plan"]


class _Table:
    """The members of one kernel call: tensors of one device and one combination of dtypes."""

    def __init__(self, update: Update, members: list[Member], positions: list[int]) -> None:
        self.choice = members[0].choice
        self.positions = positions  # in the group's list of parameters
        self.params = [m.param for m in members]
        self.shards = [m.columns[0] for m in members]  # the parameters themselves unless they are distributed
        state = [[m.columns[c] for m in members] for c in range(2, len(members[0].columns))]
        self.counters = [Scalars([m.scalars[i] for m in members]) for i in range(len(update.scalar_keys))]
        wrappers = self.params if members[0].distributed else None
        self.scales = scales = [[m.scales[i] for m in members] for i in range(len(update.scale_keys))]
        pinned = [*(counter.tensors for counter in self.counters), *scales]
        self._kinds = [list(map(_kind, column)) for column in pinned]
        self.book = AddressBook([self.shards, *state], pinned, wrappers)
        self.numel = array("q", [p.numel() for p in self.shards])
        self.elements = sum(self.numel)
        self.ahead = Ahead()
        self.same_row = array("q", bytes(8 * len(members)))
        self.on_device = members[0].on_device  # where coefficients are worked out
        self.program = program_for(update.rule, update.h, on_device=self.on_device)
        dtypes, compute = tuple(t.dtype for t in members[0].columns), compute_dtype(members[0].columns)
        device = self.shards[0].device
        self.kernel: CpuKernel | None = None
        self.device_run: DeviceRun | None = None
        if uses_triton(members[0].choice, device):
            made_of = DeviceCounters(update.rule, update.slots, self.counters, False) if self.on_device else None
            self.device_run = DeviceRun(
                self.program, dtypes, compute, self.numel, device, made_of, update.h, update.form, scales
            )
        else:
            self.kernel = cpu_kernel(self.program, dtypes, compute)

    def member(self, i: int, update: Update) -> Member | None:
        """What is known of a parameter, if it and its state are what they were; a gradient may come later."""
        p, shard, entry = self.params[i], self.shards[i], update.state.get(self.params[i]) or {}
        state = [column[i] for column in self.book.columns[1:]]
        scalars, scales = [c.tensors[i] for c in self.counters], [column[i] for column in self.scales]
        keys = (*update.tensor_keys, *update.scalar_keys, *update.scale_keys)
        found = [local(entry[key]) if isinstance(entry.get(key), Tensor) else None for key in keys]
        if local(p) is not shard or not all(map(is_, found, [*state, *scalars, *scales])):
            return None
        # Whatever was checked, chosen and compiled for it then must hold now.
        if not self.book.is_unchanged(i) or any(kinds[i] != _kind(t[i]) for t, kinds in self._beside()):
            return None
        late = not self.on_device and any(slot.late for slot in update.slots)
        if late and scalars[update.scalar_keys.index("step")].item() == 0:
            return None  # wound back: it begins anew
        columns = [shard, shard, *state]  # its gradient will look like it
        distributed = self.book.wrappers is not None
        return Member(p, columns, scalars, False, True, distributed, None, self.choice, True, self.on_device, scales)

    def _beside(self) -> Iterator[tuple[list[Tensor], list[Any]]]:
        """Counters and scales, and of which kind they were."""
        return zip([*(counter.tensors for counter in self.counters), *self.scales], self._kinds, strict=True)

    def active(self, count: int) -> list[int] | None:
        """Who of the members has a gradient, by the addresses read last; None if all have."""
        if count == len(self.params):
            return None
        return [i for i, address in enumerate(self.book.tables[1]) if address]

    def launch(self, active: list[int] | None, rows: Sequence[int] | None, coefficients: Any, extras: Extras) -> None:
        """Update those who have a gradient, with coefficients from the host."""
        which = None if rows is None else array("q", rows)
        if self.device_run is not None:
            self.device_run.with_numbers(self.book.tables, which, coefficients, extras)
            return
        assert self.kernel is not None
        elements = self.elements if active is None else sum(self.numel[i] for i in active)
        flat = array("d", [row[name] for row in coefficients for name in self.program.coefficients])
        self.kernel(self.book.tables, self.numel, self.same_row if which is None else which, flat, elements)


def _kind(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.device, t.shape, t.stride()


class Plan:
    """The tables of one group or of a part of it. Get one from :func:`make_plan`, ask :meth:`prepare` at every step."""

    def __init__(self, rule: Rule, size: int, state: State, update: Update, tables: list[_Table]) -> None:
        self.rule = rule
        self.size = size
        self.state = state
        self.clock = state.clock[0]
        self.shape = kernel_shape(rule, update.h)
        self._seen: Settings | None = None
        self.tables = tables
        self.slots = update.slots
        self.scalar_keys = update.scalar_keys
        self.late = any(slot.late for slot in update.slots)
        self.whole = len(tables) == 1 and tables[0].positions == list(range(self.size))
        planned = {i for table in tables for i in table.positions}
        self.outside = [i for i in range(self.size) if i not in planned]
        self.capturable = bool(update.h.capturable)

    @property
    def clips_exactly(self) -> bool:
        """Whether gradients can be multiplied in the same pass with the bits of a pass of its own."""
        return all(t.device_run is not None and t.device_run.compute == t.shards[0].dtype for t in self.tables)

    def prepare(
        self, settings: Settings, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None, state: State
    ) -> PlannedUpdate | None:
        """The step for these gradients (None: those in ``.grad``), or None if the plan does not fit any more."""
        if self.state is not state or self.clock != state.clock[0] or len(params) != self.size:
            return None
        if settings is not self._seen:
            if self.shape != settings.shape:
                return None
            self._seen = settings
        if self.outside and any((params[i].grad if grads is None else grads[i]) is not None for i in self.outside):
            return None
        capturing = self.capturable and is_capturing()
        parts: list[tuple[_Table, int, Any]] = []
        for table in self.tables:
            mine = params if self.whole else [params[i] for i in table.positions]
            given = grads if self.whole or grads is None else [grads[i] for i in table.positions]
            count = table.book.read(mine, given)
            if count is None:
                return None
            if table.on_device:
                assert table.device_run is not None
                run = table.device_run
                if capturing and (count < len(table.params) or not run.table.can_freeze or not run.fits(settings.h)):
                    return None
                parts.append((table, count, None))
                continue
            # A counter wound back to 0 begins anew, and what depends on that is not in the tables.
            if self.late and 0.0 in table.counters[self.scalar_keys.index("step")].read():
                return None
            h = on_host(settings.h) if settings.has_tensors else settings.h
            try:
                numbers = table.ahead.rows(self.rule, h, self.scalar_keys, table.counters)
            except (ArithmeticError, ValueError, RuntimeError):
                return None  # it may be the counter of one without a gradient that makes no sense
            parts.append((table, count, numbers))
        return PlannedUpdate(self, settings.h, parts, capturing)


class PlannedUpdate:
    """A step by a plan; the fast counterpart of :class:`~offbeat.optim.update.Update`."""

    def __init__(self, plan: Plan, h: Values, parts: list[tuple[_Table, int, Any]], capturing: bool) -> None:
        self.plan, self.h, self.parts, self.capturing = plan, h, parts, capturing

    def commit(self) -> None:
        """There is no new state."""

    def takes(self, extras: Extras) -> bool:
        """Whether :meth:`run` can do this in the same pass."""
        for table, _, numbers in self.parts:
            run = table.device_run
            if run is None or (extras.found_inf is not None and table.counters and not table.on_device):
                return False
            by_row = table.on_device or run.compute != torch.float32 or len(numbers[1]) > 1
            if not run.can_compile(extras.variant(by_row=by_row)):
                return False
        return True

    def run(self, extras: Extras = NOTHING) -> None:
        """Change the parameters and their state."""
        for table, count, numbers in self.parts:
            if not count:
                continue
            active = table.active(count)
            if numbers is None:
                self._run_on_device(table, extras)
            else:
                # What the device does not wait for comes after the launch.
                rows, coefficients, advanced = numbers
                table.launch(active, rows, coefficients, extras)
                move_on(self.plan.scalar_keys, table.counters, rows, advanced, active)
                if table.device_run is not None:
                    table.ahead.work_out(self.plan.rule, self.h, self.plan.scalar_keys, table.counters)
            # The kernel writes behind autograd's back; this is how autograd learns of it.
            table.book.bump(active)

    @torch.no_grad()
    def _run_on_device(self, table: _Table, extras: Extras) -> None:
        run = table.device_run
        assert run is not None
        if self.capturing and self.plan not in self.plan.state.kept:
            self.plan.state.kept.append(self.plan)  # a graph needs its tables for as long as it needs the state
        run.with_counters(table.book.tables, self.h, extras, capturing=self.capturing)
        if self.plan.capturable and not self.capturing:
            run.table.prepare_captures()


def make_plan(
    rule: Rule, params: Sequence[Tensor], state: State, update: Update, before: Plan | NativePlan | None = None
) -> Plan | NativePlan | None:
    """A plan for these parameters after ``update``, if all of them are plain tensors of one tier that has such.

    Args:
        before: the plan that did not fit any more. Parameters that it knew and that have no gradient this time are
            taken over, or gradients that come and go in turns would never find a plan that has them all.
    """
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
    if isinstance(before, Plan) and before.state is state and before.shape == kernel_shape(rule, update.h):
        here = {id(m.param) for m in members}
        for table in before.tables:
            idle = [i for i, p in enumerate(table.params) if id(p) in position and id(p) not in here]
            known = [table.member(i, update) for i in idle]
            members = [*members, *(m for m in known if m is not None and m.distributed == members[0].distributed)]
    batches: dict[Any, list[Member]] = {}
    for member in sorted(members, key=lambda m: position[id(m.param)]):
        kind = (member.columns[0].device, member.on_device, tuple(t.dtype for t in member.columns))
        batches.setdefault(kind, []).append(member)
    tables = [_Table(update, some, [position[id(m.param)] for m in some]) for some in batches.values()]
    return Plan(rule, len(params), state, update, tables)
