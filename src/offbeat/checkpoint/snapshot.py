"""What one rank has to save: trees as JSON, and tensors on the CPU."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat._torch import unwrapped_name
from offbeat.checkpoint.errors import CheckpointError
from offbeat.checkpoint.files import Stamp, memory, write_file
from offbeat.checkpoint.names import Names, inner_module
from offbeat.checkpoint.pieces import Entry, describe
from offbeat.checkpoint.tensors import write_tensors
from offbeat.checkpoint.tree import Place, encode, place_name

__all__ = ["Snapshot", "param_of"]


class Snapshot:
    """The state of a model, an optimizer and more on one rank, at one moment.

    Args:
        model: the model, or None.
        optimizer: the optimizer, or None.
        others: further sections by name.
        copy: whether to copy what is on the CPU already, so that training can go on.
    """

    def __init__(self, model: nn.Module | None, optimizer: Any, others: Mapping[str, Any], *, copy: bool) -> None:
        self.trees: dict[str, Any] = {}
        self.entries: dict[str, dict[str, Entry]] = {}
        self.tensors: dict[str, Tensor] = {}
        self._stored_as: dict[str, str] = {}
        self._copy = copy
        self._copying: set[torch.device] = set()
        self._seen: dict[Any, tuple[str, Tensor]] = {}
        names = Names(model)
        module = inner_module(model)
        if module is not None:
            state = {unwrapped_name(key): value for key, value in module.state_dict().items()}
            self._add("model", state, names)
        if optimizer is not None:
            self._add("optimizer", names.to_names(optimizer.state_dict(), optimizer), names)
        for section, value in others.items():
            self._add(section, value, Names(None))
        self._seen.clear()
        for device in self._copying:
            torch.cuda.current_stream(device).synchronize()

    def _add(self, section: str, value: Any, names: Names) -> None:
        entries = self.entries[section] = {}

        def put(place: Place, tensor: Tensor) -> str:
            name = place_name(place)
            while name in entries:  # keys of different types can have the same text
                name += "'"
            param = param_of(place[1:], names) if section == "optimizer" else None
            entries[name], part = describe(place, tensor, param)
            self._stored_as[name] = self._keep(name, part.detach())
            return name

        if section == "model":  # a plain dictionary, whatever the names are
            self.trees[section] = {key: encode(item, put, (section, key)) for key, item in value.items()}
        else:
            self.trees[section] = encode(value, put, (section,))

    def _keep(self, name: str, part: Tensor) -> str:
        """Keep a tensor, copied to the CPU. Returns the name of the same memory if it is there already."""
        key = (part.data_ptr(), part.dtype, part.shape, part.stride(), part.is_conj(), part.is_neg())
        if part.numel() and key in self._seen:
            return self._seen[key][0]
        self._seen[key] = (name, part)  # kept alive, so that no other tensor gets its address
        self.tensors[name] = self._on_cpu(part)
        return name

    def _on_cpu(self, part: Tensor) -> Tensor:
        part = part.resolve_conj().resolve_neg()
        if self._copy and part.device.type == "cuda":
            self._copying.add(part.device)
            pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
            return pinned.copy_(part, non_blocking=True)
        if part.device.type != "cpu":
            return part.cpu().contiguous()
        return part.clone(memory_format=torch.contiguous_format) if self._copy else part.contiguous()

    def replica(self, rank: int) -> list[int]:
        """The ranks that together have the whole model of this rank."""
        return sorted({rank, *(r for entry in self.entries.get("model", {}).values() for r in entry.ranks)})

    def digests(self) -> dict[str, dict[str, str]]:
        """For each tensor, and for each section with its tensors, a name of its content."""
        tensors = {}
        for name, tensor in self.tensors.items():
            content = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
            content.update(memory(tensor))
            tensors[name] = content.hexdigest()
        sections = {}
        for section, entries in self.entries.items():
            table = {name: [e.to_json(), tensors[self._stored_as[name]]] for name, e in entries.items()}
            text = json.dumps([self.trees[section], table, self._stored_as], sort_keys=True)
            sections[section] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return {"tensors": tensors, "sections": sections}

    def write(
        self, folder: Path, rank: int, site: Sequence[int], digests: Sequence[Mapping[str, Mapping[str, str]]]
    ) -> tuple[dict[str, str], dict[str, Stamp]]:
        """Write what no rank before this one writes.

        Args:
            folder: where to.
            rank: the number of this rank.
            site: the ranks that write into this folder, in order.
            digests: those of all ranks.

        Returns:
            The file of each section, and the sizes and checksums of the files written.
        """

        def first(kind: str, name: str) -> int:
            own = digests[rank].get(kind, {}).get(name)
            return next((r for r in site if r < rank and digests[r][kind].get(name) == own), rank) if own else rank

        files: dict[str, Stamp] = {}
        writer = {name: first("tensors", name) for name in self.tensors}
        own = {name: tensor for name, tensor in self.tensors.items() if writer[name] == rank}
        if own:
            files[_data(rank)] = write_tensors(folder / _data(rank), own)
        sections = {}
        for section, entries in self.entries.items():
            by = first("sections", section)
            sections[section] = name = f"rank-{by}-{section}.json"
            if by == rank:
                table = {
                    key: {**entry.to_json(), "file": _data(writer[stored]), "stored": stored}
                    for key, entry in entries.items()
                    for stored in [self._stored_as[key]]
                }
                text = json.dumps({"tree": self.trees[section], "tensors": table}, separators=(",", ":"))
                files[name] = write_file(folder / name, [text.encode()])
        return sections, files


def param_of(place: Place, names: Names) -> Tensor | None:
    """The parameter that a value in an optimizer's state dict belongs to: the last key that is a parameter's name."""
    if len(place) > 1 and place[0] == "state":
        return names.find(place[1])
    return names.find(place[-1]) if place else None


def check_extra(extra: Any) -> dict[str, Any]:
    """The user's own values, checked."""
    if extra is not None and (not isinstance(extra, dict) or any(type(key) is not str for key in extra)):
        raise CheckpointError(
            f"extra must be a dict with strings as keys, such as {{'epoch': 3}}, but got {extra!r:.80}"
        )
    return dict(extra or {})


def _data(rank: int) -> str:
    return f"rank-{rank}.safetensors"
