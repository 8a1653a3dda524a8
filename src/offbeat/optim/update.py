"""One update of some parameters of one group: prepared and checked first, then run.

Everything that can go wrong goes wrong while preparing, before a parameter, a state entry or a counter has
changed; that is how a failed step changes nothing.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat.errors import CaptureError
from offbeat.optim.device import DeviceCounters, DeviceRun
from offbeat.optim.extras import NOTHING, Extras
from offbeat.optim.gradients import check_gradient, local
from offbeat.optim.members import Member, align, make_member
from offbeat.optim.precision import converted, formats, is_stored_otherwise, kept_slots, run_compact
from offbeat.optim.scalars import Scalars, coefficient_rows, move_on
from offbeat.optim.settings import has_tensors, on_host
from offbeat.optim.state import State, is_unbegun, new_state
from offbeat.rules.rule import Rule, Slot, Values
from offbeat.tiers.choice import choose, uses_triton
from offbeat.tiers.foreach import run_foreach
from offbeat.tiers.fused import cpu_kernel
from offbeat.tiers.layout import compute_dtype
from offbeat.tiers.loop import run_loop
from offbeat.tiers.trace import Program, trace
from offbeat.tiers.triton_kernel import can_compile, is_interpreting
from offbeat.tiers.triton_source import Variant

__all__ = ["Update", "prepare", "program_for"]

_CAPTURABLE = ("cuda", "xpu", "hpu", "xla")


@dataclass
class Update:
    """A prepared update. :meth:`commit` stores new state, :meth:`run` changes the parameters."""

    rule: Rule
    h: Values
    state: State
    slots: tuple[Slot, ...]
    structure: dict[str, bool]
    members: list[Member] = field(default_factory=list)
    created: list[tuple[Tensor, str, Tensor]] = field(default_factory=list)
    restored: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)  # state in another form than before
    program: Program | None = None
    counters: list[Scalars] = field(default_factory=list)
    rows: list[int] | None = None
    table: list[dict[str, Any]] = field(default_factory=list)
    advanced: list[dict[str, float]] = field(default_factory=list)

    @property
    def symbolic(self) -> bool:
        """Whether numbers stay tensors: on their device, or in autograd's sight."""
        return bool(self.h.capturable or self.h.differentiable)

    @functools.cached_property
    def tensor_keys(self) -> tuple[str, ...]:
        """The state entries that are tensors like the parameter."""
        return tuple(slot.key for slot in self.slots if not slot.scalar and slot.form != "scales")

    @functools.cached_property
    def scale_keys(self) -> tuple[str, ...]:
        """The state entries that are scales of others."""
        return tuple(slot.key for slot in self.slots if slot.form == "scales")

    @functools.cached_property
    def form(self) -> tuple[str, ...]:
        """How p, g and state are stored; empty if all are plain."""
        return formats(self.h, self.slots)

    @functools.cached_property
    def scalar_keys(self) -> tuple[str, ...]:
        """The state entries that are counters and other single numbers."""
        return tuple(slot.key for slot in self.slots if slot.scalar)

    def commit(self) -> None:
        """Put the state made while preparing into the optimizer."""
        for p, entry in self.restored:
            self.state[p] = entry
        for p, key, value in self.created:
            self.state[p][key] = value

    def takes(self, extras: Extras) -> bool:
        """Whether :meth:`run` can do this in the same pass."""
        if any(not uses_triton(m.choice, m.columns[0].device) for m in self.members):
            return False
        if extras.changes_gradients and not all(m.own_gradient for m in self.members):
            return False
        for (device, dtypes), (m, *_) in _batches(self.members).items():
            program = program_for(self.rule, self.h, on_device=m.on_device)
            compute = compute_dtype(m.columns)
            by_row = m.on_device or len(self.table) > 1 or compute != torch.float32
            if not can_compile(program, dtypes, compute, extras.variant(by_row=by_row), device, self.form):
                return False
        # Counters on the host must know beforehand whether they count.
        return extras.found_inf is None or not self.scalar_keys or all(m.on_device for m in self.members)

    def run(self, extras: Extras = NOTHING) -> None:
        """Change the parameters and their state."""
        for fresh in (True, False):
            chosen = [m for m in self.members if m.on_device and m.fresh == fresh]
            for batch in _batches(chosen).values():
                self._run_on_device(batch, extras)
        for member in self.members:
            if self.symbolic and not member.on_device:
                self._run_symbolically(member)
        if self.hosted:
            self._run_from_host(extras)
        # Shards were written; autograd watches the distributed tensors around them.
        increment_version([member.param for member in self.members if member.distributed])

    @functools.cached_property
    def hosted(self) -> list[Member]:
        """The members whose coefficients are worked out on the host."""
        return [] if self.symbolic else [m for m in self.members if not m.on_device]

    def work_out(self) -> None:
        """Do the arithmetic on scalars; hyperparameters that make no sense raise here."""
        if self.symbolic:
            _sample_coefficients(self.rule, self.h)
        elif self.hosted:
            members = self.hosted
            self.counters = [Scalars([m.scalars[i] for m in members]) for i in range(len(self.scalar_keys))]
            fresh = [m.fresh for m in members]
            self.rows, self.table, self.advanced = coefficient_rows(
                self.rule, on_host(self.h), self.scalar_keys, self.counters, fresh
            )

    def _run_on_device(self, members: list[Member], extras: Extras) -> None:
        program = program_for(self.rule, self.h, on_device=True)
        columns = _columns(members)
        counters = [Scalars([m.scalars[i] for m in members]) for i in range(len(self.scalar_keys))]
        made_of = DeviceCounters(self.rule, self.slots, counters, members[0].fresh)
        run = make_device_run(program, columns, made_of, self.h, self.form, _scales(members))
        increment_version(_written(members, columns))
        run.with_counters(_addresses(columns), self.h, extras, capturing=False)

    def _run_from_host(self, extras: Extras) -> None:
        self._begin_late_tensors()
        # torch's operators want counters that have moved on already.
        move_on(self.scalar_keys, self.counters, self.rows, self.advanced)
        table, rows = self.table, self.rows or [0] * len(self.hosted)
        batches: dict[Any, list[int]] = {}
        for i, member in enumerate(self.hosted):
            dtypes = tuple(t.dtype for t in member.columns)
            key: tuple[Any, ...] = (member.choice.tier, member.columns[0].device, dtypes)
            if member.choice.tier in ("foreach", "native"):
                key = (*key, rows[i])
            batches.setdefault(key, []).append(i)
        for (tier, *_), indices in batches.items():
            members = [self.hosted[i] for i in indices]
            columns = _columns(members)
            compute = compute_dtype(members[0].columns)
            if tier == "fused":
                assert self.program is not None
                scales = _scales(members)
                increment_version([t for column in scales for t in column])
                run_kernel(self.program, columns, [rows[i] for i in indices], table, compute, extras, self.form, scales)
            elif tier == "foreach":
                assert self.program is not None
                run_foreach(self.program, columns, table[rows[indices[0]]], compute)
            elif tier == "native":
                self._run_native(members, columns)
            else:
                for i, member in zip(indices, members, strict=True):
                    self._run_loop(member, table[rows[i]], compute)

    def _begin_late_tensors(self) -> None:
        """What depends on the hyperparameters of the first step may have been allocated under others."""
        for slot in self.slots:
            if slot.late and not slot.scalar:
                column, initial = 2 + self.tensor_keys.index(slot.key), float(slot.initial(on_host(self.h)))
                steps = self.counters[self.scalar_keys.index("step")].read()
                for member, step in zip(self.hosted, steps, strict=True):
                    if step == 0:
                        member.columns[column].fill_(initial)

    def _run_loop(self, member: Member, coefficients: dict[str, Any], compute: torch.dtype) -> None:
        names = ("p", "g", *(slot.key for slot in self.rule.slots(self.h) if not slot.scalar))
        scalars = coefficients | self.structure
        if self.form:
            run_compact(self.rule, names, self.form, member.columns, member.scales, scalars)
            return
        scalars.pop("rounding_step", None)
        if member.rows is None:
            run_loop(self.rule.update, names, member.columns, scalars, compute, differentiable=self.h.differentiable)
            return
        p, g, *state = member.columns
        touched = [p[member.rows], g, *(t[member.rows] for t in state)]
        run_loop(self.rule.update, names, touched, scalars, compute)
        for whole, part in zip([p, *state], [touched[0], *touched[2:]], strict=True):
            whole.index_put_(member.rows, part)

    def _run_native(self, members: list[Member], columns: list[list[Tensor]]) -> None:
        assert self.rule.native is not None
        state = dict(zip(self.tensor_keys, columns[2:], strict=True))
        for i, key in enumerate(self.scalar_keys):
            state[key] = [m.scalars[i] for m in members]
        self.rule.native(self.h, 1 if members[0].fresh else 2, columns[0], columns[1], state)

    def _run_symbolically(self, member: Member) -> None:
        stored = dict(zip(self.scalar_keys, member.scalars, strict=True))
        for slot in self.slots:
            if slot.late:
                t = stored[slot.key] if slot.scalar else member.columns[2 + self.tensor_keys.index(slot.key)]
                t.copy_(torch.where(stored["step"] == 0, slot.initial(self.h), t.clone()))
        if "step" in stored:
            stored["step"].add_(1)
        # In double precision where the device has it, as on the host.
        wide = torch.float32 if member.columns[0].device.type in ("mps", "xla") else torch.float64
        s = Values(step=1.0 if member.fresh else 2.0)
        s.set(**{key: t.clone().to(wide) for key, t in stored.items()})
        advanced = self.rule.advance(self.h, s)
        if self.rule.advance_first:
            s.set(**advanced)
        coefficients = dict(self.rule.coefficients(self.h, s))
        if self.form:
            coefficients["rounding_step"] = s.step
        self._run_loop(member, coefficients, compute_dtype(member.columns))
        for key, value in advanced.items():
            stored[key].copy_(value)


