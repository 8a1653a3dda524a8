"""Muon on several ranks of one machine: processor time a rank and step, and the bytes that a rank hands to collectives.

    python -m benchmarks.matrices_ranks [--ranks 1 2 4] [--layers 4] [--width 256] [--save]

Processes joined by gloo, one thread each. "DDP" has all parameters on every rank and shares the work; "FSDP2" has them
cut along their rows. ``--save`` writes benchmarks/results/matrices-ranks.md and .json.
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

import offbeat
from benchmarks.machine import describe_machine
from benchmarks.matrices import shapes_of

RESULTS = Path(__file__).parent / "results"
KINDS = ("every rank does all", "DDP, shared", "FSDP2")


def parameters(kind: str, shapes: list[tuple[int, int]], mesh: Any) -> list[torch.Tensor]:
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    found = []
    for shape in shapes:
        p, g = torch.randn(shape), torch.randn(shape)
        if kind == "FSDP2":
            p, g = (distribute_tensor(t, mesh, [Shard(0)]) for t in (p, g))
        p.grad = g
        found.append(p)
    return found


def count_bytes() -> list[int]:
    """What is handed to collectives from now on, in bytes that leave this rank."""
    sent = [0]
    broadcast, all_to_all = dist.broadcast, dist.all_to_all_single

    def counted_broadcast(t: torch.Tensor, source: int, **more: Any) -> Any:
        if source == dist.get_rank():
            sent[0] += t.nbytes * (dist.get_world_size() - 1)
        return broadcast(t, source, **more)

    def counted_all_to_all(to: Any, of: Any, arriving: Any, leaving: Any, **more: Any) -> Any:
        sent[0] += sum(n for rank, n in enumerate(leaving) if rank != dist.get_rank())
        return all_to_all(to, of, arriving, leaving, **more)

    dist.broadcast, dist.all_to_all_single = counted_broadcast, counted_all_to_all
    return sent


def work(rank: int, ranks: int, store: str, given: Any, answers: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    sent = count_bytes()
    shapes: list[Any] = shapes_of(given.layers, given.width)
    found: dict[str, Any] = {}
    for kind in KINDS:
        optimizer = offbeat.Muon(parameters(kind, shapes, mesh))
        if kind == "DDP, shared":
            optimizer.share_matrices()
        optimizer.step()
        times = []
        sent[0] = 0
        for _ in range(given.repeat):
            start = time.process_time()
            optimizer.step()
            times.append(1e3 * (time.process_time() - start))
        found[kind] = {"busy_ms": statistics.median(times), "sent_mb": sent[0] / given.repeat / 1e6}
    answers.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    context = mp.get_context("spawn")
    results: dict[int, Any] = {}
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            answers = context.Queue()
            workers = [
                context.Process(target=work, args=(rank, ranks, f"{folder}/store", given, answers))
                for rank in range(ranks)
            ]
            for worker in workers:
                worker.start()
            found = dict(answers.get(timeout=600) for _ in workers)
            for worker in workers:
                worker.join()
        results[ranks] = {
            kind: {
                "busy_ms": statistics.mean(found[rank][kind]["busy_ms"] for rank in found),
                "most_busy_ms": max(found[rank][kind]["busy_ms"] for rank in found),
                "sent_mb": statistics.mean(found[rank][kind]["sent_mb"] for rank in found),
            }
            for kind in KINDS
        }
        print(ranks, results[ranks], flush=True)
    numbers = sum(a * b for a, b in shapes_of(given.layers, given.width))
    machine = describe_machine("python -m benchmarks.matrices_ranks " + " ".join(sys.argv[1:])) | {"date": given.date}
    machine["threads"] = "1 a rank"
    lines = ["# Muon on several ranks", "", "Written by `python -m benchmarks.matrices_ranks --save`.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += [
        f"- {given.layers} layers of width {given.width}, {numbers / 1e6:.1f} M float32 parameters in matrices; gloo",
        "- processor ms of a step: mean over ranks (the busiest rank); MB that a rank sends in a step",
        "",
        f"| ranks | {' | '.join(KINDS)} |",
        f"|---|{'---|' * len(KINDS)}",
    ]
    for ranks, by_kind in results.items():
        cells = [
            f"{one['busy_ms']:.0f} ({one['most_busy_ms']:.0f}), {one['sent_mb']:.1f} MB" for one in by_kind.values()
        ]
        lines.append(f"| {ranks} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.save:
        (RESULTS / "matrices-ranks.md").write_text(text)
        (RESULTS / "matrices-ranks.json").write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
