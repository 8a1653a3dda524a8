"""Kernels compile for a GPU, with Triton's own assembler: the interpreter takes what a compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.timeout(300)
def test_kernels_compile_for_hopper(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 31
    assert [line for line in lines if not line.endswith(": ok")] == []
