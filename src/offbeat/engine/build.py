"""Builds the batches for some parameters of one group: checks everything before anything changes.

Whatever can go wrong goes wrong here, before a parameter, a state entry or a counter has changed. That is how a step
that raises changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from offbeat._torch import is_traced
from offbeat.engine.batch import Batch, make_batch
from offbeat.engine.choice import Choice, choose, uses_triton
from offbeat.engine.cuda.kernel import can_compile
from offbeat.engine.cuda.source import Variant
from offbeat.engine.extras import Extras
from offbeat.engine.gradients import check_gradient
from offbeat.engine.matrix import WHOLE, MatrixBatch
from offbeat.engine.member import Member, align, make_member
from offbeat.engine.options import Options
from offbeat.engine.precision import converted, is_stored_otherwise
from offbeat.engine.state import State, new_state
from offbeat.engine.tensors import compute_dtype, has_values, local
from offbeat.engine.trace import Program
from offbeat.engine.unbegun import is_unbegun, mark_unbegun
from offbeat.errors import CaptureError

__all__ = ["Build", "Part", "build", "check_gradients"]

_CAPTURABLE = ("cuda", "xpu", "hpu", "xla")


class Part:
    """The batches of a group, or of some of its parameters.

    Attributes:
        batches: with the positions of their parameters in the list.
        choices: by parameter (its id), the tier that runs it.
        keeps: whether the batches can serve a later step.
    """

    def __init__(self, options: Options, params: Sequence[Tensor], state: State, made: Build) -> None:
        self.params = list(params)  # kept alive, so that their ids are not given to other tensors
        self.options, self.state = options, state
        self.batches: list[tuple[Batch, list[int]]] = []
        self.choices: dict[int, Choice] = {id(m.param): m.choice for m in made.members}
        self.keeps = False
        self._whole = False
        self._outside: list[int] = []
        self._made: Build | None = made
        self._clock = -1

    @property
    def is_current(self) -> bool:
        """Whether no state has been added or replaced since."""
        return self._clock == self.state.clock[0]

    def fits(self, options: Options, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> bool:
        """Whether the batches serve this step too; if so, they are ready to run."""
        if not self.is_current or len(params) != len(self.params) or options.kind != self.options.kind:
            return False
        if self._outside and any((params[i].grad if grads is None else grads[i]) is not None for i in self._outside):
            return False
        for batch, positions in self.batches:
            mine = params if self._whole else [params[i] for i in positions]
            given = grads if self._whole or grads is None else [grads[i] for i in positions]
            try:
                ready = batch.read(mine, given) and batch.prepare(options)
            except (ArithmeticError, ValueError, RuntimeError):
                ready = False  # the counter of a parameter without a gradient may make no sense; the rebuild finds out
            if not ready:
                self.release()
                return False
        return True

    def takes(self, extras: Extras) -> bool:
        """Whether :meth:`run` can do this in the same pass."""
        return all(batch.takes(extras) for batch, _ in self.batches)

    def run(self, options: Options, extras: Extras) -> None:
        """Change the parameters and their state."""
        for batch, _ in self.batches:
            if batch.has_gradients:
                batch.run(options, extras, self.state)

    def release(self) -> None:
        """Keep no gradient alive; the step is done, or does not happen."""
        for batch, _ in self.batches:
            batch.release()

    def commit(self) -> None:
        """Store the state that was created."""
        if self._made is not None:
            self._made.commit()
            self._made = None

    def settle(self) -> None:
        """All state of the step is stored: from now on, a change of state is one by somebody else."""
        self._clock = self.state.clock[0]

    def arrange(self, made: Build) -> None:
        """Put the members into batches."""
        position = {id(p): i for i, p in enumerate(self.params)}
        groups: dict[Any, list[Member]] = {}
        for m in sorted(made.members, key=lambda m: position[id(m.param)]):
            kind = (
                m.choice.tier,
                m.columns[0].device,
                m.dtypes,
                tuple(t.dtype for t in m.scalars),
                m.on_device,
                m.distributed,
                made.rule.matrix is not None and m.keys,
                made.splits(m) and m.first,
            )
            groups.setdefault(kind, []).append(m)
        for some in groups.values():
            make: Any = make_batch if made.rule.matrix is None else MatrixBatch
            batch = make(made.options, some, symbolic=made.symbolic)
            self.batches.append((batch, [position[id(m.param)] for m in some]))
        split = len({key[:-1] for key in groups}) < len(groups)  # by who is at its first step, so for this step only
        self.keeps = bool(groups) and not split and all(batch.keeps for batch, _ in self.batches)
        if self.keeps:
            inside = {i for _, positions in self.batches for i in positions}
            self._whole = len(self.batches) == 1 and len(inside) == len(self.params)
            self._outside = [i for i in range(len(self.params)) if i not in inside]


class Build:
    """What is found out about some parameters of one group while batches are built.

    Attributes:
        created: state entries that did not exist: parameter, key, value.
        restored: whole entries that were stored in another form.
    """

    def __init__(self, options: Options, state: State) -> None:
        self.options, self.state = options, state
        self.rule, self.h = options.rule, options.h
        self.tensor_keys, self.scalar_keys = options.tensor_keys, options.scalar_keys
        self.scale_keys, self.form = options.scale_keys, options.form
        self.members: list[Member] = []
        self.created: list[tuple[Tensor, str, Tensor]] = []
        self.restored: list[tuple[Tensor, dict[str, Any]]] = []
        self.symbolic = options.symbolic
        self.marks = self.rule.first_step_differs(self.h) and "step" not in self.scalar_keys

    @functools.cached_property
    def program(self) -> Program | None:
        """The rule's maths, for the tiers that trace it."""
        return None if self.h.differentiable else self.options.program()

    @functools.cached_property
    def device_program(self) -> Program:
        """The same, where the device initialises late state."""
        return self.options.program(on_device=True)

    def commit(self) -> None:
        """Store the state that was created."""
        for p, entry in self.restored:
            self.state[p] = entry
        for p, key, value in self.created:
            if self.marks and not self.options.symbolic:
                mark_unbegun(value)  # the step may still be skipped on the device
            self.state[p][key] = value

    def splits(self, m: Member) -> bool:
        """Whether members at their first step need a batch of their own."""
        return "step" not in self.scalar_keys and (m.on_device or m.choice.tier == "native")

    def add(self, p: Tensor, g: Tensor, entry: dict[str, Any], first: bool) -> None:
        """Add a parameter that has a gradient, and choose its tier."""
        member = make_member(self, p, g, entry, first)
        if not all(map(has_values, member.columns)) or is_traced():
            self.symbolic = True
        if self.rule.matrix is not None:
            member.choice = WHOLE
        elif member.rows is None:
            member.choice = choose(self.rule, self.h, self.program, member.columns, self.form)
            if member.choice.tier in ("fused", "native"):
                align(self, member)
            member.on_device = self._is_on_device(member)
        self.members.append(member)

    def _is_on_device(self, member: Member) -> bool:
        """Whether the numbers an update needs are on the device, and are to stay there."""
        p, h = member.columns[0], self.h
        if not uses_triton(member.choice, p.device) or any(t.device != p.device for t in member.scalars):
            return False
        # On the CPU, where Triton's interpreter runs, all counters are on the device of their parameters.
        counting = bool(member.scalars) and (p.device.type != "cpu" or bool(h.fused))
        if not (counting or h.capturable or self.options.has_tensors):
            return False
        compute = compute_dtype(member.columns)
        return can_compile(self.device_program, member.dtypes, compute, Variant(by_row=True), p.device, self.form)

    def take_over(self, before: Part, params: Sequence[Tensor]) -> None:
        """Add parameters without a gradient that the batches before had.

        Otherwise gradients that come in turns would never find batches that have them all.
        """
        idle = set(map(id, params)) - {id(m.param) for m in self.members}
        for batch, _ in before.batches:
            for i, p in enumerate(batch.params):
                if id(p) in idle and (member := self._known(batch, i)) is not None:
                    self.members.append(member)

    def _known(self, batch: Batch, i: int) -> Member | None:
        """A parameter of another batch, if it and its state are unchanged."""
        p, shard, entry = batch.params[i], batch.shards[i], self.state.get(batch.params[i]) or {}
        columns = [column[i] for column in batch.columns]
        scalars, scales = [c.tensors[i] for c in batch.scalars], [column[i] for column in batch.scales]
        keys = (*self.tensor_keys, *self.scalar_keys, *self.scale_keys)
        found = [local(entry[key]) if isinstance(entry.get(key), Tensor) else None for key in keys]
        same = local(p) is shard and all(a is b for a, b in zip(found, [*columns, *scalars, *scales], strict=True))
        if not same or not batch.book.is_unchanged(i):
            return None
        columns = [shard, shard, *columns]  # its gradient will look like the parameter
        return Member(p, columns, scalars, scales, choice=batch.choice, on_device=batch.on_device, idle=True)


