r"""A rule of your own: written once, run by every tier, with checkpoints, overlap and the functional forms.

    python examples/custom_rule.py

The rule is SGD with momentum whose step is divided by the running size of the gradient (NovoGrad's idea, by element):

    v <- b v + (1 - b) |g|,    m <- a m + g / (v + eps),    p <- p - lr m

What to look at: the fused kernel, the loop and a plain loop over tensors (the reference) end at the same parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from offbeat.rules.checks import eps, learning_rate, number


def update(p: Any, g: Any, momentum: Any, size: Any, c: Any) -> tuple[Any, Any, Any]:
    """One element. ``c`` has the coefficients and the structure."""
    if c.maximize:  # a branch on structure: the kernel holds only the variant that is used
        g = -g
    size = c.b * size + c.rest * abs(g)
    momentum = c.a * momentum + g / (size + c.eps)
    return p - c.lr * momentum, momentum, size


SIZED = offbeat.Rule(
    name="SizedMomentum",
    hyper=(
        learning_rate(1e-3),
        number("momentum", 0.9, "decay rate of the momentum", below=1.0),
        number("size_decay", 0.99, "decay rate of the gradient's size", below=1.0),
        eps(1e-8),
    ),
    slots=lambda h: (offbeat.Slot("momentum"), offbeat.Slot("size", positive=True)),
    structure=lambda h: {"maximize": h.maximize},
    # Worked out in double precision: the update itself never combines two coefficients.
    coefficients=lambda h, s: {
        "lr": h.lr,
        "a": h.momentum,
        "b": h.size_decay,
        "eps": h.eps,
        "rest": 1 - h.size_decay,
    },
    update=update,
)


class SizedMomentum(offbeat.RuleOptimizer, rule=SIZED):
    """Signature, checks, state dict and tiers follow from the rule."""


def reference(params: Sequence[Tensor], state: list[tuple[Tensor, Tensor]], lr: float) -> None:
    for p, (m, v) in zip(params, state, strict=True):
        assert p.grad is not None
        v.mul_(0.99).add_(p.grad.abs(), alpha=0.01)
        m.mul_(0.9).add_(p.grad / (v + 1e-8))
        p.data.sub_(lr * m)


def train(how: str, steps: int) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    params = list(model.parameters())
    optimizer = SizedMomentum(params, lr=1e-3, foreach=False if how == "loop" else None)
    state = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    for _ in range(steps):
        x = torch.randn(64, 8)
        loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
        loss.backward()
        if how == "reference":
            reference(params, state, 1e-3)
        else:
            optimizer.step()
        optimizer.zero_grad()
    print(f"{how:10} loss {loss.item():.6f}" + (f"   {optimizer.tiers()[0]}" if how != "reference" else ""))
    return torch.cat([p.detach().flatten() for p in params])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(argv)
    expected = train("reference", options.steps)
    for how in ("loop", "fused"):
        difference = (train(how, options.steps) - expected).abs().max()
        print(f"{how} against the reference: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
