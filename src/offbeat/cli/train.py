"""One process of the demo: an ordinary DistributedDataParallel training loop for each optimizer, with timers."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.cli.data import Corpus, fixed_windows, random_windows, read_corpus
from offbeat.cli.model import CONTEXT, ByteGPT

__all__ = ["ARMS", "COLLECTIVE_TIMEOUT", "EVALUATION_WINDOWS", "Job", "RankResult", "train"]

BATCH = 8
LEARNING_RATE = 2e-3
#: The learning rate grows to its full value over this many steps. With full steps from the start, rounding errors would
#: grow until runs that should agree end in different places, with any optimizer.
WARM_UP = 20
#: Split between the ranks, so that the reported loss does not depend on the number of ranks.
EVALUATION_WINDOWS = 64
#: The arms take turns of this many steps, so that other load on the machine slows down all of them equally.
TURN_STEPS = 5
#: A rank that waits longer than this for the others raises an error.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


def _overlapped(replica: DistributedDataParallel) -> torch.optim.Optimizer:
    optimizer = offbeat.AdamW(replica.parameters(), lr=LEARNING_RATE)
    offbeat.overlap(optimizer, replica)
    return optimizer


#: The optimizers to compare, by the name they are shown under.
ARMS: dict[str, Callable[[DistributedDataParallel], torch.optim.Optimizer]] = {
    "torch.optim.AdamW(fused=True)": lambda replica: torch.optim.AdamW(
        replica.parameters(), lr=LEARNING_RATE, fused=True
    ),
    "offbeat.AdamW": lambda replica: offbeat.AdamW(replica.parameters(), lr=LEARNING_RATE),
    "offbeat.AdamW, overlap": _overlapped,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, the same on every rank. ``directory`` holds the rendezvous file, logs and results."""

    ranks: int
    steps: int
    seed: int
    directory: Path


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One arm's result on one rank. Losses are (before, after); times are milliseconds, one per step."""

    train_loss: tuple[float, float]
    held_out_loss: tuple[float, float]
    optimizer_ms: list[float]
    step_ms: list[float]
    tier: str
    start_digest: str
    #: Digests of every rank's final parameters.
    digests: list[str]
    weights: dict[str, Tensor]


def train(rank: int, job: Job, on_step: Callable[[str, int, float], None]) -> dict[str, RankResult]:
    """Train every arm as ``rank`` of ``job.ranks``, in turns.

    Args:
        rank: this process's rank.
        job: what to train.
        on_step: called with the arm, the number of steps done and this rank's loss.

    Returns:
        This rank's result for each arm.
    """
    torch.set_num_threads(1)
    store = f"file://{job.directory / 'store'}"
    dist.init_process_group("gloo", store, COLLECTIVE_TIMEOUT, job.ranks, rank)
    corpus = read_corpus()
    arms = {name: _Arm(name, rank, job, corpus) for name in ARMS}
    for step in range(0, job.steps, TURN_STEPS):
        for arm in arms.values():
            arm.run(range(step, min(step + TURN_STEPS, job.steps)), on_step)
    results = {name: arm.result() for name, arm in arms.items()}
    dist.barrier()  # no rank closes its connections while another still needs them
    dist.destroy_process_group()
    return results


class _Arm:
    """The model, the data and the times of one optimizer on this rank."""

    def __init__(self, name: str, rank: int, job: Job, corpus: Corpus) -> None:
        self.name, self.rank, self.job, self.corpus = name, rank, job, corpus
        torch.manual_seed(job.seed)  # the same model on every rank and in every arm
        self.model = ByteGPT()
        self.generator = torch.Generator().manual_seed(job.seed + 1 + rank)
        self.replica = DistributedDataParallel(self.model)
        self.optimizer = ARMS[name](self.replica)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
        self.start_digest = _digest(self.model)
        self.before = self.evaluate(corpus.train), self.evaluate(corpus.held_out)
        self.optimizer_ms: list[float] = []
        self.step_ms: list[float] = []

    def run(self, steps: range, on_step: Callable[[str, int, float], None]) -> None:
        for step in steps:
            if step == 3 and os.environ.get("OFFBEAT_DEMO_FAIL_RANK") == str(self.rank):
                os._exit(13)  # for the tests: a rank that crashes without an exception
            began = perf_counter()
            x, target = random_windows(self.corpus.train, BATCH, CONTEXT, self.generator)
            loss = self.replica(x, target)
            loss.backward()
            ready = perf_counter()
            self.optimizer.step()
            stepped = perf_counter()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step_ms.append((perf_counter() - began) * 1e3)
            self.optimizer_ms.append((stepped - ready) * 1e3)
            on_step(self.name, step + 1, _finite(loss.item(), f"the training loss of step {step + 1}"))

    @torch.no_grad()
    def evaluate(self, text: Tensor) -> float:
        x, target = fixed_windows(text, EVALUATION_WINDOWS, CONTEXT)
        mine = slice(self.rank, None, self.job.ranks)
        total = self.model(x[mine], target[mine]).double() * len(x[mine])
        dist.all_reduce(total)
        return _finite(total.item() / EVALUATION_WINDOWS, "the evaluation loss")

    def result(self) -> RankResult:
        digests = [""] * self.job.ranks
        dist.all_gather_object(digests, _digest(self.model))
        return RankResult(
            train_loss=(self.before[0], self.evaluate(self.corpus.train)),
            held_out_loss=(self.before[1], self.evaluate(self.corpus.held_out)),
            optimizer_ms=self.optimizer_ms,
            step_ms=self.step_ms,
            tier=_tier(self.optimizer),
            start_digest=self.start_digest,
            digests=digests,
            weights=self.model.state_dict(),
        )


def _finite(loss: float, what: str) -> float:
    if not math.isfinite(loss):
        raise ArithmeticError(f"{what} is {loss}, but it must be finite; try another --seed")
    return loss


def _digest(model: nn.Module) -> str:
    """A hash of the bytes of every parameter, so that even -0.0 and 0.0 differ."""
    found = hashlib.sha256()
    for p in model.parameters():
        whole = p.detach().contiguous()
        found.update(ctypes.string_at(whole.data_ptr(), whole.nbytes))
    return found.hexdigest()


def _tier(optimizer: torch.optim.Optimizer) -> str:
    if isinstance(optimizer, offbeat.RuleOptimizer):
        return "; ".join(map(str, optimizer.tiers()))
    return "torch's own fused operator (fused=True)"
