"""Part 2 of the demo: one process trains a deep model on few rows, where the optimizer is a large part of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import offbeat

__all__ = ["ARMS", "run"]

LAYERS, WIDTH, ROWS = 100, 256, 4
#: Small enough that gradients are still in the processor's cache when the bucket is stepped.
BUCKET_MB = 1
#: Arms take turns of this many steps, so that other load on the machine slows down all of them.
TURN = 5
LEAST_TURNS, MOST_TURNS = 2, 30


def _overlapped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = offbeat.AdamW(model.parameters())
    offbeat.overlap(optimizer, model, bucket_cap_mb=BUCKET_MB)
    return optimizer


#: What to compare.
ARMS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch.optim.AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "torch.optim.AdamW(fused=True)": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "offbeat.AdamW": lambda model: offbeat.AdamW(model.parameters()),
    f"the same, overlap(bucket_cap_mb={BUCKET_MB})": _overlapped,
}


def run(rank: int, options: dict[str, Any], say: Callable[..., None]) -> dict[str, Any]:
    """What the process does. Options: ``seconds``."""
    torch.set_num_threads(1)
    say(doing="compiling kernels")
    arms = {name: _Arm(make) for name, make in ARMS.items()}
    end, turns = time.monotonic() + options["seconds"], 0
    while turns < LEAST_TURNS or (turns < MOST_TURNS and time.monotonic() < end):
        turns += 1
        for name, arm in arms.items():
            for _ in range(TURN):
                arm.step()
            say(doing=f"{name}, step {turns * TURN}", arm=name, step=turns * TURN, of=MOST_TURNS * TURN)
    plain, overlapped = (arms[name].params for name in list(ARMS)[-2:])
    return {
        "arms": {name: arm.figures() for name, arm in arms.items()},
        "steps": turns * TURN,
        "parameters": sum(p.numel() for p in plain),
        "tensors": len(plain),
        "same_bits": all(torch.equal(p, q) for p, q in zip(plain, overlapped, strict=True)),
    }


class _Arm:
    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(ROWS, WIDTH)
        self.model = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.params = list(self.model.parameters())
        self.most_bytes = 0
        hooks: list[Any] = [p.register_post_accumulate_grad_hook(self.count) for p in self.params]  # type: ignore[no-untyped-call]
        self.optimizer = make(self.model)
        self.seconds: list[float] = []
        self.step()  # allocates state, compiles kernels
        self.most_bytes = 0
        self.step()
        for hook in hooks:
            hook.remove()
        self.seconds.clear()

    def count(self, _: Any) -> None:
        """Look how many bytes of gradients there are. Placeholders of freed ones have another type, and no memory."""
        self.most_bytes = max(self.most_bytes, sum(p.grad.nbytes for p in self.params if type(p.grad) is torch.Tensor))

    def step(self) -> None:
        began = time.perf_counter()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)

    def figures(self) -> dict[str, float]:
        # Other load makes some steps longer and none shorter: it moves the lower quartile less than the median.
        return {"ms": 1e3 * statistics.quantiles(self.seconds, n=4)[0], "gradient_mb": self.most_bytes / 1e6}
