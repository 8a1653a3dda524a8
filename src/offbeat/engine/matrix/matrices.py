"""Batches of rules that need whole matrices: stacks of equally shaped parameters, in bounded memory.

A step goes chunk by chunk. For each, the elementwise part before the matrices writes a stack ``x``, the rule's
transform works on it, and the elementwise part after them updates the parameters from the result.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat._torch import foreach_copy_
from offbeat.engine.addresses import AddressBook
from offbeat.engine.agree import check_same_bits
from offbeat.engine.batch import UnrecordedBatch
from offbeat.engine.choice import Choice
from offbeat.engine.cuda.products import products_for
from offbeat.engine.grad_transforms import GradTransforms
from offbeat.engine.matrix import shared
from offbeat.engine.matrix.chunks import Chunk, Kernels
from offbeat.engine.matrix.pieces import Task, run_pieces, run_whole
from offbeat.engine.matrix.shared import Cut, Job, Steps, alike, cut_of, run_copies, run_shards
from offbeat.engine.matrix.stages import stages
from offbeat.engine.member import Member
from offbeat.engine.options import Options
from offbeat.engine.scalars import tensor_numbers
from offbeat.engine.state import State
from offbeat.engine.tensors import compute_dtype, has_storage, is_dense, is_plain, match_layout, same_layout
from offbeat.rules.products import Products
from offbeat.rules.rule import Matrix, Values

__all__ = ["WHOLE", "MatrixBatch"]

#: Bytes of the stacks of one chunk: on the CPU what a cache holds, elsewhere enough to keep the device busy. A single
#: parameter may need more.
CHUNK_BYTES = {"cpu": 4 << 20}
OTHERS = 448 << 20

WHOLE = Choice("matrix", "whole matrices, stacked by shape")


class MatrixBatch(UnrecordedBatch):
    """Parameters of one device and dtype under a rule that needs whole matrices."""

    def __init__(self, options: Options, members: Sequence[Member], *, symbolic: bool) -> None:
        self._symbolic, self._keys = symbolic, members[0].keys
        self._members = members if symbolic else ()
        shaped = {slot.key for slot in options.slots if slot.shape is not None}
        self._like = [i for i, key in enumerate(self._keys) if key not in shaped]
        self._odd = [i for i, key in enumerate(self._keys) if key in shaped]
        self._launches: dict[Any, Any] = {}
        self._chunks: list[Chunk] = []
        self._chunks_for: tuple[Any, ...] = ()
        self._alone: list[int] | None = None  # parameters of this step that are run alone; None for all
        self._jobs: dict[Any, list[Job]] = {}  # and those that are shared
        self._places_known = False  # whether the book has been read for this step
        super().__init__(options, members)
        self.keeps = not symbolic and all(map(self._can_stay, members))

    def _can_stay(self, m: Member) -> bool:
        """Return whether a member's tensors can be recognised at the next step by their addresses."""
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
        """Compute the coefficients of the step; raises if they are invalid."""
        if not self._symbolic:
            return super().prepare(options)
        matrix = options.rule.matrix
        assert matrix is not None
        if self.distributed and any(_cut(matrix, p) is not None for p in self.params):
            raise RuntimeError("a step on matrices that are cut over ranks cannot be traced: other ranks take part")
        options.sample_coefficients()
        return True

    def read(self, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> bool:
        """Take the gradients of the next step (None: from ``.grad``); False if the batch does not fit any more."""
        self._places_known = super().read(params, grads)
        return self._places_known

    def _run(self, options: Options, transforms: GradTransforms, state: State, active: Any) -> None:
        if self._symbolic:
            for i, member in enumerate(self._members):
                chunk = self._chunk(options, [i])
                chunk.set_numbers(options, options.h, self._symbolic_numbers(options, member))
                self._run_chunk(options, chunk)
        else:
            by_address = False
            for chunk in self._cut_up(options, self._run_with_others(options, active)):
                by_address |= self._run_chunk(options, chunk)
            if by_address:
                self.book.bump(active)  # kernels write without autograd's knowledge
            self.sets.store(options.scalar_keys, self.scalars, active)
        self._tell_autograd(active)

    def shared(self, options: Options) -> dict[Any, list[Job]]:
        """Return, by process group, the parameters that several ranks share. The others are run alone."""
        matrix = options.rule.matrix
        jobs: dict[Any, list[Job]] = {}
        self._alone, self._jobs = None, jobs
        if self._symbolic or not self._count or not (self.distributed or options.sharing is not None):
            return jobs
        assert matrix is not None
        self._alone = []
        for i in self._active() or ():
            cut = _cut(matrix, self.params[i]) if self.distributed else None
            if cut is not None:
                job = Job(i, cut.shape, self.sets.number(i), cut)
                jobs.setdefault(cut.group, []).append(job)
            elif not self.distributed and options.sharing is not None:
                job = Job(i, tuple(self.shards[i].shape), self.sets.number(i))
                jobs.setdefault(options.sharing.group, []).append(job)
            else:
                self._alone.append(i)
        return jobs

    def _run_with_others(self, options: Options, active: list[int]) -> list[int]:
        """Run those that several ranks share, and return the others."""
        matrix = options.rule.matrix
        assert matrix is not None
        for group, jobs in self._jobs.items():
            if not self.distributed:
                assert options.sharing is not None
                run_copies(jobs, self._steps(options), options.sharing.group)
            elif matrix.pieces:
                run_pieces(self._tasks(options, jobs), group)
            else:
                run_shards(jobs, self._steps(options))
        return active if self._alone is None else self._alone

    def check_copies(self, options: Options) -> None:
        """Raise, on every rank alike, unless the ranks that share matrices have the same gradients for them."""
        sharing = options.sharing
        if sharing is not None and not self.distributed and not self._symbolic:
            gradients = [g for g in self._gradients if g is not None]
            if gradients:
                check_same_bits(gradients, sharing.group, _different_gradients)

    def _tasks(self, options: Options, jobs: list[Job]) -> list[list[Task]]:
        """Rounds of parameters of which this rank transforms its piece; the same on every rank."""
        matrix = options.rule.matrix
        assert matrix is not None
        limit, width = CHUNK_BYTES.get(self.shards[0].device.type, OTHERS), compute_dtype(self.dtypes[:2]).itemsize
        rounds: list[list[Task]] = [[]]
        room = shared.ROUND_BYTES
        for jobs_alike in alike(jobs):
            cut = jobs_alike[0].cut
            assert cut is not None
            needed = max(1, torch.Size(cut.shape_on(0)).numel() * width * matrix.copies)  # rank 0 has the largest piece
            size = max(1, limit // needed)
            for k in range(0, len(jobs_alike), size):
                piece = jobs_alike[k : k + size]
                if rounds[-1] and needed * len(piece) > room:
                    rounds.append([])
                    room = shared.ROUND_BYTES
                room -= needed * len(piece)
                rounds[-1].append(self._task(options, [job.at for job in piece], cut))
        return rounds

    def _task(self, options: Options, at: list[int], cut: Cut) -> Task:
        chunk = self._chunk(options, at, cut.shape)
        chunk.set_numbers(options, options.on_host(), self.sets.of(at[0]))
        begin = functools.partial(self._transform, options, chunk, None)
        return Task(begin, functools.partial(self._finish, options, chunk), cut.dim - len(cut.shape))

    def _steps(self, options: Options) -> Steps:
        """Make the functions that work on jobs that several ranks share."""
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
            result: Tensor = matrix.transform(x, self._about(options, scalars(jobs), jobs[0].shape))[0]
            return result

        def after(jobs: list[Job], parts: list[Tensor]) -> None:
            self._after(options, [job.at for job in jobs], scalars(jobs), parts)

        dtype = _dtype_of_x(matrix, options, self.shards[:1])
        exact = options.sharing is None or options.sharing.exact
        wire = dtype if exact or dtype.itemsize < 2 else min(dtype, torch.bfloat16, key=lambda d: d.itemsize)
        return Steps(before, state, transform, after, dtype, wire, self.shards[0].device)

    def _cut_up(self, options: Options, active: list[int]) -> list[Chunk]:
        """Divide parameters into chunks of equal shape, layout and coefficients that fit the memory bound.

        The chunks of the last step are taken again if they are the same. Shapes and layouts have not changed: the batch
        would not have fit.
        """
        matrix = options.rule.matrix
        assert matrix is not None
        limit = CHUNK_BYTES.get(self.shards[0].device.type, OTHERS)
        kind = active, self.sets.chosen, limit, matrix.dtype(options.h)
        if self._chunks_for != kind:
            self._chunks = [self._chunk(options, at) for at in self._positions(options, active, limit)]
            self._chunks_for = kind
        for chunk in self._chunks:
            numbers = self.sets.of(chunk.at[0])
            if not chunk.is_for(options, numbers):
                chunk.set_numbers(options, options.on_host(), numbers)
        return self._chunks

    def _positions(self, options: Options, active: Sequence[int], limit: int) -> list[list[int]]:
        assert options.rule.matrix is not None
        alike: dict[Any, list[int]] = {}
        for i in active:
            p = self.shards[i]
            key = (p.shape, p.stride(), self.sets.number(i))
            alike.setdefault(key, []).append(i)
        chunks = []
        for positions in alike.values():
            p = self.shards[positions[0]]
            width = _dtype_of_x(options.rule.matrix, options, [p]).itemsize
            size = max(1, limit // max(1, p.numel() * width * options.rule.matrix.copies))
            # Chunks of equal size, so that one finds the launches and the memory of the one before it.
            count = -(-len(positions) // size)
            size = -(-len(positions) // count)
            chunks += [positions[k : k + size] for k in range(0, len(positions), size)]
        return chunks

    def _chunk(self, options: Options, at: list[int], shape: tuple[int, ...] | None = None) -> Chunk:
        matrix = options.rule.matrix
        assert matrix is not None
        if matrix.before is None:
            dtype = compute_dtype(self.dtypes[:2])
        else:
            read = [self.dtypes[1], *(self.dtypes[2 + i] for i in self._like)]
            dtype = matrix.dtype(options.h) or compute_dtype(read)
        params = [self.shards[i] for i in at]
        return Chunk(at, params, dtype, self._products(dtype), shape)

    def _products(self, dtype: torch.dtype) -> Products:
        """Return the matrix products for a transform: in a traced step torch's own, so that torch sees them."""
        return Products() if self._symbolic else products_for(dtype, self.shards[0].device)

    def _run_chunk(self, options: Options, chunk: Chunk) -> bool:
        """Update the parameters of a chunk; returns whether kernels have written to rows of the book."""
        matrix = options.rule.matrix
        assert matrix is not None
        kernels = self._kernels(options, chunk) if self._places_known and matrix.before is not None else None
        result = self._transform(options, chunk, kernels)
        self._finish(options, chunk, run_whole(result) if matrix.pieces else result, kernels)
        return kernels is not None

    def _transform(self, options: Options, chunk: Chunk, kernels: Kernels | None) -> Any:
        """Call the rule's transform. Return its result, or a generator if it works on pieces."""
        matrix, at = options.rule.matrix, chunk.at
        assert matrix is not None
        if matrix.before is not None:
            x = chunk.new_stack()
            if kernels is not None:
                kernels.before(x)
            else:
                self._before(options, at, chunk.scalars, list(x.unbind()))
        else:
            gradients: list[Any] = [self._gradients[i] for i in at]
            x = gradients[0].unsqueeze(0) if len(at) == 1 else torch.stack(gradients)
            x = x.to(chunk.dtype)
        odd = {self._keys[i]: torch.stack([self.columns[i][k] for k in at]).to(x.dtype) for i in self._odd}
        return matrix.transform(x, chunk.about, **odd)

    def _finish(
        self, options: Options, chunk: Chunk, results: tuple[Tensor, ...], kernels: Kernels | None = None
    ) -> None:
        """Store what the transform has computed, and update the parameters."""
        result, *new = results
        for i, stack in zip(self._odd, new, strict=True):
            foreach_copy_([self.columns[i][k] for k in chunk.at], list(stack.unbind()))
        if kernels is not None and chunk.is_like(result):
            kernels.after(result)
        else:
            self._after(options, chunk.at, chunk.scalars, list(result.unbind()))

    def _kernels(self, options: Options, chunk: Chunk) -> Kernels | None:
        if chunk.kernels is None:
            keys = tuple(self._keys[i] for i in self._like)
            like = tuple(self.dtypes[2 + i] for i in self._like)
            chunk.find_kernels(options, self.book.tables, keys, (*self.dtypes[:2], *like), self._launches)
        return chunk.kernels

    def _about(self, options: Options, scalars: Mapping[str, Any], shape: tuple[int, ...]) -> Values:
        c = Values(**scalars, **options.structure)
        assert options.rule.matrix is not None
        products = self._products(_dtype_of_x(options.rule.matrix, options, self.shards[:1]))
        return Values(h=options.h, c=c, params=[], dtype=self.shards[0].dtype, shape=shape, products=products)

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
    dtype: torch.dtype | None = matrix.dtype(options.h)
    return dtype or compute_dtype(t.dtype for t in tensors)


def _laid_out(t: Any, p: Tensor) -> Tensor:
    return match_layout(t, p) if is_dense(p) else t


def _cut(matrix: Matrix, p: Any) -> Cut | None:
    """How this parameter's matrices are cut; None if this rank has whole ones."""
    cut = cut_of(p)
    return None if cut is None or (matrix.cut and cut.dim < p.dim() - 2) else cut


def _different_gradients() -> Exception:
    return RuntimeError(
        "the ranks have different gradients, so they cannot share the work on the same matrices; average gradients "
        "before step() (as DDP does), share with the ranks that have the same, or leave share_matrices() out"
    )
