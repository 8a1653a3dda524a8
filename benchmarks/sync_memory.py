"""How much more memory a sync takes, as the kernel counts it: the process's peak from before the first sync on.

python -m benchmarks.sync memory
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offbeat

__all__ = ["memory"]

BUCKET_MB = 32


def _torch(opt: Any, model: Any, every: int, **options: Any) -> Any:
    from benchmarks.sync_link import ARMS

    return ARMS["torch blocking"](opt, model, every)


def _ours(name: str, **more: Any) -> Callable[..., Any]:
    return lambda opt, model, every, **options: getattr(offbeat, name)(
        opt, model, every, subgroup=None, **more, **options
    )


ARMS: dict[str, Callable[..., Any]] = {
    "torch's PostLocalSGDOptimizer": _torch,
    "LocalSGD": _ours("LocalSGD"),
    "LocalSGD, delay 7": _ours("LocalSGD", delay=7),
    "SlowMo": _ours("SlowMo"),
    "DiLoCo": _ours("DiLoCo"),
    "DiLoCo, delay 7": _ours("DiLoCo", delay=7),
    "DiLoCo, 4 fragments, delay 2": _ours("DiLoCo", fragments=4, delay=2),
    "DiLoCo, int8": _ours("DiLoCo", codec="int8"),
    "DiLoCo, int8, error feedback": _ours("DiLoCo", codec="int8", error_feedback=1.0),
}


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise ValueError(f"the kernel does not say {key}")


def worker(rank: int, store: str, name: str, model: str) -> None:
    from benchmarks import sync_link

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    layers, width, rows = sync_link.MODELS[model]
    arm = sync_link.Arm(sync_link.ARMS["never"], sync_link.EVERY, layers, width, rows)
    arm.step()
    arm.step()
    loss = arm.model(arm.x).square().mean()
    loss.backward()
    before_wrap = _status("VmRSS")
    arm.wrap(ARMS[name], sync_link.EVERY, bucket_mb=BUCKET_MB)
    small = torch.zeros(1)
    dist.all_reduce(small)
    before = min(before_wrap, _status("VmRSS"))  # anchors are part of it
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(2 * sync_link.EVERY):
        arm.optimizer.step()  # no forward and backward, whose own memory would hide that of the sync
    dist.barrier()
    if rank == 0:
        parameters = sum(p.numel() * p.itemsize for p in arm.model.parameters()) / 2**20
        print(json.dumps({"extra_mb": _status("VmHWM") - before, "parameters_mb": parameters}), flush=True)
    dist.destroy_process_group()


def memory(model: str = "50 M") -> dict[str, Any]:
    """Megabytes at the peak beyond what the process had before its first sync, for each arm."""
    results = {}
    for name in ARMS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.sync_memory"]
            words = [str(Path(folder) / "store"), name, model]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}
            processes = [
                subprocess.Popen([*command, str(rank), *words], env=environment, stdout=subprocess.PIPE, text=True)
                for rank in range(2)
            ]
            answer = processes[0].communicate(timeout=300)[0]
            processes[1].communicate(timeout=60)
        results[name] = json.loads(answer.strip().splitlines()[-1])
    return results


if __name__ == "__main__":
    worker(int(sys.argv[1]), *sys.argv[2:5])
