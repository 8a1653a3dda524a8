"""Probes behind ``offbeat bench``: the link, a training step, and the work of a round, over all ranks together."""

from __future__ import annotations

import copy
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.plan.cost import Machine
from offbeat.plan.link import busy_per_byte, measure_latency, measure_rates, slowest
from offbeat.plan.result import BenchResult
from offbeat.plan.settings import Settings

__all__ = ["Loss", "Plan", "Say", "Trainer", "probe"]

Loss = Callable[[nn.Module], Tensor]
Say = Callable[[str], None]


#: Whose work is measured: every strategy, and codecs.
LOCAL = (
    *(Settings(strategy) for strategy in ("local_sgd", "slowmo", "diloco")),
    *(Settings("diloco", codec=codec) for codec in ("int8", "int4")),
)


@dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes:
        sizes: bytes of tensors to time collectives with.
        seconds: for each measurement.
        every: the period of the strategies that are run.
    """

    sizes: tuple[int, ...]
    seconds: float
    every: int


class Trainer:
    """One model in training, wrapped in a strategy (None trains alone)."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor], settings: Settings | None) -> None:
        self.model: nn.Module = copy.deepcopy(model)
        self.loss = loss
        self.optimizer: Any = offbeat.AdamW(self.model.parameters(), lr=1e-5)
        if settings is not None and settings.strategy == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif settings is not None:
            self.optimizer = wrap(self.optimizer, self.model, settings)

    def step(self) -> None:
        """Make one training step."""
        self.loss(self.model).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        _wait_for_device(self.model)

    def seconds(self, steps: int) -> list[float]:
        """Make some steps, and return how long each took."""
        times = []
        for _ in range(steps):
            begun = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - begun)
        return times

    def close(self) -> None:
        """End rounds that are under way."""
        if isinstance(self.optimizer, offbeat.Replica):
            self.optimizer.finish()


def wrap(inner: Any, model: nn.Module, settings: Settings, **options: Any) -> Any:
    """The optimizer that these settings stand for. Every rank is a replica by itself."""
    options["subgroup"] = None
    if settings.strategy == "local_sgd":
        options.update(fragments=settings.fragments, delay=settings.delay)
        return offbeat.LocalSGD(inner, model, settings.period, **_without_defaults(options))
    options.update(fragments=settings.fragments, delay=settings.delay, codec=settings.codec)
    if settings.strategy == "slowmo":
        return offbeat.SlowMo(inner, model, settings.period, **_without_defaults(options))
    return offbeat.DiLoCo(inner, model, settings.period, **options)


def _without_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """LocalSGD and SlowMo have not all options of DiLoCo as arguments; their defaults can be left out."""
    defaults = {"fragments": 1, "delay": 0, "codec": None}
    return {name: value for name, value in options.items() if name not in defaults or value != defaults[name]}


def probe(model: nn.Module, loss: Loss, plan: Plan, say: Say) -> BenchResult:
    """Measure the link, a training step and the work of rounds. All ranks of the process group call this together.

    Args:
        model: what to train; every rank has the same.
        loss: a function of it.
        plan: how much to measure.
        say: is told what is being measured.
    """
    warnings.filterwarnings("ignore", message="all .* ranks are on one")
    world, params = dist.get_world_size(), sum(p.numel() for p in model.parameters() if p.requires_grad)
    timings, latency, bandwidth = [], None, None
    if world > 1:
        say("the link")
        latency, timings = measure_latency(), measure_rates(list(plan.sizes), plan.seconds)
        largest = max((one for one in timings if one.collective == "all_reduce"), key=lambda one: one.bytes)
        bandwidth = largest.sent / max(largest.seconds - latency, largest.seconds / 2)
    say("a training step")
    alone = Trainer(model, loss, None)
    alone.seconds(2)
    step_seconds = _step_seconds(alone, plan.seconds)
    say("the work of a round")
    machine = Machine(local={Machine.key(one): _local_seconds(model, one, plan.seconds) for one in LOCAL})
    if bandwidth is not None:
        busy = busy_per_byte(alone.step, bandwidth, 2 * plan.seconds)
        machine = Machine(busy=busy, round=_round_seconds(), local=machine.local)
    link = [asdict(one) for one in timings]
    return BenchResult(params, step_seconds, world, bandwidth, latency, machine, link, [], _environment())


def _step_seconds(alone: Trainer, seconds: float) -> float:
    count = max(3, min(50, round(seconds / slowest(statistics.median(alone.seconds(3))))))
    return slowest(statistics.median(alone.seconds(count)))


def _local_seconds(model: nn.Module, settings: Settings, seconds: float) -> float:
    """Seconds a parameter of a round with nobody else: copies, encoding and decoding, the outer step."""
    mine = None
    for rank in range(dist.get_world_size()):  # every rank makes every group
        group = dist.new_group([rank], backend="gloo")
        mine = group if rank == dist.get_rank() else mine
    clone = copy.deepcopy(model)
    params = [p for p in clone.parameters() if p.requires_grad]
    for p in params:
        p.grad = torch.zeros_like(p)
    # Every other step has a round: what it takes beyond its neighbours is the round's work.
    optimizer = wrap(
        offbeat.SGD(params, lr=0.0), clone, Settings(settings.strategy, 2, codec=settings.codec), group=mine
    )
    for _ in range(4):  # compiles, and takes anchors
        optimizer.step()
    count = max(4, min(20, round(seconds / 4 / slowest(_timed(optimizer.step) + _timed(optimizer.step)))))
    pairs = [(_timed(optimizer.step), _timed(optimizer.step)) for _ in range(count)]
    optimizer.finish()
    without, with_round = (statistics.median(times) for times in zip(*pairs, strict=True))
    return slowest(max(0.0, with_round - without)) / sum(p.numel() for p in params)


def _round_seconds() -> float:
    """Seconds of a round of hardly any bytes, over all ranks."""
    tiny = nn.Linear(4, 4)
    for p in tiny.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = wrap(offbeat.SGD(tiny.parameters(), lr=0.0), tiny, Settings("diloco", 1))
    optimizer.step()
    seconds = statistics.median(_timed(optimizer.step) for _ in range(10))
    optimizer.finish()
    return slowest(seconds)


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _wait_for_device(module: nn.Module) -> None:
    if _device(module).type == "cuda":
        torch.cuda.synchronize()


def _environment() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "command": " ".join(["offbeat", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "offbeat": offbeat.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "threads": torch.get_num_threads(),
    }
