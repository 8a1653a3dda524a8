"""Batches: parameters of one device and one combination of dtypes that one tier updates together.

A batch is built for a step, from members that have been checked. :meth:`Batch.prepare` works out the numbers and may
raise; :meth:`Batch.run` changes parameters and state. At the next step :meth:`Batch.read` says whether the batch still
fits: every tensor is asked again where it lies and whether it has kept its dtype, shape and layout. If so, the batch
is prepared and run again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat.engine.addresses import AddressBook
from offbeat.engine.choice import is_capturing, uses_triton
from offbeat.engine.counters import ScalarColumn
from offbeat.engine.cpu.kernel import cpu_kernel
from offbeat.engine.cuda.launch import DeviceRun
from offbeat.engine.cuda.numbers import StoredOnDevice
from offbeat.engine.extras import Extras
from offbeat.engine.foreach import run_foreach
from offbeat.engine.loop import run_loop
from offbeat.engine.member import Member
from offbeat.engine.options import Options
from offbeat.engine.precision import run_compact
from offbeat.engine.scalars import (
    CoefficientSets,
    NumbersAhead,
    TensorArithmetic,
    coefficient_sets,
    wide_dtype,
    work_out,
)
from offbeat.engine.state import State
from offbeat.engine.tensors import compute_dtype, has_storage, is_dense, is_plain, local, same_layout
from offbeat.rules.ops import where

__all__ = ["Batch", "DeviceBatch", "TensorBatch", "make_batch"]


class Batch:
    """Parameters that one tier updates together. See the module for the order of calls.

    Attributes:
        params: the parameters.
        shards: their local tensors, which are the parameters themselves unless those are DTensors.
        columns: the state tensors, one list for each.
        scalars: the stored scalars, one column for each.
        scales: the scales of 8-bit state, one list for each.
        on_device: whether coefficients are computed on the device.
        keeps: whether the batch can serve a later step.
    """

    def __init__(self, options: Options, members: Sequence[Member]) -> None:
        one = members[0]
        self.choice, self.on_device, self.distributed = one.choice, one.on_device, one.distributed
        self.params = [m.param for m in members]
        self.shards = [m.columns[0] for m in members]
        self.columns = [[m.columns[c] for m in members] for c in range(2, len(one.columns))]
        self.scalars = self._scalar_columns(members)
        self.scales = [[m.scales[i] for m in members] for i in range(len(one.scales))]
        self.compute = compute_dtype(one.columns)
        self.keeps = all(map(_can_stay, members))
        self._gradients: list[Tensor | None] = [None if m.idle else m.columns[1] for m in members]
        self._own_gradients = all(m.own_gradient for m in members)
        # Which members are at their first step; None once the batch has run.
        self._first: list[bool] | None = [m.first for m in members]
        self._sets: CoefficientSets | None = None
        self._last: Options | None = None  # the options that the sets were worked out for
        self._count = 0  # gradients found by the last read
        self._set_up(options, one.dtypes)
        if all(m.idle for m in members):
            self._first = None  # it does not run in this step, and what it finds in the next counts

    def _scalar_columns(self, members: Sequence[Member]) -> list[ScalarColumn]:
        return [ScalarColumn([m.scalars[i] for m in members]) for i in range(len(members[0].scalars))]

    def _set_up(self, options: Options, dtypes: tuple[torch.dtype, ...]) -> None:
        """Get ready to read addresses again and again."""
        pinned = [*(column.tensors for column in self.scalars), *self.scales]
        self.book = AddressBook([self.shards, *self.columns], pinned, self.params if self.distributed else None)

    def read(self, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> bool:
        """Take the gradients of the next step (None: from ``.grad``); False if the batch does not fit any more."""
        count = self.book.read(params, grads)
        if count is None:
            return False
        self._count = count
        return True

    def prepare(self, options: Options) -> bool:
        """Work out the numbers of the step; raises if they make no sense. False if the batch does not fit."""
        if self.scalars or self._first is not None or options.has_tensors or self._last is not options:
            self._sets = coefficient_sets(options.rule, options.on_host(), options.slots, self.scalars, self._first)
            self._last = None if self._first is not None else options
        return True

    def takes(self, extras: Extras) -> bool:
        """Whether :meth:`run` can do this in the same pass."""
        return False

    def run(self, options: Options, extras: Extras, state: State) -> None:
        """Change the parameters and their state."""
        raise NotImplementedError

    def _active(self) -> list[int] | None:
        """The members that have a gradient; None if all have."""
        if self._first is not None:  # the tables are not filled yet, or are filled from what was checked
            there = [i for i, g in enumerate(self._gradients) if g is not None]
            return None if len(there) == len(self.params) else there
        if self._count == len(self.params):
            return None
        return [i for i, address in enumerate(self.book.tables[1]) if address]

    def _begin_late(self, options: Options, active: Sequence[int] | None) -> None:
        """Give state that depends on the hyperparameters of the first step its initial value, at that step."""
        sets = self._sets
        assert sets is not None
        if not any(sets.begins):
            return
        for slot in options.slots:
            if slot.late and not slot.scalar:
                column = self.columns[options.tensor_keys.index(slot.key)]
                initial = float(slot.initial(options.on_host()))
                for i in range(len(column)) if active is None else active:
                    if sets.begins[sets.chosen[i] if sets.chosen else 0]:
                        column[i].fill_(initial)

    @property
    def has_gradients(self) -> bool:
        """Whether there is anything to do in this step."""
        return self._count > 0 if self._first is None else any(g is not None for g in self._gradients)

    def release(self) -> None:
        """Keep no gradient alive."""
        self._gradients = []

    def _finish(self) -> None:
        self._first = None
        self.release()


class CpuBatch(Batch):
    """One call of a compiled C kernel."""

    def _set_up(self, options: Options, dtypes: tuple[torch.dtype, ...]) -> None:
        super()._set_up(options, dtypes)
        self._program = options.program()
        self._kernel = cpu_kernel(self._program, dtypes, self.compute)
        self._numel = array("q", [p.numel() for p in self.shards])
        self._elements = sum(self._numel)
        self._all_first = array("q", bytes(8 * len(self.shards)))

    def run(self, options: Options, extras: Extras, state: State) -> None:
        """Change the parameters and their state."""
        sets, active = self._sets, self._active()
        assert sets is not None
        if self._first is not None:
            self.book.fill(self._gradients)
        self._begin_late(options, active)
        chosen = self._all_first if sets.chosen is None else array("q", sets.chosen)
        flat = array("d", [row[name] for row in sets.sets for name in self._program.coefficients])
        elements = self._elements if active is None else sum(self._numel[i] for i in active)
        self._kernel(self.book.tables, self._numel, chosen, flat, elements)
        sets.store(options.scalar_keys, self.scalars, active)
        # The kernel writes without autograd's knowledge.
        self.book.bump(active)
        self._finish()


class DeviceBatch(Batch):
    """One launch of a Triton kernel, or two if coefficients are computed on the device."""

    def _set_up(self, options: Options, dtypes: tuple[torch.dtype, ...]) -> None:
        super()._set_up(options, dtypes)
        self._capturable, self._capturing = bool(options.h.capturable), False
        self._ahead = NumbersAhead()
        device, numel = self.shards[0].device, array("q", [p.numel() for p in self.shards])
        stored = None
        if self.on_device:
            assert self._first is not None
            first = self._first[0] and "step" not in options.scalar_keys
            stored = StoredOnDevice(options.rule, options.slots, self.scalars, first)
        self.device_run = DeviceRun(
            options.program(on_device=self.on_device), dtypes, self.compute, numel, device, stored, options.h,
            options.form, self.scales,
        )  # fmt: skip

    @property
    def clips_exactly(self) -> bool:
        """Whether clipping in the same pass gives the bits of a separate multiplication."""
        return self.compute == self.shards[0].dtype

    def prepare(self, options: Options) -> bool:
        """Work out the numbers of the step; raises if they make no sense. False if the batch does not fit."""
        if self.on_device:
            self._capturing = self._capturable and is_capturing()
            run = self.device_run
            ready = self._active() is None and run.table.can_freeze and run.fits(options.h)
            return ready or not self._capturing
        if self._first is None:
            self._sets = self._ahead.take(options.rule, options.on_host(), options.slots, self.scalars)
            return True
        return super().prepare(options)

    def takes(self, extras: Extras) -> bool:
        """Whether :meth:`run` can do this in the same pass."""
        if extras.changes_gradients and not self._own_gradients:
            return False
        # Counters on the host must know beforehand whether they count.
        if extras.found_inf is not None and self.scalars and not self.on_device:
            return False
        by_row = (
            self.on_device or self.compute != torch.float32 or (self._sets is not None and len(self._sets.sets) > 1)
        )
        return self.device_run.can_compile(extras.variant(by_row=by_row))

    @torch.no_grad()
    def run(self, options: Options, extras: Extras, state: State) -> None:
        """Change the parameters and their state."""
        active = self._active()
        if self._first is not None:
            self.book.fill(self._gradients)
        if self.on_device:
            self._run_with_stored(options, extras, state)
        else:
            sets = self._sets
            assert sets is not None
            self._begin_late(options, active)
            chosen = None if sets.chosen is None else array("q", sets.chosen)
            self.device_run.with_sets(self.book.tables, chosen, sets.sets, extras)
            # The device does not wait for any of this, so it comes after the launch.
            sets.store(options.scalar_keys, self.scalars, active)
            if self._first is None:
                self._ahead.prepare(options.rule, options.on_host(), options.slots, self.scalars)
        self.book.bump(active)
        if self.scales:
            increment_version([t for column in self.scales for t in column])
        self._finish()

    def _run_with_stored(self, options: Options, extras: Extras, state: State) -> None:
        run = self.device_run
        if self._capturing and self not in state.kept:
            state.kept.append(self)  # a graph needs its tables for as long as it needs the state
        run.with_stored(self.book.tables, options.h, extras, capturing=self._capturing)
        if self._first is not None and self._first[0]:
            run.from_now_on(StoredOnDevice(options.rule, options.slots, self.scalars, first=False))
        if self._capturable and not self._capturing:
            run.table.prepare_captures()


class TensorBatch(Batch):
    """A batch whose tier takes lists of tensors."""

    def read(self, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> bool:
        """Take the gradients of the next step (None: from ``.grad``); False if the batch does not fit any more."""
        if not super().read(params, grads):
            return False
        given = [p.grad for p in params] if grads is None else grads
        self._gradients = [None if g is None else local(g) for g in given]
        return True

    def _lists(self, chosen: Sequence[int]) -> list[list[Tensor]]:
        """p, g and state of the members at these positions."""
        gradients: list[Any] = self._gradients
        return [[column[i] for i in chosen] for column in (self.shards, gradients, *self.columns)]

    def _tell_autograd(self, active: Sequence[int]) -> None:
        if self.distributed:  # the operators wrote to the shards; autograd watches the DTensors
            increment_version([self.params[i] for i in active])


class ForeachBatch(TensorBatch):
    """torch's multi-tensor operators, one for each instruction of the program."""

    @torch.no_grad()
    def run(self, options: Options, extras: Extras, state: State) -> None:
        """Change the parameters and their state."""
        sets, some = self._sets, self._active()
        assert sets is not None
        self._begin_late(options, some)
        active = range(len(self.params)) if some is None else some
        program = options.program()
        for which, row in enumerate(sets.sets):
            mine = [i for i in active if sets.chosen is None or sets.chosen[i] == which]
            if mine:
                run_foreach(program, self._lists(mine), row, self.compute)
        sets.store(options.scalar_keys, self.scalars, some)
        self._finish()


