"""The entry point of the engine: updates of whole groups, or of some of their parameters.

A step builds batches for its parameters, or reuses the batches of an earlier step if they still fit, and runs them.
Everything is checked before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat._torch import is_traced
from offbeat.engine.agree import Difference, check_same
from offbeat.engine.build import Part, check_gradients
from offbeat.engine.choice import Choice, choose
from offbeat.engine.cpu.reader import why_no_reader
from offbeat.engine.grad_transforms import NO_TRANSFORMS, GradTransforms, Work, applied_by_hand, on_one_device
from offbeat.engine.matrix.matrices import WHOLE
from offbeat.engine.options import Options, OptionsCache, Sharing
from offbeat.engine.state import State
from offbeat.engine.tensors import local
from offbeat.rules.rule import Rule

#: The largest number of parameters in cached batches, as a multiple of the optimizer's parameters. Without a limit,
#: buckets with other parameters every time would accumulate.
PARTS = 5


class Engine:
    """Runs the updates of one optimizer, and caches batches from step to step."""

    def __init__(self, rule: Rule, sharing: Sharing | None = None) -> None:
        self._options = OptionsCache(rule, sharing)
        self._parts: dict[Any, Part] = {}  # by Work.key
        self._groups: Sequence[dict[str, Any]] = ()  # those of the present step

    def run(
        self,
        work: Sequence[Work],
        state: State,
        transforms: GradTransforms,
        groups: Sequence[dict[str, Any]],
        *,
        differentiable: bool,
    ) -> None:
        """Update some parameters. All of ``work`` is checked before any of it runs.

        Args:
            groups: all groups of the optimizer; cached batches of other groups are dropped.
        """
        self._groups = groups
        if transforms is NO_TRANSFORMS and not is_traced():
            jobs: list[tuple[Part, Options]] = []
            for item in work:
                try:
                    job = self._find(item, state)
                except BaseException:  # its coefficients cannot be computed
                    for part, _ in jobs:
                        part.release()
                    raise
                if job is None:
                    break
                jobs.append(job)
            else:
                if self._options.rule.matrix is not None:
                    self._agree(jobs, work)
                for part, options in jobs:
                    part.run(options, transforms)
                return
        with torch.set_grad_enabled(differentiable):
            if self._run(work, state, transforms):
                self._forget(groups, state)

    def _find(self, item: Work, state: State) -> tuple[Part, Options] | None:
        """The batches of an earlier step, ready to run; None if they do not fit this step."""
        part, options = self._parts.get(item.key), self._options.of(item.group)
        if part is None or part.state is not state or not part.fits(options, item.params, item.grads):
            return None
        return part, options

    def check(self, work: Sequence[Work], state: State) -> None:
        """Raise if a gradient does not fit its parameter or the rule. Changes nothing."""
        for item in work:
            if not is_traced() and (cached := self._find(item, state)) is not None:
                cached[0].release()
            else:
                check_gradients(self._options.of(item.group), item.params, item.gradients)

    def _agree(self, jobs: Sequence[tuple[Part, Options]], work: Sequence[Work]) -> None:
        """Raise, on every rank alike, unless the ranks that share work are about to do the same."""
        numbers = [next((i for i, group in enumerate(self._groups) if group is item.group), -1) for item in work]
        shared: dict[Any, list[tuple[Options, Any]]] = {}
        devices: dict[Any, torch.device] = {}
        batches = [(batch, options) for part, options in jobs for batch, _ in part.batches]
        for (part, options), number in zip(jobs, numbers, strict=True):
            for batch, places in part.batches:
                for group, shared_jobs in batch.shared(options).items():
                    # By their places in the group, which do not depend on what has had gradients before.
                    what = (number, [(places[job.at], tuple(job.shape), job.kind) for job in shared_jobs])
                    shared.setdefault(group, []).append((options, what))
                    devices.setdefault(group, batch.shards[0].device)
        if not shared:
            return
        try:
            for group, shared_jobs in shared.items():
                values: dict[str, Any] = {"gradients": [what for _, what in shared_jobs]}
                for name in shared_jobs[0][0].words:
                    values[name] = ", ".join(options.words[name] for options, _ in shared_jobs)
                check_same(values, group, devices[group], _different_work)
            for batch, options in batches:
                batch.check_copies(options)
        except BaseException:
            for part, _ in jobs:
                part.release()
            raise

    def _run(self, work: Sequence[Work], state: State, transforms: GradTransforms) -> bool:
        """Like :meth:`run`; returns whether new batches were built."""
        work = [item for item in work if item.has_gradients]
        again: list[Work] = []
        jobs: list[tuple[Part, Options]] = []
        built = False
        try:
            jobs += (self._prepare(item, state, again) for item in work)
            at_hand = on_one_device(transforms, work) if transforms else NO_TRANSFORMS
            takes = not again and at_hand is not None and all(part.takes(at_hand) for part, _ in jobs)
            if not transforms or takes:
                if self._options.rule.matrix is not None:
                    self._agree(jobs, work)
                for part, _ in jobs:
                    part.commit()
                for part, _ in jobs:
                    part.settle()
                for (part, options), item in zip(jobs, work, strict=True):
                    part.run(options, at_hand or NO_TRANSFORMS)
                    if self._parts.get(item.key) is not part:
                        built = True
                        self._parts.pop(item.key, None)
                        if part.keeps and len(part.params) == len(item.params):
                            self._parts[item.key] = part
                if at_hand and at_hand.changes_gradients:
                    increment_version([g for item in work for g in item.gradients if g is not None])
        finally:
            for part, _ in jobs:
                part.release()
        if transforms and not takes:
            with applied_by_hand(transforms, work) as changed:
                return changed is not None and self._run(changed, state, NO_TRANSFORMS)
        for item in again:
            self._run([item], state, NO_TRANSFORMS)
        return built

    def _prepare(self, item: Work, state: State, again: list[Work]) -> tuple[Part, Options]:
        """Batches for this work, ready to run. Repeated parameters are added to ``again``, to be updated afterwards."""
        if not is_traced() and (cached := self._find(item, state)) is not None:
            return cached
        options = self._options.of(item.group)
        params, grads = item.params, item.gradients
        if len(set(map(id, params))) < len(params):
            (params, grads), *others = _layers(params, grads)
            for layer in others:
                check_gradients(options, *layer)
                again.append(Work(item.group, *layer))
        return Part(options, params, grads, state), options

    def _forget(self, groups: Sequence[dict[str, Any]], state: State) -> None:
        """Drop batches of groups and parameters that were removed, and the oldest batches if there are too many."""
        here = {id(group) for group in groups} | {id(p) for group in groups for p in group["params"]}
        left = PARTS * sum(len(group["params"]) for group in groups)
        kept = []
        for key, part in reversed(self._parts.items()):
            left -= len(part.params)
            if left >= 0 and part.state is state and here.issuperset(key):
                kept.append((key, part))
        self._parts = dict(reversed(kept))

    def clips_exactly(self, params: Sequence[Tensor]) -> bool:
        """Return whether the batches of these parameters clip in the same pass, with the bits of a separate pass."""
        part = self._parts.get(tuple(map(id, params)))
        return part is not None and all(batch.clips_exactly for batch, _ in part.batches)

    def choices(self, group: dict[str, Any], state: State) -> list[Choice]:
        """The tiers of a group's parameters: those of the last step, or those that a step would choose now."""
        options = self._options.of(group)
        part = self._parts.get(Work(group, group["params"], None).key)
        decided = part.choices if part is not None and part.options.kind == options.kind else {}
        choices = [decided.get(id(p)) or _would_choose(options, p, state) for p in group["params"]]
        slow = why_no_reader()
        return [
            choice._replace(reason=f"{choice.reason}; addresses are read in Python: {slow}")
            if slow and choice.tier == "fused"
            else choice
            for choice in dict.fromkeys(choices)
        ]


def _would_choose(options: Options, p: Tensor, state: State) -> Choice:
    if options.rule.matrix is not None:
        return WHOLE
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


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def _layers(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[tuple[list[Tensor], list[Tensor | None]]]:
    """The same as lists without repeats: torch.optim updates a parameter that is in a group twice two times."""
    layers: list[tuple[list[Tensor], list[Tensor | None]]] = []
    seen: dict[int, int] = {}
    for p, g in zip(params, grads, strict=True):
        depth = seen[id(p)] = seen.get(id(p), -1) + 1
        if depth == len(layers):
            layers.append(([], []))
        layers[depth][0].append(p)
        layers[depth][1].append(g)
    return layers


def _different_work(difference: Difference) -> Exception:
    if difference.name == "gradients":
        return RuntimeError(
            "the ranks have gradients for different matrices in this step, and each matrix needs all ranks; make sure "
            "that all ranks use the same parameters, or fill in zeros for gradients that are missing"
        )
    return RuntimeError(
        f"the ranks have different values of the option {difference.name!r} ({difference}), so that their parameters "
        "would drift apart; set it to the same value in the param groups of every rank. No rank has changed anything"
    )
