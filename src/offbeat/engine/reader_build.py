"""Builds ``reader.cpp`` against the headers of the installed torch: in the background, and once for all processes.

The compiler runs in a process of its own that outlives this one if need be, so that even a short program leaves the
library for the next. That process holds a lock on a file in the cache directory while it is at work; the system takes
the lock back when it ends, however it ends. Everybody looks there from time to time, and nobody waits.
"""

from __future__ import annotations

import hashlib
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

from offbeat.engine.cpu.compiler import CompilerError, cache_directory, find_compiler, version_of, why_no_compiler

SOURCE = Path(__file__).with_name("reader.cpp")
OPTIONS = ("-std=c++20", "-O2", "-w", "-fPIC", "-shared", "-fvisibility=hidden")
#: A machine that is busy with other things may need minutes for what takes 15 s.
SECONDS = 900
#: A compiler that was killed is started again, but not for ever.
ATTEMPTS = 2

# Either the library or what the compiler said is put in its place in one go.
_SCRIPT = """
work=$1 library=$2 failure=$3
shift 3
if "$@" >"$work/log" 2>&1; then mv -f "$work/reader.so" "$library"; else mv -f "$work/log" "$failure"; fi
rm -rf "$work"
"""


class Build:
    """The library for this Python, torch and compiler. Raises :class:`CompilerError` if there can be none."""

    def __init__(self) -> None:
        if reason := why_no_compiler():
            raise CompilerError(reason)
        self._command = _command()
        directory = cache_directory()
        name = f"reader-{_digest(self._command)}"
        self.library, self._failure, self._lock = (directory / f"{name}{end}" for end in (".so", ".failed", ".lock"))
        self._began = time.time()
        self._deadline = time.monotonic() + SECONDS
        self._attempts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def poll(self) -> Path | None:
        """The library if there is one; else None, and somebody is compiling it."""
        if self.library.exists():
            return self.library
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
        """The library is of no use: build it anew."""
        self.library.unlink(missing_ok=True)

    def _look_for_results(self) -> None:
        """What made it fail for another process that was at it at the same time makes it fail for this one."""
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
            start_new_session=True,  # Ctrl-C is not meant for it
            pass_fds=(lock,),
        )


def is_whole(library: Path) -> bool:
    """Whether a library has its end: loading one that has lost it kills the process."""
    if sys.platform == "darwin":
        return True
    with open(library, "rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return False
    (table,), (size, count) = struct.unpack_from("=Q", head, 40), struct.unpack_from("=HH", head, 58)
    return library.stat().st_size >= int(table) + int(size) * int(count)  # the table of sections comes last


def _is_taken(lock: int) -> bool:
    """Take the lock, or say that another has it. Where files cannot be locked everybody builds for himself."""
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
    """The compiler with its options, if the headers are there."""
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


def _digest(command: list[str]) -> str:
    """Whatever the library depends on. Of torch also when it was installed: a build of one's own keeps its version."""
    compiler = version_of(tuple(command[: command.index(OPTIONS[0])]))
    files = sorted(_torch_directory().glob("lib/*torch_python.*"))
    installed = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    parts = [SOURCE.read_text(), torch.__version__, torch.version.git_version, installed, platform.machine()]
    parts += [sysconfig.get_config_var("SOABI"), compiler, command, _libraries()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
