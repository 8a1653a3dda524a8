"""Which settings to use: every strategy estimated on one link, and a recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.plan.cost import Estimate, Setting, estimate_settings
from offbeat.plan.losses import INNER, OUTER, Loss, expected_loss
from offbeat.plan.settings import Settings

__all__ = ["CANDIDATES", "TARGET", "Option", "compare", "recommend"]

#: The part of the time that training should take.
TARGET = 0.95

#: What is compared, in the order in which the recommendation tries them: the least loss in our tables first. Those with
#: longer periods come last; how much loss they cost has not been measured for them.
CANDIDATES: tuple[Settings, ...] = (
    Settings("ddp"),
    Settings("diloco", 32, options=OUTER),
    Settings("diloco", 32, 4, 1, "int4", options=OUTER),
    Settings("diloco", 32, codec="int4", options=OUTER),
    Settings("local_sgd", 8),
    Settings("diloco", 32, 4, 4, options=OUTER),
    Settings("diloco", 32, 4, 4, "int4", options=OUTER),
    Settings("diloco", 64, 8, 8, "int4", options=OUTER),
    Settings("diloco", 128, 8, 16, "int4", options=OUTER),
    Settings("diloco", 256, 16, 16, "int4", options=OUTER),
)


@dataclass(frozen=True)
class Option:
    """One way to train, what it costs and what loss to expect.

    Attributes:
        settings: the settings.
        estimate: what they cost.
        losses: what was measured with exactly these settings; empty if nothing was.
    """

    settings: Settings
    estimate: Estimate
    losses: tuple[Loss, ...]

    @property
    def code(self) -> str:
        """The lines of Python to paste."""
        return self.settings.code if self.settings.strategy == "ddp" else f"{INNER}\n{self.settings.code}"

    def as_dict(self) -> dict[str, Any]:
        """The option as JSON has it."""
        losses = [
            {
                "inner": row.inner,
                "percent_of_ddp": row.percent,
                "spread": row.spread,
                "percent_of_ddp_with_adamw": row.adamw,
                "where": row.where,
                "source": row.source,
            }
            for row in self.losses
        ]
        settings, costs = self.settings.as_dict(), self.estimate.as_dict()
        return {"name": self.settings.name, **settings, **costs, "losses": losses, "code": self.code}


def compare(on: Setting, candidates: Sequence[Settings] = CANDIDATES) -> list[Option]:
    """Estimate each of these settings on one link.

    Args:
        on: the model, the replicas and the link.
        candidates: the settings.
    """
    return [Option(one, estimate_settings(one, on), expected_loss(one)) for one in candidates]


def recommend(options: Sequence[Option], target: float = TARGET) -> Option:
    """The first option in which training takes at least ``target`` of the time; the best one if none does.

    Args:
        options: what :func:`compare` returns, in order of preference.
        target: the part of the time, above 0 and at most 1.
    """
    if not 0 < target <= 1:
        raise ValueError(f"target={target!r} must be above 0 and at most 1")
    enough = (option for option in options if option.estimate.utilisation >= target)
    return next(enough, max(options, key=lambda option: option.estimate.utilisation))
