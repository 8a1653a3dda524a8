"""What the worker processes of test_convergence.py do. Without torch, so that they start fast."""

from __future__ import annotations

import os
import time

from benchmarks.convergence_jobs import Job


def prepare() -> None:
    """Nothing."""


def work(job: Job) -> int:
    """Succeed, raise, end the process or take too long, as the name of the arm says."""
    if job.arm == "raises":
        raise ValueError("this arm is broken")
    if job.arm == "dies":
        os._exit(3)
    if job.arm == "takes long":
        time.sleep(60)
    return job.seed
