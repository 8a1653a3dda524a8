"""Models, optimizers and training for the tests of checkpoints: what happens at a step depends on its number alone."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 5, bias=False), nn.Linear(5, 3))


def chain(model):
    split = offbeat.split_parameters(model)
    muon = offbeat.Muon(split.matrices, lr=0.01)
    return offbeat.Chain([muon, offbeat.AdamW(split.rest, lr=0.01)])


def adamw(model):
    return offbeat.AdamW(model.parameters(), lr=0.01)


def groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices, "lr": 0.01}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


def outer(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9)


#: Optimizers of one process.
PLAIN = {
    "AdamW": adamw,
    "torch AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "SGD": lambda m: offbeat.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: offbeat.SGD(m.named_parameters(), lr=0.05, momentum=0.9, dampening=0.1),
    "groups": lambda m: offbeat.RMSprop(groups(m), lr=0.02, centered=True, momentum=0.5),
    "Muon": lambda m: offbeat.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.01),
    "Adafactor": lambda m: offbeat.Adafactor(m.parameters(), lr=0.01),
    "8 bits": lambda m: offbeat.AdamW(m.parameters(), lr=0.01, state_dtype="8bit"),
    "Chain": chain,
}  # fmt: skip

#: Optimizers of replicas, in the middle of a period and with a round in flight after 7 steps.
REPLICAS = {
    "LocalSGD": lambda m: offbeat.LocalSGD(adamw(m), m, every=3, warmup=2),
    "LocalSGD, late": lambda m: offbeat.LocalSGD(adamw(m), m, every=4, delay=3),
    "SlowMo": lambda m: offbeat.SlowMo(offbeat.SGD(m.parameters(), lr=0.05), m, every=4, slow_momentum=0.5),
    "DiLoCo": lambda m: offbeat.DiLoCo(adamw(m), m, every=4),
    "DiLoCo, in flight": lambda m: offbeat.DiLoCo(chain(m), m, every=6, fragments=2, delay=2),
    "DiLoCo, int8": lambda m: offbeat.DiLoCo(adamw(m), m, every=5, delay=4, codec="int8", error_feedback=1.0),
    "levels": lambda m: offbeat.Replica(
        adamw(m), m, [offbeat.Level(every=2, deadline=30.0), offbeat.Level(every=4, delay=2, outer=outer)]
    ),
}  # fmt: skip


def train(model, optimizer, first, last, seed=0):
    """Train, with data and noise that depend on the step and the seed, and on torch's generator."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + seed)
        x = torch.randn(8, 6, generator=generator) + 0.1 * torch.randn(8, 6)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value):
    """A nested value without shards: all ranks must call it."""
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(item) for item in value)
    return value


def same(a, b):
    """Whether two nested values are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def wrapped(kind, seed=0):
    """A model: plain, in DDP, sharded over all ranks, or over pairs of ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model(seed)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    elif kind == "pairs":
        shape = (torch.distributed.get_world_size() // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))["shard"]
    if kind in ("fsdp", "pairs"):
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
    return model


def quietly(function, *args, **options):
    """Call a function without the warnings of replicas on one host."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)
