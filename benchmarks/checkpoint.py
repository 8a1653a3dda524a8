"""Saving and loading about 1 GB, against the disk's own rate and torch.save, in turns, on one core.

    python -m benchmarks.checkpoint [--rounds 7] [--folder .] [--save]

``disk`` writes the same number of bytes from memory with one fsync, and reads them into memory that is there already.
The others save a model and AdamW's state to files that are synced, and load them into both. Before anything is read,
its file is dropped from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offbeat
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"
CHUNK = 1 << 20


def make(layers: int = 22, width: int = 2000) -> tuple[nn.Module, offbeat.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = offbeat.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def forget(folder: Path) -> None:
    """Drop files from the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Disk:
    def __init__(self, size: int) -> None:
        self.memory = memoryview(torch.randint(0, 255, (size,), dtype=torch.uint8).numpy())

    def save(self, folder: Path) -> None:
        descriptor = os.open(folder / "bytes", os.O_CREAT | os.O_WRONLY)
        for start in range(0, len(self.memory), CHUNK):
            os.write(descriptor, self.memory[start : start + CHUNK])
        os.fsync(descriptor)
        os.close(descriptor)

    def load(self, folder: Path) -> None:
        with open(folder / "bytes", "rb", buffering=0) as file:
            for start in range(0, len(self.memory), CHUNK):
                file.readinto(self.memory[start : start + CHUNK])


class Ours:
    def __init__(self) -> None:
        self.model, self.optimizer = make()

    def save(self, folder: Path) -> None:
        offbeat.save_checkpoint(folder, model=self.model, optimizer=self.optimizer)

    def load(self, folder: Path) -> None:
        offbeat.load_checkpoint(folder, model=self.model, optimizer=self.optimizer)


class Torch(Ours):
    def save(self, folder: Path) -> None:
        with open(folder / "file.pt", "wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        content = torch.load(folder / "file.pt", weights_only=True)
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])


def seconds(work: Callable[[Path], None], folder: Path) -> float:
    start = time.perf_counter()
    work(folder)
    return time.perf_counter() - start


def measure(rounds: int, where: Path) -> dict[str, Any]:
    ours = Ours()
    values = (*ours.model.parameters(), *(v for state in ours.optimizer.state.values() for v in state.values()))
    size = sum(value.numel() * value.itemsize for value in values)
    arms = {"disk": Disk(size), "offbeat": ours, "torch.save": Torch()}
    times: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            folder = Path(tempfile.mkdtemp(dir=where))
            os.sync()
            saved = seconds(arm.save, folder)
            forget(folder)
            loaded = seconds(arm.load, folder)
            shutil.rmtree(folder)
            if turn:  # the first turn warms up
                times[name]["save"].append(saved)
                times[name]["load"].append(loaded)
    return {"bytes": size, "seconds": times}


def beside_training(where: Path, steps: int = 60) -> dict[str, list[float]]:
    """Seconds of steps while nothing is saved, and while a save in the background is under way."""
    _, writer = make()
    saved_model, _ = make()
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    inner = offbeat.AdamW(model.parameters())
    x = torch.randn(512, 512)

    def step() -> float:
        start = time.perf_counter()
        model(x).square().mean().backward()
        inner.step()
        inner.zero_grad()
        return time.perf_counter() - start

    result: dict[str, list[float]] = {"alone": [], "saving": []}
    for _ in range(5):
        step()
    for _ in range(5):
        result["alone"] += [step() for _ in range(steps // 5)]
        folder = Path(tempfile.mkdtemp(dir=where))
        saved = offbeat.save_checkpoint(folder, model=saved_model, optimizer=writer, background=True)
        while not saved.done:
            result["saving"].append(step())
        saved.wait()
        shutil.rmtree(folder)
    return result


def report(result: dict[str, Any]) -> str:
    size, times = result["bytes"], result["seconds"]
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    lines = [
        "# Saving and loading 1 GB",
        "",
        f"{machine}. One process on one core, {size / 1e9:.2f} GB, {len(times['disk']['save'])} turns; other programs "
        f"kept the machine busy with a load of {result['load'][0]:.0f} to {result['load'][1]:.0f}. Median (least to "
        "most) GB/s; in the last columns the median over turns of the rate as a part of the disk's in the same turn.",
        "",
        "| arm | save, GB/s | load, GB/s | save, of the disk | load, of the disk |",
        "|---|---|---|---|---|",
    ]
    for name, arm in times.items():
        cells = []
        for kind in ("save", "load"):
            rates = sorted(size / 1e9 / t for t in arm[kind])
            cells.append(f"{statistics.median(rates):.2f} ({rates[0]:.2f} to {rates[-1]:.2f})")
        for kind in ("save", "load"):
            parts = [d / t for d, t in zip(times["disk"][kind], arm[kind], strict=True)]
            cells.append(f"{100 * statistics.median(parts):.0f} %")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    beside = result["beside"]
    alone, saving = (1000 * statistics.median(beside[key]) for key in ("alone", "saving"))
    lines += [
        "",
        f"Steps of another model while such a save is written in the background: median {saving:.1f} ms of "
        f"{len(beside['saving'])} steps, and {alone:.1f} ms of {len(beside['alone'])} while nothing is saved. The "
        "process had both cores and one thread for torch.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk that is measured")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    machine = describe_machine(f"python -m benchmarks.checkpoint --rounds {options.rounds}")
    before = os.getloadavg()[0]
    result = {"machine": machine, **measure(options.rounds, options.folder)}
    result["load"] = sorted((before, os.getloadavg()[0]))
    os.sched_setaffinity(0, cores)
    result["beside"] = beside_training(options.folder)
    text = report(result)
    print(text)
    if options.save:
        (RESULTS / "checkpoint.json").write_text(json.dumps(result) + "\n")
        (RESULTS / "checkpoint.md").write_text(text)


if __name__ == "__main__":
    main()
