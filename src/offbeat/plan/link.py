"""Probes of a link: how fast the collectives that rounds use are, and what they cost training meanwhile.

All ranks of the default process group call these functions together and get the same numbers: the slowest rank's.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Timing", "busy_per_byte", "measure_latency", "measure_rates", "slowest"]

#: Calls that are timed, at least and at most.
LEAST, MOST = 3, 20


@dataclass(frozen=True)
class Timing:
    """How long a collective took.

    Attributes:
        collective: ``"all_reduce"`` or ``"all_gather"``.
        bytes: of the tensor that each rank gives.
        sent: bytes that each rank sends, as in a ring.
        seconds: the median of some calls.
    """

    collective: str
    bytes: int
    sent: int
    seconds: float


def slowest(seconds: float) -> float:
    """The largest of all ranks' numbers."""
    found = torch.tensor(seconds, dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def measure_latency() -> float:
    """Seconds of an all-reduce of 8 bytes."""
    return _time(lambda: dist.all_reduce(torch.zeros(2)), budget=0.5)


def measure_rates(sizes: list[int], budget: float) -> list[Timing]:
    """Time the collectives that rounds use, for each size.

    Args:
        sizes: bytes of the tensor that each rank gives, ascending. Those after one that took the budget are left out.
        budget: seconds for each size of each collective, after one call to warm up.
    """
    world, timings = dist.get_world_size(), []
    for name in ("all_reduce", "all_gather"):
        for size in sizes:
            tensor = torch.zeros(size // 4)
            gathered = list(torch.zeros(world, size // 4)) if name == "all_gather" else []
            seconds = _time(_caller(name, tensor, gathered), budget)
            sent = size * (world - 1) if gathered else size * 2 * (world - 1) // world
            timings.append(Timing(name, size, sent, seconds))
            if seconds > budget:
                break
    return timings


def _caller(name: str, tensor: Tensor, gathered: list[Tensor]) -> Callable[[], object]:
    if name == "all_gather":
        return lambda: dist.all_gather(gathered, tensor)
    return lambda: dist.all_reduce(tensor)


def busy_per_byte(step: Callable[[], object], bandwidth: float, seconds: float) -> float:
    """Seconds of training that are lost for each byte sent in the background.

    Args:
        step: makes one training step, without communication.
        bandwidth: bytes a second of the link.
        seconds: about how long to measure.
    """
    world = dist.get_world_size()
    size = int(min(max(bandwidth * seconds / 8, 1 << 16), 1 << 24)) // 4 * 4
    calls = max(2, round(bandwidth * seconds / (size * 2 * (world - 1) / world)))
    # A group of its own: collectives of a thread must not mix with those of the program.
    group, tensor = dist.new_group(backend="gloo"), torch.zeros(size // 4)
    dist.all_reduce(tensor, group=group)
    alone = _steps_during(step, lambda: time.sleep(seconds / 2))
    sending = _steps_during(step, lambda: [dist.all_reduce(tensor, group=group) for _ in range(calls)])
    alone += _steps_during(step, lambda: time.sleep(seconds / 2))
    lost = sum(sending) - len(sending) * statistics.median(alone)
    return max(0.0, slowest(lost) / (calls * size * 2 * (world - 1) / world))


def _steps_during(step: Callable[[], object], work: Callable[[], object]) -> list[float]:
    """How long each step took that was made while a thread worked."""
    thread, times = threading.Thread(target=work), []
    thread.start()
    while thread.is_alive():
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return times


def _time(call: Callable[[], object], budget: float) -> float:
    """The median of some calls, on the slowest rank. The number of calls is the same on all ranks."""
    call()
    begun = time.perf_counter()
    call()
    count = min(MOST, max(LEAST, int(budget / max(slowest(time.perf_counter() - begun), 1e-9))))
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return slowest(statistics.median(times))
