"""Reading a checkpoint into memory: documents first, then each file of tensors once, straight into its place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.checkpoint.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint
from offbeat.checkpoint.files import memory, read_file
from offbeat.checkpoint.manifest import Manifest
from offbeat.checkpoint.pieces import Entry, Region, cut, overlap, region_of, replicated, sharded, whole
from offbeat.checkpoint.tensors import DTYPES, read_tensors
from offbeat.checkpoint.tree import Place, decode
from offbeat.engine.tensors import is_dtensor

__all__ = ["Contents", "Target", "as_before", "beside"]


class Target:
    """Where a tensor of a checkpoint goes: which part of it is wanted, and what becomes of that part.

    Attributes:
        region: the part of the whole tensor that this rank needs.
        finish: makes the tensor to load out of that part, which is a plain tensor on the CPU.
    """

    def __init__(self, region: Region, finish: Callable[[Tensor], Tensor] = lambda value: value) -> None:
        self.region, self.finish = region, finish


def as_before(entry: Entry) -> Target:
    """The whole tensor, plain."""
    return Target(whole(entry.shape))


def beside(entry: Entry, param: Tensor | None, *, is_state: bool) -> Target:
    """A tensor of an optimizer that belongs to a parameter, placed as this parameter is.

    Args:
        entry: how it was saved.
        param: the parameter, if it is known.
        is_state: whether it is in the state of the parameter, where sharded parameters have sharded tensors; elsewhere
            they have plain ones.
    """
    if param is None or not is_dtensor(param) or entry.kind == "local" or not entry.shape:
        return as_before(entry)
    if is_state and entry.kind == "tensor" and entry.dtype in ("int8", "uint8"):
        raise CheckpointMismatch(
            "the checkpoint has optimizer state in 8 bits, in blocks of whole parameters, and here they are sharded; "
            "nothing was changed. Load it without sharding and with state_dtype=None, save that, and load it here"
        )
    as_dtensor = entry.kind == "dtensor" or (entry.kind == "tensor" and is_state)
    if entry.shape == tuple(param.shape):
        return Target(region_of(param), (lambda value: sharded(param, value)) if as_dtensor else (lambda value: value))
    return Target(whole(entry.shape), (lambda value: replicated(param, value)) if as_dtensor else (lambda value: value))


class _Read:
    """A tensor to be read, and the pieces that it is read from."""

    def __init__(self, value: Tensor, target: Target) -> None:
        self.value, self.target = value, target


class Contents:
    """A checkpoint as one rank reads it.

    Args:
        folder: the checkpoint's own folder.
        manifest: its manifest.
        sources: for each section, the rank that saved what this one reads.
    """

    def __init__(self, folder: Path, manifest: Manifest, sources: Mapping[str, int]) -> None:
        self.folder, self.manifest, self._sources = folder, manifest, sources
        self._documents: dict[str, Any] = {}
        self._reads: dict[tuple[str, str], _Read] = {}
        #: For each file and tensor in it: where the stored piece is in the whole, and who wants some of it.
        self._jobs: dict[str, dict[str, list[tuple[Entry, _Read]]]] = {}

    def tree(self, section: str) -> Any:
        """A section as JSON; None if it was not saved."""
        name = self.manifest.sections[self._sources[section]].get(section)
        return None if name is None else self._document(name)["tree"]

    def plan(self, section: str, tree: Any, target: Callable[[Place, Entry], Target]) -> Any:
        """Note which tensors are needed. Returns the section with None in their places.

        Args:
            section: its name.
            tree: it, or a part of it.
            target: called with the place and the entry of each tensor.
        """

        def take(place: Place, name: str) -> None:
            entry = self._entry(section, self._sources[section], name)[0]
            self._request(section, name, target(place, entry))

        return self._decode(section, tree, take)

    def values(self, section: str, tree: Any) -> Any:
        """The section with its tensors, after :meth:`read`."""

        def take(place: Place, name: str) -> Tensor:
            read = self._reads[section, name]
            return read.target.finish(read.value)

        return self._decode(section, tree, take)

    def read(self) -> None:
        """Read and check every file that has something that is needed, each once."""
        for name, wanted in self._jobs.items():
            copies: list[tuple[Tensor, Entry, _Read]] = []
            left = set(wanted)

            def place(stored: str, size: int) -> memoryview | None:
                jobs = wanted.get(stored, [])  # noqa: B023
                left.discard(stored)  # noqa: B023
                if not jobs:
                    return None
                entry, read = jobs[0]
                if len(jobs) == 1 and entry.region == read.target.region:
                    return memory(read.value)
                piece = read.value.new_empty(entry.size)
                copies.extend((piece, *job) for job in jobs)  # noqa: B023
                return memory(piece)

            read_tensors(self.folder / name, self.manifest.files[name], place)
            if left:
                raise DamagedCheckpoint(f"{self.folder / name}: does not have {min(left)!r}")
            for piece, entry, read in copies:
                region = read.target.region
                part = overlap(entry.region, region) if region.numel else None
                if part is not None:
                    read.value[cut(part, region)] = piece[cut(part, entry.region)]

    def _decode(self, section: str, tree: Any, take: Callable[[Place, str], Any]) -> Any:
        try:
            return decode(tree, take)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            name = self.manifest.sections[self._sources[section]][section]
            raise DamagedCheckpoint(f"{self.folder / name}: is malformed ({error!r})") from error

    def _document(self, name: str) -> Any:
        if name not in self._documents:
            path = self.folder / name
            text = read_file(path, self.manifest.files[name])
            try:
                document = json.loads(text)
                tensors = {key: self._parse(value) for key, value in document["tensors"].items()}
                self._documents[name] = {"tree": document["tree"], "tensors": tensors}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise DamagedCheckpoint(f"{path}: is malformed ({error!r})") from error
        return self._documents[name]

    def _parse(self, value: dict[str, Any]) -> tuple[Entry, str, str]:
        file, stored = value["file"], value["stored"]
        if file not in self.manifest.files or not file.endswith(".safetensors") or not isinstance(stored, str):
            raise ValueError(f"{file!r} is no file of tensors of this checkpoint")
        return Entry.from_json(value), file, stored

    def _entry(self, section: str, rank: int, name: str) -> tuple[Entry, str, str]:
        files = self.manifest.sections.get(rank)
        if files is None:
            raise CheckpointMismatch(
                f"{name} is in pieces, and that of rank {rank} is not in {self.folder}: it was saved on another disk. "
                "Load with as many ranks on as many machines as it was saved with"
            )
        document = self._document(files[section])
        result: tuple[Entry, str, str] = document["tensors"][name]
        return result

    def _request(self, section: str, name: str, target: Target) -> None:
        """Note which stored pieces the wanted region is made of."""
        own = self._entry(section, self._sources[section], name)
        pieces = [own]
        if own[0].is_piece and own[0].region != target.region:
            others = [self._entry(section, rank, name) for rank in own[0].ranks]
            pieces = list({piece[0].region: piece for piece in others}.values())  # replicated ones once
        needed = [piece for piece in pieces if overlap(piece[0].region, target.region) is not None]
        parts = [overlap(entry.region, target.region) for entry, _, _ in needed]
        if sum(part.numel for part in parts if part is not None) != target.region.numel:
            raise ValueError(f"the pieces of {name} do not make up the whole")
        dtype = DTYPES[own[0].dtype]
        if target.region.numel * dtype.itemsize > sum(self.manifest.files[file][0] for _, file, _ in needed):
            raise ValueError(f"{name} is larger than the files that hold it")
        read = _Read(torch.empty(target.region.size, dtype=dtype), target)
        self._reads[section, name] = read
        for entry, file, stored in needed:
            if (entry.dtype, entry.shape) != (own[0].dtype, own[0].shape):
                raise ValueError(f"the pieces of {name} are of different tensors")
            self._jobs.setdefault(file, {}).setdefault(stored, []).append((entry, read))
