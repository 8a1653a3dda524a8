"""Replicas that are stopped at random while they train: nothing may hang, and in the end all must agree.

    python -m benchmarks.chaos [--seconds 180] [--ranks 3] [--seed 0]

Real processes train over gloo with a deadline for every collective, each run with a random way to synchronise.
Meanwhile one after the other is stopped (SIGSTOP) for longer or shorter than the deadline. Training goes on after
:class:`offbeat.ExchangeError`, as the documentation says it can. When the steps are over nobody is stopped any more,
and ``finish()`` must make parameters, anchors and outer state the same on every rank. Ends with an error if a rank
raises anything else, if the replicas differ, or if a run takes longer than all stops and waits can explain.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat

#: Seconds that a collective may take, and that a run may take after the last stop.
DEADLINE, PATIENCE = 2.0, 240.0
#: Steps of a run, and seconds that one takes.
STEPS, PACE = 150, 0.05


def configuration(seed: int, ranks: int) -> tuple[str, dict[str, Any]]:
    """A way to synchronise."""
    draw = random.Random(seed)
    every = draw.choice([3, 4, 6, 8])
    delay = draw.choice([0, 0, 1, every - 1])
    kind = draw.choice(["LocalSGD", "DiLoCo", "SlowMo", "levels"])
    if kind == "LocalSGD":
        return kind, {"every": every, "delay": delay, "deadline": DEADLINE}
    if kind == "DiLoCo":
        fragments = draw.choice([1, 1, 2])
        delay = min(delay, every // fragments - 1)
        codec = draw.choice([None, "bf16", "int8", "int4"])
        more = {"error_feedback": 1.0} if codec == "int4" else {}
        return kind, {
            "every": every, "delay": delay, "fragments": fragments, "codec": codec, "deadline": DEADLINE, **more
        }  # fmt: skip
    if kind == "SlowMo":
        return kind, {"every": every, "deadline": DEADLINE}
    return kind, {"every": every, "size": ranks}


def make_optimizer(kind: str, options: dict[str, Any], model: nn.Module) -> Any:
    inner = offbeat.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if kind != "levels":
        return getattr(offbeat, kind)(inner, model, subgroup=None, **options)
    every = options["every"]

    def outer(groups: Any) -> Any:
        return offbeat.SGD(groups, lr=0.7, momentum=0.5, nesterov=True)

    low = offbeat.Level(every=every, deadline=DEADLINE)
    high = offbeat.Level(every=2 * every, deadline=DEADLINE, outer=outer)
    return offbeat.Replica(inner, model, [low, high], subgroup=None)


def train(rank: int, ranks: int, store: str, seed: int, done: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = make_optimizer(*configuration(seed, ranks), model)
    failed = 0
    for step in range(STEPS):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        (model(x) - x[:, :4]).square().mean().backward()
        try:
            optimizer.step()
        except offbeat.ExchangeError:
            failed += 1
        optimizer.zero_grad()
        time.sleep(PACE)
        if step == 0:
            print("training", flush=True)
    Path(f"{done}.{rank}").touch()
    while not all(Path(f"{done}.{other}").exists() for other in range(ranks)):  # nobody is stopped after this
        time.sleep(0.1)
    for attempt in range(4):
        try:
            optimizer.finish()
            break
        except offbeat.ExchangeError:
            failed += 1
            if attempt == 3:
                raise
    found = [torch.cat([p.detach().reshape(-1) for p in model.parameters()])]
    for level in optimizer.state_dict()["replica"][0]["tracks"]:
        for track in level:
            found += [t.reshape(-1) for t in tensors_in(track) if t.is_floating_point()]
    mine = torch.cat([t.double() for t in found])
    assert bool(mine.isfinite().all()), "not finite"
    others = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(others, mine)
    same = [bool(torch.equal(mine, other)) for other in others]
    print(f"failed {failed}, agreed {optimizer.agreed}, same {same}", flush=True)
    assert all(same), "replicas differ"
    assert optimizer.agreed, "finish() does not say that replicas agree"
    dist.barrier()
    dist.destroy_process_group()


def tensors_in(entry: Any) -> list[torch.Tensor]:
    """The anchors and the outer state in what a track saves. Residuals belong to a rank."""
    if isinstance(entry, torch.Tensor):
        return [entry]
    if isinstance(entry, dict):
        return [t for key, value in entry.items() if "residual" not in str(key) for t in tensors_in(value)]
    if isinstance(entry, (list, tuple)):
        return [t for value in entry for t in tensors_in(value)]
    return []


def disturb(workers: list[Any], draw: random.Random) -> float:
    """Stop a rank for some time. Returns for how long."""
    worker = draw.choice(workers)
    seconds = draw.choice([0.3, 1.0, 3.0, 6.0])
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(worker.pid, signal.SIGCONT)
    return seconds


def run(seed: int, ranks: int) -> str:
    """One run; returns what happened, or raises."""
    draw = random.Random(seed)
    kind, options = configuration(seed, ranks)
    with tempfile.TemporaryDirectory() as folder:
        store, done = os.path.join(folder, "store"), os.path.join(folder, "done")
        command = [sys.executable, "-m", "benchmarks.chaos", "--seed", str(seed), "--ranks", str(ranks)]
        logs = [Path(folder, f"log.{rank}") for rank in range(ranks)]
        workers = []
        for rank in range(ranks):
            with logs[rank].open("w") as out:
                workers.append(
                    subprocess.Popen(
                        [*command, "--rank", str(rank), "--store", store, "--done", done],
                        stdout=out, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        try:
            while not all("training" in log.read_text() for log in logs) and not any(w.poll() for w in workers):
                time.sleep(0.1)
            stops: list[float] = []
            end = time.monotonic() + PATIENCE
            while not any(Path(f"{done}.{rank}").exists() for rank in range(ranks)) and time.monotonic() < end:
                if any(worker.poll() is not None for worker in workers):
                    break
                if len(stops) < 3:
                    time.sleep(draw.uniform(0.2, 2.0))
                    stops.append(disturb(workers, draw))
                else:
                    time.sleep(0.2)
            end = time.monotonic() + PATIENCE
            for worker in workers:
                worker.wait(timeout=max(1.0, end - time.monotonic()))
            if any(worker.returncode for worker in workers):
                raise RuntimeError("a rank failed")
            words = logs[0].read_text().splitlines()[-1]
            return f"{kind} {options}: stopped for {stops} s; {words}"
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            tails = "\n".join(f"rank {i}: {log.read_text()[-1500:]}" for i, log in enumerate(logs))
            raise SystemExit(f"seed {seed}, {kind} {options}: {error}\n{tails}") from None
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="no run begins after this time")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each has one of its own")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--done", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        train(given.rank, given.ranks, given.store, given.seed, given.done)
        return
    end, seed = time.monotonic() + given.seconds, given.seed
    while time.monotonic() < end:
        start = time.monotonic()
        print(f"seed {seed}: {run(seed, given.ranks)} ({time.monotonic() - start:.0f} s)", flush=True)
        seed += 1


if __name__ == "__main__":
    main()