def prepare(rule: Rule, h: Values, params: Sequence[Tensor], grads: Sequence[Tensor | None], state: State) -> Update:
    """Check the gradients, allocate missing state, and choose tiers. Nothing the user can see changes."""
    update = Update(rule, h, state, kept_slots(rule, h), rule.structure(h))
    given = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    for p, g in given:
        check_gradient(rule, h, p, g)
        if h.capturable and p.device.type not in _CAPTURABLE:
            raise CaptureError(
                f"If capturable=True, params and state_steps must be on supported devices: {list(_CAPTURABLE)}, "
                f"but one is on {p.device}; leave capturable out"
            )
    for p, _ in given:
        entry = state.get(p)
        if entry and is_stored_otherwise(entry, update.slots):
            was = "8bit" if any(key.endswith("_8bit") for key in entry) else None
            update.restored.append((p, converted(entry, p, update.slots, was, vars(h).get("state_dtype"))))
    others = {id(p): entry for p, entry in update.restored}
    entries, update.created = new_state(update.slots, h, [p for p, _ in given], state, others)
    newborn = {id(p) for p, _, _ in update.created}
    marked = rule.first_step_differs(h) and "step" not in update.scalar_keys
    for (p, g), entry in zip(given, entries, strict=True):
        fresh = id(p) in newborn or (marked and all(is_unbegun(local(entry[key])) for key in update.tensor_keys))
        update.members.append(make_member(update, p, g, entry, fresh))
    if update.members and not h.differentiable:
        update.program = program_for(rule, h)
    for member in update.members:
        if member.rows is None:
            member.choice = choose(rule, h, update.program, member.columns, update.form)
            if member.choice.tier in ("fused", "native"):
                align(update, member)
            member.on_device = _is_on_device(update, member)
    update.work_out()
    return update


