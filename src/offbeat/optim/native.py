"""What an optimizer remembers between steps that torch's own fused operator runs: lists of tensors, ready to hand over.

Counters stay on the device: nothing here asks it for a number, so a step does not wait for the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat.optim.extras import NOTHING, Extras
from offbeat.optim.scalars import Scalars
from offbeat.optim.settings import Settings, kernel_shape
from offbeat.optim.state import State
from offbeat.optim.update import Update
from offbeat.rules.rule import Rule, Values
from offbeat.tiers.addresses import AddressBook, unwrap

__all__ = ["NativePlan", "NativeUpdate", "make_native_plan"]


class NativePlan:
    """The tensors of parameters that have begun, all on one device and of one dtype."""

    def __init__(self, rule: Rule, params: Sequence[Tensor], state: State, update: Update) -> None:
        members = update.members
        self.rule = rule
        self.params = list(params)
        self.state = state
        self.clock = state.clock[0]
        self.shape = kernel_shape(rule, update.h)
        self.distributed = members[0].distributed
        self.shards = [m.columns[0] for m in members]
        self.columns = {key: [m.columns[2 + i] for m in members] for i, key in enumerate(update.tensor_keys)}
        self.counters = {key: Scalars([m.scalars[i] for m in members]) for i, key in enumerate(update.scalar_keys)}
        counters = [counter.tensors for counter in self.counters.values()]
        self.book = AddressBook([self.shards, *self.columns.values()], counters)

    def prepare(
        self, settings: Settings, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None, state: State
    ) -> NativeUpdate | None:
        """The step for these gradients (None: those in ``.grad``), or None if the plan does not fit any more."""
        if self.state is not state or self.clock != state.clock[0] or len(params) != len(self.params):
            return None
        if self.shape != settings.shape or not all(map(is_, params, self.params)):
            return None
        given = [p.grad for p in params] if grads is None else list(grads)
        if self.distributed:
            unwrapped = unwrap(params, given)
            if unwrapped is None or not all(map(is_, unwrapped[0], self.shards)):
                return None
            given = unwrapped[1]
        # The addresses are not needed, but that all tensors are what they were is.
        if self.book.read(self.shards, given) != len(self.shards):
            return None
        return NativeUpdate(self, settings.h, given)


class NativeUpdate:
    """A step by a :class:`NativePlan`."""

    def __init__(self, plan: NativePlan, h: Values, grads: list[Any]) -> None:
        self.plan, self.h, self.grads = plan, h, grads

    def commit(self) -> None:
        """There is no new state."""

    def takes(self, extras: Extras) -> bool:
        """Whether :meth:`run` can do this in the same pass."""
        return not extras

    def run(self, extras: Extras = NOTHING) -> None:
        """Change the parameters and their state."""
        plan = self.plan
        for counter in plan.counters.values():
            counter.count(None)
        state: dict[str, list[Tensor]] = {**plan.columns, **{k: c.tensors for k, c in plan.counters.items()}}
        assert plan.rule.native is not None
        plan.rule.native(self.h, 2, plan.shards, self.grads, state)
        if plan.distributed:
            increment_version(plan.params)


def make_native_plan(rule: Rule, params: Sequence[Tensor], state: State, update: Update) -> NativePlan | None:
    """A plan for the steps of these parameters after ``update``, if torch's operator took all of them in one call."""
    members = update.members
    if len(members) != len(params) or any(m.choice.tier != "native" or not m.simple for m in members):
        return None
    if any(m.param is not p for m, p in zip(members, params, strict=True)):
        return None
    if len({(m.distributed, m.columns[0].dtype, m.columns[0].device) for m in members}) > 1:
        return None
    if any(slot.late for slot in update.slots) or set(update.scalar_keys) - {"step"}:
        return None
    return NativePlan(rule, params, state, update)
