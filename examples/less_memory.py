"""Less memory: the optimizer steps during backward, so that the gradients of a model never exist all at once.

    python examples/less_memory.py
    torchrun --nproc-per-node 2 examples/less_memory.py

What to look at: the gradients that exist after backward, and on a GPU the peak of memory. Losses are equal to the bit.
On one process the saving is largest; DDP keeps its communication buckets, which are as large as the gradients.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat


def make_model(layers: int, width: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    blocks = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    model: nn.Module = nn.Sequential(*blocks, nn.Linear(width, width)).to(device)
    return DistributedDataParallel(model) if dist.is_initialized() else model


def train(overlapped: bool, layers: int, width: int, steps: int, device: torch.device) -> tuple[float, float, float]:
    """The last loss, the MB of gradients alive after backward, and on a GPU the peak of allocated MB."""
    model = make_model(layers, width, device)
    optimizer = offbeat.AdamW(model.parameters(), lr=1e-3)
    if overlapped:
        offbeat.overlap(optimizer, model)  # the only difference
    parameters = {id(p) for p in model.parameters()}
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(1)).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        # A gradient that has been used is a placeholder without memory.
        alive = [p.grad for p in model.parameters() if p.grad is not None and type(p.grad) is torch.Tensor]
        megabytes = sum(grad.numel() * grad.element_size() for grad in alive) / 1e6
        optimizer.step()
        optimizer.zero_grad()
    assert parameters == {id(p) for p in model.parameters()}  # nothing has moved
    peak = torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else float("nan")
    return loss.item(), megabytes, peak


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args(argv)

    local, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    use_cuda = torch.cuda.device_count() > local
    device = torch.device("cuda", local) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if use_cuda else "gloo")
    for overlapped in (False, True):
        loss, gradients, peak = train(overlapped, options.layers, options.width, options.steps, device)
        if local == 0:
            name = "overlapped" if overlapped else "after backward"
            print(f"{name:15} loss {loss:.8f}   gradients after backward {gradients:6.1f} MB")
            if use_cuda:
                print(f"{'':15} peak of memory {peak:.0f} MB")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
