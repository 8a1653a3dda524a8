"""Turns a kernel's C source into a loaded library, once per machine.

Libraries are cached in ``$OFFBEAT_CACHE_DIR`` (default: ``offbeat`` in the user's cache directory) under a name
made from the source, the compiler and the processor.
"""

from __future__ import annotations

import atexit
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


def why_no_compiler() -> str | None:
    """Why kernels cannot be compiled here, or None if they can."""
    if os.environ.get("OFFBEAT_NO_COMPILER"):
        return "OFFBEAT_NO_COMPILER is set"
    if sys.platform == "win32":
        return "compiled kernels are not supported on Windows"
    if find_compiler() is None:
        wanted = os.environ.get("CC") or "cc, gcc or clang"
        return f"no C compiler ({wanted}) was found; install one, or set CC"
    return None


@functools.cache
def version_of(compiler: tuple[str, ...]) -> str:
    """What the compiler says of itself. Raises :class:`CompilerError`."""
    return _run([*compiler, "--version"]).stdout


@functools.cache
def _fingerprint() -> str:
    """Compiler and processor: a library built by or for another is not reused."""
    version = version_of(find_compiler() or ())
    try:
        cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        cpu = "\n".join(line for line in cpu.splitlines() if line.startswith(("model name", "flags", "Features")))
    except OSError:
        cpu = platform.processor()
    return "\n".join((version, platform.machine(), cpu, " ".join(OPTIONS)))


def cache_directory() -> Path:
    """A directory of this user's own; a shared one could hold somebody else's code."""
    if configured := os.environ.get("OFFBEAT_CACHE_DIR"):
        directory = Path(configured)
    else:
        try:
            directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat"
        except RuntimeError:  # the user has no home directory
            return _private_directory()
    if problem := _why_not_trusted(directory):
        _warn_once(
            f"{problem}; kernels are compiled anew in every process. Set OFFBEAT_CACHE_DIR to a directory of yours"
        )
        return _private_directory()
    return directory


def _why_not_trusted(directory: Path) -> str | None:
    """Who can write to the directory can make this process run any code. None if that is this user alone."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = directory.stat()
    except OSError as error:
        return f"the cache directory {directory} cannot be used: {error}"
    if found.st_uid != os.getuid():
        return (
            f"the cache directory {directory} is not trusted: it belongs to user {found.st_uid}, not to {os.getuid()}"
        )
    if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        return (
            f"the cache directory {directory} is not trusted: others may write to it (mode {found.st_mode & 0o777:o})"
        )
    if not os.access(directory, os.W_OK):
        return f"the cache directory {directory} cannot be written to"
    return None


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
    if reason := why_no_compiler():
        raise CompilerError(reason)
    digest = hashlib.sha256((source + _fingerprint()).encode()).hexdigest()[:32]
    directory = cache_directory()
    path = directory / f"{digest}.so"
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged, or built for another system: build it anew
            pass
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
