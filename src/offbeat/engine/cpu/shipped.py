"""Kernels that come with the package: a wheel for one platform has them, a checkout and a pure wheel do not.

There is one library for each level of processors, with the kernels of all built-in rules. It was made from the sources
that :func:`~offbeat.engine.cpu.compiler.load` gets, so its results have the same bits. The names of its functions end
in a hash of their source: a kernel from another source is not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
from pathlib import Path
from typing import Any

__all__ = ["LEVELS", "Shipped", "digest", "file_of", "shipped"]

_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
#: For each kind of machine its levels, named as for -march, the best first, and the flags that /proc/cpuinfo must have.
LEVELS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {"x86-64-v4": _V4, "x86-64-v3": _V3},
    "aarch64": {"armv8-a": frozenset()},
    "arm64": {"armv8-a": frozenset()},
}


class Shipped:
    """The functions that were made from one source."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library, self._name = library, name

    def __getattr__(self, function: str) -> Any:
        return getattr(self._library, f"{function}_{self._name}")


def digest(text: str) -> str:
    """A short hash, for the name of a file or a function."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_of(level: str) -> Path:
    """Where the library for a level is, if the package has one."""
    return Path(__file__).with_name(f"kernels-{level}.so")


def shipped(source: str) -> Shipped | None:
    """The functions of this source, or None if the package does not have them for this processor."""
    library, name = _library(), digest(source)
    return Shipped(library, name) if library is not None and hasattr(library, f"offbeat_has_{name}") else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    levels = LEVELS.get(platform.machine(), {})
    there = [level for level in levels if file_of(level).exists()]
    flags = _flags() if there else frozenset()
    for level in there:
        if levels[level] <= flags:
            with contextlib.suppress(OSError):  # torch exports no OpenMP, or the system has another C library
                return ctypes.CDLL(str(file_of(level)))
    return None


def _flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())
