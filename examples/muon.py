"""Muon for hidden matrices and AdamW for the rest, as one optimizer, with DDP or FSDP2.

    torchrun --nproc-per-node 2 examples/muon.py --parallel ddp
    torchrun --nproc-per-node 2 examples/muon.py --parallel fsdp2

What to look at: the report says which parameter goes where, and why. Ranks share the work: each matrix is
orthogonalised by one rank, its owner. Both forms of parallelism reach about the same loss.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offbeat


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + change.roll(1, dims=1)  # mixes neighbours


class Model(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits.clone()  # FSDP2 warns if a module returns a view


def start() -> torch.device:
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def run(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    model: nn.Module = Model().to(device)
    if options.parallel == "ddp":
        model = DistributedDataParallel(model)
    else:
        for block in [*(m for m in model.modules() if isinstance(m, Block)), model]:
            fully_shard(block)
    split = offbeat.split_parameters(model)
    optimizer = offbeat.Chain([offbeat.Muon(split.matrices, lr=0.02), offbeat.AdamW(split.rest, lr=3e-3)])
    if options.parallel == "ddp":
        optimizer.share_matrices()  # FSDP2 shares them by itself
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)  # one scheduler for both
    if dist.get_rank() == 0:
        print(split.report)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(options.steps):
        tokens = torch.randint(0, 32, (16, 24), generator=generator).to(device)
        target = tokens.roll(1, dims=1)  # say what the neighbour was
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % max(1, options.steps // 4) == 0 or step == options.steps - 1):
            print(f"{options.parallel} step {step:4}   loss {loss.item():.4f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)
    run(options, start())
    dist.destroy_process_group()  # the model is gone by now: torch can deadlock if DDP outlives its process group


if __name__ == "__main__":
    main()
