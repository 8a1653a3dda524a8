"""How long codecs take: nanoseconds per element to encode, to encode with a residual, to decode and to decode and add.

    python -m benchmarks.codecs [--numel 8400000]

One thread. "torch" is the plain version, "C" the compiled one ("Triton" on a GPU). The best of several runs, after one
that is not counted. The first line is a copy of float32 values, the least that a pass over memory takes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch

from benchmarks.machine import describe_machine
from offbeat.wire.codecs import Codec, TopK, make_codec


def best(function: Callable[[], object], device: torch.device, seconds: float = 0.4) -> float:
    """Seconds of the fastest call."""
    function()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(codec: Codec, numel: int, device: torch.device) -> list[float]:
    x, out, left = (
        torch.randn(numel, device=device),
        torch.zeros(numel, device=device),
        torch.zeros(numel, device=device),
    )
    data = torch.zeros(codec.encoded_bytes(numel), dtype=torch.uint8, device=device)
    work = [
        lambda: codec.encode(x, data),
        lambda: codec.encode(x, data, left),
        lambda: codec.decode(data, out),
        lambda: codec.decode(data, out, add=True),
    ]
    return [best(one, device) * 1e9 / numel for one in work]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=8_400_000)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    for key, value in describe_machine("python -m benchmarks.codecs").items():
        print(f"{key}: {value}")
    x, y = torch.randn(options.numel, device=device), torch.zeros(options.numel, device=device)
    print(
        f"\nns per element, {options.numel:,} elements; copy: {best(lambda: y.copy_(x), device) * 1e9 / len(x):.3g}\n"
    )
    print("| codec | bits | by | encode | with residual | decode | decode and add |")
    print("|---|---|---|---|---|---|---|")
    off, fused = ("OFFBEAT_NO_TRITON", "Triton") if device.type == "cuda" else ("OFFBEAT_NO_COMPILER", "C")
    for codec in [*map(make_codec, ("bf16", "fp16", "int8", "int4", "int2")), TopK(0.03)]:
        assert codec is not None
        bits = codec.encoded_bytes(1 << 24) * 8 / (1 << 24)
        for by in ("torch", fused):
            os.environ.pop(off, None)
            if by == "torch":
                os.environ[off] = "1"
            times = " | ".join(f"{ns:.3g}" for ns in measure(codec, options.numel, device))
            print(f"| {codec.name} | {bits:.2f} | {by} | {times} |", flush=True)


if __name__ == "__main__":
    main()
