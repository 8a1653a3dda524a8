"""What a result must say about where it was measured."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import torch

import offbeat

__all__ = ["describe_machine"]


def describe_machine(command: str) -> dict[str, str]:
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        **gpu,
        "cpu": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "offbeat": offbeat.__version__,
        "system": sys.platform,
    }