def _is_on_device(update: Update, member: Member) -> bool:
    """Whether the numbers an update needs are on the device, and are to stay there."""
    p, rule, h = member.columns[0], update.rule, update.h
    if not uses_triton(member.choice, p.device):
        return False
    if any(t.device != p.device for t in member.scalars):
        return False
    # On the CPU, where Triton's interpreter runs, all counters are beside their parameters.
    counting = bool(member.scalars) and (p.device.type != "cpu" or bool(h.fused))
    if not (counting or h.capturable or has_tensors(h)):
        return False
    program = program_for(rule, h, on_device=True)
    compute = compute_dtype(member.columns)
    return can_compile(program, _dtypes(member), compute, Variant(by_row=True), p.device, update.form)


def _sample_coefficients(rule: Rule, h: Values) -> dict[str, Any]:
    """Coefficients for some stored scalars: their names, and a check that they can be worked out."""
    stored = {slot.key: 0.5 for slot in rule.slots(h) if slot.scalar and slot.key != "step"}
    return rule.coefficients(h, Values(step=1, **stored))


def program_for(rule: Rule, h: Values, *, on_device: bool = False) -> Program:
    """The rule's maths under these hyperparameters, for the tiers that do not run it on tensors.

    With ``on_device`` it sees itself to state that begins at the first step: only the device knows which is.
    """
    slots = rule.slots(h)
    keys = tuple(slot.key for slot in slots if not slot.scalar)
    names = tuple(_sample_coefficients(rule, on_host(h, stand_in=0.5)))
    late = tuple(slot.key for slot in slots if slot.late and not slot.scalar) if on_device else ()
    more = ("rounding_step",) if formats(h, kept_slots(rule, h)) else ()
    return trace(rule.update, keys, names, tuple(sorted(rule.structure(h).items())), late, more)


