"""How an optimizer shares the work on whole matrices with other ranks, and which rank has gradients and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat._types import Group
from offbeat.engine.agree import check_same_parameters, check_same_step, send_from_owners
from offbeat.engine.extras import Work
from offbeat.engine.options import Sharing
from offbeat.engine.owners import Owners
from offbeat.engine.step import Engine
from offbeat.rules.rule import Rule

__all__ = ["SharesMatrices"]


class SharesMatrices:
    """The part of an optimizer that shares matrices."""

    if TYPE_CHECKING:
        rule: ClassVar[Rule]
        param_groups: list[dict[str, Any]]
        state: Any
        _engine: Engine

        def init_state(self) -> None:  # noqa: D102
            ...

    _sharing: Sharing | None = None

    def share_matrices(self, process_group: Group | None = None, *, exact: bool = False) -> None:
        """Share the work of whole matrices among ranks that have the same parameters and the same gradients (DDP).

        Each matrix gets a rank that owns it; costs are balanced. In every step the owner transforms the matrix and
        sends the result to the other ranks, while the next matrices are computed. With n ranks, each rank does about
        1/n of the arithmetic. All ranks get the same numbers, and every rank keeps all state. Parameters sharded by
        FSDP2 do not need this call: their shards are sent to owners and back automatically.

        Args:
            process_group: the ranks; None for all. Every rank of the group must make this call and every ``step()``. If
                their gradients differ, a step raises on all ranks.
            exact: whether to send results in the dtype in which they are computed. If not, results of a wider dtype are
                rounded to bfloat16, the dtype in which Muon computes by default.
        """
        if not self.has_matrices:
            raise TypeError(
                f"{type(self).__name__} has no matrices to share: it is elementwise, or needs whole parameters; leave "
                "share_matrices() out"
            )
        if self.owners is not None:
            raise RuntimeError(
                "the gradients of these matrices are reduced to their owners, which already share the work; leave "
                "share_matrices() out, or call remove() of the handle that offbeat.reduce_to_owners() returned"
            )
        self._share(process_group, exact, owned=False)

    @property
    def has_matrices(self) -> bool:
        """Whether the rule works on whole matrices, which ranks can share."""
        return self.rule.matrix is not None and self.rule.matrix.cut

    @property
    def owners(self) -> Owners | None:
        """The owners of the matrices if only they have gradients and state (offbeat.reduce_to_owners()), else None."""
        return None if self._sharing is None else self._sharing.owners

    @property
    def sharing_group(self) -> Any:
        """The process group of the ranks that share the work on whole matrices; None if each rank does all of it."""
        return None if self._sharing is None else self._sharing.group

    def own_matrices(self, process_group: Any, *, exact: bool) -> None:
        """Keep the gradient and the state of each matrix on its owner only. The caller reduces gradients to owners."""
        self._share(process_group, exact, owned=True)

    def disown_matrices(self, *, gather: bool = True) -> None:
        """Send all state to all ranks, and stop sharing. Every rank must make this call.

        Args:
            gather: whether to send the state. If False, nothing is sent.
        """
        if gather:
            self.gather_state()
        self._sharing = None
        self._engine = Engine(self.rule, None)

    def gather_state(self) -> None:
        """Send the state of each matrix from its owner to all ranks. Every rank must make this call.

        Does nothing if every rank has all state, which is the case without :func:`offbeat.reduce_to_owners`.
        """
        if self.owners is None:
            return
        found = [
            (value, self.owners.of(p))
            for group in self.param_groups
            for p in group["params"]
            for key, value in sorted(self.state.get(p, {}).items())
            if isinstance(value, Tensor) and value.dim() > 0
        ]
        with torch.no_grad():
            send_from_owners([value for value, _ in found], [owner for _, owner in found], self.sharing_group)
        self.owners.stale = False

    def _agree(self, work: Callable[[], list[Work]], error: Exception | None = None) -> list[Work]:
        """The work of a step in which only owners have gradients, once all ranks are about to take the same step.

        Args:
            error: why this rank cannot take the step, if that is known.

        Raises:
            Exception: a rank cannot take the step, or the ranks would take different ones. All ranks raise.
        """
        found: list[Work] = []
        about: dict[str, str] = {}
        if error is None:
            try:
                found = work()
                self._engine.check(found, self.state)
                about = self._engine.describe(found)
            except Exception as mine:
                error = mine
        device = self.param_groups[0]["params"][0].device
        check_same_step(self._engine.names, about, self.sharing_group, device, error)
        return found

    def _share(self, process_group: Any, exact: bool, *, owned: bool) -> None:
        shapes = [[tuple(p.shape) for p in group["params"]] for group in self.param_groups]
        check_same_parameters(shapes, process_group, self.param_groups[0]["params"][0].device)
        # A group of its own, because DDP may use the other one at the same time, from another thread.
        ranks = dist.get_process_group_ranks(process_group)
        own = dist.new_group(ranks, use_local_synchronization=True)
        owners = Owners(len(ranks), dist.get_rank(own)) if owned and len(ranks) > 1 else None
        self._sharing = Sharing(own, exact, owners) if len(ranks) > 1 else None
        self._engine = Engine(self.rule, self._sharing)
        if owners is not None:
            owners.add(p for group in self.param_groups for p in group["params"])

    def _check_all_state(self) -> None:
        if self.owners is not None and self.owners.stale:
            raise RuntimeError(
                "this rank has the state of its own matrices only, because gradients are reduced to their owners; call "
                "optimizer.gather_state() on every rank first, which sends all state to all ranks"
            )
