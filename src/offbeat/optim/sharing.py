"""How an optimizer shares the work on whole matrices with other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from offbeat._types import Group
from offbeat.engine.agree import Difference, check_same
from offbeat.engine.engine import Engine
from offbeat.engine.options import Sharing
from offbeat.rules.rule import Rule

__all__ = ["SharesMatrices"]


class SharesMatrices:
    """The part of an optimizer that shares matrices."""

    if TYPE_CHECKING:
        rule: ClassVar[Rule]
        param_groups: list[dict[str, Any]]
        state: Any
        _engine: Engine

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
        ranks_group: Any = process_group
        shapes = [[tuple(p.shape) for p in group["params"]] for group in self.param_groups]
        device = self.param_groups[0]["params"][0].device
        check_same({"shapes": shapes}, ranks_group, device, _different_parameters)
        # A group of its own, because DDP may use the other one at the same time, from another thread.
        ranks = dist.get_process_group_ranks(ranks_group)
        own = dist.new_group(ranks, use_local_synchronization=True)
        self._sharing = Sharing(own, exact) if len(ranks) > 1 else None
        self._engine = Engine(self.rule, self._sharing)

    @property
    def has_matrices(self) -> bool:
        """Return whether the rule works on whole matrices, which ranks can share."""
        return self.rule.matrix is not None and self.rule.matrix.cut

    @property
    def sharing_group(self) -> Any:
        """The process group of the ranks that share the work on whole matrices; None if each rank does all of it."""
        return None if self._sharing is None else self._sharing.group


def _different_parameters(difference: Difference) -> Exception:
    return RuntimeError(
        "the ranks have different parameters, or the same in another order, so they cannot share the work; build the "
        f"same model and the same groups on every rank. They have groups of these shapes: {difference}"
    )
