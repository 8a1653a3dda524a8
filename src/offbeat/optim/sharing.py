"""How an optimizer shares the work of whole matrices with other ranks, and where gradients and state are then."""

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

        Each matrix gets an owner, balanced by cost. In every step the owner transforms it and sends the result to the
        others, while the next matrices are worked on. So the arithmetic of a rank falls as one over the number of
        ranks. All ranks have the same numbers, and state stays on every rank. Parameters that FSDP2 cuts need no call:
        their pieces go to owners and back by themselves.

        Args:
            process_group: the ranks; None for all. Every rank of it must call this, and every ``step()``, together. If
                their gradients differ, a step raises on all of them.
            exact: send results in the dtype in which they are computed. Otherwise wider ones are rounded to bfloat16,
                which is what Muon computes in by default.
        """
        if not self.has_matrices:
            raise TypeError(
                f"{type(self).__name__} has no matrices to share: it works element by element, or needs whole "
                "parameters; leave share_matrices() out"
            )
        if self.owners is not None:
            raise RuntimeError(
                "the gradients of these matrices are reduced to their owners, which share the work already; leave "
                "share_matrices() out, or call remove() of the handle that offbeat.reduce_to_owners() returned"
            )
        self._share(process_group, exact, owned=False)

    @property
    def has_matrices(self) -> bool:
        """Whether the rule works on whole matrices, which ranks can share."""
        return self.rule.matrix is not None and self.rule.matrix.cut

    @property
    def owners(self) -> Owners | None:
        """The owners of the matrices, if gradients and state are on their owner alone: offbeat.reduce_to_owners()."""
        return None if self._sharing is None else self._sharing.owners

    @property
    def sharing_group(self) -> Any:
        """The process group of the ranks that share the work of whole matrices; None if each does all of it."""
        return None if self._sharing is None else self._sharing.group

    def own_matrices(self, process_group: Any, *, exact: bool) -> None:
        """Have the gradients and the state of each matrix on its owner alone. Whoever calls this reduces them there."""
        self._share(process_group, exact, owned=True)

    def disown_matrices(self, *, gather: bool = True) -> None:
        """Bring all state to all ranks, and share no more. Every rank must call this together.

        Args:
            gather: whether to bring the state. Without, nothing is sent.
        """
        if gather:
            self.gather_state()
        self._sharing = None
        self._engine = Engine(self.rule, None)

    def gather_state(self) -> None:
        """Bring the state that only owners of matrices have to all ranks. Every rank must call this together.

        Nothing happens if every rank has all state, as it does without :func:`offbeat.reduce_to_owners`.
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
        # Of its own: DDP may be using the other one at the same time, from another thread.
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
                "optimizer.gather_state() on every rank first, which brings all of it to all of them"
            )
