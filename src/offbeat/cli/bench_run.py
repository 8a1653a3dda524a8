"""What the processes of ``offbeat bench`` do: measure the link, a training step, the work of rounds, and strategies."""

from __future__ import annotations

import copy
import ctypes
import gc
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
from offbeat.cli import link as connections
from offbeat.plan.cost import Machine, Setting, estimate_settings
from offbeat.plan.link import busy_per_byte, measure_latency, measure_rates, slowest
from offbeat.plan.result import BenchResult
from offbeat.plan.settings import Settings

__all__ = ["Plan", "bench"]

Say = Callable[[str], None]


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


def strategies(every: int) -> list[Settings]:
    """What is run."""
    some = min(4, every)
    return [
        Settings("ddp"),
        Settings("local_sgd", every),
        Settings("diloco", every),
        Settings("diloco", every, codec="int8"),
        Settings("diloco", every, some, min(1, every), "int4"),
    ]


def bench(model: nn.Module, loss: Callable[[nn.Module], Tensor], plan: Plan, say: Say) -> BenchResult:
    """Measure everything. All ranks of the default process group call this together.

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
    growth = _memory_growth(lambda: Trainer(model, loss, None).seconds(2))
    step_seconds = _step_seconds(alone, plan.seconds)
    say("the work of a round")
    local = {Machine.key(one): _local_seconds(model, one, plan.seconds) for one in _measured_alone(plan.every)}
    machine = Machine(local=local)
    if bandwidth is not None:
        busy = busy_per_byte(alone.step, step_seconds, bandwidth, 2 * plan.seconds)
        machine = Machine(busy=busy, round=_round_seconds(), local=local)
    rows = []
    for settings in strategies(plan.every) if world > 1 else []:
        say(settings.name)
        on = Setting(params, step_seconds, world, bandwidth or 1.0, latency or 0.0, machine)
        rows.append(_run(lambda one=settings: Trainer(model, loss, one), alone, settings, on, plan, growth))  # type: ignore[misc]
    return BenchResult(
        params, step_seconds, world, bandwidth, latency, machine, [asdict(one) for one in timings], rows, _environment()
    )


def _run(
    make: Callable[[], Trainer], alone: Trainer, settings: Settings, on: Setting, plan: Plan, growth: int | None
) -> dict[str, Any]:
    """Run a strategy for some whole periods, between steps of a trainer that never communicates."""
    trainers: list[Trainer] = []

    def begin() -> None:
        trainers.append(make())
        trainers[0].seconds(max(2, settings.period))

    memory = _memory_growth(begin)
    trainer = trainers[0]
    expected = estimate_settings(settings, on)
    count = max(1, min(8, round(plan.seconds / (expected.step_seconds * settings.period)))) * settings.period
    before = alone.seconds(max(2, count // 4))
    dist.barrier()
    sent, begun = connections.sent_bytes(), time.perf_counter()
    trainer.seconds(count)
    seconds, after = slowest(time.perf_counter() - begun) / count, connections.sent_bytes()
    nearby = slowest(statistics.median([*before, *alone.seconds(max(2, count // 4))]))
    trainer.close()
    expected = estimate_settings(
        settings, Setting(on.params, nearby, on.replicas, on.bandwidth, on.latency, on.machine)
    )
    counted = None if sent is None or after is None or _device(trainer.model).type != "cpu" else after - sent
    return {
        "name": settings.name,
        **settings.as_dict(),
        "step_seconds": seconds,
        "compute_seconds": nearby,
        "utilisation": min(1.0, nearby / seconds),
        "bytes_per_step": expected.bytes_per_step if counted is None else counted / count,
        "extra_memory": None if memory is None or growth is None else max(0, memory - growth),
        "predicted_step_seconds": expected.step_seconds,
        "predicted_extra_memory": expected.extra_memory,
    }


def _step_seconds(alone: Trainer, seconds: float) -> float:
    count = max(3, min(50, round(seconds / slowest(statistics.median(alone.seconds(3))))))
    return slowest(statistics.median(alone.seconds(count)))


def _measured_alone(every: int) -> list[Settings]:
    dense = [Settings("local_sgd", every), Settings("slowmo", every), Settings("diloco", every)]
    return [*dense, *(Settings("diloco", every, codec=codec) for codec in ("int8", "int4"))]


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


def _memory_growth(work: Callable[[], object]) -> int | None:
    """Bytes by which the most memory in use exceeds what was in use before; None where the system does not say."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(
            0
        )  # free memory that malloc keeps would not count as growth when it is used again
    with suppress(OSError, StopIteration):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        work()
        return _status("VmHWM") - before
    work()
    return None


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


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
