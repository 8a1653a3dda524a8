"""One replica of a run in which replicas come and go: stop it with kill -9, start it again, start more of them.

In one terminal, the lighthouse (``pip install 'torchft>=0.2'``):

    offbeat lighthouse --bind 0.0.0.0:29510

In others, a replica each; they may be on other machines, with the lighthouse's address:

    python examples/elastic.py --lighthouse localhost:29510 --name a
    python examples/elastic.py --lighthouse localhost:29510 --name b
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import offbeat


def batch(step: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of a step, from the run's clock and the replica's name: who returns neither repeats nor skips any."""
    generator = torch.Generator().manual_seed(hash_of(f"{name} {step}"))
    x = torch.randn(32, 16, generator=generator)
    return x, x.cumsum(1).tanh()


def hash_of(text: str) -> int:
    """A number for a text, the same in every process."""
    return sum(ord(letter) * 31**i for i, letter in enumerate(text)) % 2**31


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", default="localhost:29510")
    parser.add_argument("--name", default="a")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    inner = offbeat.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, options.steps)
    group = offbeat.Elastic(options.lighthouse, replica=options.name, carry={"scheduler": scheduler})
    optimizer = offbeat.DiLoCo(inner, model, every=32, group=group, deadline=10.0)
    print(f"replica {options.name} begins at step {optimizer.steps}", flush=True)

    while optimizer.steps < options.steps:  # the run's clock, which a newcomer takes over
        x, y = batch(optimizer.steps, options.name)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(0.02)  # in place of a larger model
        if optimizer.steps % 64 == 0:
            print(f"step {optimizer.steps}, {optimizer.replicas} replicas, loss {loss.item():.4f}", flush=True)
    optimizer.finish()
    print(f"done after {optimizer.steps} steps; all replicas that are left are equal", flush=True)


if __name__ == "__main__":
    main()
