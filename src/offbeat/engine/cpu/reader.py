"""The compiled address reader. The first address book starts the compiler; the library is then loaded and checked.

Until it is ready, and where it cannot be compiled, :class:`~offbeat.engine.addresses.AddressBook` reads in Python.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
import time
from array import array
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.engine.cpu.compiler import CompilerError
from offbeat.engine.cpu.reader_build import Build, is_whole

#: Seconds between two checks whether the compiler is done.
SECONDS_BETWEEN = 0.1


class _Reader:
    """The compiled reader of this process: not started, being compiled, ready or failed."""

    def __init__(self) -> None:
        self.module: Any = None
        self.reason: str | None = "no step has needed the compiled reader yet"
        self._build: Build | None = None
        self.over = False
        self._next_look = 0.0
        self._loads = 0
        self._lock = threading.Lock()

    def get(self) -> Any:
        """The module, or None while there is none. Never raises."""
        if self.over or time.monotonic() < self._next_look or not self._lock.acquire(blocking=False):
            return self.module
        try:
            self._look()
        except Exception as error:  # Python can read the addresses instead
            self._end(None, str(error) if isinstance(error, CompilerError) else f"{type(error).__name__}: {error}")
        finally:
            self._next_look = time.monotonic() + SECONDS_BETWEEN
            self._lock.release()
        return self.module

    def after_fork(self) -> None:
        """Replace the lock: a thread of the parent process may have held it, and that thread does not exist here."""
        self._lock = threading.Lock()

    def _look(self) -> None:
        self.reason = "it is being compiled"
        if self._build is None:
            self._build = Build()
        library = self._build.poll()
        if library is None or _torch.has_dispatch_mode():  # a mode may change the results of the check
            return
        try:
            module = _load(library)
        except (ImportError, OSError) as error:
            self._loads += 1
            if self._loads > 1:
                raise CompilerError(f"the compiled reader could not be loaded: {error}") from error
            self._build.discard()  # it is damaged: build it again
            return
        if _agrees(module):
            self._end(module, None)
        else:
            self._end(None, "the compiled reader and Python disagree about some tensors")

    def _end(self, module: Any, reason: str | None) -> None:
        self.module, self.reason, self.over = module, reason, True


_reader = _Reader()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _reader.after_fork())


def _why_not_wanted() -> str | None:
    if os.environ.get("OFFBEAT_READER") == "python":
        return "OFFBEAT_READER=python is set"
    return "OFFBEAT_NO_COMPILER is set" if os.environ.get("OFFBEAT_NO_COMPILER") else None


def compiled_reader(device: torch.device | None = None) -> Any:
    """The compiled reader's module if it is ready and can read tensors of this device, else None.

    The first call starts the compiler. No call waits for it.
    """
    if _reader.over and _reader.module is None:
        return None
    module = None if _why_not_wanted() else _reader.get()
    return module if module is None or device is None or _suits(module, device) else None


def why_no_reader() -> str | None:
    """Why addresses are read in Python now, or None if they are not."""
    if reason := _why_not_wanted():
        return reason
    return None if _reader.module is not None else _reader.reason


def wait_for_reader(seconds: float) -> bool:
    """Wait until the compiled reader is ready or has failed. Returns whether it is ready."""
    end = time.monotonic() + seconds
    while compiled_reader() is None:
        if _why_not_wanted() or _reader.over or time.monotonic() > end:
            return False
        time.sleep(SECONDS_BETWEEN)
    return True


def shapes_of(tensors: list[Tensor]) -> array[int]:
    """The number of dimensions, the sizes and the strides of each tensor, as the compiled reader takes them."""
    shapes = array("q")
    for t in tensors:
        shapes.extend((t.dim(), *t.shape, *t.stride()))
    return shapes


def _load(library: Path) -> Any:
    if not is_whole(library):
        raise ImportError(f"{library} has been cut off")
    loader = ExtensionFileLoader("offbeat_reader", str(library))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.lru_cache(maxsize=64)
def _suits(module: Any, device: torch.device) -> bool:
    """Return whether the reader accepts a plain tensor of this device."""
    with torch.inference_mode(False):
        return _read(module, [torch.empty(0, device=device)], []) == ([0], [0])


def _read(module: Any, tensors: list[Tensor], grads: list[Any] | None) -> tuple[list[int], list[int]] | None:
    """The addresses of parameters without state and of their gradients, as the module reads them."""
    tables = [array("q", bytes(8 * len(tensors))) for _ in range(2)]
    padded = None if grads is None else [*grads, *[None] * (len(tensors) - len(grads))]
    count = module.read(
        tensors, padded, [tensors], tables, shapes_of(tensors), [tensors[0].dtype], tensors[0].device,
        [], array("q"), None, [], [],
    )  # fmt: skip
    if count < 0:
        return None
    assert count == sum(address != 0 for address in tables[1])
    return tables[0].tolist(), tables[1].tolist()


class _Subclass(Tensor):
    """A subclass of Tensor, which the reader must refuse: its memory need not hold its values."""


@torch.inference_mode(False)
def _agrees(module: Any) -> bool:
    """Return whether the module and Python give the same answers for some tensors."""
    # Written out, because the program may have set another default dtype or device.
    like: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    plain = [torch.nn.Parameter(torch.arange(6, **like)[2:]), torch.ones(2, 3, **like).t()]
    other = torch.zeros(4, **like)
    here, gradient = [t.data_ptr() for t in plain], other.data_ptr()
    with torch.inference_mode():
        inference = torch.zeros(4, **like)
    odd = [torch.zeros(4, 1, **like), other.double(), other.as_subclass(_Subclass), other.to_sparse(), inference, 1]
    odd += [_torch.neg_view(other), torch.zeros(8, **like)[::2], torch.zeros(4, dtype=torch.float32, device="meta")]
    answers = [_read(module, plain, None), _read(module, plain, [other])]
    plain[0].grad = other
    answers.append(_read(module, plain, None))
    refused = [_read(module, plain, [g]) for g in odd]
    before = [_torch.version_of(t) for t in plain]
    module.bump([plain], array("q", [1, 0]), None)
    return (
        answers == [(here, [0, 0]), (here, [gradient, 0]), (here, [gradient, 0])]
        and not any(refused)
        and [_torch.version_of(t) for t in plain] == [before[0] + 1, before[1]]
    )
