"""The safetensors format: an eight-byte length, a JSON header with names and offsets, and the bytes of the tensors.

Written and read here and not by the package of that name, because a checkpoint is summed up while it is written and
read, in one pass, straight from and into the memory of the tensors. The files are ordinary safetensors files.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.checkpoint.errors import DamagedCheckpoint
from offbeat.checkpoint.files import Buffer, Reader, Stamp, memory, write_file

__all__ = ["DTYPES", "dtype_name", "read_tensors", "write_tensors"]

_CODES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "U64": "uint64", "U32": "uint32", "U16": "uint16",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
#: The dtypes that can be saved, by name. The last ones have no name in the format, and are stored as bytes.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (*_CODES.values(), "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CODE_OF = {name: code for code, name in _CODES.items()}
_BYTES_OF = {code: DTYPES[name].itemsize for code, name in _CODES.items() if name in DTYPES}

#: The largest header, as in the safetensors package.
_LARGEST_HEADER = 100_000_000


def dtype_name(dtype: torch.dtype) -> str | None:
    """The name under which a dtype is saved; None if it cannot be."""
    return _NAMES.get(dtype)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Stamp:
    """Write contiguous tensors on the CPU to a new file."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.itemsize
        code, shape = _CODE_OF.get(_NAMES[tensor.dtype]), list(tensor.shape)
        if code is None:
            code, shape = "U8", [end - start]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 64)
    if len(text) > _LARGEST_HEADER:
        raise ValueError(f"{path.name} would need a header of {len(text)} bytes, and {_LARGEST_HEADER} are allowed")

    def buffers() -> Iterator[Buffer]:
        yield struct.pack("<Q", len(text)) + text
        for name in names:
            yield memory(tensors[name])

    return write_file(path, buffers())


def read_tensors(path: Path, stamp: Stamp, place: Callable[[str, int], memoryview | None]) -> None:
    """Read a file once, from its beginning to its end, and check it.

    Args:
        path: the file.
        stamp: its size and checksum.
        place: called with the name and the size in bytes of each tensor; returns where its bytes go, or None.
    """
    with Reader(path, stamp) as reader:
        (length,) = struct.unpack("<Q", reader.take(8))
        if length > min(_LARGEST_HEADER, reader.size - 8):
            raise DamagedCheckpoint(f"{path}: its header would have {length} bytes, the file has {reader.size}")
        for name, size in _parse(path, reader.take(length), reader.size - 8 - length):
            buffer = place(name, size)
            if buffer is not None and len(buffer) != size:
                raise DamagedCheckpoint(f"{path}: {name!r} has {size} bytes, and {len(buffer)} were expected")
            reader.into(buffer if buffer is not None else memoryview(bytearray(size)))
        reader.finish()


def _parse(path: Path, text: bytes, size: int) -> list[tuple[str, int]]:
    """The names and sizes of tensors, in the order of their bytes, which must leave nothing out."""
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        entries = []
        for name, entry in header.items():
            if name != "__metadata__":
                (start, end), code, shape = entry["data_offsets"], entry["dtype"], entry["shape"]
                if not all(type(n) is int and n >= 0 for n in (start, end, *shape)):
                    raise ValueError(f"{name!r} has a number that is not allowed")
                if math.prod(shape) * _BYTES_OF[code] != end - start:
                    raise ValueError(f"{name!r} has {end - start} bytes, which its shape and dtype do not")
                entries.append((start, end, name))
        entries.sort()
        ends = [0, *(end for _, end, _ in entries)]
        if [start for start, _, _ in entries] != ends[:-1] or ends[-1] != size:
            raise ValueError("its tensors overlap, leave a gap, or do not fill the file")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: its header is malformed ({error})") from error
    return [(name, end - start) for start, end, name in entries]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name is there twice")
    return result
