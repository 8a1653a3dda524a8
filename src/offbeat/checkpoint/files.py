"""Files and folders that survive a crash: written, checksummed, synced; every call to the operating system is here."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from offbeat.checkpoint.errors import DamagedCheckpoint

__all__ = [
    "Buffer",
    "Reader",
    "Stamp",
    "make_folder",
    "memory",
    "read_file",
    "remove_folder",
    "sync_folder",
    "write_file",
]

Buffer: TypeAlias = "bytes | memoryview"
#: The size of a file and the CRC-32 of its content.
Stamp: TypeAlias = "tuple[int, int]"

#: So much is written, or read and summed up, at a time: small enough to be still in the processor's cache.
_CHUNK = 1 << 22
#: So much is asked for ahead of reading, so that the disk works while a chunk is summed up.
_AHEAD = 1 << 25
#: No links, and no waiting for the other end of a pipe.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_FLAGS", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


def write_file(path: Path, buffers: Iterable[Buffer]) -> Stamp:
    """Write a new file and sync it to the disk. Returns its size and checksum."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
    try:
        size = checksum = 0
        for chunk in _chunks(buffers):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
            while chunk:
                chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, checksum


def _chunks(buffers: Iterable[Buffer]) -> Iterator[memoryview]:
    """The same bytes in pieces of about the right size: many small tensors are not as many calls."""
    small = bytearray()
    for buffer in buffers:
        if len(buffer) < _CHUNK // 4:
            small += buffer
            if len(small) < _CHUNK:
                continue
        if small:
            yield memoryview(bytes(small))
            small.clear()
            if len(buffer) < _CHUNK // 4:
                continue
        view = memoryview(buffer)
        for start in range(0, len(view), _CHUNK):
            yield view[start : start + _CHUNK]
    if small:
        yield memoryview(bytes(small))


class Reader:
    """A file that is read once from its beginning to its end, and checked against its size and checksum.

    Args:
        path: the file. A symbolic link is refused.
        stamp: its size and checksum, or None if they are not known.
        limit: a size in bytes that is refused.
    """

    def __init__(self, path: Path, stamp: Stamp | None, limit: int | None = None) -> None:
        self.path, self._stamp, self._checksum, self._read = path, stamp, 0, 0
        self._asked = 0
        try:
            descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        except OSError as error:
            raise DamagedCheckpoint(f"{path}: cannot be opened ({_reason(error)})") from error
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        try:
            found = os.fstat(descriptor)
            self.size = found.st_size
            if not stat.S_ISREG(found.st_mode):
                raise DamagedCheckpoint(f"{path}: is not a file")
            if stamp is not None and self.size != stamp[0]:
                raise DamagedCheckpoint(f"{path}: has {self.size} bytes, but {stamp[0]} were written")
            if limit is not None and self.size > limit:
                raise DamagedCheckpoint(f"{path}: has {self.size} bytes, more than the {limit} that are allowed")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def into(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes."""
        for start in range(0, len(buffer), _CHUNK):
            chunk = buffer[start : start + _CHUNK]
            done = 0
            self._ask_ahead()
            while done < len(chunk):
                try:
                    count = self._file.readinto(chunk[done:])
                except OSError as error:
                    raise DamagedCheckpoint(f"{self.path}: cannot be read ({_reason(error)})") from error
                if not count:
                    raise DamagedCheckpoint(f"{self.path}: ends after {self._read + done} bytes")
                done += count
            self._checksum = zlib.crc32(chunk, self._checksum)
            self._read += len(chunk)

    def _ask_ahead(self) -> None:
        if self._read + _AHEAD // 2 >= self._asked and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), self._asked, _AHEAD, os.POSIX_FADV_WILLNEED)
            self._asked += _AHEAD

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        if size > self.size - self._read:
            raise DamagedCheckpoint(f"{self.path}: {size} bytes are announced, but {self.size - self._read} are left")
        content = bytearray(size)
        self.into(memoryview(content))
        return bytes(content)

    def finish(self) -> None:
        """Raise unless everything was read and has the right checksum."""
        if self._read != self.size:
            raise DamagedCheckpoint(f"{self.path}: has {self.size - self._read} bytes after its end")
        if self._stamp is not None and self._checksum != self._stamp[1]:
            raise DamagedCheckpoint(
                f"{self.path}: its checksum is {self._checksum:08x}, but {self._stamp[1]:08x} was written"
            )


def read_file(path: Path, stamp: Stamp | None, limit: int | None = None) -> bytes:
    """The content of a file, checked."""
    with Reader(path, stamp, limit) as reader:
        content = reader.take(reader.size)
        reader.finish()
    return content


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied. Only valid as long as the tensor lives."""
    count = tensor.numel() * tensor.itemsize
    if count == 0:
        return memoryview(b"")
    array = (ctypes.c_char * count).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def make_folder(path: Path) -> None:
    """Create a folder and those above it that are missing, and sync the folders that they are in."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with contextlib.suppress(FileExistsError):  # another rank was faster
        os.mkdir(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Remove a folder of files."""
    for name in os.listdir(path):
        os.unlink(path / name)
    os.rmdir(path)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
