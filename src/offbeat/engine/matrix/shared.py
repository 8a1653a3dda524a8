"""Matrices that several ranks share: each is transformed once, by its owner.

- **Shards** (FSDP2): each rank has a piece of every matrix. Pieces go to the owners by one packed all-to-all, and those
  of the result come back by another.
- **Copies** (DDP): each rank has every matrix and its gradient. Each transforms its own and sends them to the others.

Both go round by round, and the exchange of one round runs beside the arithmetic of the next. Results travel with a flag
that says whether the rank could compute them. If one could not, every rank raises, and the round changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.engine.matrix.assign import assign, cost_of, rounds
from offbeat.engine.tensors import is_plain_shard

__all__ = ["Cut", "Job", "Steps", "alike", "cut_of", "run_copies", "run_shards"]

#: Bytes of the matrices that a rank works on in one round. A single matrix may need more.
ROUND_BYTES = 64 << 20


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut over the ranks of a process group."""

    group: Any
    dim: int
    shape: tuple[int, ...]

    def size(self, rank: int) -> int:
        """How much of the cut dimension a rank has; the last ranks may have less, or nothing."""
        whole = self.shape[self.dim]
        piece = -(-whole // dist.get_world_size(self.group))
        return max(0, min(whole - rank * piece, piece))

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's piece."""
        return (*self.shape[: self.dim], self.size(rank), *self.shape[self.dim + 1 :])


def cut_of(p: Any) -> Cut | None:
    """How a DTensor is cut; None if every rank has all of it.

    Raises:
        RuntimeError: it is cut along several dimensions of its mesh, or in another way than evenly in order.
    """
    several = [(i, placement) for i, placement in enumerate(p.placements) if p.device_mesh.size(i) > 1]
    cuts = [(i, placement) for i, placement in several if not placement.is_replicate()]
    if not cuts:
        return None
    if len(cuts) > 1 or not is_plain_shard(cuts[0][1]):
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} has the placements {tuple(p.placements)}; matrices that are cut "
            "can be put together along one dimension of the mesh only (FSDP2 or HSDP). Leave this parameter out of "
            "tensor parallelism, or use an elementwise rule such as AdamW for it"
        )
    mesh_dim, placement = cuts[0]
    return Cut(p.device_mesh.get_group(mesh_dim), placement.dim % p.dim(), tuple(p.shape))


@dataclass(frozen=True)
class Job:
    """One matrix, or a stack of them in one parameter.

    Attributes:
        at: its position in the batch.
        shape: the shape of the whole parameter.
        kind: jobs of different kinds have different coefficients.
        cut: how it is cut; None for copies.
    """

    at: int
    shape: tuple[int, ...]
    kind: Any
    cut: Cut | None = None


@dataclass(frozen=True)
class Steps:
    """The functions that work on jobs; each function gets jobs of one kind and shape.

    Attributes:
        before: writes ``x`` of each job into the tensors it is given, and updates the state.
        state: the state that ``before`` changes.
        transform: the result for a stack of ``x``.
        after: updates the parameters from the results.
        dtype: the dtype of ``x``.
        wire: the dtype in which results of copies are sent.
        device: where all of it is.
    """

    before: Callable[[list[Job], list[Tensor]], None]
    state: Callable[[list[Job]], list[Tensor]]
    transform: Callable[[list[Job], Tensor], Tensor]
    after: Callable[[list[Job], list[Tensor]], None]
    dtype: torch.dtype
    wire: torch.dtype
    device: torch.device


def run_shards(jobs: Sequence[Job], steps: Steps) -> None:
    """Transform matrices of which each rank has a piece. All jobs are cut over the same process group."""
    first = jobs[0].cut
    assert first is not None
    owners = assign([cost_of(job.shape) for job in jobs], dist.get_world_size(first.group))
    _pipeline(jobs, owners, steps, first.group, _ShardRound)


def run_copies(jobs: Sequence[Job], steps: Steps, group: Any) -> None:
    """Transform matrices that every rank of the group has."""
    owners = assign([cost_of(job.shape) for job in jobs], dist.get_world_size(group))
    _pipeline(jobs, owners, steps, group, _CopyRound)


