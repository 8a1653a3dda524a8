"""The checks of ``offbeat doctor``: each looks at one thing and says what to do if it is not as it should be."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import socket
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

import offbeat
from offbeat import _torch
from offbeat.engine.cpu.compiler import CompilerError, cache_directory, find_compiler, why_no_compiler
from offbeat.engine.cpu.reader import wait_for_reader, why_no_reader

__all__ = ["CHECKS", "Finding", "run_checks"]

Status: TypeAlias = Literal["OK", "WARN", "FAIL"]
GIGABYTE, MEGABYTE = 10**9, 10**6
#: Compiling the address reader takes 15 s or so, once.
READER_SECONDS = 60.0
SLOWER = "steps work, but take longer"
FRAMEWORKS = ("lightning", "accelerate", "transformers")


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        name: what was looked at.
        status: ``"FAIL"`` if offbeat cannot work, ``"WARN"`` if it is slower or lacks something.
        said: what there is.
        fix: what to do; empty if there is nothing to do.
    """

    name: str
    status: Status
    said: str
    fix: str = ""


def run_checks(checks: dict[str, Callable[[], Finding]] | None = None) -> list[Finding]:
    """Run all checks. One that raises is a FAIL of its own and stops no other.

    Args:
        checks: name and function; by default :data:`CHECKS`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong stands in the line
        return [_run(name, check) for name, check in (CHECKS if checks is None else checks).items()]


def _run(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        fix = "run offbeat doctor again; if it stays, report this line"
        return Finding(name, "FAIL", f"{type(error).__name__}: {_first_line(error)}", fix)


def check_python() -> Finding:
    """The version of Python."""
    said = f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform}, {platform.machine()})"
    return Finding("Python", "OK", said)


def check_torch() -> Finding:
    """The version of torch, and the private names of it that offbeat uses."""
    said = f"{torch.__version__}, offbeat {offbeat.__version__}"
    if (reason := _outside("torch", torch.__version__)) is not None:
        return Finding("torch", "WARN", f"{said}; {reason}", f"pip install 'torch{reason.rpartition(' ')[2]}'")
    missing = [name for name, is_there in _torch.report() if not is_there]
    if missing:
        said += f"; private names that are not there: {', '.join(missing)}"
        return Finding("torch", "WARN", said, "features that need them raise; use another version of torch")
    return Finding("torch", "OK", said)


def check_compiler() -> Finding:
    """The C compiler, and the tier that a step runs in."""
    parameter = torch.nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    optimizer = offbeat.Lion([parameter], lr=0.1)  # torch has no Lion, so only a compiled kernel makes it fused
    optimizer.step()
    tier = optimizer.tiers()[0]
    if tier.tier == "fused":
        compiler = " ".join(find_compiler() or ("none, but the kernels are there",))
        return Finding("compiler", "OK", f"{compiler}; steps are fused")
    reason = why_no_compiler() or tier.reason
    return Finding(
        "compiler", "WARN", reason, _unset(reason) or f"{SLOWER}; install gcc or clang, or pip install ziglang"
    )


def check_cache() -> Finding:
    """The folder of compiled kernels."""
    try:
        folder = cache_directory()
    except CompilerError as error:
        return Finding("kernels' cache", "FAIL", _first_line(error), "set OFFBEAT_CACHE_DIR to a folder of yours")
    if folder.name.startswith("offbeat-") and folder.parent == Path(tempfile.gettempdir()):
        said = "the usual folder cannot be used, so that kernels are compiled anew in every process"
        return Finding("kernels' cache", "WARN", said, "set OFFBEAT_CACHE_DIR to a folder that only you can write to")
    kernels = list(folder.glob("*.so"))
    size = sum(path.stat().st_size for path in kernels) / MEGABYTE
    return Finding("kernels' cache", "OK", f"{folder}, {len(kernels)} libraries, {size:.1f} MB")


def check_reader() -> Finding:
    """The compiled address reader."""
    if wait_for_reader(READER_SECONDS):
        return Finding("address reader", "OK", "compiled")
    reason = why_no_reader() or "not ready"
    fix = _unset(reason) or f"{SLOWER}; install g++ and Python's headers (python3-dev)"
    return Finding("address reader", "WARN", reason, fix)


def check_triton() -> Finding:
    """Triton, which makes kernels on GPUs."""
    gpu = torch.cuda.is_available()
    try:
        version = importlib.import_module("triton").__version__
    except Exception as error:
        if not gpu:
            return Finding("Triton", "OK", "not installed, and not needed without a GPU")
        return Finding("Triton", "WARN", _first_line(error), "pip install triton; steps on the GPU are slower without")
    return Finding("Triton", "OK", f"{version}{'' if gpu else ', not used without a GPU'}")


def check_gloo() -> Finding:
    """gloo, by an all-reduce of one process."""
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("gloo", "FAIL", "this torch has no gloo", "install a torch with distributed support")
    if dist.is_initialized():
        return Finding("gloo", "OK", "in use by this process")
    try:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        fix = "set GLOO_SOCKET_IFNAME to one of: " + ", ".join(name for _, name in socket.if_nameindex())
        return Finding("gloo", "FAIL", _first_line(error), f"{fix}; or add this host's name to /etc/hosts")
    return Finding("gloo", "OK", "one process connects and sums")


def check_interface() -> Finding:
    """The network interface that gloo will use, as it chooses it: by name, else the address of the host's name."""
    addresses = _addresses()
    if name := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        if missing := [one for one in name.split(",") if one not in addresses]:
            fix = f"set it to one of: {', '.join(addresses)}"
            return Finding(
                "interface", "FAIL", f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which is not here", fix
            )
        return Finding("interface", "OK", ", ".join(f"{one} ({addresses[one]})" for one in name.split(",")))
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        fix = "set GLOO_SOCKET_IFNAME, or add the name to /etc/hosts"
        return Finding("interface", "WARN", f"the host's name, {host}, has no address; gloo will use loopback", fix)
    interface = next((one for one, here in addresses.items() if here == address), None)
    if interface is None and not address.startswith("127."):
        said = f"the host's name, {host}, leads to {address}, which no interface here has; gloo will use loopback"
        return Finding("interface", "WARN", said, "set GLOO_SOCKET_IFNAME to the interface that others can reach")
    if address.startswith("127."):
        others = [one for one, here in addresses.items() if not here.startswith("127.")]
        said = f"{interface or 'lo'} ({address}): enough for one machine, out of reach for others"
        if not others:
            return Finding("interface", "OK", said)
        fix = f"for several machines set GLOO_SOCKET_IFNAME to one of: {', '.join(others)}"
        return Finding("interface", "WARN", said, fix)
    return Finding("interface", "OK", f"{interface} ({address})")


