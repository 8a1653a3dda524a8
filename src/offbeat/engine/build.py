"""Builds the batches for some parameters of one group, and checks everything before anything changes.

Errors are raised here, before a parameter, a state entry or a counter changes. So a step that raises changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from offbeat._torch import is_traced
from offbeat.engine.batch import Batch, CpuBatch, ForeachBatch, LoopBatch, NativeBatch
from offbeat.engine.choice import TRACED, Choice, choose, uses_triton
from offbeat.engine.cuda.kernel import TritonError, why_no_kernel
from offbeat.engine.cuda.launch import DeviceBatch
from offbeat.engine.cuda.numbers import NotTraceable
from offbeat.engine.cuda.source import Variant
from offbeat.engine.first_step import is_before_first_step, mark_before_first_step
from offbeat.engine.grad_transforms import GradTransforms
from offbeat.engine.gradients import check_gradient
from offbeat.engine.matrix.matrices import WHOLE, MatrixBatch
from offbeat.engine.member import Created, Member, align, make_member
from offbeat.engine.options import Options
from offbeat.engine.precision import converted, is_stored_otherwise
from offbeat.engine.state import State, new_state
from offbeat.engine.tensors import has_values, local
from offbeat.errors import CaptureError

_CAPTURABLE = ("cuda", "xpu", "hpu", "xla")


class Part:
    """The batches of a group, or of some of its parameters.

    The constructor checks the gradients, allocates missing state, chooses tiers and makes batches. It does not change
    the optimizer's state; :meth:`commit` does.

    Attributes:
        batches: the batches, each with the indices of its parameters.
        choices: the tier of each parameter (by id).
        keeps: whether a later step can reuse the batches.
    """

    def __init__(
        self, options: Options, params: Sequence[Tensor], grads: Sequence[Tensor | None], state: State
    ) -> None:
        self.params = list(params)  # keeps them alive, so that no other tensor gets their ids
        self.options, self.state = options, state
        self.batches: list[tuple[Batch, list[int]]] = []
        self.keeps = False
        self._whole = False
        self._outside: list[int] = []
        self._clock = -1
        self._created: Created = []
        self._restored: list[tuple[Tensor, dict[str, Any]]] = []
        self._symbolic = options.symbolic
        members = self._members(check_gradients(options, params, grads))
        idle = [] if self._symbolic or options.rule.matrix is not None else self._idle({id(m.param) for m in members})
        try:
            self._arrange([*members, *idle])
        except (ArithmeticError, ValueError, RuntimeError):
            if not idle:
                raise
            self._arrange(members)  # a parameter without a gradient may have an invalid counter
        self.choices: dict[int, Choice] = {id(m.param): m.choice for m in members}

    def _members(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Member]:
        """The parameters that have a gradient, with their state and tier."""
        options, state = self.options, self.state
        for p, _ in pairs:
            entry = state.get(p)
            if entry and is_stored_otherwise(entry, options.slots):
                was = "8bit" if any(key.endswith("_8bit") for key in entry) else None
                self._restored.append((p, converted(entry, p, options.slots, was, vars(options.h).get("state_dtype"))))
        others = {id(p): entry for p, entry in self._restored}
        entries, self._created = new_state(options.slots, options.h, [p for p, _ in pairs], state, others)
        newborn = {id(p) for p, _, _ in self._created}
        return [
            self._member(p, g, entry, id(p) in newborn or self._is_marked(entry), self._created)
            for (p, g), entry in zip(pairs, entries, strict=True)
        ]

    def _is_marked(self, entry: dict[str, Any]) -> bool:
        """Return whether the state is marked as unused by any step, for rules that do not count steps."""
        return self.options.marks and all(is_before_first_step(local(entry[key])) for key in self.options.tensor_keys)

    def _member(self, p: Tensor, g: Tensor, entry: dict[str, Any], first: bool, created: Created) -> Member:
        member = make_member(self.options, p, g, entry, first, created)
        if self.options.rule.matrix is not None:
            member.choice = WHOLE
            self._symbolic = self._symbolic or is_traced() or not all(map(has_values, member.columns))
        elif member.rows is None:
            member.choice = choose(self.options, member.columns)
            self._symbolic = self._symbolic or member.choice is TRACED
            if member.choice.tier in ("fused", "native"):
                align(self.options, member, created)
            member.on_device = self._is_on_device(member)
        elif is_traced() or not all(map(has_values, member.columns)):
            self._symbolic = True
        return member

    def _is_on_device(self, member: Member) -> bool:
        """Return whether the coefficients of an update are computed on the device."""
        p, h = member.columns[0], self.options.h
        if not uses_triton(member.choice, p.device) or any(t.device != p.device for t in member.scalars):
            return False
        # With Triton's interpreter, counters are always on the device of their parameters: the CPU.
        counting = bool(member.scalars) and (p.device.type != "cpu" or bool(h.fused))
        if not (counting or h.capturable or self.options.has_tensors):
            return False
        return why_no_kernel(self.options.typed(member.dtypes, on_device=True), Variant(by_row=True), p.device) is None

    def _idle(self, active: set[int]) -> list[Member]:
        """Parameters without a gradient that have state. The parameter itself stands in for the gradient.

        With them, a batch also fits later steps in which other parameters have gradients.
        """
        idle: list[Member] = []
        wanted = [slot.key for slot in self.options.slots]
        for p in self.params:
            entry = self.state.get(p) or {}
            there = has_values(p) and all(isinstance(entry.get(key), Tensor) for key in wanted)
            if id(p) in active or not there or is_stored_otherwise(entry, self.options.slots):
                continue
            created: Created = []
            try:
                if self._is_marked(entry):
                    continue
                member = self._member(p, p, entry, False, created)
            except (
                TypeError,
                ValueError,
                RuntimeError,
            ):  # this parameter has no gradient, so its errors do not matter to this step
                continue
            if member.simple and not created and member.choice.tier != "loop":
                member.idle = True
                idle.append(member)
        return idle

    def _arrange(self, members: list[Member]) -> None:
        """Group the members into batches, and compute their coefficients."""
        options = self.options
        position = {id(p): i for i, p in enumerate(self.params)}
        groups: dict[Any, list[Member]] = {}
        for m in sorted(members, key=lambda m: position[id(m.param)]):
            # Members at their first step need their own batch if all members of a batch share one step.
            alone = m.first and "step" not in options.scalar_keys and (m.on_device or m.choice.tier == "native")
            scalars = tuple(t.dtype for t in m.scalars)
            kind = (m.choice.tier, m.columns[0].device, m.dtypes, m.keys, scalars, m.on_device, m.distributed, alone)
            groups.setdefault(kind, []).append(m)
        self.batches = [(self._batch(group), [position[id(m.param)] for m in group]) for group in groups.values()]
        for batch, _ in self.batches:
            batch.prepare(options)
        split = len({key[:-1] for key in groups}) < len(groups)  # only in this step
        self.keeps = bool(groups) and not split and all(batch.keeps for batch, _ in self.batches)
        if self.keeps:
            inside = {i for _, positions in self.batches for i in positions}
            self._whole = len(self.batches) == 1 and len(inside) == len(self.params)
            self._outside = [i for i in range(len(self.params)) if i not in inside]

    def _batch(self, members: Sequence[Member]) -> Batch:
        choice, device = members[0].choice, members[0].columns[0].device
        if choice is WHOLE:
            return MatrixBatch(self.options, members, symbolic=self._symbolic)
        if choice.tier == "loop":
            return LoopBatch(self.options, members, symbolic=self._symbolic)
        if uses_triton(choice, device):
            try:
                return DeviceBatch(self.options, members)
            except (NotTraceable, TritonError) as error:  # the device cannot compute the coefficients
                for m in members:
                    m.on_device = False
                    if self.options.h.capturable:
                        m.choice = Choice("loop", f"capturable=True, and {error}")
                return self._batch(members)
        return {"fused": CpuBatch, "foreach": ForeachBatch, "native": NativeBatch}[choice.tier](self.options, members)

    @property
    def is_current(self) -> bool:
        """Return whether no state was added or replaced since the batches were built."""
        return self._clock == self.state.clock[0]

    def fits(self, options: Options, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> bool:
        """Return whether the batches fit this step too; if so, they are ready to run."""
        if not self.is_current or len(params) != len(self.params) or options.kind != self.options.kind:
            return False
        if self._outside and any((params[i].grad if grads is None else grads[i]) is not None for i in self._outside):
            return False
        for batch, positions in self.batches:
            batch_params = params if self._whole else [params[i] for i in positions]
            batch_grads = grads if self._whole or grads is None else [grads[i] for i in positions]
            try:
                ready = batch.read(batch_params, batch_grads) and batch.prepare(options)
            except (ArithmeticError, ValueError, RuntimeError):
                ready = False  # perhaps a parameter without a gradient has an invalid counter; rebuild to find out
            if not ready:
                self.release()
                return False
        return True

    def takes(self, transforms: GradTransforms) -> bool:
        """Return whether :meth:`run` can apply these transforms in the same pass."""
        return all(batch.takes(transforms) for batch, _ in self.batches)

    def commit(self) -> None:
        """Store the state that was created."""
        for p, entry in self._restored:
            self.state[p] = entry
        for p, key, value in self._created:
            if self.options.marks and not self.options.symbolic:
                mark_before_first_step(value)  # the device may still skip the step
            self.state[p][key] = value
        self._restored, self._created = [], []

    def settle(self) -> None:
        """Call this when all state of the step is stored, so that later changes of the state are noticed."""
        self._clock = self.state.clock[0]

    def run(self, options: Options, transforms: GradTransforms) -> None:
        """Change the parameters and their state."""
        for batch, _ in self.batches:
            batch.run(options, transforms, self.state)

    def release(self) -> None:
        """Drop references to gradients: the step is done, or does not happen."""
        for batch, _ in self.batches:
            batch.release()


def check_gradients(
    options: Options, params: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """The parameters that have a gradient, with their gradients. Raises if a gradient does not fit."""
    pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    for p, g in pairs:
        check_gradient(options.rule, options.h, p, g)
        if options.h.capturable and p.device.type not in _CAPTURABLE:
            raise CaptureError(
                f"If capturable=True, params and state_steps must be on supported devices: {list(_CAPTURABLE)}, "
                f"but one is on {p.device}; leave capturable out"
            )
    return pairs
