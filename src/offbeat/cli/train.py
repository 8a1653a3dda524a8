"""One rank of the demo: an ordinary DistributedDataParallel training loop, with a clock around its parts."""

from __future__ import annotations

import ctypes
import hashlib
import io
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
from offbeat.cli.data import fixed_windows, random_windows, read_corpus
from offbeat.cli.model import CONTEXT, ByteGPT

__all__ = ["ARMS", "EVALUATION_WINDOWS", "LEARNING_RATE", "Job", "RankResult", "train"]

BATCH = 8
LEARNING_RATE = 2e-3
#: The rate grows to its full value over so many steps. Full steps from the start would throw a run about so much
#: that the last bits of a rounding decide where it goes, whichever optimizer does it.
WARM_UP = 20
#: Split between the ranks, so that the loss reported does not depend on how many there are.
EVALUATION_WINDOWS = 64
#: Steps until another arm may go on.
TURN_STEPS = 5
#: A rank that waits longer than this for the others gives up.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


def _overlapped(replica: DistributedDataParallel) -> torch.optim.Optimizer:
    optimizer = offbeat.AdamW(replica.parameters(), lr=LEARNING_RATE)
    offbeat.overlap(optimizer, replica)
    return optimizer


#: The contestants, by the name they are shown under.
ARMS: dict[str, Callable[[DistributedDataParallel], torch.optim.Optimizer]] = {
    "torch.optim.AdamW(fused=True)": lambda replica: torch.optim.AdamW(
        replica.parameters(), lr=LEARNING_RATE, fused=True
    ),
    "offbeat.AdamW": lambda replica: offbeat.AdamW(replica.parameters(), lr=LEARNING_RATE),
    "offbeat.AdamW, overlap": _overlapped,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank of one arm is told. ``directory`` is where they meet and write their logs."""

    arm: str
    ranks: int
    steps: int
    seed: int
    directory: Path


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank found. Losses are (before, after); times are milliseconds, one per step."""

    train_loss: tuple[float, float]
    held_out_loss: tuple[float, float]
    optimizer_ms: list[float]
    step_ms: list[float]
    tier: str
    parameters: int
    tensors: int
    start_digest: str
    #: Of every rank's final parameters, as this rank received them.
    digests: list[str]
    #: The final parameters in torch.save's format; from rank 0 only.
    weights: bytes | None


def train(
    rank: int, job: Job, on_step: Callable[[int, float], None], turn: Callable[[], None] = lambda: None
) -> RankResult:
    """Train as ``rank`` of ``job.ranks``.

    Args:
        rank: this process's rank.
        job: what to train, the same on every rank.
        on_step: hears the number of steps done and this rank's loss.
        turn: called every few steps, outside the times; it may wait, on all ranks alike.
    """
    torch.set_num_threads(1)
    store = f"file://{job.directory / 'store'}"
    dist.init_process_group("gloo", store, COLLECTIVE_TIMEOUT, job.ranks, rank)
    corpus = read_corpus()
    # The model's numbers are the same on every rank and in every arm, the data's differ from rank to rank.
    torch.manual_seed(job.seed)
    model = ByteGPT()
    generator = torch.Generator().manual_seed(job.seed + 1 + rank)
    replica = DistributedDataParallel(model)
    optimizer = ARMS[job.arm](replica)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    start = _digest(model)
    before = _evaluate(model, corpus.train, rank, job), _evaluate(model, corpus.held_out, rank, job)
    optimizer_ms, step_ms = [], []
    for step in range(job.steps):
        if step == 3 and os.environ.get("OFFBEAT_DEMO_FAIL_RANK") == str(rank):
            os._exit(13)  # the tests' way to lose a rank as a crash would: no exception, no goodbye
        if step % TURN_STEPS == 0:
            turn()
        began = perf_counter()
        x, target = random_windows(corpus.train, BATCH, CONTEXT, generator)
        loss = replica(x, target)
        loss.backward()
        ready = perf_counter()
        optimizer.step()
        stepped = perf_counter()
        scheduler.step()
        optimizer.zero_grad()
        step_ms.append((perf_counter() - began) * 1e3)
        optimizer_ms.append((stepped - ready) * 1e3)
        on_step(step + 1, _finite(loss.item(), f"the training loss of step {step + 1}"))
    after = _evaluate(model, corpus.train, rank, job), _evaluate(model, corpus.held_out, rank, job)
    result = RankResult(
        train_loss=(before[0], after[0]),
        held_out_loss=(before[1], after[1]),
        optimizer_ms=optimizer_ms,
        step_ms=step_ms,
        tier=_tier(optimizer),
        parameters=sum(p.numel() for p in model.parameters()),
        tensors=len(list(model.parameters())),
        start_digest=start,
        digests=_gather(_digest(model), job.ranks),
        weights=_packed(model) if rank == 0 else None,
    )
    dist.barrier()  # nobody hangs up while another still listens
    dist.destroy_process_group()
    return result


@torch.no_grad()
def _evaluate(model: nn.Module, text: Tensor, rank: int, job: Job) -> float:
    x, target = fixed_windows(text, EVALUATION_WINDOWS, CONTEXT)
    mine = slice(rank, None, job.ranks)
    total = model(x[mine], target[mine]).double() * len(x[mine])
    dist.all_reduce(total)
    return _finite(total.item() / EVALUATION_WINDOWS, "the evaluation loss")


def _finite(loss: float, what: str) -> float:
    if not math.isfinite(loss):
        raise ArithmeticError(f"{what} is {loss}, and a loss has to be finite; try another --seed")
    return loss


def _digest(model: nn.Module) -> str:
    """A hash of every byte of every parameter: equal only if all bits are (-0.0 is not 0.0 here)."""
    found = hashlib.sha256()
    for p in model.parameters():
        whole = p.detach().contiguous()
        found.update(ctypes.string_at(whole.data_ptr(), whole.nbytes))
    return found.hexdigest()


def _gather(digest: str, ranks: int) -> list[str]:
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(all_of_them, mine)
    return [bytes(each.tolist()).hex() for each in all_of_them]


def _packed(model: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.getvalue()


def _tier(optimizer: torch.optim.Optimizer) -> str:
    if isinstance(optimizer, offbeat.RuleOptimizer):
        return "; ".join(map(str, optimizer.tiers()))
    return "torch's own fused operator (fused=True)"
