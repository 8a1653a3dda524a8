"""Arms and tasks of the search for recipes: Muon with AdamW inside, on text that is seen once.

    python -m benchmarks.convergence --device cuda --compiled --save --tasks recipes-choose recipes-scan
    python -m benchmarks.convergence --device cuda --compiled --save --tasks recipes

The first command is for choosing: short runs with seeds 0 to 2 (recipes-scan: 0 alone), judged on text held out for
that. The second reports: four times as long, with seeds 3 to 5, judged on text that no choice was made by.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import offbeat
from benchmarks.convergence_data import packages
from benchmarks.convergence_models import ByteGPT
from benchmarks.convergence_train import Arm, Task

__all__ = ["RECIPE_ARMS", "RECIPE_TASKS", "FilledSGD"]

diloco = functools.partial(functools.partial, offbeat.DiLoCo)
local = functools.partial(functools.partial, offbeat.LocalSGD)


class FilledSGD(torch.optim.SGD):
    """SGD whose momentum begins as if all rounds before the first had brought the same gradient."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Fill empty buffers with the gradient's sum over all earlier rounds, then step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = p.grad / (1 - group["momentum"])
        return super().step(closure)


def muon(module: nn.Module) -> offbeat.Chain:
    """The settings of the task's AdamW, with Muon for the hidden matrices."""
    return offbeat.muon_with_adamw(module, lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))


def outer(lr: float, momentum: float, every: int = 32, **options: Any) -> Callable[..., Any]:
    """DiLoCo with these outer settings."""
    return diloco(every=every, outer_lr=lr, outer_momentum=momentum, **options)


def stream(lr: float, momentum: float, delay: int, mixing: float, **options: Any) -> Arm:
    """Streaming DiLoCo over Muon."""
    return Arm(outer(lr, momentum, fragments=4, delay=delay, mixing=mixing, **options), delay=delay, inner=muon)


#: Outer learning rates and momenta for 32 steps.
OUTER = ((0.6, 0.9), (0.8, 0.6), (0.7, 0.6), (0.9, 0.4), (1.0, 0.6), (1.2, 0.6), (1.0, 0.8))
RECIPE = "Muon, DiLoCo(32), 0.8/0.6"
STREAM = "Muon, streaming DiLoCo(32), 0.8/0.6"
FASTER = "Muon, streaming DiLoCo(32), 1.0/0.6"
#: "0.8/0.6" is an outer learning rate of 0.8 and an outer momentum of 0.6; "average" is ``state="average"``. Arms
#: without "Muon" have AdamW inside.
RECIPE_ARMS = {
    "Muon, DDP": Arm(inner=muon),
    "Muon, DDP, lr / √2": Arm(inner=muon, rate=1 / math.sqrt(2)),
    "Muon, DDP, lr × √2": Arm(inner=muon, rate=math.sqrt(2)),
    "Muon, one replica alone, a quarter of the batch": Arm(inner=muon, alone=True),
    "Muon, LocalSGD(1)": Arm(local(every=1), inner=muon),
    "Muon, LocalSGD(8)": Arm(local(every=8), inner=muon),
    "Muon, LocalSGD(8), average": Arm(local(every=8, state="average"), inner=muon),
    "LocalSGD(8), average": Arm(local(every=8, state="average")),
    "LocalSGD(8), average of exp_avg_sq": Arm(local(every=8, state={"exp_avg_sq": "average"})),
    **{f"Muon, DiLoCo(32), {lr}/{momentum}": Arm(outer(lr, momentum), inner=muon) for lr, momentum in OUTER},
    f"{RECIPE}, without nesterov": Arm(
        diloco(every=32, outer=functools.partial(offbeat.SGD, lr=0.8, momentum=0.6)), inner=muon
    ),
    f"{RECIPE}, momentum filled": Arm(
        diloco(every=32, outer=functools.partial(FilledSGD, lr=0.8, momentum=0.6, nesterov=True)), inner=muon
    ),
    f"{RECIPE}, average": Arm(outer(0.8, 0.6, state="average"), inner=muon),
    f"{RECIPE}, int4": Arm(outer(0.8, 0.6, codec="int4"), inner=muon),
    f"{RECIPE}, int4, error feedback": Arm(outer(0.8, 0.6, codec="int4", error_feedback=1.0), inner=muon),
    "Muon, DiLoCo(32), 1.0/0.6, average": Arm(outer(1.0, 0.6, state="average"), inner=muon),
    "Muon, DiLoCo(32), 1.0/0.6, int4": Arm(outer(1.0, 0.6, codec="int4"), inner=muon),
    "Muon, DiLoCo(8), 0.9/0.3, average": Arm(outer(0.9, 0.3, every=8, state="average"), inner=muon),
    "Muon, DiLoCo(128), 1.0/0.6": Arm(outer(1.0, 0.6, every=128), inner=muon),
    "DiLoCo(32), 0.8/0.6": Arm(outer(0.8, 0.6)),
    "DiLoCo(32), 1.0/0.6": Arm(outer(1.0, 0.6)),
    **{f"{STREAM}, delay {delay}, mixing {mixing}": stream(0.8, 0.6, delay, mixing)
       for delay in (1, 2, 4) for mixing in (0.0, 0.25, 0.5)},
    f"{STREAM}, no delay": stream(0.8, 0.6, 0, 0.0),
    f"{FASTER}, delay 1, mixing 0.0": stream(1.0, 0.6, 1, 0.0),
    f"{FASTER}, delay 4, mixing 0.0": stream(1.0, 0.6, 4, 0.0),
    f"{FASTER}, delay 1, mixing 0.0, int4": stream(1.0, 0.6, 1, 0.0, codec="int4"),
    f"{FASTER}, delay 4, mixing 0.0, int4": stream(1.0, 0.6, 4, 0.0, codec="int4"),
}  # fmt: skip

