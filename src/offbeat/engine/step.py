"""The way into the engine: one optimizer's updates, of whole groups or of parts of them.

A step builds batches for its parameters, or finds the batches of an earlier step that still fit, and runs them. All
of a step is checked before any of it is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat._torch import is_traced
from offbeat.engine.build import Part, check_gradients
from offbeat.engine.choice import Choice, choose
from offbeat.engine.extras import NOTHING, Extras, Work, by_hand, fitting, gradients_of
from offbeat.engine.options import Options, OptionsCache
from offbeat.engine.reader import why_no_reader
from offbeat.engine.state import State
from offbeat.engine.tensors import local
from offbeat.rules.rule import Rule

__all__ = ["Engine"]

#: How many parameters the kept parts of groups may have, in multiples of the optimizer's parameters. Buckets that are
#: cut differently every time would add up.
PARTS = 4


class Engine:
    """Runs the updates of one optimizer, and keeps batches from step to step."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._options = OptionsCache(rule)
        self._groups: dict[int, Part] = {}
        self._parts: dict[tuple[int, ...], Part] = {}

    def run(
        self,
        work: Sequence[Work],
        state: State,
        extras: Extras,
        groups: Sequence[dict[str, Any]],
        *,
        differentiable: bool,
    ) -> None:
        """Update some parameters: all of ``work`` is checked before any of it is run.

        Args:
            work: groups, parameters of them, and their gradients.
            groups: all groups of the optimizer; batches of others are dropped.
        """
        if extras is NOTHING and not is_traced():
            known = [self._find(*item, state) for item in work]
            if all(job is not None for job in known):
                for job in known:
                    assert job is not None
                    job[0].run(job[1], extras)
                return
        with torch.set_grad_enabled(differentiable):
            self._run(work, state, extras)
        self._forget(groups, state)

    def _find(
        self, group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor | None] | None, state: State
    ) -> tuple[Part, Options] | None:
        """The batches of an earlier step, if they fit; they are then ready to run."""
        part, options = self._known(group, params), self._options.of(group)
        if part is None or part.state is not state or not part.fits(options, params, grads):
            return None
        return part, options

    def _known(self, group: dict[str, Any], params: Sequence[Tensor]) -> Part | None:
        if params is group["params"]:
            return self._groups.get(id(group))
        return self._parts.get(tuple(map(id, params)))

    def _run(self, work: Sequence[Work], state: State, extras: Extras) -> None:
        work = [item for item in work if _has_gradients(*item)]
        again: list[Work] = []
        jobs: list[tuple[Part, Options]] = []
        try:
            jobs += (self._prepare(item, state, again) for item in work)
            at_hand = fitting(extras, work) if extras else NOTHING
            takes = not again and at_hand is not None and all(part.takes(at_hand) for part, _ in jobs)
            if not extras or takes:
                for part, _ in jobs:
                    part.commit()
                for part, _ in jobs:
                    part.settle()
                for (part, options), (group, params, _) in zip(jobs, work, strict=True):
                    part.run(options, at_hand or NOTHING)
                    self._remember(group, params, part)
                if at_hand and at_hand.changes_gradients:
                    increment_version([g for some in gradients_of(work) for g in some if g is not None])
        finally:
            for part, _ in jobs:
                part.release()
        if extras and not takes:
            with by_hand(extras, work) as changed:
                if changed is not None:
                    self._run(changed, state, NOTHING)
            return
        for item in again:
            self._run([item], state, NOTHING)

    def _prepare(self, item: Work, state: State, again: list[Work]) -> tuple[Part, Options]:
        """Batches for this work that are ready to run; work that must wait until it is done goes to ``again``."""
        group, params, grads = item
        if not is_traced() and (found := self._find(group, params, grads, state)) is not None:
            return found
        options = self._options.of(group)
        given = [p.grad for p in params] if grads is None else grads
        if len(set(map(id, params))) < len(params):
            layers = _layers(params, given)
            for layer in layers[1:]:
                check_gradients(options, *layer)
            params, given = layers[0]
            again.extend((group, *layer) for layer in layers[1:])
        return Part(options, params, given, state), options

    def _remember(self, group: dict[str, Any], params: Sequence[Tensor], part: Part) -> None:
        """Keep batches for the next step of this group or part."""
        known: dict[Any, Part] = self._groups if params is group["params"] else self._parts
        key = id(group) if params is group["params"] else tuple(map(id, params))
        known.pop(key, None)
        if part.keeps and len(part.params) == len(params):
            known[key] = part

    def _forget(self, groups: Sequence[dict[str, Any]], state: State) -> None:
        """Drop the batches of groups and of state that the optimizer does not have any more, and the oldest parts."""
        here = {id(group) for group in groups}
        self._groups = {key: part for key, part in self._groups.items() if key in here and part.state is state}
        allowed = PARTS * sum(len(group["params"]) for group in groups)
        members = sum(map(len, self._parts))
        for key, part in list(self._parts.items()):
            if members > allowed or part.state is not state:
                del self._parts[key]
                members -= len(key)  # one id for each parameter
        if len(self._parts) > 1 and not all(part.is_current for part in self._parts.values()):
            everyone = {id(p) for group in groups for p in group["params"]}
            self._parts = {key: part for key, part in self._parts.items() if everyone.issuperset(key)}

    def clips_exactly(self, params: Sequence[Tensor]) -> bool:
        """Whether these parameters have batches that clip in the same pass, with the bits of a separate pass."""
        part = self._parts.get(tuple(map(id, params)))
        return part is not None and all(batch.clips_exactly for batch, _ in part.batches)

    def choices(self, group: dict[str, Any], state: State) -> list[Choice]:
        """The tiers of a group's parameters: as decided at the last step, or as they would be decided now."""
        options = self._options.of(group)
        part = self._groups.get(id(group))
        decided = part.choices if part is not None and part.options.kind == options.kind else {}
        found = [decided.get(id(p)) or self._would_choose(options, p, state) for p in group["params"]]
        slow = why_no_reader()
        return [
            choice._replace(reason=f"{choice.reason}; addresses are read in Python: {slow}")
            if slow and choice.tier == "fused"
            else choice
            for choice in dict.fromkeys(found)
        ]

    def _would_choose(self, options: Options, p: Tensor, state: State) -> Choice:
        like = _real(local(p).detach())
        entry = state.get(p) or {}
        tensors = [like, like]
        for slot in options.slots:
            if slot.key in options.tensor_keys:
                there = entry.get(slot.key)
                missing = like if slot.dtype is None else torch.empty_like(like, dtype=slot.dtype)
                tensors.append(_real(local(there)) if isinstance(there, Tensor) else missing)
        try:
            return choose(options, tensors)
        except RuntimeError as error:
            return Choice("none", str(error))


def _has_gradients(group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> bool:
    return any(p.grad is not None for p in params) if grads is None else any(g is not None for g in grads)


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def _layers(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[tuple[list[Tensor], list[Tensor | None]]]:
    """Lists without repeats: torch.optim updates a parameter that is in a group twice two times in a row."""
    layers: list[tuple[list[Tensor], list[Tensor | None]]] = []
    seen: dict[int, int] = {}
    for p, g in zip(params, grads, strict=True):
        depth = seen[id(p)] = seen.get(id(p), -1) + 1
        if depth == len(layers):
            layers.append(([], []))
        layers[depth][0].append(p)
        layers[depth][1].append(g)
    return layers
