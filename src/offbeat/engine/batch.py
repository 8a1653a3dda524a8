"""Batches: parameters of one device and one combination of dtypes that one tier updates together.

A batch is built for a step, from members that have been checked. :meth:`Batch.prepare` computes the coefficients and
may raise; :meth:`Batch.run` changes parameters and state. At the next step :meth:`Batch.read` tells whether the batch
still fits: it reads the address of every tensor, and checks that dtype, shape and strides are the same. If they are,
the batch is prepared and run again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat._torch import set_grad_enabled
from offbeat.engine.addresses import AddressBook
from offbeat.engine.cpu.kernel import CpuKernel, cpu_kernel
from offbeat.engine.foreach import pieces_of, run_foreach
from offbeat.engine.grad_transforms import GradTransforms
from offbeat.engine.loop import run_compact, run_loop
from offbeat.engine.member import Member
from offbeat.engine.options import Options
from offbeat.engine.scalars import CoefficientSets, ScalarColumn, coefficient_sets, tensor_numbers
from offbeat.engine.state import State
from offbeat.engine.tensors import has_storage, is_dense, is_plain, local, same_layout
from offbeat.rules.ops import where


class Batch:
    """Parameters that one tier updates together. See the module for the order of calls.

    Attributes:
        params: the parameters.
        shards: their local tensors, which are the parameters themselves unless those are DTensors.
        columns: the state tensors, one list for each.
        scalars: the stored scalars, one column for each.
        scales: the scales of 8-bit state, one list for each.
        sets: the coefficients of this step, once they are prepared on the host.
        dtypes: the dtypes of p, g and the state.
        on_device: whether coefficients are computed on the device.
        keeps: whether a later step can reuse the batch.
        clips_exactly: whether clipping in the same pass gives the same bits as a separate multiplication.
    """

    sets: CoefficientSets
    clips_exactly = False
    _symbolic = False  # whether coefficients are 0-d tensors

    def __init__(self, options: Options, members: Sequence[Member]) -> None:
        first = members[0]
        self.dtypes, self.on_device, self.distributed = first.dtypes, first.on_device, first.distributed
        self.params = [m.param for m in members]
        self.shards = [m.columns[0] for m in members]
        self.columns = [[m.columns[c] for m in members] for c in range(2, len(first.columns))]
        count = 0 if self._symbolic else len(first.scalars)
        self.scalars = [ScalarColumn([m.scalars[i] for m in members]) for i in range(count)]
        self.scales = [[m.scales[i] for m in members] for i in range(len(first.scales))]
        self.keeps = all(map(_can_stay, members))
        self._gradients: list[Tensor | None] = [None if m.idle else m.columns[1] for m in members]
        self._own_gradients = all(m.own_gradient for m in members)
        self._count = sum(g is not None for g in self._gradients)  # gradients of this step
        # Which members are at their first step; None once the batch has run.
        self._first: list[bool] | None = [m.first for m in members]
        self._sets_for: tuple[Options, list[bytes | None]] | None = None
        self._set_up(options)

    def _set_up(self, options: Options) -> None:
        """Prepare for reading addresses at every step."""
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
        """Compute the coefficients of the step; raises if they are invalid. False if the batch does not fit."""
        if self._symbolic:
            options.sample_coefficients()
            return True
        if options.constant is not None:
            if self._sets_for is None or self._sets_for[0] is not options:
                self.sets = CoefficientSets(None, [options.constant], [{}], [False])
                self._sets_for = options, []
            return True
        stored = [column.raw() for column in self.scalars]
        known = self._sets_for is not None and self._sets_for[0] is options and self._sets_for[1] == stored
        if not known:
            self.sets = coefficient_sets(options, self.scalars, self._first)
            changing = self._first is not None or options.has_tensors or None in stored
            self._sets_for = None if changing else (options, stored)
        return True

    def shared(self, options: Options) -> dict[Any, list[Any]]:
        """Return, by process group, the work that :meth:`run` shares with other ranks."""
        return {}

    def check_copies(self, options: Options) -> None:
        """Raise, on every rank alike, unless ranks that share work have the same gradients for it."""

    def takes(self, transforms: GradTransforms) -> bool:
        """Return whether :meth:`run` can apply these transforms in the same pass."""
        return False

    def run(self, options: Options, transforms: GradTransforms, state: State) -> None:
        """Change the parameters and their state, if there is a gradient."""
        if self._count:
            active = self._active()
            self._run(options, transforms, state, active)
            self._first = None
        self.release()

    def _run(self, options: Options, transforms: GradTransforms, state: State, active: Sequence[int] | None) -> None:
        """Update the members with the indices ``active`` (None: all)."""
        raise NotImplementedError

    def _active(self) -> Sequence[int] | None:
        """The indices of the members that have a gradient; None if all have one."""
        if self._count == len(self.params):
            return None
        return [i for i, address in enumerate(self.book.tables[1]) if address]

    def _begin_late(self, options: Options, active: Sequence[int] | None) -> None:
        """At the first step, initialise state that depends on the hyperparameters of that step."""
        if not any(self.sets.begins):
            return
        for slot in options.slots:
            if slot.late and not slot.scalar:
                column = self.columns[options.tensor_keys.index(slot.key)]
                initial = float(slot.initial(options.on_host()))
                for i in range(len(column)) if active is None else active:
                    if self.sets.begins[self.sets.number(i)]:
                        column[i].fill_(initial)

    def release(self) -> None:
        """Drop references to gradients."""
        self._gradients = []


class CpuBatch(Batch):
    """One call of a compiled C kernel."""

    def _set_up(self, options: Options) -> None:
        super()._set_up(options)
        self.book.fill(self._gradients)
        kernel = cpu_kernel(options.typed(self.dtypes))
        assert isinstance(kernel, CpuKernel)
        self._kernel = kernel
        self._numel = array("q", [p.numel() for p in self.shards])
        self._elements = sum(self._numel)
        self._all_first = array("q", bytes(8 * len(self.shards)))

    def _run(self, options: Options, transforms: GradTransforms, state: State, active: Sequence[int] | None) -> None:
        self._begin_late(options, active)
        chosen = self._all_first if self.sets.chosen is None else array("q", self.sets.chosen)
        flat = array("d", [row[name] for row in self.sets.sets for name in options.program.coefficients])
        elements = self._elements if active is None else sum(self._numel[i] for i in active)
        self._kernel(self.book.tables, self._numel, chosen, flat, elements)
        self.sets.store(options.scalar_keys, self.scalars, active)
        # Autograd does not see what the kernel writes.
        self.book.bump(active)


class TensorBatch(Batch):
    """A batch whose tier takes lists of tensors."""

    def read(self, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> bool:
        """Take the gradients of the next step (None: from ``.grad``); False if the batch does not fit any more."""
        gradients = [p.grad for p in params] if grads is None else list(grads)
        count = self.book.read(params, gradients)
        if count is None:
            return False
        self._count = count
        self._gradients = [None if g is None else local(g) for g in gradients] if self.distributed else gradients
        return True

    def _active(self) -> Sequence[int] | None:
        return [i for i, g in enumerate(self._gradients) if g is not None]

    def _tell_autograd(self, active: Sequence[int] | None) -> None:
        if self.distributed:  # the operators wrote to the local tensors; autograd tracks the DTensors
            increment_version(self.params if active is None else [self.params[i] for i in active])


class UnrecordedBatch(TensorBatch):
    """A batch whose updates autograd does not record."""

    def run(self, options: Options, transforms: GradTransforms, state: State) -> None:
        """Change the parameters and their state, if there is a gradient."""
        recording = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            super().run(options, transforms, state)
        finally:
            set_grad_enabled(recording)


class ListBatch(UnrecordedBatch):
    """A batch whose tier updates all tensors of a list with one call."""

    def _active(self) -> Sequence[int] | None:
        return None if self._count == len(self.params) else super()._active()

    def _lists(self, chosen: Sequence[int] | None) -> list[list[Tensor]]:
        """p, g and state of the members with these indices (None: all)."""
        gradients: list[Any] = self._gradients
        columns = [self.shards, gradients, *self.columns]
        return columns if chosen is None else [[column[i] for i in chosen] for column in columns]


class ForeachBatch(ListBatch):
    """torch's multi-tensor operators, one for each instruction of the program."""

    def _set_up(self, options: Options) -> None:
        super()._set_up(options)
        self._typed = options.typed(self.dtypes)
        self._pieces = pieces_of(self._typed, self.shards)

    def _run(self, options: Options, transforms: GradTransforms, state: State, active: Sequence[int] | None) -> None:
        if self._typed.program is not options.program:
            self._typed = options.typed(self.dtypes)
        self._begin_late(options, active)
        if active is None and self.sets.chosen is None:
            run_foreach(self._typed, self._lists(None), self.sets.sets[0], self._pieces)
        else:
            for which, row in enumerate(self.sets.sets):
                members = range(len(self.params)) if active is None else active
                rows = [i for i in members if self.sets.number(i) == which]
                if rows:
                    run_foreach(self._typed, self._lists(rows), row)
        self.sets.store(options.scalar_keys, self.scalars, active)
        self._tell_autograd(active)


