"""Muon on several ranks of one machine: processor time a rank and step, and the bytes that a rank sends.

    python -m benchmarks.matrices_ranks [--device cpu] [--ranks 1 2 4] [--layers 4] [--width 256] [--save]

Processes joined by gloo, one thread each. On a GPU all ranks share one, and the time of products is that of their
kernels, as torch's profiler has it for one step. "every rank does all" and "DDP, shared" have all parameters on every
rank, in a DDP module; "FSDP2" has them cut along their rows. Bytes are those that a rank hands to collectives, where
an all-reduce sends what a ring sends; gradients and updates apart. The bound is what must leave a rank at least: for
an all-reduce each number twice but for its own part, and each update once to every other rank. ``--save`` writes
benchmarks/results/matrices-ranks.md and .json (matrices-ranks-cuda on a GPU).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import offbeat
from benchmarks.machine import describe_machine
from benchmarks.matrices import shapes_of
from offbeat.rules import muon

RESULTS = Path(__file__).parent / "results"
KINDS = ("every rank does all", "DDP, shared", "FSDP2")


class Matrices(nn.Module):
    """Matrices whose gradients cost nothing to compute."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList([torch.randn(shape) for shape in shapes])

    def forward(self) -> torch.Tensor:
        return torch.stack([p.sum() for p in self.all]).sum()


class Sent:
    """Bytes that leave this rank, from now on."""

    def __init__(self) -> None:
        self.bytes = 0.0
        ranks, me = dist.get_world_size(), dist.get_rank()
        broadcast, all_to_all, all_reduce = dist.broadcast, dist.all_to_all_single, dist.all_reduce

        def counted_broadcast(t: torch.Tensor, source: int, **more: Any) -> Any:
            self.bytes += t.nbytes * (ranks - 1) * (source == me)
            return broadcast(t, source, **more)

        def counted_all_to_all(to: Any, of: Any, arriving: Any, leaving: Any, **more: Any) -> Any:
            self.bytes += sum(n for rank, n in enumerate(leaving) if rank != me)
            return all_to_all(to, of, arriving, leaving, **more)

        def counted_all_reduce(t: torch.Tensor, *args: Any, **more: Any) -> Any:
            self.bytes += 2 * (ranks - 1) / ranks * t.nbytes
            return all_reduce(t, *args, **more)

        dist.broadcast, dist.all_to_all_single = counted_broadcast, counted_all_to_all
        dist.all_reduce = counted_all_reduce


class Multiplied:
    """What this rank has multiplied, as a share of one multiplication of all matrices."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        self.share = 0.0
        whole, all_of_it = muon.newton_schulz, sum(a * b * min(a, b) for a, b in shapes)

        def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
            self.share += x.numel() * min(x.shape[-2:]) / all_of_it
            return whole(x, *args)

        muon.newton_schulz = counted


def step_of(kind: str, shapes: list[tuple[int, int]], mesh: Any, device: str) -> tuple[Any, Any]:
    """Two functions: one that computes and reduces gradients, and one that steps."""
    from torch.distributed.tensor import DTensor, Shard

    model = Matrices(shapes).to(device)
    if kind == "FSDP2":  # which reduces and gathers by itself; here it is about the optimizer alone
        shards = [p.detach().chunk(dist.get_world_size())[dist.get_rank()].clone() for p in model.all]
        params = [DTensor.from_local(shard, mesh, [Shard(0)]) for shard in shards]
        for p, shard in zip(params, shards, strict=True):
            p.grad = DTensor.from_local(torch.ones_like(shard), mesh, [Shard(0)])
        return lambda: None, offbeat.Muon(params).step
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = offbeat.Muon(model.parameters())
    ddp.register_comm_hook(None, allreduce_hook)  # what DDP does, where its bytes can be counted
    if kind == "DDP, shared":
        optimizer.share_matrices()

    def backward() -> None:
        optimizer.zero_grad()
        ddp().backward()

    return backward, optimizer.step


def bound(kind: str, numbers: int, ranks: int) -> float:
    """Megabytes that a rank must send at least, on average: float32 gradients, bfloat16 updates."""
    others = (ranks - 1) / ranks
    each = {"every rank does all": 8, "DDP, shared": 8 + 2, "FSDP2": 4 / ranks}[kind]
    return each * others * numbers / 1e6


def work(rank: int, ranks: int, store: str, given: Any, answers: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh(given.device, (ranks,))
    sent = Sent()
    shapes: list[Any] = shapes_of(given.layers, given.width)
    multiplied = Multiplied(shapes)
    found: dict[str, Any] = {}
    for kind in KINDS:
        backward, step = step_of(kind, shapes, mesh, given.device)
        reducing, stepping, gradients, updates = [], [], 0.0, 0.0
        for turn in range(given.repeat + 2):
            marks = [(time.process_time(), sent.bytes)]
            for part in (backward, step):
                part()
                marks.append((time.process_time(), sent.bytes))
            if turn == 1:
                multiplied.share = 0.0
            elif turn >= 2:
                reducing.append(1e3 * (marks[1][0] - marks[0][0]))
                stepping.append(1e3 * (marks[2][0] - marks[1][0]))
                gradients += (marks[1][1] - marks[0][1]) / given.repeat / 1e6
                updates += (marks[2][1] - marks[1][1]) / given.repeat / 1e6
        found[kind] = {
            "backward_ms": statistics.median(reducing),
            "busy_ms": statistics.median(stepping),
            "gradients_mb": gradients,
            "updates_mb": updates,
            "share": multiplied.share / given.repeat,
        }
        if given.device == "cuda":
            backward()
            found[kind]["products_ms"] = products_ms(step)
    answers.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def products_ms(step: Any) -> float:
    """What the kernels for products take in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = ("symmetric", "add_product")
    return sum(event.self_device_time_total for event in profile.key_averages() if event.key in names) / 1e3


