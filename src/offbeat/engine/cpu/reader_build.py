"""Builds ``reader.cpp`` against the headers of the installed torch: in the background, and once for all processes.

The compiler runs in a process of its own, which may outlive this one, so even a short program builds the library for
the next one. The compiler's process holds a file lock in the cache directory, which the system releases when the
process ends for any reason. All processes check the directory from time to time; none of them waits.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch

from offbeat.engine.cpu.compiler import (
    CompilerError,
    cache_directory,
    cached,
    digest,
    find_compiler,
    version_of,
    why_not_readable,
    why_not_wanted,
)

SOURCE = Path(__file__).with_name("reader.cpp")
OPTIONS = ("-std=c++20", "-O2", "-w", "-fPIC", "-shared", "-fvisibility=hidden")
#: It usually takes 15 s, but may take minutes on a busy machine.
SECONDS = 900
#: How many times the compiler is started if it is killed.
ATTEMPTS = 2

# Either the library or the compiler's output is moved into place, atomically.
_SCRIPT = """
work=$1 library=$2 failure=$3
shift 3
if "$@" >"$work/log" 2>&1; then mv -f "$work/reader.so" "$library"; else mv -f "$work/log" "$failure"; fi
rm -rf "$work"
"""


class Build:
    """The library for this Python, torch and compiler. Raises :class:`CompilerError` if it cannot be built.

    Without a compiler, a cached library for the same source, torch and Python is used, whichever compiler made it.
    """

    def __init__(self) -> None:
        name, self._command = f"reader-{_digest()}", list[str]()
        try:
            self._command = _command()
        except CompilerError as error:
            libraries = cached(f"{name}-*.so")
            if not libraries:
                raise CompilerError(why_not_readable() or str(error)) from error
            self.library, self._why_not = libraries[0], str(error)
            return
        self._name = f"{name}-{_digest_of_build(self._command)}"
        libraries = cached(f"{self._name}.so")  # the directory may be read-only
        self._use(libraries[0].parent if libraries else cache_directory())
        self._began = time.time()
        self._deadline = time.monotonic() + SECONDS
        self._attempts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def poll(self) -> Path | None:
        """The library, or None while this or another process compiles it."""
        if self.library.exists():
            return self.library
        if not self._command:
            raise CompilerError(self._why_not)
        running = self._process is not None and self._process.poll() is None
        if time.monotonic() > self._deadline:
            if running:
                assert self._process is not None
                os.killpg(self._process.pid, signal.SIGKILL)
            raise CompilerError(f"the compiler was not done after {SECONDS} s")
        if running:
            return None
        try:
            with open(self._lock, "wb") as lock:  # only the compiler's process keeps it open
                if _is_taken(lock.fileno()):
                    return None
                self._look_for_results()
                if self.library.exists():
                    return self.library
                self._start(lock.fileno())
        except OSError as error:
            raise CompilerError(f"nothing could be compiled in {self.library.parent}: {error}") from error
        return None

    def discard(self) -> None:
        """Remove a library that cannot be loaded, so that it is built again."""
        if self._command:
            try:
                self.library.unlink(missing_ok=True)
            except OSError:
                self._use(cache_directory())

    def _use(self, directory: Path) -> None:
        self.library, self._failure, self._lock = (
            directory / f"{self._name}{end}" for end in (".so", ".failed", ".lock")
        )

    def _look_for_results(self) -> None:
        """Raise if the compiler has failed for another process since this one started."""
        try:
            if self._failure.stat().st_mtime < self._began - 1:  # some file systems have whole seconds
                return
            said = self._failure.read_text(errors="replace").strip()
        except FileNotFoundError:
            return
        raise CompilerError(f"{self._command[0]} failed on the address reader: {said[:2000]}")

    def _start(self, lock: int) -> None:
        if self._attempts == ATTEMPTS:
            raise CompilerError(f"{self._command[0]} was killed while it compiled the address reader")
        self._attempts += 1
        work = Path(tempfile.mkdtemp(dir=self.library.parent, prefix="build-"))
        source = shutil.copyfile(SOURCE, work / "reader.cpp")
        command = [*self._command, str(source), "-o", str(work / "reader.so"), *_libraries()]
        self._failure.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "sh", str(work), str(self.library), str(self._failure), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach it
            pass_fds=(lock,),
        )


def is_whole(library: Path) -> bool:
    """Return whether a library is complete. Loading one that was cut off would kill the process."""
    if sys.platform == "darwin":
        return True
    with open(library, "rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return False
    (table,), (size, count) = struct.unpack_from("=Q", head, 40), struct.unpack_from("=HH", head, 58)
    return library.stat().st_size >= int(table) + int(size) * int(count)  # the table of sections comes last


def _is_taken(lock: int) -> bool:
    """Try to take the lock; True if another process has it. If files cannot be locked, every process builds."""
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _torch_directory() -> Path:
    return Path(torch.__file__).parent


def _command() -> list[str]:
    """The compiler with its options, if the headers are there. Raises :class:`CompilerError`."""
    if reason := why_not_wanted():
        raise CompilerError(reason)
    compiler = find_compiler("CXX", ("c++", "g++", "clang++"))
    if compiler is None:
        raise CompilerError(f"no C++ compiler ({os.environ.get('CXX') or 'c++, g++ or clang++'}) was found; set CXX")
    python = [sysconfig.get_paths()[name] for name in ("include", "platinclude")]
    headers = _torch_directory() / "include"
    for header in (Path(python[0]) / "Python.h", headers / "torch/csrc/autograd/python_variable.h"):
        if not header.exists():
            raise CompilerError(f"{header} is missing")
    directories = [headers, headers / "torch/csrc/api/include", *dict.fromkeys(python)]
    include = [word for directory in directories for word in ("-isystem", str(directory))]
    return [*compiler, *OPTIONS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *include]


def _libraries() -> list[str]:
    directory = _torch_directory() / "lib"
    allow = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [f"-L{directory}", "-lc10", "-ltorch_cpu", "-ltorch_python", f"-Wl,-rpath,{directory}", *allow]


def _installed() -> list[os.stat_result]:
    return [file.stat() for file in sorted(_torch_directory().glob("lib/*torch_python.*"))]


def _digest() -> str:
    """A hash of what the library must match, whichever compiler made it: the source, torch and Python."""
    sizes = [file.st_size for file in _installed()]
    parts = [SOURCE.read_text(), torch.__version__, torch.version.git_version, sizes, platform.machine()]
    return digest(repr([*parts, sysconfig.get_config_var("SOABI"), OPTIONS]))


def _digest_of_build(command: list[str]) -> str:
    """A hash of the rest, including when torch was installed: a local build of torch keeps its version number."""
    compiler = version_of(tuple(command[: command.index(OPTIONS[0])]))
    return digest(repr([compiler, command, _libraries(), [file.st_mtime_ns for file in _installed()]]))[:8]
