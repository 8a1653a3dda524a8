"""Find what offbeat knows about an optimizer that a framework has wrapped."""

from __future__ import annotations

from typing import Any

from offbeat.frameworks import inner_optimizer
from offbeat.overlap import Overlap
from offbeat.overlap.handle import overlap_of
from offbeat.replicas.wrapper import OptimizerWrapper

__all__ = ["handle_of", "is_replica"]


def handle_of(optimizer: Any) -> Overlap | None:
    """The handle of an overlapped optimizer, also of one that a framework has wrapped; None if it is not overlapped.

    Use it to read norms, or to announce backward passes that a framework does not announce::

        with handle_of(self.optimizers()).accumulate():
            self.manual_backward(loss)
    """
    found = inner_optimizer(optimizer)
    return overlap_of(found.optim if isinstance(found, OptimizerWrapper) else found)


def is_replica(optimizer: Any) -> bool:
    """Whether this optimizer averages replicas, also if a framework has wrapped it."""
    return isinstance(inner_optimizer(optimizer), OptimizerWrapper)
