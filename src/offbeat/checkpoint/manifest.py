"""The list of a checkpoint's files, which is written last: a folder without it is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.checkpoint.errors import DamagedCheckpoint
from offbeat.checkpoint.files import Stamp, read_file, write_file

__all__ = ["SECTIONS", "CheckpointInfo", "Manifest", "folder_name", "list_checkpoints"]

#: The parts of a checkpoint.
SECTIONS = ("model", "optimizer", "extra", "random")

_MANIFEST = "manifest.json"
_FORMAT = {"format": "offbeat checkpoint", "version": 1}
_FOLDER = re.compile(r"(\d{6,15})-step-(\d{1,18})")
_FILE = re.compile(rf"rank-\d{{1,9}}(\.safetensors|-({'|'.join(SECTIONS)})\.json)")
_LARGEST = 1 << 30


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint in a folder.

    Attributes:
        step: the number of steps after which it was saved.
        path: its own folder, which :func:`offbeat.load_checkpoint` takes as well.
        complete: whether all its files are there, with the right sizes. Their checksums are compared when it is loaded.
        damage: what is wrong if it is not complete; else empty.
        id: a name that no other checkpoint has.
    """

    step: int
    path: Path
    complete: bool
    damage: str = ""
    id: str = ""

    @property
    def sequence(self) -> int:
        """Its place in the order in which checkpoints were saved into this folder."""
        return parse_name(self.path.name)[0]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        id: a name that no other checkpoint has; parts on different disks have the same one.
        step: the number of steps after which it was saved.
        ranks: the number of ranks that saved it.
        replicas: which ranks together have a whole model.
        sections: for each rank that saved into this folder, the file of each section.
        files: the size and checksum of each file.
    """

    id: str
    step: int
    ranks: int
    replicas: list[list[int]]
    sections: dict[int, dict[str, str]]
    files: dict[str, Stamp]

    def write(self, folder: Path) -> None:
        """Write it into a folder and sync it."""
        sections = {str(rank): files for rank, files in self.sections.items()}
        write_file(folder / _MANIFEST, [_text({**_FORMAT, **vars(self), "sections": sections})])

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder, checked. Looks at no other file."""
        path = folder / _MANIFEST
        text = read_file(path, None, _LARGEST)
        try:
            content = json.loads(text)
            if _text({key: value for key, value in content.items() if key != "checksum"}) != text:
                raise ValueError("its checksum is of another content")
            if {key: content[key] for key in _FORMAT} != _FORMAT:
                raise ValueError(f"it is in format {content['format']!r}, version {content['version']}")
            result = cls(
                id=str(content["id"]),
                step=int(content["step"]),
                ranks=int(content["ranks"]),
                replicas=[[int(rank) for rank in replica] for replica in content["replicas"]],
                sections={int(rank): dict(files) for rank, files in content["sections"].items()},
                files={name: (int(size), int(checksum)) for name, (size, checksum) in content["files"].items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path}: is malformed ({error})") from error
        names = {name for files in result.sections.values() for name in files.values()}
        for name in (*result.files, *names):
            if not _FILE.fullmatch(name) or name not in result.files:
                raise DamagedCheckpoint(f"{path}: names the file {name!r}, which is no file of a checkpoint")
        if not result.sections:
            raise DamagedCheckpoint(f"{path}: has no ranks")
        return result

    def check_sizes(self, folder: Path) -> None:
        """Raise unless all files are there, with the right sizes."""
        for name, (size, _) in self.files.items():
            try:
                found = os.lstat(folder / name).st_size
            except OSError as error:
                raise DamagedCheckpoint(f"{folder / name}: is missing ({error.strerror})") from error
            if found != size:
                raise DamagedCheckpoint(f"{folder / name}: has {found} bytes, but {size} were written")


def _text(content: dict[str, Any]) -> bytes:
    """The only spelling of a content: any other bytes are damage."""
    body = json.dumps(content, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
    return json.dumps({**content, "checksum": checksum}, sort_keys=True, separators=(",", ":")).encode()


def folder_name(sequence: int, step: int) -> str:
    """The name of a checkpoint's own folder: its place in the order of saving, and its step."""
    return f"{sequence:06d}-step-{step}"


def parse_name(name: str) -> tuple[int, int]:
    """The place in the order of saving and the step that a folder's name says; -1 each if it is no checkpoint's."""
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def list_checkpoints(folder: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The checkpoints in a folder, in the order in which they were saved: the newest is the last one.

    Args:
        folder: the folder that :func:`offbeat.save_checkpoint` was given. One that does not exist has none.

    Example:
        >>> import tempfile, torch, offbeat
        >>> model = torch.nn.Linear(2, 2)
        >>> folder = tempfile.mkdtemp()
        >>> for step in (10, 20):
        ...     saved = offbeat.save_checkpoint(folder, model=model, step=step)
        >>> [(one.step, one.complete) for one in offbeat.list_checkpoints(folder)]
        [(10, True), (20, True)]
    """
    folder = Path(folder)
    names = [name for name in (os.listdir(folder) if folder.is_dir() else []) if _FOLDER.fullmatch(name)]
    return [describe(folder / name) for name in sorted(names, key=parse_name)]


def describe(path: Path) -> CheckpointInfo:
    """What there is to say of a checkpoint's own folder."""
    step = parse_name(path.name)[1]
    try:
        manifest = Manifest.read(path)
        manifest.check_sizes(path)
    except DamagedCheckpoint as error:
        return CheckpointInfo(step, path, False, str(error))
    return CheckpointInfo(manifest.step, path, True, id=manifest.id)
