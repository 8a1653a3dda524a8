"""Turns a kernel's C source into a loaded library, once per machine.

Libraries are cached in ``$OFFBEAT_CACHE_DIR`` (default: ``offbeat`` in the user's cache directory). A library's name is
made from the source, the processor and the compiler. Where there is no compiler, a library that any compiler made from
the same source for the same processor is loaded: the options allow none of them to change a result.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

#: Contraction is off so that an element's new value does not depend on where in a tensor it stands.
OPTIONS = ("-O3", "-march=native", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w")
COMPILE_SECONDS = 120


class CompilerError(RuntimeError):
    """A kernel could not be compiled or loaded; the message says why."""


def find_compiler(variable: str = "CC", names: tuple[str, ...] = ("cc", "gcc", "clang")) -> tuple[str, ...] | None:
    """The command that an environment variable holds (it may have arguments), else the first of ``names``."""
    return _find(os.environ.get(variable, ""), names)


@functools.cache
def _find(given: str, names: tuple[str, ...]) -> tuple[str, ...] | None:
    commands = [shlex.split(given)] if given.strip() else [[name] for name in names]
    return next(((found, *rest) for name, *rest in commands if (found := shutil.which(name))), None)


def why_not_wanted() -> str | None:
    """Why compiled kernels are not used at all, wherever they come from; None if they are."""
    if os.environ.get("OFFBEAT_NO_COMPILER"):
        return "OFFBEAT_NO_COMPILER is set"
    return "compiled kernels are not supported on Windows" if sys.platform == "win32" else None


def why_no_compiler() -> str | None:
    """Why kernels cannot be compiled here, or None if they can."""
    if reason := why_not_wanted():
        return reason
    if find_compiler() is None:
        wanted = os.environ.get("CC") or "cc, gcc or clang"
        return f"no C compiler ({wanted}) was found; install one, or set CC"
    return None


@functools.cache
def version_of(compiler: tuple[str, ...]) -> str:
    """What the compiler says of itself. Raises :class:`CompilerError`."""
    return _run([*compiler, "--version"]).stdout


#: Lines of /proc/cpuinfo that say which instructions a processor has.
_PROCESSOR = ("vendor_id", "cpu family", "model\t", "flags", "CPU implementer", "CPU part", "Features")


@functools.cache
def _target() -> str:
    """The processor and the options: a library built for others is not used."""
    try:
        cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        cpu = "\n".join(line for line in cpu.splitlines() if line.startswith(_PROCESSOR))
    except OSError:
        cpu = platform.processor()
    return "\n".join((platform.machine(), cpu, " ".join(OPTIONS)))


def digest(text: str) -> str:
    """A short hash, for the name of a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cache_directory() -> Path:
    """A directory of this user's own; a shared one could hold somebody else's code."""
    directory = _configured_directory()
    if directory is None:
        return _private_directory()
    if problem := _why_not_trusted(directory):
        _warn_once(
            f"{problem}; kernels are compiled anew in every process. Set OFFBEAT_CACHE_DIR to a directory of yours"
        )
        return _private_directory()
    return directory


def cached(pattern: str) -> list[Path]:
    """Files of the cache, the newest first. The cache need not be writable, so it may be part of a container image."""
    directory = _configured_directory()
    if directory is None or not directory.is_dir():
        return []
    if problem := _why_not_trusted(directory, writable=False):
        _warn_once(f"{problem}; its kernels are not used. Set OFFBEAT_CACHE_DIR to a directory of yours")
        return []
    return sorted(directory.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)


def _configured_directory() -> Path | None:
    if configured := os.environ.get("OFFBEAT_CACHE_DIR"):
        return Path(configured)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat"
    except RuntimeError:  # the user has no home directory
        return None


def _why_not_trusted(directory: Path, *, writable: bool = True) -> str | None:
    """Who can write to the directory can make this process run any code. None if that is this user alone."""
    try:
        if writable:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = directory.stat()
    except OSError as error:
        return f"the cache directory {directory} cannot be used: {error}"
    if found.st_uid not in (os.getuid(), 0):  # root can change this program anyway
        return (
            f"the cache directory {directory} is not trusted: it belongs to user {found.st_uid}, not to {os.getuid()}"
        )
    if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        return (
            f"the cache directory {directory} is not trusted: others may write to it (mode {found.st_mode & 0o777:o})"
        )
    if writable and not os.access(directory, os.W_OK):
        return f"the cache directory {directory} cannot be written to"
    return None


def warn_of_torch(reason: str) -> None:
    """Say once in a process that steps are slower than they could be, and what to do about it."""
    if why_not_wanted() is None and not _warned:
        _warned.append(reason)
        warnings.warn(
            f"offbeat has no compiled kernels for the CPU: {reason}. Steps use torch's own operators, most of which "
            "are slower. Install a C compiler; or fill a cache on a machine that has one, copy it and set "
            "OFFBEAT_CACHE_DIR to it; or set OFFBEAT_NO_COMPILER=1, which also silences this warning",
            stacklevel=2,
        )


_warned: list[str] = []


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


@functools.cache
def _private_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="offbeat-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


@functools.lru_cache(maxsize=1024)
def load(source: str) -> ctypes.CDLL:
    """The library made from ``source``. Raises :class:`CompilerError`."""
    name = digest(source + _target())
    reason = why_no_compiler()
    if reason is None:
        path = cache_directory() / f"{name}-{digest(version_of(find_compiler() or ()))[:8]}.so"
        known = [path] if path.exists() else []
    else:
        known = cached(f"{name}-*.so")
    for one in known:
        with contextlib.suppress(OSError):  # damaged, or built for another system: build it anew
            return ctypes.CDLL(str(one))
    if reason is not None:
        raise CompilerError(reason)
    problem: OSError | None = None
    for own_threads in (False, True):
        try:
            _build(find_compiler() or (), source, path, own_threads)
        except OSError as error:
            raise CompilerError(f"a kernel could not be written to {path.parent}: {error}") from error
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            path.unlink(missing_ok=True)
            problem = error
    raise CompilerError(f"a compiled kernel could not be loaded: {problem}") from problem


def _build(compiler: tuple[str, ...], source: str, path: Path, own_threads: bool) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as work:
        code, obj, lib = (Path(work) / name for name in ("kernel.c", "kernel.o", "kernel.so"))
        code.write_text(source)
        # First linked without an OpenMP library: the symbols are then those of the one torch has loaded, and
        # both share one set of threads. Only where torch exports none does the kernel bring its own.
        link = ["-shared", *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])]
        for command in (
            [*compiler, *OPTIONS, "-c", str(code), "-o", str(obj)],
            [*compiler, *link, str(obj), "-o", str(lib), *(["-fopenmp"] if own_threads else [])],
        ):
            done = _run(command)
            if done.returncode:
                raise CompilerError(f"{' '.join(compiler)} failed on a kernel: {done.stderr.strip()[-2000:]}")
        os.replace(lib, path)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} did not run: {error}") from error
