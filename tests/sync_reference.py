"""Replicas that average now and then, in one process and a few lines: what the real thing is compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat

__all__ = [
    "adamw", "batch", "close", "everyone", "flat", "flight_of", "loss", "make", "sgd", "simulate", "train",
    "wait_for_flight", "write",
]  # fmt: skip


def make(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 6, dtype=dtype, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3].cumsum(1)).square().mean()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def write(model: nn.Module, vector: Tensor) -> None:
    nn.utils.vector_to_parameters(vector.clone(), model.parameters())  # which become views of it


def everyone(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """What each rank has."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, tensor, group=group)
    return found


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> Any:
    return offbeat.AdamW(params, lr=0.01)


def train(module: nn.Module, optimizer: Any, steps: range, rank: int) -> list[Tensor]:
    """The loop a user would write; returns parameters after every step."""
    history = []
    for step in steps:
        loss(module, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(flat(module))
    return history


def close(ours: list[Tensor], theirs: list[list[Tensor]], rank: int) -> None:
    """Whether a rank's parameters after every step are those of the simulation."""
    assert len(ours) == len(theirs)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(a, b[rank], rtol=1e-11, atol=1e-12, msg=lambda m, step=step: f"step {step}: {m}")


def flight_of(replica: Any) -> Any:
    """The round in flight of an optimizer with one track."""
    ((track,),) = replica._tracks._tracks
    return track.flight


def wait_for_flight(replica: Any) -> Any:
    """Wait until the exchange in the background is over; returns the round, which is not applied."""
    flight = flight_of(replica)
    if flight is not None:
        replica._tracks._driver.wait(flight)
    return flight


def simulate(
    world: int,
    steps: int,
    optimizer: Any,
    due: Any,
    *,
    warmup: int = 0,
    node: int = 1,
    delay: int = 0,
    weight: Any = lambda rank, step: 1.0,
) -> list[list[Tensor]]:
    """Every rank's parameters after every step.

    Args:
        due: from the step to the groups of ranks that average after it.
        node: ranks whose gradients are averaged after warm-up.
    """
    models = [make() for _ in range(world)]
    optimizers = [optimizer(model.parameters()) for model in models]
    flights: list[tuple[int, dict[int, Tensor]]] = []
    history = []
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss(model, batch(step, rank)).backward()
        size = world if step < warmup else node
        for start in range(0, world, size):
            for same in zip(*(model.parameters() for model in models[start : start + size]), strict=True):
                mean = sum(p.grad for p in same) / size
                for p in same:
                    p.grad = mean.clone()
        for one in optimizers:
            one.step()
        groups = due(step)
        for landing, differences in list(flights):
            if step >= landing or groups:
                for rank, difference in differences.items():
                    write(models[rank], flat(models[rank]) + difference)
                flights.remove((landing, differences))
        for group in groups:
            weights = {rank: weight(rank, step) for rank in group}
            mean = sum(weights[rank] * flat(models[rank]) for rank in group) / sum(weights.values())
            differences = {rank: mean - flat(models[rank]) for rank in group}
            flights.append((step + delay, differences))
            if delay == 0:
                flights.pop()
                for rank in group:
                    write(models[rank], mean)
        history.append([flat(model) for model in models])
    return history
