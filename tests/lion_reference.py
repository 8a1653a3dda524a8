"""Lion from the paper's pseudocode, on tensors one by one: the reference where torch.optim has none."""

from __future__ import annotations

import torch


class ReferenceLion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = -p.grad if group["maximize"] else p.grad
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = (beta1 * momentum + (1 - beta1) * g).sign()
                p.copy_(p - group["lr"] * (update + group["weight_decay"] * p))
                momentum.copy_(beta2 * momentum + (1 - beta2) * g)
