"""The codecs under test, what their errors may be, and ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offbeat.wire.codecs import Codec, TopK, make_codec
from tests.int3 import Int3

__all__ = ["BUILT_IN", "CODECS", "SIZES", "ThreadPeers", "decoded", "encoded", "error_bound", "run_threads"]

BUILT_IN = [*map(make_codec, ("bf16", "fp16", "int8", "int4", "int2")), TopK(), TopK(0.1, bits=4), TopK(1.0, bits=8)]
#: Every property test runs over these. A new codec is one entry here, and its bound in error_bound().
CODECS = [*BUILT_IN, Int3()]
SIZES = [0, 1, 2, 3, 31, 33, 64, 255, 256, 257, 1000, 4095, 4097, 12289, 70001]

#: An element that is NaN shows whoever reads memory that was not written.
NAN = float("nan")


def encoded(codec: Codec, x: Tensor, residual: Tensor | None = None) -> Tensor:
    data = torch.full((codec.encoded_bytes(x.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(x, data, residual)
    return data


def decoded(codec: Codec, data: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), NAN)
    codec.decode(data, out)
    return out


def error_bound(codec: Codec, x: Tensor) -> Tensor:
    """The documented bound of each element's error, in float64, worked out one block after the other."""
    x = x.double()
    if codec.name == "bf16":
        return x.abs() * 2.0**-8 + 2.0**-134
    bounds = [_of_block(codec, block) for block in x.split(codec.block) if len(block)]
    return torch.cat([x[:0], *bounds])


def _of_block(codec: Codec, block: Tensor) -> Tensor:
    size, m = block.abs(), block.abs().max()
    if codec.name == "fp16":
        bound = torch.maximum(size * 2.0**-11, m * 2.0**-39)
    elif codec.name in ("int8", "int3"):
        bound = (m / {"int8": 252, "int3": 5.9}[codec.name]).expand_as(block)
    elif codec.name in ("int4", "int2"):
        limit, most, clamped = {"int4": (-7.5 / 8, 15.8, 8), "int2": (-1.5 / 2, 3.9, 2)}[codec.name]
        sign = 1 if block.max() == m else -1
        bound = torch.where(block * sign < limit * m, m / clamped, m / most)
    else:
        order = size.sort(descending=True, stable=True).indices[: codec.layout(len(block)).k]
        sent = size[order][size[order] >= 2.0**-80]
        bound = size.clone()
        if len(sent):
            bound[order] = ((sent.max() - sent.min()) / (1.98 * 2 ** (codec.bits - 1))).clamp(min=2.0**-80)
    return bound.clamp(min=2.0**-80) if m < 2.0**-80 else bound * (1 + 1e-6)


class _Done:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        self._finish()


class ThreadPeers:
    """Ranks that are threads of this process. Counts what it is handed, times the ranks each message goes to."""

    def __init__(self, rank: int, size: int, shared: dict[Any, Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.ranks = rank, size, list(range(size))
        self._shared, self._barrier = shared, barrier
        self.sent = self._turn = 0
        self.device = torch.device("cpu")

    def can_exchange(self, device: torch.device) -> bool:
        return True

    def _swap(self, mine: Any) -> list[Any]:
        turn, self._turn = self._turn, self._turn + 1
        self._shared[turn, self.rank] = mine
        self._barrier.wait(20)
        return [self._shared[turn, rank] for rank in range(self.size)]

    def all_gather(self, out: Tensor, mine: Tensor) -> _Done:
        assert out.dtype == mine.dtype == torch.uint8
        assert out.numel() == self.size * mine.numel()
        self.sent += mine.numel() * (self.size - 1)
        return _Done(lambda: out.copy_(torch.cat(self._swap(mine.clone()))))

    def all_to_all(self, out: Tensor, mine: Tensor, out_splits: list[int], in_splits: list[int]) -> _Done:
        assert sum(out_splits) == out.numel()
        assert sum(in_splits) == mine.numel()
        assert in_splits[self.rank] == 0
        self.sent += mine.numel()
        parts = mine.clone().split(in_splits)

        def finish() -> None:
            got = [theirs[self.rank] for theirs in self._swap(parts)]
            assert [len(part) for part in got] == out_splits
            out.copy_(torch.cat(got))

        return _Done(finish)


def run_threads(size: int, function: Callable[[ThreadPeers], Any], kind: type[ThreadPeers] = ThreadPeers) -> list[Any]:
    """What the function returned, or the exception it raised, on each of the ranks."""
    shared, barrier, answers = {}, threading.Barrier(size), [None] * size

    def main(rank: int) -> None:
        try:
            answers[rank] = function(kind(rank, size, shared, barrier))
        except Exception as error:
            answers[rank] = error
            if not isinstance(error, ValueError):
                barrier.abort()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return answers
