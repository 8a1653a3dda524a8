"""Matrices that several ranks share: each is transformed once, by its owner.

- **Shards** (FSDP2): each rank has a piece of every matrix. Pieces go to the owners by one packed all-to-all, and those
  of the result come back by another.
- **Copies** (DDP): each rank has every matrix. Each transforms its own and sends them to the others.

Both go round by round, and the exchange of one round runs beside the arithmetic of the next.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.engine.owners import assign, cost_of, rounds

__all__ = [
    "Cut",
    "Job",
    "Steps",
    "check_agreement",
    "check_same_gradients",
    "check_same_parameters",
    "cut_of",
    "run_copies",
    "run_shards",
]

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
    cuts = [(i, one) for i, one in enumerate(p.placements) if not one.is_replicate() and p.device_mesh.size(i) > 1]
    if not cuts:
        return None
    if len(cuts) > 1 or type(cuts[0][1]).__name__ != "Shard":
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
    """What is done with jobs; each function gets jobs of one kind and shape.

    Attributes:
        before: writes ``x`` of each job into the tensors it is given.
        transform: the result for a stack of ``x``.
        after: updates the parameters from the results.
        dtype: the dtype of ``x``.
        wire: the dtype in which results of copies are sent.
        device: where all of it is.
    """

    before: Callable[[list[Job], list[Tensor]], None]
    transform: Callable[[list[Job], Tensor], Tensor]
    after: Callable[[list[Job], list[Tensor]], None]
    dtype: torch.dtype
    wire: torch.dtype
    device: torch.device


def check_same_parameters(shapes: Any, group: Any, device: torch.device) -> None:
    """Raise, on every rank alike, unless all ranks of the group pass the same."""
    if not _same(repr(shapes), group, device):
        raise RuntimeError(
            "the ranks have different parameters, or the same in another order, so they cannot share the work; build "
            "the same model and the same groups on every rank"
        )


def check_same_gradients(gradients: Sequence[Tensor], group: Any) -> None:
    """Raise, on every rank alike, unless all ranks of the group have the same gradients to the bit.

    One pass over the gradients: their bits are added up as whole numbers, in which the order does not matter.
    """
    total = torch.zeros((), dtype=torch.int64, device=gradients[0].device)
    for g in gradients:
        total += g.contiguous().view(_WORDS[g.element_size()]).sum(dtype=torch.int64)
    if not _agree(total & (2**62 - 1), group):
        raise RuntimeError(
            "the ranks have different gradients, so they cannot share the work on the same matrices; average gradients "
            "before step() (as DDP does), share with the ranks that have the same, or leave share_matrices() out"
        )


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same(text: str, group: Any, device: torch.device) -> bool:
    return _agree(torch.tensor(zlib.crc32(text.encode()), dtype=torch.int64, device=device), group)


def _agree(number: Tensor, group: Any) -> bool:
    pair = torch.stack([number, -number])
    dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
    return bool(pair[0] == -pair[1])


def check_agreement(jobs: Sequence[Job], group: Any, device: torch.device) -> None:
    """Raise, on every rank alike, unless all ranks of the group have the same jobs. Exchanges two numbers."""
    if not _same(repr([(job.at, job.shape) for job in jobs]), group, device):
        raise RuntimeError(
            "the ranks have gradients for different matrices in this step, and each matrix needs all ranks; make sure "
            "that all ranks use the same parameters, or fill in zeros for gradients that are missing"
        )


def run_shards(jobs: Sequence[Job], steps: Steps) -> None:
    """Transform matrices of which each rank has a piece. All jobs are cut over the same process group."""
    first = jobs[0].cut
    assert first is not None
    _pipeline(jobs, steps, first.group, _ShardRound)


def run_copies(jobs: Sequence[Job], steps: Steps, group: Any) -> None:
    """Transform matrices that every rank of the group has."""
    _pipeline(jobs, steps, group, _CopyRound)


def _pipeline(jobs: Sequence[Job], steps: Steps, group: Any, kind: Any) -> None:
    """Begin a round, work on the one before it while its data travels, and finish the one before that."""
    world = dist.get_world_size(group)
    owners = assign([cost_of(job.shape) for job in jobs], world)
    sizes = [torch.Size(job.shape).numel() * steps.dtype.itemsize for job in jobs]
    underway: list[Any] = []
    for some in rounds(sizes, owners, world, ROUND_BYTES):
        underway.append(kind([jobs[i] for i in some], [owners[i] for i in some], steps, group))
        if len(underway) > 1:
            underway[-2].work()
        if len(underway) > 2:
            underway.pop(0).finish()
    if underway:
        underway[-1].work()
    for one in underway:
        one.finish()


class _ShardRound:
    """One round of matrices that are cut: pieces to the owners, results back, in the same two buffers."""

    def __init__(self, jobs: list[Job], owners: list[int], steps: Steps, group: Any) -> None:
        self.jobs, self.steps, self.group = jobs, steps, group
        me, world = dist.get_rank(group), dist.get_world_size(group)
        self.mine = [job for job, owner in zip(jobs, owners, strict=True) if owner == me]
        out = [[job for job, owner in zip(jobs, owners, strict=True) if owner == rank] for rank in range(world)]
        self._out = _Packed([[(job, me) for job in some] for some in out], steps)
        self._in = _Packed([[(job, rank) for job in self.mine] for rank in range(world)], steps)
        parts = self._out.views
        for some in _alike(jobs):
            steps.before(some, [parts[job.at, me] for job in some])
        self._sent = _all_to_all(self._in, self._out, group)
        self._me = me

    def work(self) -> None:
        """Put the matrices together, transform them, and send the pieces of the results back."""
        self._sent.wait()
        world, views = dist.get_world_size(self.group), self._in.views
        for some in _alike(self.mine):
            cut = some[0].cut
            assert cut is not None
            x = torch.stack([torch.cat([views[job.at, rank] for rank in range(world)], cut.dim) for job in some])
            result = self.steps.transform(some, x)
            for job, whole in zip(some, result.unbind(), strict=True):
                pieces = torch.split(whole, [cut.size(rank) for rank in range(world)], cut.dim)
                for rank, piece in enumerate(pieces):
                    views[job.at, rank].copy_(piece)
        self._sent = _all_to_all(self._out, self._in, self.group)

    def finish(self) -> None:
        """Update the parameters from the pieces that came back."""
        self._sent.wait()
        for some in _alike(self.jobs):
            self.steps.after(some, [self._out.views[job.at, self._me] for job in some])


class _CopyRound:
    """One round of matrices that every rank has: each rank transforms its own and sends them to all."""

    def __init__(self, jobs: list[Job], owners: list[int], steps: Steps, group: Any) -> None:
        self.jobs, self.steps, self.group = jobs, steps, group
        self._me, world = dist.get_rank(group), dist.get_world_size(group)
        by_owner = [[job for job, owner in zip(jobs, owners, strict=True) if owner == rank] for rank in range(world)]
        self.mine = by_owner[self._me]
        self._x = _Packed([[(job, 0) for job in some] for some in by_owner], steps)
        self._wire = self._x
        if steps.wire != steps.dtype:
            self._wire = _Packed([[(job, 0) for job in some] for some in by_owner], steps, steps.wire)
        for some in _alike(jobs):
            steps.before(some, [self._x.views[job.at, 0] for job in some])
        self._sent: list[Any] = []

    def work(self) -> None:
        """Transform this rank's matrices, and send them while those of the others arrive."""
        for some in _alike(self.mine):
            result = self.steps.transform(some, torch.stack([self._x.views[job.at, 0] for job in some]))
            for job, whole in zip(some, result.unbind(), strict=True):
                self._wire.views[job.at, 0].copy_(whole)
        for rank, part in enumerate(torch.split(self._wire.flat, self._wire.splits)):
            if part.numel():
                source = dist.get_global_rank(self.group, rank) if self.group is not None else rank
                sent = dist.broadcast(part.view(torch.uint8), source, group=self.group, async_op=True)
                self._sent.append(sent)

    def finish(self) -> None:
        """Update the parameters from what all ranks have now."""
        for sent in self._sent:
            sent.wait()
        for some in _alike(self.jobs):
            self.steps.after(some, [self._wire.views[job.at, 0] for job in some])


