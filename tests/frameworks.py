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

__all__ = [
    "adamw",
    "assert_close",
    "assert_equal",
    "assert_same",
    "average",
    "batch",
    "batches",
    "differ",
    "launched",
    "loss_of",
    "make",
    "plain",
    "sharded_replicas",
    "shared_folder",
    "values",
]


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


def sharded_replicas(
    steps: int,
    *,
    model: Callable[[], nn.Module] = make,
    loss: Any = loss_of,
    data: Any = batch,
    make_optimizer: Any = adamw,
    clip: float,
    every: int,
    warmup: int = 0,
) -> nn.Module:
    """Two replicas of two ranks each, which average gradients among themselves, all in one process."""
    models = [model(), model()]
    optimizers = [make_optimizer(one.parameters()) for one in models]
    pairs = list(zip(models[0].parameters(), models[1].parameters(), strict=True))
    for step in range(steps):
        for replica, one in enumerate(models):
            for rank in (2 * replica, 2 * replica + 1):
                (loss(one, data(rank, step)) / 2).backward()
        for p, q in pairs if step < warmup else ():
            assert p.grad is not None
            assert q.grad is not None
            p.grad = p.grad / 2 + q.grad / 2
            q.grad = p.grad.clone()
        for one, optimizer in zip(models, optimizers, strict=True):
            nn.utils.clip_grad_norm_(one.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        if step + 1 == steps or (step >= warmup and (step - warmup) % every == 0):
            for p, q in pairs:
                p.data.copy_(p.data / 2 + q.data / 2)
                q.data.copy_(p.data)
    return models[0]


def values(model: nn.Module) -> list[Tensor]:
    """The parameters, put together if they are sharded. Call it on every rank."""
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    """As :func:`assert_same`, for modules of which one may be sharded."""
    for (name, _), p, q in zip(a.named_parameters(), values(a), values(b), strict=True):
        assert torch.equal(p, q), f"{name} differs by {(p - q).abs().max().item()}"


def assert_close(a: nn.Module, b: nn.Module) -> None:
    """Where the order of a sum differs: the norm of sharded gradients."""
    for p, q in zip(values(a), values(b), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


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