def make_device_run(
    program: Program,
    columns: list[list[Tensor]],
    counters: DeviceCounters | None = None,
    h: Values | None = None,
    form: tuple[str, ...] = (),
    scales: Sequence[Sequence[Tensor]] = (),
) -> DeviceRun:
    """The launch for these columns, all on one device."""
    dtypes = tuple(column[0].dtype for column in columns)
    first = [column[0] for column in columns]
    numel = [p.numel() for p in columns[0]]
    return DeviceRun(program, dtypes, compute_dtype(first), numel, first[0].device, counters, h, form, scales)


def _scales(members: Sequence[Member]) -> list[list[Tensor]]:
    return [[m.scales[i] for m in members] for i in range(len(members[0].scales))]


def _written(members: Sequence[Member], columns: list[list[Tensor]]) -> list[Tensor]:
    """The tensors a kernel writes."""
    return [t for column in (columns[0], *columns[2:], *_scales(members)) for t in column]


def _columns(members: Sequence[Member]) -> list[list[Tensor]]:
    return [[m.columns[c] for m in members] for c in range(len(members[0].columns))]


def _addresses(columns: list[list[Tensor]]) -> list[array[int]]:
    # An empty gradient lies nowhere, but it is there.
    return [array("q", [t.data_ptr() or int(c == 1) for t in column]) for c, column in enumerate(columns)]


def _dtypes(member: Member) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for t in member.columns)


def _batches(members: Sequence[Member]) -> dict[tuple[torch.device, tuple[torch.dtype, ...]], list[Member]]:
    """Members that one launch can take together, by device and dtypes."""
    found: dict[tuple[torch.device, tuple[torch.dtype, ...]], list[Member]] = {}
    for m in members:
        found.setdefault((m.columns[0].device, _dtypes(m)), []).append(m)
    return found


def run_kernel(
    program: Program,
    columns: list[list[Tensor]],
    rows: Sequence[int],
    table: list[dict[str, Any]],
    compute: torch.dtype,
    extras: Extras = NOTHING,
    form: tuple[str, ...] = (),
    scales: Sequence[Sequence[Tensor]] = (),
) -> None:
    """Run the compiled kernel over these columns."""
    # The kernel writes behind autograd's back; this is how autograd learns of it.
    increment_version([t for i, column in enumerate(columns) if i != 1 for t in column])
    if columns[0][0].device.type != "cpu" or is_interpreting():
        run = make_device_run(program, columns, form=form, scales=scales)
        run.with_numbers(_addresses(columns), array("q", rows), table, extras)
        return
    kernel = cpu_kernel(program, tuple(column[0].dtype for column in columns), compute)
    numel = array("q", [t.numel() for t in columns[0]])
    flat = array("d", [row[name] for row in table for name in program.coefficients])
    kernel(_addresses(columns), numel, array("q", rows), flat, sum(numel))
