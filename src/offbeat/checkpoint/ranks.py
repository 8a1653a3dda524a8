"""What the ranks of a run decide together about a checkpoint. Everything crosses the network as JSON."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from offbeat.checkpoint.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint
from offbeat.checkpoint.files import memory

__all__ = ["Ranks", "distinct", "sites"]

_ERRORS: dict[str, type[CheckpointError]] = {
    cls.__name__: cls for cls in (CheckpointError, CheckpointMismatch, DamagedCheckpoint)
}

#: The default process group of the run, and a gloo group of the same ranks that only checkpoints use.
_groups: tuple[Any, Any] | None = None


class Ranks:
    """All ranks of the default process group, or this process alone if there is none.

    The first one that is made in a run makes a process group, so every rank must make it.

    Attributes:
        rank: the number of this rank.
        size: the number of ranks.
    """

    def __init__(self) -> None:
        global _groups
        self.rank, self.size, self._group = 0, 1, None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            if _groups is None or _groups[0] is not dist.group.WORLD:
                _groups = (dist.group.WORLD, dist.new_group(backend="gloo"))
            self.rank, self.size, self._group = dist.get_rank(), dist.get_world_size(), _groups[1]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, which JSON can hold."""
        if self._group is None:
            return [value]
        content = json.dumps(value).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=self._group)
        largest = int(max(sizes))
        own = torch.frombuffer(bytearray(content.ljust(largest)), dtype=torch.uint8)  # JSON may end with spaces
        parts = [torch.empty(largest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self._group)
        return [json.loads(bytes(memory(part))) for part in parts]

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Do something on every rank, and return what it returned on each.

        Raises:
            Exception: what it raised on the first rank on which it raised. Other ranks raise a
            :class:`CheckpointError` with its message.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            if self._group is None:
                raise
            error = caught
        told = None if error is None else [type(error).__name__, str(error)]
        answers = self.gather({"result": result, "error": told})
        for rank, answer in enumerate(answers):  # the first error decides what all ranks do next
            if answer["error"] is not None:
                if rank == self.rank and error is not None:
                    raise error
                kind, message = answer["error"]
                raise _ERRORS.get(kind, CheckpointError)(f"rank {rank}: {message}") from error
        return [answer["result"] for answer in answers]


def sites(ranks: Ranks, folder: Path) -> list[list[int]]:
    """The ranks that see the same folder, as lists; usually one list of all. The folder must exist.

    Folders of the same name on different machines are different folders, unless they are on a file system that the
    machines share.
    """
    if ranks.size == 1:
        return [[0]]
    token = ranks.gather(uuid.uuid4().hex)[0]
    own = folder / f".here-{token}-{ranks.rank}"

    def leave() -> None:
        os.close(os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY))

    def look() -> list[int]:
        return [rank for rank in range(ranks.size) if os.path.lexists(folder / f".here-{token}-{rank}")]

    try:
        ranks.together(leave)
        seen = ranks.together(look)
    finally:
        if own.exists():
            own.unlink()
    result = distinct(seen)
    if sorted(rank for site in result for rank in site) != list(range(ranks.size)):
        raise CheckpointError(f"ranks do not agree on who shares {folder} with whom: each one sees {seen}")
    return result


def distinct(groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """Each list of ranks once, in the order of their first ranks."""
    return [list(ranks) for ranks in sorted({tuple(sorted(group)) for group in groups})]
