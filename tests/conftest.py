"""Kernels compiled by the tests go to one directory a test run, so that a broken cache cannot hide a broken kernel."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch


def pytest_configure(config):
    # Workers inherit it from the controlling process.
    if "OFFBEAT_CACHE_DIR" not in os.environ:
        os.environ["OFFBEAT_CACHE_DIR"] = tempfile.mkdtemp(prefix="offbeat-tests-")
        config.stash[_directory] = Path(os.environ["OFFBEAT_CACHE_DIR"])


_directory = pytest.StashKey[Path]()


def pytest_unconfigure(config):
    directory = config.stash.get(_directory, None)
    if directory is not None:
        import shutil

        shutil.rmtree(directory, ignore_errors=True)


def pytest_sessionstart(session):
    _prepare_triton()
    # It takes a while, and many workers need it: whoever is first has it compiled while tests are collected.
    from offbeat.engine.cpu.reader import compiled_reader

    compiled_reader()


def _prepare_triton():
    """Where there is no GPU Triton's own functions are made for its interpreter: that is decided at their import."""
    if not torch.cuda.is_available():
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            import triton.language  # noqa: F401
        except ImportError:
            pass
        finally:
            os.environ.pop("TRITON_INTERPRET")
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