def check_nccl() -> Finding:
    """NCCL."""
    if not torch.cuda.is_available():
        return Finding("NCCL", "OK", "not needed without a GPU")
    if not dist.is_nccl_available():
        return Finding("NCCL", "WARN", "this torch has no NCCL", "gradients on GPUs need it: install torch with CUDA")
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Finding("NCCL", "OK", f"{version}, {torch.cuda.device_count()} GPUs ({torch.cuda.get_device_name()})")


def check_lighthouse() -> Finding:
    """torchft, whose lighthouse replicas that come and go need."""
    try:
        return Finding("lighthouse", "OK", f"torchft {importlib.metadata.version('torchft')}")
    except importlib.metadata.PackageNotFoundError:
        fix = "only for replicas that come and go: pip install torchft"
        return Finding("lighthouse", "OK", "torchft is not installed", fix)


def check_disk() -> Finding:
    """Free space where kernels, temporary files and checkpoints go."""
    folders = {Path.cwd(), Path(tempfile.gettempdir())}
    with suppress(CompilerError):
        folders.add(cache_directory())
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    folder, least = min(free.items(), key=lambda pair: pair[1])
    said = f"{least / GIGABYTE:,.1f} GB free in {folder}"
    if least >= GIGABYTE:
        return Finding("disk", "OK", said)
    fix = "make room, or set OFFBEAT_CACHE_DIR and TMPDIR to another disk"
    return Finding("disk", "FAIL" if least < 100 * MEGABYTE else "WARN", said, fix)


def check_frameworks() -> Finding:
    """The frameworks that offbeat.integrations works with."""
    versions, wrong = [], []
    for name in FRAMEWORKS:
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            versions.append(f"{name} {version}")
            if reason := _outside(name, version):
                wrong.append(f"{name} {version}: {reason}")
    if wrong:
        return Finding("frameworks", "WARN", "; ".join(wrong), "pip install lightning accelerate transformers")
    return Finding("frameworks", "OK", ", ".join(versions) or "none of " + ", ".join(FRAMEWORKS))


#: All checks, in the order in which they are printed.
CHECKS: dict[str, Callable[[], Finding]] = {
    "Python": check_python,
    "torch": check_torch,
    "compiler": check_compiler,
    "kernels' cache": check_cache,
    "address reader": check_reader,
    "Triton": check_triton,
    "gloo": check_gloo,
    "interface": check_interface,
    "NCCL": check_nccl,
    "lighthouse": check_lighthouse,
    "disk": check_disk,
    "frameworks": check_frameworks,
}


def _outside(package: str, version: str) -> str | None:
    """Why a version is not one that offbeat supports; None if it is, or if that cannot be told."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(line) for line in importlib.metadata.requires("offbeat") or []]
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return None
    for one in requirements:
        if one.name == package and not one.specifier.contains(version.partition("+")[0], prereleases=True):
            return f"supported is {one.specifier}"
    return None


def _unset(reason: str) -> str:
    """What to do if the reason is a variable of the environment; empty if it is not."""
    return f"{SLOWER}; unset {reason.split()[0].partition('=')[0]}" if reason.endswith(" is set") else ""


def _addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found: dict[str, str] = {}
    if sys.platform != "linux":
        return found
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as request:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(request.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
