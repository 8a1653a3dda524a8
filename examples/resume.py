"""Exact resume: stop DiLoCo in the middle of a period, load, go on, and get the bits of a run that never stopped.

    torchrun --nproc-per-node 2 examples/resume.py

Between rounds replicas differ, so every rank saves its own file: the model and ``optimizer.state_dict()``, which holds
the inner optimizer, anchors, the outer momentum, residuals, counters and rounds in flight. What to look at: "same bits:
True".
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat


def make(device: torch.device) -> tuple[nn.Module, offbeat.DiLoCo]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device))
    inner = offbeat.AdamW(model.parameters(), lr=1e-2)
    return model, offbeat.DiLoCo(
        inner, model, every=8, fragments=2, delay=3, codec="int8", error_feedback=1.0, subgroup=None
    )


def train(model: nn.Module, optimizer: offbeat.DiLoCo, first: int, last: int, device: torch.device) -> float:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())  # data that depends on the step alone
        x = torch.randn(32, 8, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run(options: argparse.Namespace, device: torch.device) -> None:
    folder = options.folder or Path(tempfile.mkdtemp())
    file = folder / f"rank{dist.get_rank()}.pt"
    half = options.steps // 2 - 1  # in the middle of a period, with a round in flight

    model, optimizer = make(device)
    train(model, optimizer, 0, half, device)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    loss = train(model, optimizer, half, options.steps, device)  # goes on as if nothing had been saved

    resumed, again = make(device)
    saved = torch.load(file, weights_only=True, map_location=device)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    loss_again = train(resumed, again, half, options.steps, device)
    same = torch.equal(flat(model), flat(resumed))
    print(f"rank {dist.get_rank()}: loss {loss:.6f} and {loss_again:.6f}, same bits: {same}")
    optimizer.finish()
    again.finish()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=42)
    parser.add_argument("--folder", type=Path, default=None, help="where to save; by default a temporary folder")
    options = parser.parse_args(argv)

    local = int(os.environ["LOCAL_RANK"])
    use_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    run(options, device)
    dist.destroy_process_group()  # the model is gone by now: torch can deadlock if DDP outlives its process group


if __name__ == "__main__":
    main()
