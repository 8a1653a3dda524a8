"""What loss to expect: held-out loss against DDP, from our own tables in benchmarks/results.

This is the one file to update when tables are measured again. A row names settings, where they were measured, and the
percentage by which their held-out loss was above that of DDP with the same inner optimizer (below, if negative).
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.plan.settings import Settings

__all__ = ["INNER", "OUTER", "ROWS", "Loss", "expected_loss"]

#: The recipe so far: the inner optimizer to recommend with rounds, as lines to paste, and its outer settings.
INNER = "inner = offbeat.muon_with_adamw(model, lr=2e-3)"
OUTER = (("outer_lr", 1.0), ("outer_momentum", 0.6))


@dataclass(frozen=True)
class Loss:
    """How much loss some settings cost.

    Attributes:
        settings: the settings.
        inner: the inner optimizer.
        percent: held-out loss against DDP with the same inner optimizer, median over seeds.
        spread: the smallest and the largest over seeds; None if there was one seed.
        adamw: held-out loss against DDP with AdamW, where another inner optimizer ran.
        where: model, replicas, steps and seeds.
        source: the file under benchmarks/results.
    """

    settings: Settings
    inner: str
    percent: float
    spread: tuple[float, float] | None
    adamw: float | None
    where: str
    source: str


_GPU = "GPT of 10 M parameters, 4 replicas, 3,328 steps, three seeds"
_LONG = "GPT of 0.04 M parameters, 2 replicas, 6,656 steps, three seeds"
_RECIPES = "convergence-recipes.md"
_STREAM = Settings("diloco", 32, 4, 4)

ROWS: tuple[Loss, ...] = (
    Loss(Settings("diloco", 32, codec="int4"), "Muon", 1.9, (1.6, 2.0), -3.9, _GPU, _RECIPES),
    Loss(Settings("diloco", 32, 4, 1, "int4"), "Muon", 1.3, (1.2, 1.6), -4.4, _GPU, _RECIPES),
    Loss(Settings("diloco", 32), "AdamW", 1.39, (0.95, 1.63), None, _LONG, "convergence-codecs.md"),
    Loss(Settings("diloco", 32, codec="int8"), "AdamW", 1.30, (0.93, 1.62), None, _LONG, "convergence-codecs.md"),
    Loss(Settings("diloco", 32, codec="int4"), "AdamW", 0.81, (0.66, 1.66), None, _LONG, "convergence-codecs.md"),
    Loss(_STREAM, "AdamW", 1.28, (1.21, 1.54), None, _LONG, "convergence-codecs.md"),
    Loss(Settings("diloco", 32, 4, 4, "int8"), "AdamW", 1.30, (1.21, 1.56), None, _LONG, "convergence-codecs.md"),
    Loss(Settings("diloco", 32, 4, 4, "int4"), "AdamW", 1.53, (1.16, 1.66), None, _LONG, "convergence-codecs.md"),
)


def expected_loss(settings: Settings) -> tuple[Loss, ...]:
    """The rows that were measured with exactly these settings; none if they were not measured."""
    return tuple(row for row in ROWS if row.settings == settings)
