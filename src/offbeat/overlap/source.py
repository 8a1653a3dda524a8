"""Where the buckets of an overlapped optimizer come from: the interface of the three sources, and what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from offbeat.overlap.arrivals import Arrivals
from offbeat.overlap.consumed import receive
from offbeat.overlap.step import Step

__all__ = ["Source", "refuse_graph"]


class Source(ABC):
    """Gives a :class:`~offbeat.overlap.step.Step` its buckets.

    :class:`~offbeat.overlap.module.ModuleSource` serves plain modules, :class:`~offbeat.overlap.ddp.DdpSource` those in
    ``DistributedDataParallel``, and :class:`~offbeat.overlap.fsdp.FsdpSource` those with ``fully_shard``.
    """

    def __init__(self, step: Step, module: torch.nn.Module) -> None:
        self.step = step
        self.module_name = type(module).__name__
        self._removed = False
        self._pass: int | None = None  # the backward pass that brought the last gradient
        self._arrivals = Arrivals(self.arrived, module)

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether a backward pass is running."""

    @abstractmethod
    def arrived(self, p: Tensor) -> None:
        """Called when a gradient has been accumulated in ``p.grad``, on this rank."""

    @abstractmethod
    def flush(self) -> None:
        """Hand on all buckets, full or not."""

    def parameters_changed(self) -> None:
        """Called when parameters were added to the optimizer or removed from it, frozen or unfrozen."""
        self._arrivals.cover(self.step.parameters.all)

    def settle(self) -> None:  # noqa: B027
        """Wait until no bucket is being stepped in another thread."""

    def begin_step(self) -> None:
        """Called when gradients from here on belong to the next step."""
        self._pass = None

    def remove(self) -> None:
        """Remove all hooks."""
        self._removed = True
        self._arrivals.remove()

    def _check_not_removed(self) -> None:
        if self._removed:
            raise RuntimeError(
                "a backward pass was still running after handle.remove(); call remove() when no backward pass runs"
            )

    def _receive(self, p: Tensor) -> None:
        """What every source does first when a gradient arrives."""
        self._check_not_removed()
        receive(p)
        self._forget_skipped_step()

    def _forget_skipped_step(self) -> None:
        """Begin a new step if the scaler has skipped the last one, of which ``optimizer.step()`` was not told."""
        if self.step.was_skipped:
            self.step.reset()
            self.begin_step()

    def _refresh(self) -> None:
        if self.step.refresh():
            self.parameters_changed()


def refuse_graph(g: Tensor | None) -> None:
    """Raise if a gradient is part of a graph."""
    if g is not None and g.requires_grad:
        raise RuntimeError(
            "backward(create_graph=True) cannot be overlapped: the graph of the gradients holds parameters that would "
            "be updated in place; call handle.remove() and step after backward"
        )
