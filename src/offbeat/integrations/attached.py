"""An optimizer that offbeat works on inside a framework, and each rank's part of its checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat import _torch
from offbeat._warn import warn
from offbeat.integrations.shards import meshes_of, pack, places, unpack
from offbeat.overlap import Overlap
from offbeat.replicas import Replica

__all__ = ["Attached", "Living", "gather_parts", "rank_and_world", "rank_to_load", "warn_of_plain_checkpoint"]


class Attached:
    """One optimizer with its features turned on.

    Attributes:
        optimizer: what the framework has to step: the inner optimizer, or what wraps it.
        inner: the optimizer that the user made.
        module: what the framework calls.
        handle: the handle of the overlapped optimizer, or None.

    Args:
        scaler: the framework's ``GradScaler``, or None.
        keeps_norm: whether the next step is clipped by the norm of the last one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        inner: Optimizer,
        module: torch.nn.Module,
        handle: Overlap | None,
        scaler: Any,
        *,
        keeps_norm: bool,
    ) -> None:
        self.optimizer, self.inner, self.module, self.handle = optimizer, inner, module, handle
        self._scaler = scaler
        self._keeps_norm = keeps_norm
        self._overlap_state: dict[str, Any] | None = None

    @property
    def replica(self) -> Replica | None:
        """What averages replicas, or None."""
        return self.optimizer if isinstance(self.optimizer, Replica) else None

    @property
    def has_part(self) -> bool:
        """Whether a checkpoint needs more than the framework saves."""
        return self.replica is not None or self._keeps_norm

    def part(self, *, whole: bool = False) -> dict[str, Any]:
        """What this rank needs to go on exactly, in addition to what the framework saves of the first rank.

        Between rounds replicas differ in everything: parameters, buffers, optimizer state, the scale of the loss. Of a
        sharded module it is this rank's shards.

        Args:
            whole: include all of that even if there are no replicas.
        """
        part: dict[str, Any] = {"overlap": self._norm() if self._keeps_norm else None}
        if whole or self.replica is not None:
            meshes = meshes_of(self.module)
            part["module"] = pack(self._plain().state_dict(), meshes)
            part["optimizer"] = pack(self.optimizer.state_dict(), meshes)
            part["shards"] = places(meshes)
            part["scaler"] = None if self._scaler is None else self._scaler.state_dict()
        return part

    def load_part(self, part: dict[str, Any]) -> None:
        """Go on from :meth:`part`. Call it after the framework has loaded what it saved."""
        if "optimizer" in part:
            meshes = meshes_of(self.module)
            if (saved := part.get("shards", [])) != places(meshes):
                raise ValueError(
                    f"the checkpoint is of a module that was sharded over {_in_words(saved)}, and here it is "
                    f"sharded over {_in_words(places(meshes))}; shard it as it was, with as many ranks"
                )
            self._plain().load_state_dict(unpack(part["module"], meshes))
            self.optimizer.load_state_dict(unpack(part["optimizer"], meshes))
            if self._scaler is not None and part["scaler"]:
                self._scaler.load_state_dict(part["scaler"])
        if self.handle is not None and part["overlap"] is not None:
            self.handle.load_state_dict(part["overlap"])

    def average_gradients(self) -> None:
        """Average gradients now if replicas would do it in their next step: they are about to be clipped."""
        if self.replica is not None:
            self.replica.average_gradients()

    def finish(self) -> None:
        """Let replicas agree one last time."""
        if self.replica is not None:
            self.replica.finish()

    def remove_overlap(self) -> None:
        """Let the optimizer step after backward again."""
        if self.handle is not None:
            self._overlap_state = self._norm()
            self.handle.reset()  # training may have ended in the middle of a step, by an error
            self.handle.remove()
            self.handle = None

    def _plain(self) -> torch.nn.Module:
        module = _torch.inner_module(self.module)
        plain: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        return plain

    @property
    def is_sharded(self) -> bool:
        """Whether parameters of the module are cut between ranks."""
        return bool(meshes_of(self.module))

    def _norm(self) -> dict[str, Any] | None:
        return self._overlap_state if self.handle is None else self.handle.state_dict()


class Living:
    """Attached optimizers that a framework's object refers to, and does not keep alive: their wrappers do."""

    def __init__(self, attached: Iterable[Attached] = ()) -> None:
        self._found: list[weakref.ref[Attached]] = []
        self.add(attached)

    def add(self, attached: Iterable[Attached]) -> None:
        """Refer to these too."""
        self._found += map(weakref.ref, attached)

    def __iter__(self) -> Iterator[Attached]:
        return iter([one for found in self._found if (one := found()) is not None])


def rank_and_world() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_parts(part: Any) -> list[Any] | None:
    """The parts of all ranks on the first rank, in CPU memory; None on the others. Call it on every rank."""
    rank, world = rank_and_world()
    if world == 1:
        return [part]
    parts: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(_on_cpu(part), parts, dst=0)
    return parts


def rank_to_load(ranks: int) -> int:
    """Which rank's part this rank goes on from, if as many ranks saved the checkpoint."""
    rank, world = rank_and_world()
    if ranks != world:
        warn(
            f"the checkpoint was saved by {ranks} ranks, and there are {world} now, so that this run does not go on "
            f"exactly as the other; rank {rank} goes on from what rank {rank % ranks} saved"
        )
    return rank % ranks


def warn_of_plain_checkpoint() -> None:
    """Warn that a checkpoint has no parts of ranks."""
    warn(
        "the checkpoint was saved without offbeat: replicas start from its model and optimizer, and steps, with them "
        "warm-up, are counted from 0"
    )


def _in_words(shards: list[Any]) -> str:
    """What :func:`offbeat.integrations.shards.places` has returned."""
    found = [f"a mesh of size {' x '.join(map(str, shape))} (place {place})" for shape, place in shards]
    return " and ".join(found) or "no mesh"


def _on_cpu(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().cpu()
    if isinstance(tree, dict):
        return {key: _on_cpu(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_on_cpu(value) for value in tree)
    return tree
