"""Several sites: the ranks of a site average often, sites synchronise rarely and with few bits.

    torchrun --nproc-per-node 4 examples/several_sites.py --ranks-per-site 2

What to look at: "spread" is the largest difference between the parameters of two ranks. Inside a site it falls to zero
every 4 steps, between sites every 16. ``bytes_sent`` is what one rank has sent in rounds of either kind.
"""

from __future__ import annotations

import argparse
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
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


def spread(model: nn.Module, ranks_per_site: int) -> tuple[float, float]:
    """The largest difference of a parameter between ranks of the first site, and between any two ranks."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    inside = max((one - everyone[0]).abs().max().item() for one in everyone[:ranks_per_site])
    return inside, max((one - everyone[0]).abs().max().item() for one in everyone)


def run(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 4)).to(device))
    nesterov = functools.partial(offbeat.SGD, lr=0.6, momentum=0.9, nesterov=True)
    levels = [
        # Inside a site: the mean, every 4 steps. Ranks 0 to n-1 are the first site, and so on.
        offbeat.Level(every=4, group=options.ranks_per_site),
        # Between all: DiLoCo every 16 steps, in 8 bits.
        offbeat.Level(every=16, outer=nesterov, codec="int8", error_feedback=1.0),
    ]
    # subgroup=None: gradients are averaged with nobody, each rank trains by itself between rounds.
    inner = offbeat.AdamW(model.parameters(), lr=3e-3)
    optimizer = offbeat.Replica(inner, model, levels, warmup=2, subgroup=None)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(options.steps):
        x = torch.randn(32, 16, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(x), x[:, :4].sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        inside, between = spread(model, options.ranks_per_site)
        if dist.get_rank() == 0 and (inside == 0 or step == options.steps - 1):
            print(f"step {step:3}   loss {loss.item():.4f}   spread in a site {inside:.1e}   between {between:.1e}")
    optimizer.finish()
    if dist.get_rank() == 0:
        print(f"{optimizer.syncs} rounds, {optimizer.bytes_sent / 1e3:.1f} kB sent by rank 0")
    print(f"rank {dist.get_rank()}: spread after finish() {spread(model, options.ranks_per_site)[1]:.1e}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=34)
    parser.add_argument("--ranks-per-site", type=int, default=2)
    options = parser.parse_args(argv)
    run(options, start())
    dist.destroy_process_group()  # the model is gone by now: torch can deadlock if DDP outlives its process group


if __name__ == "__main__":
    main()