def _pipeline(jobs: Sequence[Job], owners: Sequence[int], steps: Steps, group: Any, kind: Any) -> None:
    """Begin a round, work on the one before it while its data travels, and finish the one before that."""
    sizes = [torch.Size(job.shape).numel() * steps.dtype.itemsize for job in jobs]
    underway: list[_Round] = []
    try:
        for members in rounds(sizes, owners, dist.get_world_size(group), ROUND_BYTES):
            underway.append(kind([jobs[i] for i in members], [owners[i] for i in members], steps, group))
            if len(underway) > 1:
                underway[-2].work()
            if len(underway) > 2:
                underway[0].finish()
                underway.pop(0)
        underway[-1].work()
        while underway:
            underway[0].finish()
            underway.pop(0)
    except Exception:
        for begun in underway:
            begun.undo()
        raise


class _Round:
    """The matrices of a round, each with its owner.

    :meth:`work` transforms those of this rank, and :meth:`finish` updates the parameters from all results. No rank
    raises by itself while the others wait for its data: it notes the error, tells them, and all raise together in
    :meth:`finish`.
    """

    def __init__(self, jobs: list[Job], owners: list[int], steps: Steps, group: Any) -> None:
        self.jobs, self.steps, self.group = jobs, steps, group
        self.me, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.by_owner: list[list[Job]] = [[] for _ in range(self.world)]
        for job, owner in zip(jobs, owners, strict=True):
            self.by_owner[owner].append(job)
        self.own_jobs = self.by_owner[self.me]
        self._sent: list[Any] = []
        self._error: Exception | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []

    def work(self) -> None:
        """Transform the matrices of this rank and send the results."""
        raise NotImplementedError

    def finish(self) -> None:
        """Update the parameters. Raises, on every rank alike, if a rank could not compute its results."""
        raise NotImplementedError

    def undo(self) -> None:
        """Put the state back as it was before the round."""
        self._wait()
        for t, copy in self._kept:
            t.copy_(copy)

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._error is None:
            try:
                action()
            except Exception as error:
                self._error = error

    def _begin(self, jobs: list[Job], parts: list[Tensor]) -> None:
        """Write ``x`` of these jobs, and keep their state until the round has succeeded."""
        self._kept += [(t, t.clone()) for t in self.steps.state(jobs)]
        self.steps.before(jobs, parts)

    def _wait(self) -> None:
        for sent in self._sent:
            sent.wait()
        self._sent = []

    def _check(self, results: _Packed, ranks: Sequence[int]) -> None:
        """Raise if one of these ranks could not compute its results."""
        flags = torch.stack([results.flags[rank] for rank in ranks]).tolist()
        failed = [rank for rank, flag in zip(ranks, flags, strict=True) if flag != 1]
        if not failed:
            return
        whose = ", ".join(map(str, failed))
        raise RuntimeError(
            f"the matrices of rank {whose} (in the process group) could not be transformed there; the error of that "
            "rank says why. No rank has changed the matrices of this round, or their state"
        ) from self._error


class _ShardRound(_Round):
    """One round of matrices that are cut: pieces to the owners, results back, in the same two buffers."""

    def __init__(self, jobs: list[Job], owners: list[int], steps: Steps, group: Any) -> None:
        super().__init__(jobs, owners, steps, group)
        self._out = _Packed([[(job, self.me) for job in owned] for owned in self.by_owner], steps)
        self._in = _Packed([[(job, rank) for job in self.own_jobs] for rank in range(self.world)], steps)
        self._attempt(self._before)
        self._sent = [_all_to_all(self._in, self._out, group)]

    def _before(self) -> None:
        for jobs in alike(self.jobs):
            self._begin(jobs, [self._out.views[job.at, self.me] for job in jobs])

    def work(self) -> None:
        """Put the matrices together, transform them, and send the pieces of the results back."""
        self._wait()
        self._attempt(self._transform)
        for flag in self._in.flags:
            flag.fill_(self._error is None)
        self._sent = [_all_to_all(self._out, self._in, self.group)]

    def _transform(self) -> None:
        views = self._in.views
        for jobs in alike(self.own_jobs):
            cut = jobs[0].cut
            assert cut is not None
            x = torch.stack([torch.cat([views[job.at, rank] for rank in range(self.world)], cut.dim) for job in jobs])
            result = self.steps.transform(jobs, x)
            for job, whole in zip(jobs, result.unbind(), strict=True):
                pieces = torch.split(whole, [cut.size(rank) for rank in range(self.world)], cut.dim)
                for rank, piece in enumerate(pieces):
                    views[job.at, rank].copy_(piece)

    def finish(self) -> None:
        """Update the parameters from the pieces that came back."""
        self._wait()
        self._check(self._out, range(self.world))
        for jobs in alike(self.jobs):
            self.steps.after(jobs, [self._out.views[job.at, self.me] for job in jobs])