class NativeBatch(TensorBatch):
    """One call of torch's own fused operator. Counters stay where they are: the host asks for no number."""

    def prepare(self, options: Options) -> bool:
        """Check that the numbers can be worked out."""
        options.sample_coefficients()
        return True

    @torch.no_grad()
    def run(self, options: Options, extras: Extras, state: State) -> None:
        """Change the parameters and their state."""
        some = self._active()
        active = range(len(self.params)) if some is None else some
        for column in self.scalars:  # the operator wants counters that include this step
            column.count(some)
        p, g, *columns = self._lists(active)
        entries = dict(zip(options.scalar_keys, ([c.tensors[i] for i in active] for c in self.scalars), strict=True))
        entries |= dict(zip(options.tensor_keys, columns, strict=True))
        assert options.rule.surface.native is not None
        options.rule.surface.native(options.h, 1 if self._first and any(self._first) else 2, p, g, entries)
        self._tell_autograd(active)
        self._finish()


class LoopBatch(TensorBatch):
    """The rule's own function, for one parameter after the other. Built anew for every step."""

    def __init__(self, options: Options, members: Sequence[Member], *, symbolic: bool) -> None:
        self._members, self._symbolic = members, symbolic
        super().__init__(options, members)
        self.keeps = False

    def _scalar_columns(self, members: Sequence[Member]) -> list[ScalarColumn]:
        return [] if self._symbolic else super()._scalar_columns(members)

    def _set_up(self, options: Options, dtypes: tuple[torch.dtype, ...]) -> None:
        pass  # nothing is read again

    def prepare(self, options: Options) -> bool:
        """Work out the numbers of the step; raises if they make no sense."""
        if self._symbolic:
            options.sample_coefficients()
            return True
        return super().prepare(options)

    def run(self, options: Options, extras: Extras, state: State) -> None:
        """Change the parameters and their state."""
        if not self._symbolic:
            assert self._sets is not None
            self._begin_late(options, None)
            self._sets.store(options.scalar_keys, self.scalars, None)
        for i, member in enumerate(self._members):
            if self._symbolic:
                self._run_symbolically(options, member)
            else:
                assert self._sets is not None
                self._update(options, member, self._sets.of(i))
        self._tell_autograd(range(len(self.params)))
        self._finish()

    def _update(self, options: Options, member: Member, coefficients: dict[str, Any]) -> None:
        scalars = coefficients | options.structure
        rule, compute = options.rule, compute_dtype(member.columns)
        if options.form:
            run_compact(rule, options.names, options.form, member.columns, member.scales, scalars)
        elif member.rows is None:
            watched = bool(options.h.differentiable)
            run_loop(rule.apply, options.names, member.columns, scalars, compute, differentiable=watched)
        else:
            p, g, *state = member.columns
            touched = [p[member.rows], g, *(t[member.rows] for t in state)]
            run_loop(rule.apply, options.names, touched, scalars, compute)
            for whole, part in zip([p, *state], [touched[0], *touched[2:]], strict=True):
                whole.index_put_(member.rows, part)

    def _run_symbolically(self, options: Options, member: Member) -> None:
        """With numbers that are 0-d tensors."""
        device = member.columns[0].device
        stored = dict(zip(options.scalar_keys, member.scalars, strict=True))
        before = {key: t.clone() for key, t in stored.items()}
        if "step" in before:
            before["step"] = before["step"].to(wide_dtype(device))
        where_stored = next(iter(stored.values())).device if stored else device
        arithmetic = TensorArithmetic({key: t.dtype for key, t in stored.items()}, where_stored)
        numbers = work_out(options.rule, options.h, options.slots, before, arithmetic, first=member.first)
        for slot in options.slots:
            if slot.late and not slot.scalar:
                t = member.columns[2 + options.tensor_keys.index(slot.key)]
                t.copy_(where(numbers.begins, slot.initial(options.h), t.clone()))
        coefficients = numbers.coefficients | {"rounding_step": numbers.step}
        self._update(options, member, coefficients)
        for key, value in numbers.stored.items():
            stored[key].copy_(value)


def _can_stay(m: Member) -> bool:
    """Whether a member's tensors can be recognised at the next step by asking where they lie."""
    p = m.columns[0]
    plain = m.simple and m.rows is None and all(is_plain(t) and has_storage(t) for t in m.columns)
    return plain and all(is_dense(t) and same_layout(t, p) for t in m.columns)


def make_batch(options: Options, members: Sequence[Member], *, symbolic: bool) -> Batch:
    """The batch of the members' tier.

    Args:
        symbolic: whether the loop tier keeps numbers as tensors.
    """
    tier = members[0].choice.tier
    if tier == "loop":
        return LoopBatch(options, members, symbolic=symbolic)
    if uses_triton(members[0].choice, members[0].columns[0].device):
        return DeviceBatch(options, members)
    return {"fused": CpuBatch, "foreach": ForeachBatch, "native": NativeBatch}[tier](options, members)
