"""Meta-learning: learn the learning rates of an inner optimizer by differentiating through its steps.

    python examples/meta_learning.py

The inner loop fits a sine wave with three steps of Adam. ``offbeat.as_pure`` returns new parameters and state instead
of changing them, so autograd sees every step; tasks run side by side with ``vmap``. The outer loop trains the initial
parameters and one learning rate per tensor (Meta-SGD). What to look at: the loss after the inner steps, on tasks that
are new at every step, and the learning rates, which started equal.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import offbeat

Params = dict[str, Tensor]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--inner-steps", type=int, default=3)
    options = parser.parse_args(argv)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1)).to(device)
    start = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    rates = {name: torch.tensor(-4.0, device=device, requires_grad=True) for name in start}  # logarithms
    adam = offbeat.as_pure(offbeat.Adam, lr=1e-2)

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(functional_call(model, params, (x,)), y)

    def learn(params: Params, x: Tensor, y: Tensor, x_new: Tensor, y_new: Tensor) -> Tensor:
        """The loss on new points of a task, after a few steps on the points that are given."""
        states = {name: adam.init(p) for name, p in params.items()}
        for _ in range(options.inner_steps):
            gradients = grad(loss)(params, x, y)
            for name in params:  # a learning rate for each tensor
                new, states[name] = adam.update(params[name], gradients[name], states[name], lr=rates[name].exp())
                params = {**params, name: new}
        return loss(params, x_new, y_new)

    outer = offbeat.AdamW([*start.values(), *rates.values()], lr=3e-3)
    for step in range(options.steps):
        amplitude, phase = torch.rand(16, 1, 1, device=device) * 2 + 0.5, torch.rand(16, 1, 1, device=device) * 3
        x, x_new = torch.rand(2, 16, 10, 1, device=device) * 6 - 3
        tasks = (x, amplitude * (x + phase).sin(), x_new, amplitude * (x_new + phase).sin())
        after = vmap(learn, in_dims=(None, 0, 0, 0, 0))(start, *tasks).mean()
        after.backward()
        outer.step()
        outer.zero_grad()
        if step % max(1, options.steps // 5) == 0 or step == options.steps - 1:
            print(f"step {step:4}   loss after {options.inner_steps} inner steps {after.item():.4f}")
    print("learned rates: " + ", ".join(f"{name} {rate.exp().item():.4f}" for name, rate in rates.items()))


if __name__ == "__main__":
    main()