class _Packed:
    """A buffer with a part for each rank, and in it a view for each piece of a matrix.

    Attributes:
        views: by the job's position and the rank whose piece it is.
        splits: the number of elements of each part.
    """

    def __init__(self, parts: list[list[tuple[Job, int]]], steps: Steps, dtype: torch.dtype | None = None) -> None:
        shapes = [[job.shape if job.cut is None else job.cut.shape_on(rank) for job, rank in part] for part in parts]
        sizes = [[torch.Size(shape).numel() for shape in some] for some in shapes]
        self.splits = [sum(some) for some in sizes]
        self.flat = torch.empty(sum(self.splits), dtype=dtype or steps.dtype, device=steps.device)
        pieces = torch.split(self.flat, [size for some in sizes for size in some]) if self.flat.numel() else ()
        names = [(job.at, rank) for part in parts for job, rank in part]
        flat_shapes = [shape for some in shapes for shape in some]
        if not pieces:
            pieces = tuple(self.flat.new_empty(0) for _ in names)
        self.views = {name: piece.view(shape) for name, piece, shape in zip(names, pieces, flat_shapes, strict=True)}


def _all_to_all(to: _Packed, of: _Packed, group: Any) -> Any:
    width = of.flat.element_size()  # as bytes, which every backend can send
    return dist.all_to_all_single(
        to.flat.view(torch.uint8), of.flat.view(torch.uint8),
        [width * n for n in to.splits], [width * n for n in of.splits], group=group, async_op=True,
    )  # fmt: skip


def _alike(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs of one kind, shape and cut, together."""
    found: dict[Any, list[Job]] = {}
    for job in jobs:
        found.setdefault((job.kind, job.shape, job.cut.dim if job.cut else None), []).append(job)
    return list(found.values())
