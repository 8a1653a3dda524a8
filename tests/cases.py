"""The one table of cases: rule × hyperparameters. Dtypes and tiers are crossed in by the tests.

A new rule is one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import offbeat
from tests.lion_reference import ReferenceLion

__all__ = ["CASES", "MATRIX_CASES", "ONE_A_RULE", "SHAPES", "TIERS", "Case", "make_params", "set_gradients"]


@dataclass(frozen=True)
class Case:
    """One rule under one set of hyperparameters."""

    name: str
    hyper: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> Any:
        return getattr(offbeat, self.name)

    @property
    def theirs(self) -> Any:
        """The independent reference: torch.optim's for-loop, or a dozen lines of float64."""
        return getattr(torch.optim, self.name, None) or ReferenceLion

    def reference(self, params: Any) -> Any:
        options = dict(self.hyper)
        if self.theirs not in (ReferenceLion, torch.optim.Muon):
            options["foreach"] = False
        return self.theirs(params, **options)

    def __str__(self) -> str:
        return self.name + "".join(f",{k}={v}" for k, v in self.hyper.items())


_TABLE: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    ],
    "Adam": [
        {"lr": 0.01},
        {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
        {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-4, "maximize": True},
        {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    "AdamW": [{"lr": 0.01}, {"lr": 0.01, "amsgrad": True, "maximize": True}, {"lr": 0.01, "weight_decay": 0}],
    "Adamax": [{"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}],
    "NAdam": [
        {"lr": 0.01},
        {"lr": 0.01, "weight_decay": 0.1, "momentum_decay": 6e-3},
        {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ],
    "RAdam": [
        {"lr": 0.01},
        {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.99)},
        {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
        {"lr": 0.01, "betas": (0.9, 0.5)},
    ],
    "Adagrad": [
        {"lr": 0.1},
        {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.1},
        {"lr": 0.1, "initial_accumulator_value": 0.1, "maximize": True},
    ],
    "Adadelta": [{}, {"lr": 0.5, "rho": 0.95, "weight_decay": 0.1, "maximize": True}],
    "RMSprop": [
        {"lr": 0.01},
        {"lr": 0.01, "centered": True},
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
        {"lr": 0.01, "centered": True, "momentum": 0.9, "maximize": True},
    ],
    "Rprop": [{}, {"etas": (0.3, 1.5), "step_sizes": (1e-3, 0.05), "maximize": True}],
    "ASGD": [
        {},
        {"lr": 0.02, "lambd": 0.1, "t0": 3, "weight_decay": 0.1},
        {"lr": 0.02, "alpha": 0.5, "t0": 0, "maximize": True},
    ],
    "Lion": [{"lr": 0.01}, {"lr": 0.01, "betas": (0.95, 0.98), "weight_decay": 0.1, "maximize": True}],
}

CASES = [Case(name, hyper) for name, rows in _TABLE.items() for hyper in rows]
ONE_A_RULE = [Case(name, rows[-1]) for name, rows in _TABLE.items()]

#: Rules that work on whole matrices. They have one tier.
MATRIX_CASES = [
    Case("Muon", {"lr": 0.02}),
    Case("Muon", {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.8}),
    Case("Muon", {"lr": 0.02, "weight_decay": 0.0, "ns_steps": 3, "ns_coefficients": (1.5, -0.5, 0.0), "eps": 1e-5}),
    Case("Adafactor", {}),
    Case("Adafactor", {"lr": 0.05, "weight_decay": 0.1, "maximize": True}),
    Case("Adafactor", {"beta2_decay": -1.0, "d": 1.5, "eps": (1e-5, 1e-2)}),
]

#: How to ask for each tier.
TIERS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "default": {},
}

SHAPES = [(3, 4), (), (0,), (7,), (130, 5), (1, 33)]


def make_params(dtype: torch.dtype, seed: int = 0, shapes: Any = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    return [v.to(dtype).requires_grad_() for v in values]


def set_gradients(step: int, *sets: list[torch.Tensor], none_at: tuple[tuple[int, int], ...] = ()) -> None:
    """The same gradients for each set of parameters; ``none_at`` lists (step, parameter) pairs without one."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, first in enumerate(sets[0]):
        value = torch.randn(first.shape, dtype=torch.float64, generator=generator)
        if first.is_complex():
            value = torch.complex(value, torch.randn(first.shape, dtype=torch.float64, generator=generator))
        for params in sets:
            p = params[i]
            p.grad = None if (step, i) in none_at else value.to(p.device, p.dtype).reshape(p.shape).clone()
