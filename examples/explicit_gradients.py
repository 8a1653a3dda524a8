"""Explicit gradients: clip the gradient of each sample by itself (as DP-SGD does), then step with their mean.

    python examples/explicit_gradients.py

``torch.func`` computes one gradient per sample; ``offbeat.as_functional`` takes gradients as arguments and never looks
at ``.grad``. What to look at: the loss falls although one sample of each batch has a wrong label and a huge gradient.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import offbeat


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of the gradient of one sample")
    options = parser.parse_args(argv)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    names, params = list(dict(model.named_parameters())), [p.detach() for p in model.parameters()]

    def sample_loss(params: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        prediction = functional_call(model, dict(zip(names, params, strict=True)), (x.unsqueeze(0),))
        return nn.functional.mse_loss(prediction, y.unsqueeze(0))

    per_sample = vmap(grad(sample_loss), in_dims=(None, 0, 0))
    fn = offbeat.as_functional(offbeat.AdamW, params, lr=3e-3)
    for step in range(options.steps):
        x = torch.randn(64, 8, device=device)
        y = x[:, :1].sin()
        y[0] = 1000.0  # a wrong label
        gradients = per_sample(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
        factor = (options.clip / norms).clamp(max=1.0)
        fn.step([torch.einsum("n,n...->...", factor, g) / len(x) for g in gradients])
        if step % max(1, options.steps // 5) == 0 or step == options.steps - 1:
            losses = vmap(sample_loss, in_dims=(None, 0, 0))(params, x[1:], y[1:])
            print(f"step {step:4}   loss {losses.mean().item():.4f}   largest norm {norms.max().item():.0f}")


if __name__ == "__main__":
    main()
