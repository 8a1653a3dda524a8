"""What the tests of integrations share: a small problem, and the same training in plain PyTorch, without offbeat."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["assert_same", "batch", "batches", "differ", "launched", "loss_of", "make", "plain", "shared_folder"]


def launched(rank: int, world: int) -> None:
    """What a launcher tells its processes. The process group exists already; nobody listens at the address."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        ACCELERATE_USE_CPU="true",
    )


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(rank: int, index: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + index))


def batches(rank: int, number: int) -> list[Tensor]:
    return [batch(rank, i) for i in range(number)]


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x) - x[:, :3].sin()).square().mean()


def adamw(params: Iterable[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that all ranks use, removed when all have left the block."""
    with tempfile.TemporaryDirectory(prefix="offbeat-") as mine:
        found = [mine]
        dist.broadcast_object_list(found)
        yield found[0]
        dist.barrier()


@torch.no_grad()
def average(tensors: Iterable[Tensor]) -> None:
    for one in tensors:
        if one.is_floating_point():
            one.div_(dist.get_world_size())
            dist.all_reduce(one)


def plain(
    rank: int,
    number: int,
    *,
    model: nn.Module | None = None,
    loss: Any = loss_of,
    data: Any = batch,
    make_optimizer: Any = adamw,
    accumulate: int = 1,
    clip: float | None = None,
    local: bool = False,
    every: int = 4,
    warmup: int = 0,
    outer: dict[str, Any] | None = None,
    scheduler: Any = None,
    finish: bool = True,
) -> nn.Module:
    """Train in plain PyTorch, on one rank or on several that have a process group.

    Args:
        number: of batches, ``accumulate`` in a step, fewer in the last.
        local: average parameters every ``every`` steps after ``warmup``, and gradients only before.
        outer: options of the outer SGD of DiLoCo, whose first round comes after ``every`` steps.
        finish: average one last time.
    """
    model = make() if model is None else model
    optimizer = make_optimizer(model.parameters())
    schedule = None if scheduler is None else scheduler(optimizer)
    several = dist.is_initialized() and dist.get_world_size() > 1
    params = list(model.parameters())
    buffers = list(model.buffers())
    anchors = [p.detach().clone() for p in params]
    outer_optimizer = torch.optim.SGD(anchors, **outer) if outer else None
    step = 0

    def agree() -> None:
        average([p.data for p in params] + buffers)
        if outer_optimizer is not None:
            for a, p in zip(anchors, params, strict=True):
                a.grad = a - p.detach()
            outer_optimizer.step()
            for a, p in zip(anchors, params, strict=True):
                p.data.copy_(a)

    for i in range(number):
        (loss(model, data(rank, i)) / accumulate).backward()
        if (i + 1) % accumulate and i + 1 < number:
            continue
        is_local = local and step >= warmup
        if several and not is_local:
            average([p.grad for p in params if p.grad is not None])
        if clip is not None:
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        step += 1
        if several and is_local:
            first = every if outer else 1
            if step - warmup >= first and (step - warmup - first) % every == 0:
                agree()
    if several and local and finish and step > warmup:
        agree()
    return model


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), f"{name} differs by {(p - q).abs().max().item()}"
    for (name, p), q in zip(a.named_buffers(), b.buffers(), strict=True):
        assert torch.equal(p, q), name


def differ(model: nn.Module) -> bool:
    """Whether the parameters differ between ranks. Call it on every rank."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    found = torch.tensor(float(not torch.equal(mine, first)))
    dist.all_reduce(found)
    return bool(found.item())