def build(
    options: Options,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    state: State,
    before: Part | None = None,
) -> Part:
    """Check the gradients, allocate missing state, choose tiers and make batches. Nothing the user can see changes.

    Args:
        before: the batches that did not fit any more.
    """
    made = Build(options, state)
    h = options.h
    given = check_gradients(options, params, grads)
    for p, _ in given:
        entry = state.get(p)
        if entry and is_stored_otherwise(entry, options.slots):
            was = "8bit" if any(key.endswith("_8bit") for key in entry) else None
            made.restored.append((p, converted(entry, p, options.slots, was, vars(h).get("state_dtype"))))
    others = {id(p): entry for p, entry in made.restored}
    entries, made.created = new_state(options.slots, h, [p for p, _ in given], state, others)
    newborn = {id(p) for p, _, _ in made.created}
    for (p, g), entry in zip(given, entries, strict=True):
        first = id(p) in newborn or (made.marks and all(is_unbegun(local(entry[key])) for key in options.tensor_keys))
        made.add(p, g, entry, first)
    part = Part(options, params, state, made)
    if (
        options.rule.matrix is None
        and before is not None
        and before.keeps
        and before.state is state
        and before.options.kind == options.kind
    ):
        made.take_over(before, params)
        try:
            return _arranged(part, made)
        except (ArithmeticError, ValueError, RuntimeError):  # a counter that was taken over may make no sense
            made.members = [m for m in made.members if not m.idle]
            part.batches = []
    return _arranged(part, made)


def check_gradients(
    options: Options, params: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """The parameters that have a gradient, with it. Raises if one does not fit."""
    given = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    for p, g in given:
        check_gradient(options.rule, options.h, p, g)
        if options.h.capturable and p.device.type not in _CAPTURABLE:
            raise CaptureError(
                f"If capturable=True, params and state_steps must be on supported devices: {list(_CAPTURABLE)}, "
                f"but one is on {p.device}; leave capturable out"
            )
    return given


def _arranged(part: Part, made: Build) -> Part:
    part.arrange(made)
    for batch, _ in part.batches:
        batch.prepare(made.options)
    return part
