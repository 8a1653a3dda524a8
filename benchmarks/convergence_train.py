"""One run of the convergence benchmark: replicas in threads of one process, with the code that real processes run."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import offbeat
from benchmarks.convergence_data import Samples, batches, whole_batches
from benchmarks.convergence_graph import gradients_of

__all__ = ["Arm", "Task", "judge", "loss_of", "train", "training_loss"]

CLIP = 1.0
#: The last learning rate, of the highest.
LAST_RATE = 0.1
#: Replicas share torch's generator, which makes the parameters.
SEEDING = threading.Lock()


@dataclass(frozen=True)
class Task:
    """What is trained, on what, with what.

    Attributes:
        batch: samples of a replica's step.
        seeds: the seeds that this task has, whatever else is asked for.
        tokens: targets in a sample.
        synchronised: steps with averaged gradients at the start, in which the learning rate rises.
        evaluate: steps from one evaluation to the next.
        timed: whether to time a step, by itself.
        whole: train DDP's arms as one replica with all batches of a step: the same gradient up to rounding, in a tenth
            of the time.
    """

    title: str
    samples: Callable[[], Samples]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    settings: str
    arms: Sequence[str]
    replicas: int
    batch: int
    tokens: int
    steps: int
    synchronised: int
    evaluate: int
    unit: str = "tokens"
    seeds: Sequence[int] | None = None
    timed: bool = True
    whole: bool = False


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        wrap: makes the optimizer of a replica, from the inner optimizer, the module, ``warmup=``, ``group=`` and
            ``subgroup=``. None averages gradients at every step, as DDP does.
        rate: what learning rates are multiplied by.
        local_rate: likewise after the synchronised steps, from the number of replicas.
        alone: the first replica with its own batches only.
        delay: steps that a round has before it is waited for.
        like: the arm it is compared with, besides DDP.
        inner: makes the inner optimizer, from the module; by default the task's optimizer.
    """

    wrap: Callable[..., Optimizer] | None = None
    rate: float = 1.0
    local_rate: Callable[[int], float] = lambda replicas: 1.0
    alone: bool = False
    delay: int = 0
    like: str | None = None
    inner: Callable[[nn.Module], Optimizer] | None = None


def training_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss over all targets."""
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss over all targets, and the share of them guessed right."""
    logits = model(x).flatten(0, -2)
    return nn.functional.cross_entropy(logits, y.flatten()), (logits.argmax(-1) == y.flatten()).float().mean()


@torch.no_grad()
def judge(model: nn.Module, samples: Samples) -> tuple[float, float]:
    """Loss and accuracy on what was held out."""
    loss, right = loss_of(model.eval(), samples.held_out_x, samples.held_out_y)
    return loss.item(), right.item()


class Jury:
    """Judges the mean of all replicas' parameters and buffers, without a byte on the simulated network."""

    def __init__(self, replicas: int, samples: Samples) -> None:
        self._models: list[nn.Module | None] = [None] * replicas
        self._samples, self._barrier = samples, threading.Barrier(replicas, timeout=300)

    def judge(self, rank: int, model: nn.Module) -> tuple[float, float] | None:
        """Loss and accuracy on rank 0, None on others. All replicas call it, after the same step."""
        self._models[rank] = model
        self._barrier.wait()
        found = judge(self._mean(), self._samples) if rank == 0 else None
        self._barrier.wait()
        return found

    @torch.no_grad()
    def _mean(self) -> nn.Module:
        mean = copy.deepcopy(self._models[0])
        assert mean is not None
        states = [model.state_dict() for model in self._models if model is not None]
        for name, tensor in mean.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.stack([state[name] for state in states]).mean(0))
        return mean