def measure(ranks: int, given: Any) -> dict[str, Any]:
    """Means over ranks, and the busiest rank."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        workers = [
            context.Process(target=work, args=(rank, ranks, f"{folder}/store", given, answers)) for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        found = dict(answers.get(timeout=600) for _ in workers)
        for worker in workers:
            worker.join()
    result: dict[str, Any] = {}
    for kind in KINDS:
        each = [found[rank][kind] for rank in found]
        result[kind] = {key: statistics.mean(one[key] for one in each) for key in each[0]}
        result[kind]["most_busy_ms"] = max(one["busy_ms"] for one in each)
        result[kind]["largest_share"] = max(one["share"] for one in each)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    numbers = sum(a * b for a, b in shapes_of(given.layers, given.width))
    results: dict[int, Any] = {}
    for ranks in given.ranks:
        results[ranks] = measure(ranks, given)
        for kind in KINDS:
            results[ranks][kind]["bound_mb"] = bound(kind, numbers, ranks)
        print(ranks, results[ranks], flush=True)
    machine = describe_machine("python -m benchmarks.matrices_ranks " + " ".join(sys.argv[1:])) | {"date": given.date}
    machine["threads"] = "1 a rank"
    lines = ["# Muon on several ranks", "", "Written by `python -m benchmarks.matrices_ranks --save`.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    if given.device == "cuda":
        lines += ["- the ranks share the GPU: the time of a kernel contains what those of other ranks take meanwhile"]
    lines += [
        f"- {given.layers} layers of width {given.width}, {numbers / 1e6:.1f} M float32 parameters in matrices; gloo",
        "- processor ms of `step()`: mean over ranks (the busiest rank); of backward, with gradients that cost "
        "nothing: what reducing them takes",
        "- MB that a rank sends in a step, mean over ranks, beside the least that is possible; FSDP2 without its own "
        "gathering and reducing",
        "",
        "| ranks | who does what | share of the arithmetic, mean (most) | `step()`, processor ms "
        "| backward, processor ms | gradients, MB | updates, MB "
        "| together, MB (bound) |" + (" kernels of the products, ms |" if given.device == "cuda" else ""),
        "|---|---|---|---|---|---|---|---|" + ("---|" if given.device == "cuda" else ""),
    ]
    for ranks, by_kind in results.items():
        for kind, one in by_kind.items():
            together = one["gradients_mb"] + one["updates_mb"]
            lines.append(
                f"| {ranks} | {kind} | {one['share']:.2f} ({one['largest_share']:.2f}) "
                f"| {one['busy_ms']:.0f} ({one['most_busy_ms']:.0f}) | {one['backward_ms']:.0f} "
                f"| {one['gradients_mb']:.2f} | {one['updates_mb']:.2f} | {together:.2f} ({one['bound_mb']:.2f}) |"
                + (f" {one['products_ms']:.2f} |" if given.device == "cuda" else "")
            )
    text = "\n".join(lines) + "\n"
    print(text)
    if given.save:
        path = RESULTS / ("matrices-ranks" + ("-cuda" if given.device == "cuda" else ""))
        path.with_suffix(".md").write_text(text)
        path.with_suffix(".json").write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
