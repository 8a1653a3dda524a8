"""The start of training: replicas must be equal, and anchors are what the first local step starts from."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from offbeat import _torch
from offbeat.overlap.handle import overlap_of
from offbeat.sync.agreement import check_same_items, check_same_values
from offbeat.sync.anchors import Anchors
from offbeat.sync.calendar import Calendar
from offbeat.sync.checks import check_not_wrapped_since
from offbeat.sync.contents import Contents
from offbeat.sync.items import Item, local_part
from offbeat.wire.groups import members
from offbeat.wire.peers import GroupPeers, Peers

__all__ = ["Start"]


class Start:
    """What must be done once, before the first step and before the first local one.

    Args:
        everyone: all ranks that take part.
        ddp: the DDP module, if the module is one.
        sharded: whether the module is sharded.

    Attributes:
        is_anchored: whether anchors are in use.
        averages_gradients: whether ``step()`` averages gradients, because the module does not.
        missed_warmup: whether this rank has run out of data during warm-up.
    """

    def __init__(
        self,
        contents: Contents,
        anchors: Anchors,
        calendar: Calendar,
        everyone: Peers,
        ddp: DistributedDataParallel | None,
        *,
        sharded: bool,
    ) -> None:
        self._contents, self._anchors, self._calendar, self._everyone = contents, anchors, calendar, everyone
        self._ddp, self._sharded = ddp, sharded
        self.is_anchored = self.averages_gradients = self.missed_warmup = False
        self._has_begun = self._looked_at_module = self._ran_in_ddp = False

    def load(self, *, begun: bool, anchored: bool) -> None:
        """After a checkpoint was loaded.

        Args:
            begun: whether it was saved after the first step.
            anchored: whether it has anchors.
        """
        self._has_begun, self.is_anchored = begun, anchored

    @torch.no_grad()
    def from_the_first(self) -> None:
        """Take over the first rank's parameters and buffers."""
        items = [*self._contents.all_items(), *self._contents.buffers()]
        check_same_items(items, self._everyone)
        for item in items:
            part = local_part(item.tensor)
            value = part.to(self._everyone.device, copy=True).contiguous()
            self._everyone.broadcast(value, 0).wait()
            part.copy_(value)

    def begin(self, wrapper: str) -> None:
        """Before a step: see to it that replicas are equal, and take anchors.

        Args:
            wrapper: the name of the replica's class, for errors.
        """
        if not self._looked_at_module or self._ran_in_ddp:
            self._looked_at_module = True
            if self._ddp is None and self._everyone.size > 1 and isinstance(self._everyone, GroupPeers):
                params = self._contents.params()
                check_not_wrapped_since(params, wrapper, sharded=self._sharded, in_ddp=self._ran_in_ddp)
        if not self._has_begun:
            self._has_begun = True
            others = self.averages_gradients
            if self._ddp is not None:
                others = len(members(self._ddp.process_group)) < self._everyone.size
            if others and not self._calendar.settle() and self._calendar.step == 0:
                params = self._contents.params()
                items = [Item(name, p) for name, p in params.items()]
                check_same_values(items + self._contents.frozen_items(), self._everyone)
        if self._calendar.settle():
            self._contents.mark_trained()
            if self._anchors:
                self._begin_local_step()

    def _begin_local_step(self) -> None:
        if self.is_anchored:
            self._anchors.follow()
            return
        handle = overlap_of(self._contents.optimizer)
        if handle is None or not handle.has_updated:  # else parameters have moved since the forward pass
            self._anchors.refresh()
        self.is_anchored = True
        if self._everyone.size > 1:
            self._compare_anchors(is_stepping=True)

    def before_forward(self) -> None:
        """Take anchors, for an overlapped local step, which is made in backward.

        Also look for a DDP module around this one that nobody has told us of, such as a copy.
        """
        if self._ddp is None and not self._ran_in_ddp and not torch.compiler.is_compiling():
            ddp = _torch.running_ddp()
            if ddp is not None:
                ours = {id(p) for p in self._contents.params().values()}
                self._ran_in_ddp = any(id(p) in ours for p in ddp.parameters())
        if not self._anchors:
            return
        if self.is_anchored:
            self._anchors.follow()
        elif self._calendar.is_local:
            self._anchors.refresh()

    def between_steps(self) -> None:
        """Before a round that no local step has led to: the parameters are where everybody starts from."""
        if self.is_anchored:
            self._anchors.follow()
        elif self._anchors:
            self._anchors.refresh()

    def at_the_end(self) -> None:
        """On a rank that has no data left: others that make their first local step compare their anchors with it.

        It may never have had any data, or all ranks may be at the end, perhaps of warm-up.
        """
        self.between_steps()
        if not self._anchors or self.is_anchored:
            return
        if self._everyone.size > 1:
            self.is_anchored = self._compare_anchors(is_stepping=False)

    def _compare_anchors(self, *, is_stepping: bool) -> bool:
        """All ranks have the same anchors. One without data has missed steps of the warm-up, and takes the others'.

        Returns:
            Whether any rank is about to make a local step.
        """
        found = self._everyone.gather_objects((self.missed_warmup, is_stepping))
        late = [missed for missed, _ in found]
        if any(late) and not all(late):
            root = late.index(False)
            for item in self._anchors.items():
                value = item.tensor.to(self._everyone.device, copy=True).contiguous()
                self._everyone.broadcast(value, root).wait()
                if self.missed_warmup:
                    item.tensor.copy_(value)
            if self.missed_warmup:
                self._anchors.set_params()
                self.missed_warmup = False
        check_same_values(self._anchors.items() + self._contents.frozen_items(), self._everyone)
        return any(stepping for _, stepping in found)
