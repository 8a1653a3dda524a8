"""From torch.distributed.optim to offbeat: the same post-local SGD, three times, with the same numbers.

    torchrun --nproc-per-node 2 examples/migrate_torch_distributed.py

1. torch: a communication hook, an averager and PostLocalSGDOptimizer, with two counters to keep in step.
2. offbeat under torch's names: only the import changes.
3. offbeat.LocalSGD: one line, one counter.

What to look at: the last column, the largest difference from torch's parameters after the last step.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as torch_hook
import torch.distributed.algorithms.model_averaging.averagers as torch_averagers
from torch import Tensor, nn
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import offbeat

PERIOD, WARMUP = 4, 6


def make_optimizer(how: str, model: DistributedDataParallel, alone: Any) -> torch.optim.Optimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # any optimizer works in all three
    if how == "torch":
        state = torch_hook.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=WARMUP)
        model.register_comm_hook(state, torch_hook.post_localSGD_hook)
        averager = torch_averagers.PeriodicModelAverager(period=PERIOD, warmup_steps=WARMUP)
        return PostLocalSGDOptimizer(inner, averager)
    if how == "offbeat, torch's names":
        ours = offbeat.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=WARMUP)
        model.register_comm_hook(ours, offbeat.post_localSGD_hook)
        return offbeat.PostLocalSGDOptimizer(inner, offbeat.PeriodicModelAverager(period=PERIOD, warmup_steps=WARMUP))
    return offbeat.LocalSGD(inner, model, every=PERIOD, warmup=WARMUP, subgroup=alone)


def train(how: str, steps: int, device: torch.device, alone: Any) -> tuple[float, Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device))
    optimizer = make_optimizer(how, model, alone)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(32, 8, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), torch.cat([p.detach().flatten() for p in model.parameters()])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(argv)

    local = int(os.environ["LOCAL_RANK"])
    use_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    # After warm-up every rank is by itself: a group of one. On several machines it would be the ranks of a machine.
    alone, _ = dist.new_subgroups(group_size=1)
    ends = {}
    for how in ("torch", "offbeat, torch's names", "offbeat.LocalSGD"):
        loss, ends[how] = train(how, options.steps, device, alone)
        difference = (ends[how] - ends["torch"]).abs().max().item()
        if dist.get_rank() == 0:
            print(f"{how:24} loss {loss:.6f}   difference from torch {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
