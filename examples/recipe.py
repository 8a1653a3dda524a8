"""The recipe for a slow link: Muon with AdamW inside, DiLoCo between replicas, differences in 4 bits.

    torchrun --nproc-per-node 2 examples/recipe.py            # every process is a replica
    torchrun --nproc-per-node 2 examples/recipe.py --method ddp
    torchrun --nproc-per-node 2 examples/recipe.py --method short

What to look at: the last line says the loss and how many bytes one rank has sent a step. ``short`` is for runs of a few
hundred steps: the mean every 8 steps, of optimizer state too.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import offbeat


class Model(nn.Module):
    """An embedding, three hidden matrices and a head, over sequences of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.hidden = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
        self.head = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(x)))


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(32, (64, 16), generator=generator)
    return x, (7 * x + 3) % 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=["recipe", "short", "ddp"], default="recipe")
    parser.add_argument("--steps", type=int, default=256)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = Model()
    inner = offbeat.muon_with_adamw(model, lr=2e-3)
    module: nn.Module = model
    optimizer: torch.optim.Optimizer = inner
    if options.method == "ddp":
        module = DistributedDataParallel(model)
    elif options.method == "recipe":
        optimizer = offbeat.DiLoCo(
            inner, model, every=32, outer_lr=1.0, outer_momentum=0.6, fragments=4, delay=1, codec="int4", subgroup=None
        )
    else:
        optimizer = offbeat.LocalSGD(inner, model, every=8, state="average", subgroup=None)

    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(options.steps):
        x, y = batch(generator)
        loss = functional.cross_entropy(module(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    gradients = sum(p.numel() * p.itemsize for p in model.parameters())
    sent = gradients * options.steps  # what a ring all-reduce of two ranks sends
    if isinstance(optimizer, offbeat.Replica):
        optimizer.finish()
        sent = optimizer.bytes_sent
    if rank == 0:
        print(f"{options.method}: loss {loss.item():.4f}, {sent / options.steps / 1e3:.1f} kB a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
