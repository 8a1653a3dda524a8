"""Wrong uses. Never executed: mypy and pyright report every line that ends in "wrong", and no other."""

from __future__ import annotations

import torch
from torch import nn

import offbeat


def optimizers(model: nn.Module) -> None:
    offbeat.AdamW(model.parameters(), lr="x")  # wrong
    offbeat.AdamW(model.parameters(), weight_deacy=0.1)  # wrong
    offbeat.AdamW(model.parameters(), decoupled_weight_decay=True)  # wrong
    offbeat.AdamW(model.parameters(), betas=0.9)  # wrong
    offbeat.AdamW(model.parameters(), state_dtype="4bit")  # wrong
    offbeat.AdamW(model.parameters(), rounding="up")  # wrong
    offbeat.AdamW(model)  # wrong
    offbeat.AdamW()  # wrong
    offbeat.SGD(model.parameters(), 0.1, 0.9, 0.0, 0.0, True, True)  # wrong
    offbeat.SGD(model.parameters(), nesterov="yes")  # wrong
    offbeat.Muon(model.parameters(), ns_steps=5.0)  # wrong
    offbeat.Muon(model.parameters(), adjust_lr_fn="rms")  # wrong
    offbeat.AdamW(model.parameters()).step(clip="all")  # wrong
    offbeat.LBFGS(model.parameters(), line_search_fn="wolfe")  # wrong
    offbeat.LBFGS(model.parameters()).step()  # wrong
    offbeat.Chain(offbeat.AdamW(model.parameters()))  # wrong
    offbeat.split_parameters(model.parameters())  # wrong
    offbeat.Adamw(model.parameters())  # wrong


def functional(model: nn.Module) -> None:
    offbeat.as_functional(offbeat.SGD, model.parameters(), lr="x")  # wrong
    offbeat.as_functional(offbeat.SGD, model.parameters(), momentm=0.9)  # wrong
    offbeat.as_functional(offbeat.SGD)  # wrong
    offbeat.as_functional(offbeat.SGD(model.parameters()))  # wrong
    offbeat.as_functional(offbeat.SGD, [], lr=0.1).step(torch.nn.Linear(1, 1))  # wrong
    offbeat.as_pure(offbeat.SGD, lr="x")  # wrong
    offbeat.as_pure(offbeat.SGD, momentm=0.9)  # wrong