def rate_at(task: Task, arm: Arm, steps: int) -> Callable[[int], float]:
    """The learning rate of a step, of the highest: linearly up, then down along a cosine."""
    rise = min(task.synchronised, steps // 2)

    def rate(step: int) -> float:
        cosine = 0.5 + 0.5 * math.cos(math.pi * max(0, step - rise) / (steps - rise))
        local = arm.local_rate(task.replicas) if step >= rise else 1.0
        return arm.rate * local * min((step + 1) / rise, LAST_RATE + (1 - LAST_RATE) * cosine)

    return rate


def now(device: torch.device) -> float:
    """Seconds: of this thread's processor time, or on a GPU of the wall clock once it is idle."""
    if device.type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def turns(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """On a GPU one replica at a time launches its kernels: threads that hand the interpreter's lock to and fro at every
    operator take more processor time for the same launches. On the CPU replicas compute side by side."""
    return contextlib.nullcontext() if device.type == "cpu" else threading.Lock()


def train(
    task: Task,
    arm: Arm,
    samples: Samples,
    seed: int,
    steps: int,
    *,
    timed: bool | None = None,
    compiled: bool = False,
) -> dict[str, Any]:
    """Train one arm. Returns its curve, what was sent and how long a step took.

    Args:
        timed: whether to time steps; by default on the CPU only. On a GPU every step would wait for the device, and
            what it takes says little unless nothing else runs there.
        compiled: whether forward and backward are compiled.
    """
    whole = task.whole and arm.wrap is None and not arm.alone
    single = arm.alone or whole
    replicas, device = 1 if single else task.replicas, samples.x.device
    timed = device.type == "cpu" if timed is None else timed
    turn = turns(device)
    simulation, jury = offbeat.Simulation(replicas, timeout=300), Jury(replicas, samples)
    all_ready = threading.Barrier(replicas, timeout=300)
    warmup = min(task.synchronised, steps // 2)

    def replica(rank: int, peers: Any) -> dict[str, Any]:
        deal = whole_batches if whole else functools.partial(batches, rank=rank)
        source = deal(samples, ranks=task.replicas, size=task.batch, seed=seed)
        size = task.batch * (task.replicas if whole else 1)
        with SEEDING:
            torch.manual_seed(seed)
            model = task.model().to(device)
            gradients = gradients_of(model, training_loss, *samples.at(slice(size)), compiled=compiled)
        all_ready.wait()  # nothing else is launched while a graph is recorded
        inner = arm.inner(model) if arm.inner else task.optimizer(model.parameters())
        optimizer = inner
        if not single:
            wrap = arm.wrap or offbeat.LocalSGD
            optimizer = wrap(inner, model, warmup=warmup if arm.wrap else steps, group=peers, subgroup=None)
        schedule = LambdaLR(optimizer, rate_at(task, arm, steps))
        curve, losses, seconds, sent = [], [], [], {0: 0}
        for step in range(1, steps + 1):
            start = now(device) if timed else 0.0
            with turn:
                loss = gradients(*next(source))
            if not single:
                optimizer.average_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if timed:
                seconds.append(now(device) - start)
            if step <= warmup:
                losses.append(loss)  # a number only at the end: that waits for the device
            if step == warmup:
                sent[step] = simulation.bytes_sent[rank]
            if step % task.evaluate == 0 or step == steps:
                optimizer.state_dict()  # waits for rounds in flight, so that their bytes are counted
                sent[step] = simulation.bytes_sent[rank]
                found = jury.judge(rank, model.train())
                if found is not None:
                    each = task.batch * task.replicas * task.tokens
                    curve.append({"step": step, "seen": step * each, "loss": found[0], "accuracy": found[1]})
        rounds = 0 if single else optimizer.syncs
        if not single:
            optimizer.finish()
        if whole:  # of a ring: each number is sent once to be summed and once as a sum, but for its last stop
            bytes_a_step = 2 * (task.replicas - 1) * sum(p.nbytes for p in model.parameters()) // task.replicas
            sent = {step: step * bytes_a_step for step in sent}
        return {
            "curve": curve,
            "finished": jury.judge(rank, model),
            "first_losses": torch.stack(losses).tolist(),
            "rounds": rounds,
            "sent": {"synchronised": sent[warmup], "all": sent[steps]},
            "seconds": statistics.median(seconds[warmup:]) if timed else None,
        }

    start = time.perf_counter()
    found = simulation.run(replica)[0]
    return {**found, "wall": round(time.perf_counter() - start, 1)}
