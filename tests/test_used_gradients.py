"""The error for a gradient that has been used: it names the parameter, and the one remedy that fits."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import offbeat

REMEDIES = {
    "zero_grad": r"call optimizer\.zero_grad\(\) after every step",
    "accumulate": r"announce the backward passes of a step with overlap\(\.\.\., accumulate=N\)",
    "checkpoint": r"use checkpoint\(use_reentrant=False\)",  # tested with checkpoints
    "clip_norm": r"clip with overlap\(\.\.\., clip_norm=\)",
    "clamp": r"clip by norm instead of by value",
    "scaler": r"pass the GradScaler as overlap\(\.\.\., scaler=\)",
    "read": r"read or change gradients during backward",
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def forget_zero_grad(model, optimizer):
    optimizer.step()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


def two_passes(model, optimizer):
    model(torch.ones(2, 6)).sum().backward()


def clip_norm(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_norm_one_by_one(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)


def clip_value(model, optimizer):
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def unscale(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def read(model, optimizer):
    print(model[2].weight.grad.sum())


def copy_after_the_step(model, optimizer):
    optimizer.step()
    torch.empty(3, 12).copy_(model[2].weight.grad)


def copy_all_after_the_step(model, optimizer):
    optimizer.step()
    torch._foreach_copy_([torch.empty_like(p) for p in model.parameters()], [p.grad for p in model.parameters()])


CASES = {
    "zero_grad": [forget_zero_grad],
    "accumulate": [two_passes],
    "clip_norm": [clip_norm, clip_norm_one_by_one],
    "clamp": [clip_value],
    "scaler": [unscale],
    "read": [read, copy_after_the_step, copy_all_after_the_step],
}


@pytest.mark.parametrize(("remedy", "tried"), [(remedy, one) for remedy, some in CASES.items() for one in some])
def test_one_remedy(remedy, tried):
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"the gradient of parameter '[02]\.(weight|bias)' was used and freed"
    ) as error:
        tried(model, optimizer)
    assert [name for name, words in REMEDIES.items() if re.search(words, str(error.value))] == [remedy]


def test_parameters_without_a_name_have_a_shape():
    model = make()
    optimizer = offbeat.SGD(model[0].parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    extra = nn.Parameter(torch.ones(5))
    model.register_parameter("extra", extra)
    optimizer.add_param_group({"params": [extra]})
    for _ in range(2):  # a parameter that has just been added is left to step()
        optimizer.zero_grad()
        (model(torch.ones(2, 6)).sum() + extra.sum()).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(5,\) was used and freed"):
        extra.grad.sum()
