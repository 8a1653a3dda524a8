"""A slow link between processes of one machine, and the bytes they send over it.

There are two ways to make it slow:

- ``"namespaces"``: each process has a network of its own, and a virtual cable with a token bucket (``tbf``) joins them.
  Needs root and iproute2. The networks have no names; they are gone with the processes that are in them.
- ``"pacing"``: the processes talk over the loopback device, and Linux limits the rate of each connection
  (``SO_MAX_PACING_RATE``). Needs no privileges.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

__all__ = ["DESCRIPTIONS", "enter", "interface", "join", "limit_rate", "possible", "prepare", "sent_bytes"]

#: What each way is called on the screen. "none" is for systems that can do neither.
DESCRIPTIONS = {
    "namespaces": "network namespaces, limited by a token bucket",
    "pacing": "the loopback device, each connection limited by Linux's TCP pacing",
    "none": "the loopback device at full speed: this system cannot limit it",
}
_CLONE_NEWNET = 0x40000000
_SO_MAX_PACING_RATE = 47
#: Where ``struct tcp_info`` has tcpi_bytes_sent and tcpi_bytes_retrans (Linux 4.19 and later).
_BYTES_SENT, _COUNTERS = 200, "=QQ"
_CABLE = "site{}"


def possible() -> list[str]:
    """The ways that this system allows, the best first."""
    found = ["none"]
    with socket.socket() as connection, suppress(OSError):
        if sys.platform == "linux":
            connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 1 << 20)
            found.insert(0, "pacing")
    if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"):
        probe = subprocess.run([sys.executable, __file__], capture_output=True, timeout=60)
        if probe.returncode == 0:
            found.insert(0, "namespaces")
    return found


def enter(way: str) -> None:
    """In each process, before it starts threads: move to a network of its own if the link is made that way."""
    if way == "namespaces":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "a network namespace could not be made")


def join(way: str, pids: list[int]) -> None:
    """In the parent, when both processes have entered: lay the cable."""
    if way == "namespaces":
        one, other = pids
        _run(f"ip link add {interface(way, 0)} netns {one} type veth peer name {interface(way, 1)} netns {other}")


def prepare(way: str, rank: int, mbit: float) -> None:
    """In each process, after :func:`join`: set up this end, and tell gloo to use it."""
    if way == "namespaces":
        _set_up(interface(way, rank), f"10.0.0.{rank + 1}/24", mbit)
    if name := interface(way, rank):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface(way: str, rank: int) -> str:
    """The device that a process sends through."""
    if way == "namespaces":
        return _CABLE.format(rank)
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")


def limit_rate(way: str, mbit: float) -> None:
    """Limit the connections that this process has by now."""
    if way == "pacing":
        for connection in _connections():
            connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(mbit * 1e6 / 8))


def sent_bytes() -> int | None:
    """What this process has sent over its connections, without repeats; None if the system does not know."""
    total, size = 0, _BYTES_SENT + struct.calcsize(_COUNTERS)
    for connection in _connections():
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        if len(info) < size:
            return None
        sent, again = struct.unpack_from(_COUNTERS, info, _BYTES_SENT)
        total += sent - again
    return total if sys.platform == "linux" else None


def _connections() -> Iterator[socket.socket]:
    """This process's TCP connections, whoever opened them."""
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found


def _set_up(name: str, address: str, mbit: float) -> None:
    _run(f"ip addr add {address} dev {name}")
    _run(f"ip link set {name} up")
    _run("ip link set lo up")
    _run(f"tc qdisc add dev {name} root tbf rate {round(mbit * 1000)}kbit burst 64kb latency 100ms")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")


if __name__ == "__main__":  # what possible() tries: the steps above, in a network that ends with this process
    enter("namespaces")
    _run("ip link add site0 type veth peer name site1")
    _set_up("site0", "10.0.0.1/24", 100)