#: In order of importance: a run that is cut off has the first ones with all seeds.
CHOOSE = [
    "DDP",
    "Muon, DDP",
    RECIPE,
    "Muon, DiLoCo(32), 1.0/0.6",
    f"{RECIPE}, average",
    f"{STREAM}, delay 4, mixing 0.0",
    f"{STREAM}, delay 1, mixing 0.0",
    f"{STREAM}, delay 4, mixing 0.5",
    "LocalSGD(8)",
    "LocalSGD(8), average",
    f"{RECIPE}, int4",
    "Muon, DiLoCo(32), 0.9/0.4",
    "Muon, DiLoCo(32), 0.7/0.6",
    "Muon, LocalSGD(8)",
    "Muon, LocalSGD(8), average",
    f"{RECIPE}, without nesterov",
    "Muon, DiLoCo(32), 0.6/0.9",
    "DiLoCo(32)",
    "Muon, DiLoCo(32), 1.0/0.6, average",
    f"{FASTER}, delay 1, mixing 0.0",
]
#: With one seed, to see where to look further. DDP at other rates is cheap: see ``Task.whole``.
SCAN = [
    "Muon, DiLoCo(32), 1.2/0.6",
    "Muon, DiLoCo(32), 1.0/0.8",
    "DiLoCo(32), 1.0/0.6",
    f"{RECIPE}, momentum filled",
    "LocalSGD(8), average of exp_avg_sq",
    "Muon, DiLoCo(128), 1.0/0.6",
    "DDP",
    "DDP, lr / √2",
    "DDP, lr × √2",
    "Muon, DDP",
    "Muon, DDP, lr / √2",
    "Muon, DDP, lr × √2",
    f"{RECIPE}, int4, error feedback",
    "DiLoCo(32), 0.8/0.6",
    f"{STREAM}, delay 2, mixing 0.0",
    f"{STREAM}, no delay",
    f"{STREAM}, delay 4, mixing 0.25",
    "Muon, DiLoCo(8), 0.9/0.3, average",
    "Muon, LocalSGD(1)",
    "LocalSGD(1)",
    "Muon, one replica alone, a quarter of the batch",
]
REPORT = [
    "Muon, DiLoCo(32), 1.0/0.6, int4",
    "Muon, DDP",
    "DDP",
    f"{FASTER}, delay 1, mixing 0.0, int4",
    "Muon, DiLoCo(32), 1.0/0.6, average",
    "LocalSGD(8), average",
    "DiLoCo(32), 1.0/0.6",
]

#: With 2 and 8 replicas; DDP does not depend on their number.
NUMBERS = ["Muon, DiLoCo(32), 1.0/0.6"]

CHOICE = Task(
    "4 replicas: a GPT of 10 M parameters over bytes, to choose by",
    functools.partial(packages, "choose"),
    functools.partial(ByteGPT, layers=8, width=320, heads=5, length=256),
    lambda params: offbeat.AdamW(params, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "lr 2e-3, weight decay 0.1, AdamW's betas 0.9 and 0.95, Muon's momentum 0.95",
    arms=CHOOSE,
    replicas=4,
    batch=16,
    tokens=256,
    steps=832,
    synchronised=64,
    evaluate=64,
    timed=False,
)
RECIPE_TASKS = {
    "recipes-choose": CHOICE,
    "recipes-scan": dataclasses.replace(CHOICE, title="The same, with one seed", arms=SCAN, seeds=(0,), whole=True),
    "recipes-2": dataclasses.replace(
        CHOICE, title="2 replicas, the same batch in all", arms=NUMBERS, replicas=2, batch=32, seeds=(0,)
    ),
    "recipes-8": dataclasses.replace(
        CHOICE, title="8 replicas, the same batch in all", arms=NUMBERS, replicas=8, batch=8, seeds=(0,)
    ),
    "recipes": dataclasses.replace(
        CHOICE,
        title="4 replicas: a GPT of 10 M parameters over bytes, four times as long",
        samples=functools.partial(packages, "report"),
        arms=REPORT,
        steps=4 * CHOICE.steps,
        synchronised=4 * CHOICE.synchronised,
        evaluate=4 * CHOICE.evaluate,
        seeds=(3, 4, 5),
        whole=True,
    ),
}  # fmt: skip
