"""The samples of the convergence benchmark: sources of Python and of installed packages, and scikit-learn's digits.

Nothing is downloaded. ``python -m benchmarks.convergence_data FILE.gz`` writes the list of the packages' files.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Samples", "batches", "digits", "packages", "sources", "whole_batches"]

#: Directories of the standard library that are not prose about programs: tests, and tables written by programs.
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data"}


#: Of every 20 files the one that is held out to choose settings by, and the one that is held out for reported results.
HELD_OUT = {"choose": 0, "report": 10}


class Samples(NamedTuple):
    """Inputs and targets to train on, and others to judge by. ``noise`` is the deviation of what training adds."""

    x: Tensor
    y: Tensor
    held_out_x: Tensor
    held_out_y: Tensor
    words: str
    noise: float = 0.0

    def to(self, device: str) -> Samples:
        """The same samples on another device."""
        tensors = {name: t.to(device) for name, t in self._asdict().items() if isinstance(t, Tensor)}
        return self._replace(**tensors)

    def at(self, chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The samples with these indices. Bytes become the integers that embeddings and losses take."""
        x, y = self.x[chosen], self.y[chosen]
        return (x.long(), y.long()) if x.dtype == torch.uint8 else (x, y)


def sources(length: int = 128, held_out: int = 160, hold_out_every: int = 20) -> Samples:
    """The standard library's sources, cut into windows; each byte's target is the one that follows it.

    Whole files are held out, so that no held-out line has a neighbour in the training text. Of their windows
    ``held_out`` are taken, evenly spaced.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    # Only packages: site-packages and the build's configuration have no identifiers for names.
    paths = [path.relative_to(root) for path in root.rglob("*.py") if not path.name.startswith("_sysconfigdata")]
    kept = sorted(
        path.as_posix()
        for path in paths
        if all(part.isidentifier() and part not in LEFT_OUT for part in path.parts[:-1])
    )
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    for number, path in enumerate(kept, start=1):
        parts[number % hold_out_every == 0].extend((root / path).read_bytes())
    train, rest = (torch.frombuffer(part, dtype=torch.uint8).unfold(0, length + 1, length + 1).long() for part in parts)
    rest = rest[torch.linspace(0, len(rest) - 1, held_out).long()]
    size = sum(map(len, parts))
    words = (
        f"{len(kept)} source files of Python's standard library, {size / 1e6:.1f} MB; every {hold_out_every}th held out"
    )
    return Samples(train[:, :-1], train[:, 1:], rest[:, :-1], rest[:, 1:], words)


def packages(part: Literal["choose", "report"], length: int = 256, held_out: int = 256) -> Samples:
    """The Python sources of the packages installed beside torch, cut into windows, as :func:`sources` does.

    Of every 20 files one is held out to choose settings by and one for reported results; both are never trained on. A
    file with the bytes of another is left out, so that no text is seen twice.
    """
    files = package_files(Path(torch.__file__).parents[1])
    parts: dict[str, bytearray] = {name: bytearray() for name in (*HELD_OUT, "train")}
    for number, text in enumerate(files.values(), start=1):
        parts[next((name for name, at in HELD_OUT.items() if number % 20 == at), "train")].extend(text)
    train, rest = (
        torch.frombuffer(text, dtype=torch.uint8).unfold(0, length + 1, length + 1)
        for text in (parts["train"], parts[part])
    )
    rest = rest[torch.linspace(0, len(rest) - 1, held_out).long()].long()
    sizes = {name: len(text) / 1e6 for name, text in parts.items()}
    words = (
        f"{len(files):,} Python files of the packages beside torch, {sum(sizes.values()):.1f} MB, no two alike: "
        f"{sizes['train']:.1f} MB to train on, {sizes['choose']:.1f} MB held out to choose settings by and "
        f"{sizes['report']:.1f} MB held out for reported results; {held_out} windows of {length} bytes of what was "
        f"held out {'for reported results' if part == 'report' else 'to choose by'}; SHA-256 of all: {digest(files)}"
    )
    return Samples(train[:, :-1], train[:, 1:], rest[:, :-1], rest[:, 1:], words)


@functools.cache
def package_files(root: Path) -> dict[str, bytes]:
    """The Python files below a folder by their path, sorted, each text once; empty files are left out."""
    found: dict[str, bytes] = {}
    seen = {hashlib.sha256(b"").digest()}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        text = path.read_bytes()
        key = hashlib.sha256(text).digest()
        if key not in seen:
            seen.add(key)
            found[path.relative_to(root).as_posix()] = text
    return found


def digest(files: dict[str, bytes]) -> str:
    """A hash of all paths and texts."""
    whole = hashlib.sha256()
    for path, text in files.items():
        whole.update(f"{path} {len(text)}\n".encode() + text)
    return whole.hexdigest()


def digits(hold_out_every: int = 3, noise: float = 0.3) -> Samples:
    """scikit-learn's 1797 digits of 8 x 8 pixels between 0 and 1, with noise, new at each pass.

    Without noise the net is wrong about two to five of the held-out images, and the loss is theirs alone. Of each
    held-out image there are four noisy ones, always the same.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(found.target)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator)
    rest, train = order[::hold_out_every], order[torch.arange(len(x)) % hold_out_every != 0]
    words = f"scikit-learn's digits, {len(train)} images to train on and {len(rest)} held out, with noise of {noise}"
    rest = rest.repeat(4)
    held_out = x[rest] + noise * torch.randn(x[rest].shape, generator=generator)
    return Samples(x[train], y[train], held_out, y[rest], words, noise)


def batches(samples: Samples, rank: int, ranks: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's batches, without end: its own part of the samples, dealt out at random, in a new order at each pass."""
    dealt = torch.randperm(len(samples.x), generator=torch.Generator().manual_seed(seed))
    mine = dealt[rank::ranks]
    generator = torch.Generator().manual_seed(1000 * (seed + 1) + rank)
    while True:
        order = mine[torch.randperm(len(mine), generator=generator)]
        order = order.to(samples.x.device)  # once a pass: indices in CPU memory would be copied at every batch
        for chosen in order.split(size):
            if len(chosen) == size:
                x, y = samples.at(chosen)
                if samples.noise:
                    x = x + samples.noise * torch.randn(x.shape, generator=generator).to(x.device)
                yield x, y


def whole_batches(samples: Samples, ranks: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches that all ranks have in a step, as one."""
    for step in zip(*(batches(samples, rank, ranks, size, seed) for rank in range(ranks)), strict=True):
        x, y = (torch.cat(part) for part in zip(*step, strict=True))
        yield x, y


if __name__ == "__main__":
    listed = package_files(Path(torch.__file__).parents[1])
    lines = [f"SHA-256 of all paths and texts: {digest(listed)}", *(f"{len(listed[path])} {path}" for path in listed)]
    Path(sys.argv[1]).write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
