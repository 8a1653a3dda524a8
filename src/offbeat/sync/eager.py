r"""Eager outer steps: a replica does not wait for the mean, but takes its own part of the outer step at once.

Let :math:`\Delta_i = a - x_i` be the pseudo-gradient of replica :math:`i` of :math:`M` in a round. The replica hands it
in, gives its own share of the mean to an outer optimizer of its own, which has a momentum of its own, and trains on:

.. math:: d_i \leftarrow \mathrm{outer}_i\bigl(0,\; \tfrac{1}{M} \Delta_i\bigr), \qquad x_i \leftarrow a + d_i .

When the mean arrives, :math:`k` steps later, the anchor makes the true step and takes the place of the eager one:

.. math:: a' = \mathrm{outer}\bigl(a,\; \tfrac{1}{M} \textstyle\sum_j \Delta_j\bigr), \qquad
   x_i \leftarrow x_i + (a' - a) - d_i .

With a delay of one whole period this is the eager update of arXiv 2502.12996: in round :math:`t` replica :math:`i`
makes an outer step with

.. math:: \tilde\Delta_i^{(t)} = \tfrac{1}{M} \bigl(\Delta_i^{(t)} - \Delta_i^{(t-1)}\bigr)
   + \tfrac{1}{M} \textstyle\sum_j \Delta_j^{(t-1)},

the others' pseudo-gradients of the round before and its own of this one. Both are the same if the outer step is linear
in the pseudo-gradient, as that of SGD with momentum is. Here the anchor and its outer state are the same on every rank
at any time, and a round that fails takes nothing but :math:`d_i` back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.sync.items import local_part
from offbeat.sync.outer import Outer

__all__ = ["Eager", "check_linear"]


class Eager:
    """The eager steps of one level, of all its fragments.

    Args:
        outer: the anchors and the outer optimizer of the level.
        own: the same for this replica alone; its "anchors" are the displacements :math:`d_i`.
        share: this replica's share of a mean, :math:`1/M`.
    """

    def __init__(self, outer: Outer, own: Outer, share: float) -> None:
        self._outer, self.own, self._share = outer, own, share
        #: The pseudo-gradients of rounds in flight, to give back what a round that fails had taken.
        self.gradients: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, params: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Move these parameters to the anchor, and on by this replica's part of the outer step."""
        self.own.mirror(self._outer)
        self._copy_options()
        for name in names:
            anchor = self._outer.anchors[name]
            self.gradients[name] = anchor - _like(local_part(params[name]), anchor)
            self.own.anchors[name].zero_()
        self.own.move(names, [self.gradients[name] * self._share for name in names])
        for name in names:
            local_part(params[name]).copy_(self._outer.anchors[name] + self.own.anchors[name])

    @torch.no_grad()
    def before_landing(self, params: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Keep what the replica has learnt since its eager step, in place of the displacement."""
        for name in names:
            anchor, kept = self._outer.anchors[name], self.own.anchors[name]
            torch.sub(_like(local_part(params[name]), anchor) - anchor, kept, out=kept)

    @torch.no_grad()
    def land(self, params: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """After the true step of the anchor: parameters are the anchor and what the replica has learnt since."""
        for name in names:
            local_part(params[name]).copy_(self._outer.anchors[name] + self.own.anchors[name])
        self.forget(names)

    @torch.no_grad()
    def undo(self, params: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """After a round that changed nothing: give back the replica's own pseudo-gradient, and take its step back."""
        for name in names:
            if name in self.gradients and name in params:
                part = local_part(params[name])
                part.sub_(_like(self.gradients[name] + self.own.anchors[name], part))
        self.forget(names, momentum=True)

    def forget(self, names: Sequence[str], *, momentum: bool = False) -> None:
        """Drop what a round in flight needed.

        Args:
            momentum: forget the replica's own momentum too.
        """
        for name in names:
            self.gradients.pop(name, None)
            if momentum and self.own.optimizer is not None and name in self.own.anchors:
                self.own.optimizer.state.pop(self.own.anchors[name], None)

    def reset(self) -> None:
        """Forget everything."""
        self.gradients = {}
        self.own.reset()

    def _copy_options(self) -> None:
        """The options that are in force, such as a scheduled learning rate."""
        assert self.own.optimizer is not None
        assert self._outer.optimizer is not None
        for mine, theirs in zip(self.own.optimizer.param_groups, self._outer.optimizer.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    def state_dict(self) -> dict[str, Any]:
        """Displacements, this replica's momentum, and its pseudo-gradients in flight."""
        return {"own": self.own.state_dict(), "gradients": {name: g.clone() for name, g in self.gradients.items()}}

    def load_state_dict(self, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`."""
        if state["own"]["optimizer"] is not None:
            self.own.load_state_dict(state["own"], params)
        self.gradients = {name: g.clone() for name, g in state["gradients"].items() if name in params}


def check_linear(optimizer: Optimizer | None) -> None:
    """Raise unless a step of this outer optimizer is linear in the pseudo-gradient."""
    name = type(optimizer).__name__
    assert optimizer is not None
    for group in optimizer.param_groups:
        if name not in ("SGD", "_SlowMomentum") or group.get("weight_decay", 0) or group.get("maximize", False):
            raise ValueError(
                "eager=True needs an outer optimizer whose step is linear in the pseudo-gradient, so that each replica "
                "can take its own part of it: SGD, with or without momentum, and without weight decay; but got a "
                f"{name} with { ({key: value for key, value in group.items() if key != 'params'}) }"
            )


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    return tensor.to(device=other.device, dtype=other.dtype)
