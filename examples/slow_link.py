"""A slow link between machines: DDP, LocalSGD and DiLoCo, with what each sends and learns.

    torchrun --nproc-per-node 2 examples/slow_link.py --method ddp
    torchrun --nproc-per-node 2 examples/slow_link.py --method local-sgd
    torchrun --nproc-per-node 2 examples/slow_link.py --method diloco

What to look at: MB sent a step, and the loss at the same number of steps. On one machine the link is fast, so steps a
second differ little; between machines, start it with ``--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT``
on each. DiLoCo here sends its differences in 4 bits, part by part, while training goes on.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat


def start() -> torch.device:
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def wrap(method: str, optimizer: torch.optim.Optimizer, model: nn.Module, warmup: int) -> torch.optim.Optimizer:
    # subgroup=None: every rank trains by itself. Leave it out to have the GPUs of a machine average their gradients at
    # every step, and only machines drift apart.
    if method == "local-sgd":
        return offbeat.LocalSGD(optimizer, model, every=8, warmup=warmup, subgroup=None)
    if method == "diloco":
        return offbeat.DiLoCo(
            optimizer, model, 16, fragments=4, delay=4, codec="int4", error_feedback=1.0, warmup=warmup, subgroup=None
        )
    return optimizer


def run(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    teacher = nn.Linear(32, 8).to(device)
    layers = [nn.Linear(32, options.width), nn.GELU(), nn.Linear(options.width, options.width), nn.GELU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(options.width, 8)).to(device))
    optimizer: torch.optim.Optimizer = offbeat.AdamW(model.parameters(), lr=1e-3)
    optimizer = wrap(options.method, optimizer, model, warmup=options.steps // 10)

    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank has data of its own
    begin = time.perf_counter()
    for step in range(options.steps):
        x = torch.randn(64, 32, generator=generator).to(device)
        target: Tensor = teacher(x).detach().tanh()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % max(1, options.steps // 4) == 0:
            print(f"step {step:4}   loss {loss.item():.4f}")
    if isinstance(optimizer, offbeat.Replica):
        optimizer.finish()  # synchronise one last time
    seconds = time.perf_counter() - begin

    # DDP's ring of n ranks sends 2 (n - 1) / n of the gradients at every step. LocalSGD and DiLoCo count their own.
    n, size = dist.get_world_size(), sum(p.numel() * p.element_size() for p in model.parameters())
    sent = getattr(optimizer, "bytes_sent", options.steps * 2 * (n - 1) / n * size)
    if dist.get_rank() == 0:
        print(
            f"{options.method}: {options.steps / seconds:.0f} steps/s, {sent / options.steps / 1e6:.3f} MB sent a step"
        )
        print(f"final loss {loss.item():.4f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["ddp", "local-sgd", "diloco"], default="diloco")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args(argv)
    run(options, start())
    dist.destroy_process_group()  # the model is gone by now: torch can deadlock if DDP outlives its process group


if __name__ == "__main__":
    main()
