"""Turns a kernel's C source into a loaded library, once per machine.

Libraries are cached in ``$OFFBEAT_CACHE_DIR`` (default: ``offbeat`` in the user's cache directory). A library's name is
made from the source, the processor and the compiler. Without a compiler, a library from the same source for the same
processor is loaded, whichever compiler made it: with these options all compilers give the same results.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fnmatch
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

#: Contraction is off, so that the new value of an element does not depend on its position in a tensor.
OPTIONS = ("-O3", "-march=native", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w")
COMPILE_SECONDS = 120


class CompilerError(RuntimeError):
    """A kernel could not be compiled or loaded; the message says why."""


def digest(text: str) -> str:
    """A short hash, for the name of a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find_compiler(variable: str = "CC", names: tuple[str, ...] = ("cc", "gcc", "clang")) -> tuple[str, ...] | None:
    """The command in an environment variable (it may have arguments), else the first of ``names`` that exists."""
    return _find(os.environ.get(variable, ""), names)


@functools.cache
def _find(command: str, names: tuple[str, ...]) -> tuple[str, ...] | None:
    commands = [shlex.split(command)] if command.strip() else [[name] for name in names]
    return next(((program, *rest) for name, *rest in commands if (program := shutil.which(name))), None)


def why_not_wanted() -> str | None:
    """The reason that compiled kernels are not used at all, not even from a cache; None if they are used."""
    if os.environ.get("OFFBEAT_NO_COMPILER"):
        return "OFFBEAT_NO_COMPILER is set"
    return "compiled kernels are not supported on Windows" if sys.platform == "win32" else None


def why_no_compiler() -> str | None:
    """Why kernels cannot be compiled here, or None if they can."""
    if reason := why_not_wanted():
        return reason
    if find_compiler() is None:
        if command := os.environ.get("CC", "").strip():
            return f"no C compiler was found: there is no {command}, which CC names"
        return "no C compiler (cc, gcc or clang) was found; install one, or set CC"
    return None


@functools.cache
def version_of(compiler: tuple[str, ...]) -> str:
    """The output of ``--version``. Raises :class:`CompilerError`."""
    return _run([*compiler, "--version"]).stdout


#: Lines of /proc/cpuinfo that tell which instructions a processor has.
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


def cache_directory() -> Path:
    """The directory for new kernels. It must belong to this user: a shared one could contain somebody else's code.

    Raises :class:`CompilerError` if nothing can be written anywhere.
    """
    directory = _configured_directory()
    if directory is None:
        return _private_directory()
    problem = None
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        problem = f"the cache directory {directory} cannot be used: {error}"
    else:
        if not _is_trusted(directory):
            return _private_directory()
        if not os.access(directory, os.W_OK | os.X_OK):
            problem = f"the cache directory {directory} cannot be written to"
    if problem is None:
        return directory
    _warn_once(
        f"{problem}; kernels that are not in it are compiled anew in every process. "
        "Set OFFBEAT_CACHE_DIR to a directory of yours"
    )
    return _private_directory()


def cached(pattern: str) -> list[Path]:
    """Files of the cache, the newest first. The cache need not be writable, so it may be part of a container image.

    A directory or a file that cannot be reached counts as not there.
    """
    directory = _configured_directory()
    if directory is None:
        return []
    try:
        names = _names_in(directory)
    except OSError:
        return []
    if not _is_trusted(directory):
        return []
    dated = []
    for name in fnmatch.filter(names, pattern):
        with contextlib.suppress(OSError):  # another process may have removed it
            dated.append(((directory / name).stat().st_mtime, directory / name))
    return [path for _, path in sorted(dated, reverse=True)]


def why_not_readable() -> str | None:
    """The reason that the directory OFFBEAT_CACHE_DIR cannot be read; None if it can, or is missing or not set."""
    configured = os.environ.get("OFFBEAT_CACHE_DIR")
    if not configured:
        return None
    try:
        _names_in(Path(configured))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"the cache directory {configured} cannot be read: {error.strerror}"
    return None


def _names_in(directory: Path) -> list[str]:
    # With the dot, the system also checks whether files in the directory can be opened.
    return os.listdir(os.path.join(directory, "."))


def _configured_directory() -> Path | None:
    if configured := os.environ.get("OFFBEAT_CACHE_DIR"):
        return Path(configured)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat"
    except RuntimeError:  # the user has no home directory
        return None


def _is_trusted(directory: Path) -> bool:
    """Warn and return False if others can write to the directory: they could make this process run any code."""
    try:
        status = directory.stat()
    except OSError:  # it has just been removed
        return False
    if status.st_uid not in (os.getuid(), 0):  # root can change this program anyway
        problem = f"it belongs to user {status.st_uid}, not to {os.getuid()}"
    elif status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        problem = f"others may write to it (mode {status.st_mode & 0o777:o})"
    else:
        return True
    _warn_once(
        f"the cache directory {directory} is not trusted: {problem}; kernels are neither loaded from it nor kept in it."
        " Set OFFBEAT_CACHE_DIR to a directory of yours"
    )
    return False


def warn_of_torch(reason: str) -> None:
    """Warn once per process that steps are slower than they could be, and how to change that."""
    if why_not_wanted() is None and not _warned:
        _warned.append(reason)
        if why_no_compiler() is not None and why_not_readable() is not None:
            ways = "Let this user read the directory (chmod -R a+rX); or install a C compiler"
        else:
            ways = "Install a C compiler; or fill a cache on a machine that has one, copy it and set "
            ways += "OFFBEAT_CACHE_DIR to it"
        warnings.warn(
            f"offbeat has no compiled kernels for the CPU: {reason}. Steps use torch's own operators, most of which "
            f"are slower. {ways}; or set OFFBEAT_NO_COMPILER=1, which also silences this warning",
            stacklevel=2,
        )


_warned: list[str] = []


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


@functools.cache
def _private_directory() -> Path:
    try:
        directory = tempfile.mkdtemp(prefix="offbeat-")
    except OSError as error:
        raise CompilerError(f"there is no directory for compiled kernels: {error}; set OFFBEAT_CACHE_DIR") from error
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


@functools.lru_cache(maxsize=1024)
def load(source: str) -> ctypes.CDLL:
    """The library made from ``source``: a cached or a new one. Raises :class:`CompilerError`."""
    name = digest(source + _target())
    reason = why_no_compiler()
    made_by = digest(version_of(find_compiler() or ()))[:8] if reason is None else "*"
    for library in cached(f"{name}-{made_by}.so"):
        with contextlib.suppress(OSError):  # it is damaged, or built for another system: build it again
            return ctypes.CDLL(str(library))
    if reason is not None:
        raise CompilerError(why_not_readable() or reason)
    path = cache_directory() / f"{name}-{made_by}.so"
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
        # First linked without an OpenMP library: the symbols then resolve to the library that torch has loaded, and
        # both share one set of threads. If torch exports none, the kernel is linked with its own.
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
