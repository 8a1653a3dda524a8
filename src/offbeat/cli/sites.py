"""Part 1 of the demo: two sites train one model over a slow link, in several ways, each for as many steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.cli import link
from offbeat.cli.data import random_windows, read_text, spaced_windows
from offbeat.cli.model import ByteGPT

__all__ = ["ARMS", "LONGER", "RECIPE", "run"]

BATCH, CONTEXT = 8, 64
LAYERS, WIDTH = 6, 96
LEARNING_RATE, WARM_UP = 2e-3, 20
#: The number of steps is a multiple of this, so that every arm ends with a whole period.
PERIOD = 16
MOST_STEPS = 64 * PERIOD
HELD_OUT_WINDOWS = 128
#: A process that waits longer for the other raises, and its error says more than its parent could.
COLLECTIVE_TIMEOUT = timedelta(seconds=40)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _ddp(model: nn.Module) -> tuple[nn.Module, Any]:
    return DistributedDataParallel(model), _adamw(model)


def _local_sgd(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, offbeat.LocalSGD(_adamw(model), model, every=8, subgroup=None)


def _diloco(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, offbeat.DiLoCo(_adamw(model), model, every=PERIOD, fragments=4, delay=4, subgroup=None)


def _recipe(model: nn.Module) -> tuple[nn.Module, Any]:
    inner = offbeat.muon_with_adamw(model, lr=LEARNING_RATE)
    return model, offbeat.DiLoCo(inner, model, every=PERIOD, fragments=4, delay=1, codec="int4", subgroup=None)


RECIPE, LONGER = "the recipe: Muon, delay=1, int4", "that, for as long as DDP took"
#: What to compare at the same number of steps, which is set by the speed of the first.
ARMS: dict[str, Callable[[nn.Module], tuple[nn.Module, Any]]] = {
    "DDP": _ddp,
    "LocalSGD(every=8)": _local_sgd,
    "DiLoCo(every=16, fragments=4, delay=4)": _diloco,
    RECIPE: _recipe,
}


def run(rank: int, options: dict[str, Any], say: Callable[..., None]) -> dict[str, Any]:
    """What each of the two processes does. Options: ``link``, ``mbit``, ``store`` (a file), ``seconds`` (for DDP)."""
    torch.set_num_threads(1)
    say(doing="connecting")
    link.prepare(options["link"], rank, options["mbit"])
    dist.init_process_group("gloo", f"file://{options['store']}", COLLECTIVE_TIMEOUT, 2, rank)
    train, held_out = read_text()
    say(doing="compiling kernels")
    # Kept, because the system counts the bytes of a connection as long as it is open.
    kept = [_warm_up(wrap) for wrap in ARMS.values()]
    results: dict[str, Any] = {}
    seconds, steps = options["seconds"], MOST_STEPS  # what the arm may take: as many seconds, or if that is None, steps
    for name, wrap in [*ARMS.items(), (LONGER, ARMS[RECIPE])]:
        if name == LONGER:
            seconds = results["DDP"]["seconds"]
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1 + rank)
        model = ByteGPT(layers=LAYERS, width=WIDTH, context=CONTEXT)
        module, optimizer = wrap(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
        kept.append((module, optimizer))
        times: list[float] = []
        dist.barrier()  # what was sent before has arrived, and is not counted here
        before = link.sent_bytes()
        while len(times) < steps:
            link.limit_rate(options["link"], options["mbit"])
            began = time.perf_counter()
            loss = module(*random_windows(train, BATCH, CONTEXT, generator))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
            if seconds is not None and len(times) % PERIOD == 0:
                steps = _agree_on_steps(times, seconds)
            if len(times) == steps and isinstance(optimizer, offbeat.Replica):
                optimizer.finish()
                times[-1] = time.perf_counter() - began
            say(doing=f"{name}, step {len(times)}", arm=name, step=len(times), of=steps, loss=loss.item())
        seconds = None
        dist.barrier()
        after = link.sent_bytes()
        results[name] = {
            "steps": steps,
            "seconds": sum(times),
            "worst_ms": 1e3 * max(times),
            "mb_per_step": None if after is None or before is None else (after - before) / steps / 1e6,
            "held_out_loss": _loss(model, held_out),
        }
    return {"arms": results, "parameters": sum(p.numel() for p in model.parameters())}


def _warm_up(wrap: Callable[[nn.Module], tuple[nn.Module, Any]]) -> Any:
    """Make a round with a tiny model, so that kernels are compiled when time begins to count."""
    torch.manual_seed(0)
    model = ByteGPT(layers=1, width=8, context=1)
    module, optimizer = wrap(model)
    byte = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(PERIOD + PERIOD // 2):
        module(byte, byte).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def _agree_on_steps(times: list[float], seconds: float) -> int:
    """How many steps fit into some seconds, and are not fewer than have been made."""
    fit = min(MOST_STEPS, int(seconds * len(times) / sum(times)) // PERIOD * PERIOD)
    steps = torch.tensor(max(fit, len(times)))
    dist.broadcast(steps, 0)
    return int(steps)


@torch.no_grad()
def _loss(model: nn.Module, text: torch.Tensor) -> float:
    return float(model(*spaced_windows(text, HELD_OUT_WINDOWS, CONTEXT)))
