"""A faster optimizer step: torch.optim.AdamW against offbeat.AdamW on a model with many small tensors.

    python examples/faster_step.py --steps 50

What to look at: the milliseconds a step. Both train the same model on the same data, so the losses agree to several
digits. ``optimizer.tiers()`` says how the step is executed. The first step compiles a kernel. The first run on a
machine also compiles a small C++ file in the background, for some 15 s; until then steps are slower, so run it twice.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import offbeat


class Model(nn.Module):
    """Many layers, each with a small weight and a bias."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh() / len(self.layers)
        result: Tensor = self.head(x)
        return result


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> tuple[float, float]:
    """Train; returns the milliseconds that optimizer.step() took (median) and the last loss."""
    times = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        finish(x.device)
        start = time.perf_counter()
        optimizer.step()
        finish(x.device)
        times.append(1e3 * (time.perf_counter() - start))
        optimizer.zero_grad()
    return sorted(times)[len(times) // 2], loss.item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args(argv)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(32, options.width, device=device)
    y = x[:, :1].sin()
    optimizers = {
        "torch.optim.AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
        "torch.optim.AdamW(fused=True)": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        "offbeat.AdamW": lambda params: offbeat.AdamW(params, lr=1e-3),  # the whole migration
    }
    print(f"{2 * options.layers + 2} tensors on {device.type}, {options.steps} steps")
    for name, make in optimizers.items():
        torch.manual_seed(0)
        model = Model(options.layers, options.width).to(device)
        optimizer = make(model.parameters())
        milliseconds, loss = train(model, optimizer, x, y, options.steps)
        print(f"{name:32} {milliseconds:8.2f} ms a step    loss {loss:.6f}")
    assert isinstance(optimizer, offbeat.AdamW)
    for choice in optimizer.tiers():
        print(choice)


if __name__ == "__main__":
    main()
