"""Batches of rules that need whole matrices: stacks of equally shaped parameters, in bounded memory.

A step goes chunk by chunk. For each, the elementwise part before the matrices writes a stack ``x``, the rule's
transform works on it, and the elementwise part after them updates the parameters from the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat._torch import foreach_copy_
from offbeat.engine.addresses import AddressBook
from offbeat.engine.agree import check_agreement, check_same_gradients
from offbeat.engine.batch import TensorBatch
from offbeat.engine.choice import Choice
from offbeat.engine.elementwise import stages
from offbeat.engine.exchange import Cut, Job, Steps, cut_of, run_copies, run_shards
from offbeat.engine.extras import Extras
from offbeat.engine.member import Member
from offbeat.engine.options import Options, Sharing
from offbeat.engine.scalars import tensor_numbers
from offbeat.engine.state import State
from offbeat.engine.tensors import compute_dtype, has_storage, is_dense, is_plain, match_layout, same_layout
from offbeat.rules.rule import Matrix, Values

__all__ = ["WHOLE", "MatrixBatch"]

#: Bytes of the stacks of one chunk: on the CPU what a cache holds, elsewhere enough to keep the device busy. A single
#: parameter may need more.
CHUNK_BYTES = {"cpu": 4 << 20}
OTHERS = 256 << 20

WHOLE = Choice("matrix", "whole matrices, stacked by shape")


class MatrixBatch(TensorBatch):
    """Parameters of one device and dtype under a rule that needs whole matrices."""

    def __init__(self, options: Options, members: Sequence[Member], *, symbolic: bool) -> None:
        self._symbolic, self._keys = symbolic, members[0].keys
        self._members = members if symbolic else ()
        shaped = {slot.key for slot in options.slots if slot.shape is not None}
        self._like = [i for i, key in enumerate(self._keys) if key not in shaped]
        self._odd = [i for i, key in enumerate(self._keys) if key in shaped]
        self._launches: dict[Any, Any] = {}
        super().__init__(options, members)
        self.keeps = not symbolic and all(map(self._can_stay, members))

    def _can_stay(self, m: Member) -> bool:
        """Whether a member's tensors can be recognised at the next step by asking where they lie."""
        p, like = m.columns[0], [m.columns[1], *(m.columns[2 + i] for i in self._like)]
        if not m.simple or not all(is_plain(t) and has_storage(t) for t in m.columns):
            return False
        return is_dense(p) and all(is_dense(t) and same_layout(t, p) for t in like)

    def _set_up(self, options: Options) -> None:
        if self._symbolic:
            return
        pinned = [*(column.tensors for column in self.scalars), *(self.columns[i] for i in self._odd)]
        like = [self.columns[i] for i in self._like]
        self.book = AddressBook([self.shards, *like], pinned, self.params if self.distributed else None)

    def prepare(self, options: Options) -> bool:
        """Work out the numbers of the step; raises if they make no sense."""
        if not self._symbolic:
            return super().prepare(options)
        if options.sharing is not None and options.sharing.owners is not None:
            raise RuntimeError(
                "a step whose gradients are reduced to the owners of matrices cannot be traced: other ranks take part"
            )
        options.sample_coefficients()
        return True

    @torch.no_grad()
    def _run(self, options: Options, extras: Extras, state: State, active: Any) -> None:
        if self._symbolic:
            for i, member in enumerate(self._members):
                self._run_chunk(options, [i], self._symbolic_numbers(options, member))
        else:
            for chunk in self._chunks(options, self._run_with_others(options, active)):
                self._run_chunk(options, chunk, self.sets.of(chunk[0]))
            self.sets.store(options.scalar_keys, self.scalars, active)
        self._tell_autograd(active)

    def _run_with_others(self, options: Options, active: list[int]) -> list[int]:
        """Run those that several ranks share, and return the others."""
        matrix = options.rule.matrix
        assert matrix is not None
        alone, jobs = [], []
        for i in active:
            cut = _cut(matrix, self.params[i]) if self.distributed else None
            if cut is None and (self.distributed or options.sharing is None):
                alone.append(i)
            else:
                shape = tuple(self.shards[i].shape) if cut is None else cut.shape
                jobs.append(Job(i, shape, self.sets.number(i), cut))
        if not jobs:
            return alone
        steps = self._steps(options)
        if not self.distributed:
            assert options.sharing is not None
            self._run_copies(jobs, steps, options.sharing)
            return alone
        by_group: dict[Any, list[Job]] = {}
        for job in jobs:
            assert job.cut is not None
            by_group.setdefault(job.cut.group, []).append(job)
        for group, mine in by_group.items():
            check_agreement(mine, group, steps.device)
        for mine in by_group.values():
            run_shards(mine, steps)
        return alone

    def _run_copies(self, jobs: list[Job], steps: Steps, sharing: Sharing) -> None:
        check_agreement(jobs, sharing.group, steps.device)
        if sharing.owners is None:
            check_same_gradients([g for job in jobs if (g := self._gradients[job.at]) is not None], sharing.group)
            run_copies(jobs, steps, sharing.group)
        else:
            owners = [sharing.owners.of(self.params[job.at]) for job in jobs]
            sharing.owners.stale = True
            run_copies(jobs, steps, sharing.group, owners)

    def _steps(self, options: Options) -> Steps:
        """What is done with jobs that several ranks share."""
        matrix, sets = options.rule.matrix, self.sets
        assert matrix is not None

        def scalars(jobs: list[Job]) -> dict[str, Any]:
            return {**sets.of(jobs[0].at), **matrix.scales(options.on_host(), jobs[0].shape)}

        def before(jobs: list[Job], parts: list[Tensor]) -> None:
            self._before(options, [job.at for job in jobs], scalars(jobs), parts)

        def state(jobs: list[Job]) -> list[Tensor]:
            stage, _ = stages(options.rule)
            keys = stage.keys(self._keys) if stage is not None else ()
            return [self.columns[self._keys.index(key)][job.at] for key in keys for job in jobs]

        def transform(jobs: list[Job], x: Tensor) -> Tensor:
            result: Tensor = matrix.transform(x, self._about(options, scalars(jobs), []))[0]
            return result

        def after(jobs: list[Job], parts: list[Tensor]) -> None:
            self._after(options, [job.at for job in jobs], scalars(jobs), parts)

        dtype = _dtype_of_x(matrix, options, self.shards[:1])
        exact = options.sharing is None or options.sharing.exact
        wire = dtype if exact or dtype.itemsize < 2 else min(dtype, torch.bfloat16, key=lambda d: d.itemsize)
        return Steps(before, state, transform, after, dtype, wire, self.shards[0].device)

    def _chunks(self, options: Options, active: Sequence[int]) -> list[list[int]]:
        """Positions of parameters of equal shape, layout and coefficients, few enough for the bound of memory."""
        assert options.rule.matrix is not None
        alike: dict[Any, list[int]] = {}
        for i in active:
            p = self.shards[i]
            key = (p.shape, p.stride(), self.sets.number(i))
            alike.setdefault(key, []).append(i)
        found = []
        for some in alike.values():
            p = self.shards[some[0]]
            width = _dtype_of_x(options.rule.matrix, options, [p]).itemsize
            limit = CHUNK_BYTES.get(p.device.type, OTHERS)
            size = max(1, limit // max(1, p.numel() * width * options.rule.matrix.copies))
            # Chunks of equal size, so that one finds the launches and the memory of the one before it.
            count = -(-len(some) // size)
            size = -(-len(some) // count)
            found += [some[k : k + size] for k in range(0, len(some), size)]
        return found

    def _run_chunk(self, options: Options, chunk: list[int], numbers: Mapping[str, Any]) -> None:
        matrix = options.rule.matrix
        assert matrix is not None
        params = [self.shards[i] for i in chunk]
        h = options.h if self._symbolic else options.on_host()
        scalars = {**numbers, **matrix.scales(h, tuple(params[0].shape))}
        if matrix.before is not None:
            x = _stack_like(params[0], len(chunk), _dtype_of_x(matrix, options, self._inputs(chunk[0])))
            self._before(options, chunk, scalars, list(x.unbind()))
        else:
            gradients: list[Any] = [self._gradients[i] for i in chunk]
            x = gradients[0].unsqueeze(0) if len(chunk) == 1 else torch.stack(gradients)
            x = x.to(compute_dtype([params[0].dtype, gradients[0].dtype]))
        odd = {self._keys[i]: [self.columns[i][k] for k in chunk] for i in self._odd}
        stacks = {key: torch.stack(tensors).to(x.dtype) for key, tensors in odd.items()}
        result, *new = matrix.transform(x, self._about(options, scalars, params), **stacks)
        del x
        for tensors, stack in zip(odd.values(), new, strict=True):
            foreach_copy_(tensors, list(stack.unbind()))
        self._after(options, chunk, scalars, list(result.unbind()))

    def _about(self, options: Options, scalars: Mapping[str, Any], params: list[Tensor]) -> Values:
        c = Values(**scalars, **options.structure)
        return Values(h=options.h, c=c, params=params, dtype=self.shards[0].dtype)

    def _inputs(self, i: int) -> list[Any]:
        """The gradient and the state that the part before the matrices reads."""
        return [self._gradients[i], *(self.columns[k][i] for k in self._like)]

    def _before(self, options: Options, chunk: list[int], scalars: Mapping[str, Any], parts: list[Tensor]) -> None:
        """Write ``x`` of these parameters into ``parts``."""
        stage, _ = stages(options.rule)
        if stage is None:
            foreach_copy_(parts, [self._gradients[i] for i in chunk])
            return
        gradients = [_laid_out(self._gradients[i], self.shards[i]) for i in chunk]
        keys = stage.keys(self._keys)
        state = [[self.columns[self._keys.index(key)][i] for i in chunk] for key in keys]
        stage.run(options, keys, [parts, gradients, *state], scalars, self._launches)

    def _after(self, options: Options, chunk: list[int], scalars: Mapping[str, Any], parts: list[Tensor]) -> None:
        """Update these parameters from the results of the transform."""
        _, stage = stages(options.rule)
        params = [self.shards[i] for i in chunk]
        keys = stage.keys(self._keys)
        state = [[self.columns[self._keys.index(key)][i] for i in chunk] for key in keys]
        results = [_laid_out(result, p) for result, p in zip(parts, params, strict=True)]
        stage.run(options, keys, [params, results, *state], scalars, self._launches)

    def _symbolic_numbers(self, options: Options, member: Member) -> dict[str, Any]:
        """Coefficients that are 0-d tensors; the stored scalars are written at once."""
        stored = dict(zip(options.scalar_keys, member.scalars, strict=True))
        before = {key: t.clone() for key, t in stored.items()}
        device = next(iter(stored.values()), member.columns[0]).device
        numbers = tensor_numbers(options.rule, options.h, options.slots, before, device, first=member.first)
        for key, value in numbers.stored.items():
            stored[key].copy_(value)
        return numbers.coefficients


def _dtype_of_x(matrix: Matrix, options: Options, tensors: Sequence[Tensor]) -> torch.dtype:
    found: torch.dtype | None = matrix.dtype(options.h)
    return found or compute_dtype(t.dtype for t in tensors)


def _laid_out(t: Any, p: Tensor) -> Tensor:
    return match_layout(t, p) if is_dense(p) else t


def _cut(matrix: Matrix, p: Any) -> Cut | None:
    """How this parameter's matrices are cut; None if this rank has whole ones."""
    cut = cut_of(p)
    return None if cut is None or (matrix.cut and cut.dim < p.dim() - 2) else cut


def _stack_like(p: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """A stack of ``n`` tensors laid out like ``p``, without values."""
    if not is_dense(p) or p.is_contiguous():
        return torch.empty((n, *p.shape), dtype=dtype, device=p.device)
    return torch.empty_strided((n, *p.shape), (p.numel(), *p.stride()), dtype=dtype, device=p.device)
