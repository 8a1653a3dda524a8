"""Two hosts in network namespaces joined by a rate-limited link, for as long as needed. Needs root and iproute2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Host", "hosts", "run_on_both", "sent_bytes"]


@dataclass(frozen=True)
class Host:
    """One end of the link."""

    namespace: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """How to run something there."""
        return ["ip", "netns", "exec", self.namespace, *words]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def hosts(rate: str = "1gbit") -> Iterator[tuple[Host, Host]]:
    """Bring two hosts up, and take them down whatever happens."""
    tag = f"off{os.getpid() % 100000}"
    ends = [Host(f"{tag}{end}", f"{tag}{end}0", f"10.78.0.{i}") for i, end in ((1, "a"), (2, "b"))]
    try:
        for host in ends:
            _run("ip", "netns", "add", host.namespace)
        _run("ip", "link", "add", ends[0].interface, "type", "veth", "peer", "name", ends[1].interface)
        for host in ends:
            name = host.namespace
            _run("ip", "link", "set", host.interface, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _run("ip", "-n", name, "link", "set", host.interface, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            limit = f"tc qdisc add dev {host.interface} root tbf rate {rate} burst 512kb latency 100ms"
            _run(*host.command(*limit.split()))
        yield ends[0], ends[1]
    finally:
        for host in ends:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)


def run_on_both(module: str, words: Callable[[Host], list[str]], rate: str, environment: dict[str, str]) -> Any:
    """Run ``python -m module RANK ADDRESS ...`` on two hosts; returns what rank 0 printed last, as JSON."""
    with hosts(rate) as ends:
        processes = []
        for rank, host in enumerate(ends):
            command = host.command(sys.executable, "-m", module, str(rank), ends[0].address, *words(host))
            settings = {**os.environ, **environment, "GLOO_SOCKET_IFNAME": host.interface}
            processes.append(subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True))
        try:
            answer = processes[0].communicate(timeout=1800)[0]
            processes[1].communicate(timeout=60)
        finally:
            for process in processes:
                process.kill()
    return json.loads(answer.strip().splitlines()[-1])


def sent_bytes(interface: str) -> int:
    """What an interface has sent, as the kernel counts it; to be asked on the host that has it."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise ValueError(f"there is no interface {interface!r} here")