class NativeBatch(ListBatch):
    """One call of torch's own fused operator, which reads the counters itself: the host does not wait for them."""

    _checked: Options | None = None

    def _set_up(self, options: Options) -> None:
        super()._set_up(options)
        stored = (column.tensors for column in self.scalars)
        self._state = dict(zip(options.scalar_keys, stored, strict=True))
        self._state |= dict(zip(options.tensor_keys, self.columns, strict=True))

    def prepare(self, options: Options) -> bool:
        """Check that the coefficients can be computed, once for each set of options."""
        if options is not self._checked:
            options.sample_coefficients()
            self._checked = options
        return True

    def _run(self, options: Options, transforms: GradTransforms, state: State, active: Sequence[int] | None) -> None:
        for column in self.scalars:  # the operator expects counters that include this step
            column.count(active)
        p, g, *_ = self._lists(active)
        if active is not None:
            entries = {key: [column[i] for i in active] for key, column in self._state.items()}
        else:
            entries = self._state
        assert options.rule.surface.native is not None
        options.rule.surface.native(options.h, 1 if self._first and any(self._first) else 2, p, g, entries)
        self._tell_autograd(active)


class LoopBatch(TensorBatch):
    """The rule's own function, called for one parameter after the other. Built again for every step."""

    def __init__(self, options: Options, members: Sequence[Member], *, symbolic: bool) -> None:
        self._members, self._symbolic = members, symbolic
        super().__init__(options, members)
        self.keeps = False

    def _set_up(self, options: Options) -> None:
        pass  # nothing is read again

    def _run(self, options: Options, transforms: GradTransforms, state: State, active: Any) -> None:
        if not self._symbolic:
            self._begin_late(options, active)
            self.sets.store(options.scalar_keys, self.scalars, active)
        for i in active:
            if self._symbolic:
                self._run_symbolically(options, self._members[i])
            else:
                self._update(options, self._members[i], self.sets.of(i))
        self._tell_autograd(active)

    def _update(self, options: Options, member: Member, coefficients: dict[str, Any]) -> None:
        scalars = coefficients | options.structure
        if options.form:
            run_compact(options.rule, options.names, options.form, member.columns, member.scales, scalars)
        elif member.rows is None:
            run_loop(options.rule, options.names, member.columns, scalars, differentiable=options.h.differentiable)
        else:
            p, g, *state = member.columns
            touched = [p[member.rows], g, *(t[member.rows] for t in state)]
            run_loop(options.rule, options.names, touched, scalars)
            for whole, part in zip([p, *state], [touched[0], *touched[2:]], strict=True):
                whole.index_put_(member.rows, part)

    def _run_symbolically(self, options: Options, member: Member) -> None:
        stored = dict(zip(options.scalar_keys, member.scalars, strict=True))
        before = {key: t.clone() for key, t in stored.items()}
        device = next(iter(stored.values())).device if stored else member.columns[0].device
        numbers = tensor_numbers(options.rule, options.h, options.slots, before, device, first=member.first)
        for slot in options.slots:
            if slot.late and not slot.scalar:
                t = member.columns[2 + options.tensor_keys.index(slot.key)]
                t.copy_(where(numbers.begins, slot.initial(options.h), t.clone()))
        self._update(options, member, numbers.coefficients | {"rounding_step": numbers.step})
        for key, value in numbers.stored.items():
            stored[key].copy_(value)


def _can_stay(m: Member) -> bool:
    """Return whether addresses, dtypes, shapes and strides tell a later step that a member's tensors still fit."""
    p = m.columns[0]
    plain = m.simple and m.rows is None and all(is_plain(t) and has_storage(t) for t in m.columns)
    return plain and all(is_dense(t) and same_layout(t, p) for t in m.columns)