class _CopyRound(_Round):
    """One round of matrices that every rank has: each rank transforms its own and sends them to all."""

    def __init__(self, jobs: list[Job], owners: list[int], steps: Steps, group: Any) -> None:
        super().__init__(jobs, owners, steps, group)
        self._wire = _Packed([[(job, 0) for job in owned] for owned in self.by_owner], steps, steps.wire)
        self._x = self._buffer(self.own_jobs) if steps.wire != steps.dtype else self._wire
        self._attempt(self._before)

    def _buffer(self, jobs: list[Job]) -> _Packed:
        return _Packed([[(job, 0) for job in jobs]], self.steps)

    def _before(self) -> None:
        for jobs in alike(self.own_jobs):
            self._begin(jobs, [self._x.views[job.at, 0] for job in jobs])

    def work(self) -> None:
        """Transform this rank's matrices, and send them while those of the others arrive."""
        self._attempt(self._transform)
        self._wire.flags[self.me].fill_(self._error is None)
        for rank, part in enumerate(self._wire.parts):
            if self.by_owner[rank]:
                source = dist.get_global_rank(self.group, rank) if self.group is not None else rank
                self._sent.append(dist.broadcast(part.view(torch.uint8), source, group=self.group, async_op=True))

    def _transform(self) -> None:
        for jobs in alike(self.own_jobs):
            result = self.steps.transform(jobs, torch.stack([self._x.views[job.at, 0] for job in jobs]))
            for job, whole in zip(jobs, result.unbind(), strict=True):
                self._wire.views[job.at, 0].copy_(whole)

    def finish(self) -> None:
        """Update the parameters from what all ranks have now."""
        self._wait()
        self._check(self._wire, [rank for rank, jobs in enumerate(self.by_owner) if jobs])
        self._follow()
        for jobs in alike(self.jobs):
            self.steps.after(jobs, [self._wire.views[job.at, 0] for job in jobs])

    def _follow(self) -> None:
        """Update the state of matrices that others have transformed. Their ``x`` is not needed."""
        own = {job.at for job in self.own_jobs}
        for jobs in alike([job for job in self.jobs if job.at not in own]):
            ignored = self._buffer(jobs)
            self.steps.before(jobs, [ignored.views[job.at, 0] for job in jobs])


class _Packed:
    """A buffer with a part for each rank, and in it a view for each piece of a matrix.

    Attributes:
        views: by the job's position and the rank whose piece it is.
        parts: the parts, each of which ends with a flag.
        flags: the flags; 1 says that the numbers of the part could be computed.
    """

    def __init__(self, parts: list[list[tuple[Job, int]]], steps: Steps, dtype: torch.dtype | None = None) -> None:
        shapes = [[job.shape if job.cut is None else job.cut.shape_on(rank) for job, rank in part] for part in parts]
        dtype = dtype or steps.dtype
        flag_size = 16 // dtype.itemsize
        sizes = [[*(torch.Size(shape).numel() for shape in part_shapes), flag_size] for part_shapes in shapes]
        self.splits = [sum(part_shapes) for part_shapes in sizes]
        self.flat = torch.empty(sum(self.splits), dtype=dtype, device=steps.device)
        self.parts = torch.split(self.flat, self.splits)
        self.views: dict[tuple[int, int], Tensor] = {}
        self.flags: list[Tensor] = []
        for part, names, part_shapes, size in zip(self.parts, parts, shapes, sizes, strict=True):
            *pieces, flag = torch.split(part, size)
            self.flags.append(flag[0])
            for (job, rank), piece, shape in zip(names, pieces, part_shapes, strict=True):
                self.views[job.at, rank] = piece.view(shape)


def _all_to_all(to: _Packed, of: _Packed, group: Any) -> Any:
    width = of.flat.element_size()  # as bytes, which every backend can send
    return dist.all_to_all_single(
        to.flat.view(torch.uint8), of.flat.view(torch.uint8),
        [width * n for n in to.splits], [width * n for n in of.splits], group=group, async_op=True,
    )  # fmt: skip


def alike(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs of one kind, shape and cut, together."""
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.kind, job.shape, job.cut.dim if job.cut else None), []).append(job)
    return list(groups.values())
