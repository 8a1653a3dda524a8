"""Replicas begin equal, and anchors are what the first local step starts from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from offbeat import _torch
from offbeat.ddp import is_inside_ddp
from offbeat.engine.tensors import is_dtensor
from offbeat.frameworks import DDP_IN_FRAMEWORKS
from offbeat.overlap.handle import overlap_of
from offbeat.replicas.compare import check_same_items, check_same_values, have_same_values
from offbeat.replicas.contents import Contents, Item, local_part
from offbeat.replicas.fragment import Fragment
from offbeat.replicas.outer import Outer
from offbeat.replicas.schedule import Schedule
from offbeat.wire.groups import members
from offbeat.wire.peers import Peers, gather
from offbeat.wire.tree import broadcast_tree

__all__ = ["Anchoring"]


class Anchoring:
    """What must be done once: before the first step, and before the first local one.

    Args:
        contents: the tensors of the optimizer and its module.
        fragments: those of all levels.
        schedule: counts steps.
        everyone: all ranks that take part.
        ddp: the DDP module, if the module is one.
        sharded: whether the module is sharded.

    Attributes:
        is_anchored: whether anchors are in use.
        averages_gradients: whether ``step()`` averages gradients, because the module does not.
        loaded_apart: the class whose checkpoint was loaded that replicas had saved between two rounds, without anchors.
    """

    def __init__(
        self,
        contents: Contents,
        fragments: Sequence[Fragment],
        schedule: Schedule,
        everyone: Peers,
        ddp: DistributedDataParallel | None,
        *,
        sharded: bool,
    ) -> None:
        self._contents, self._fragments, self._schedule, self._everyone = contents, fragments, schedule, everyone
        self._outers: list[Outer] = list({id(f.outer): f.outer for f in fragments if f.outer is not None}.values())
        self._ddp, self._sharded = ddp, sharded
        self.is_anchored = self.averages_gradients = False
        self.loaded_apart: str | None = None
        self._has_begun = self._looked_at_module = self._ran_in_ddp = False

    def load(self, *, begun: bool, anchored: bool, apart: str | None) -> None:
        """After a checkpoint was loaded.

        Args:
            begun: whether it was saved after the first step.
            anchored: whether it has anchors.
            apart: the class that saved it, if that was between two rounds.
        """
        self._has_begun, self.is_anchored = begun, anchored
        self.loaded_apart = None if anchored else apart

    @torch.no_grad()
    def start_from_first_rank(self) -> None:
        """Take over the first rank's parameters and buffers, trained or not."""
        items = [*self._contents.all_items(), *self._contents.buffers()]
        check_same_items(items, self._everyone)
        mine = {item.name: local_part(item.tensor) for item in items}
        first = broadcast_tree(self._everyone, mine if self._everyone.rank == 0 else None, 0)
        if self._everyone.rank > 0:
            for name, part in mine.items():
                part.copy_(first[name])

    def before_step(self, wrapper: str) -> None:
        """See to it that replicas are equal, and take anchors before the first local step.

        Args:
            wrapper: the name of the replica's class, for errors.
        """
        if not self._looked_at_module or self._ran_in_ddp:
            self._looked_at_module = True
            if self._ddp is None and self._everyone.size > 1 and getattr(self._everyone, "group", None) is not None:
                self._check_not_wrapped_since(wrapper)
        if not self._has_begun:
            self._has_begun = True
            others = self.averages_gradients
            if self._ddp is not None:
                others = len(members(self._ddp.process_group)) < self._everyone.size
            if others and not self._schedule.settle() and self._schedule.step == 0:
                params = self._contents.params()
                items = [Item(name, p) for name, p in params.items()]
                check_same_values(items + self._contents.frozen_items(), self._everyone)
        if not self._schedule.settle():
            return
        for outer in self._outers:
            outer.check_params(self._contents.params())
        self._contents.mark_trained()
        self.compare_anchors()

    def compare_anchors(self) -> None:
        """Before the first local step, or at the beginning of a forward pass that belongs to it: begin with anchors."""
        if self._outers and not self.is_anchored:
            handle = overlap_of(self._contents.optimizer)
            if handle is None or not handle.has_updated:  # else parameters have moved since the forward pass
                self._refresh()
            self._compare(is_stepping=True)
            self._use_anchors()

    def before_forward(self) -> None:
        """Take anchors, for an overlapped local step, which is made in backward.

        Also look for a DDP module around this one that nobody has told us of, such as a copy.
        """
        if self._ddp is None and not self._ran_in_ddp and not torch.compiler.is_compiling():
            ddp = _torch.running_ddp()
            if ddp is not None:
                ours = {id(p) for p in self._contents.params().values()}
                self._ran_in_ddp = any(id(p) in ours for p in ddp.parameters())
        if self._outers and not self.is_anchored and self._schedule.is_local:
            self._refresh()

    def before_sync(self) -> None:
        """Before a round that no local step has led to.

        Where replicas are equal, that is where everybody starts from. Where they are not, they have no anchors yet, and
        the round gives them some: the mean.
        """
        if self.is_anchored or not self._outers:
            return
        items = [Item(name, p) for name, p in self._contents.params().items()]
        if have_same_values(items, self._everyone):
            self._refresh()
            self._begin_versions()
        self.loaded_apart = None

    def at_the_end(self) -> None:
        """On a rank that has no data left: others that make their first local step compare their anchors with it."""
        if self._outers and not self.is_anchored:
            self._refresh()
            if self._compare(is_stepping=False):
                self._use_anchors()

    def _refresh(self) -> None:
        for outer in self._outers:
            outer.refresh(self._contents.params())

    def _use_anchors(self) -> None:
        self.is_anchored, self.loaded_apart = True, None
        self._begin_versions()

    def _begin_versions(self) -> None:
        for fragment in self._fragments:
            fragment.version = max(fragment.version, 0)

    def _compare(self, *, is_stepping: bool) -> bool:
        """Raise on all ranks unless all have the same anchors. Returns whether any is about to make a local step."""
        if self._everyone.size == 1:
            return True
        rows = gather(self._everyone, [is_stepping, self.loaded_apart])
        apart = next((name for _, name in rows if name is not None), None)
        remedy = None
        if apart is not None:
            remedy = (
                f"the checkpoint was saved by {apart} between two rounds, when replicas differed, and it has no "
                "anchors for the outer optimizer; call sync() on every rank before the first step, which starts from "
                "their mean, or pass sync_init=True to start from the first rank's parameters"
            )
        items = [item for outer in self._outers for item in outer.items(list(outer.anchors))]
        check_same_values(items + self._contents.frozen_items(), self._everyone, remedy)
        for outer in self._outers:
            outer.unchecked.clear()
        return any(stepping for stepping, _ in rows)

    def _check_not_wrapped_since(self, wrapper: str) -> None:
        """Raise if parameters of a plain module have been given to DDP or FSDP2, which all ranks do together.

        Frameworks wrap the module after the optimizer is made. What they wrap it in averages gradients over all ranks
        at every step, so that replicas would never train by themselves.
        """
        params = list(self._contents.params().values())
        outside = "fully_shard" if any(is_dtensor(p) for p in params) and not self._sharded else None
        if outside is None and (self._ran_in_ddp or is_inside_ddp(params)):
            outside = "DistributedDataParallel"
        if outside is not None:
            raise RuntimeError(
                f"the module is wrapped in {outside}, but {wrapper} was made with the bare module, so that gradients "
                "are averaged over all ranks at every step and replicas never train by themselves. Wrap the module "
                f"first, then make the optimizer, then {wrapper}(optimizer, module) with the wrapped module"
                + (f": {DDP_IN_FRAMEWORKS}" if outside == "DistributedDataParallel" else "")
            )
