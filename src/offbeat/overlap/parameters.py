"""The parameters of an overlapped optimizer, read from its live ``param_groups``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from offbeat.optim import Chain, RuleOptimizer
from offbeat.overlap.clipping import Shards, shard_groups

__all__ = ["Parameters"]


class Parameters:
    """All parameters of an optimizer.

    Args:
        named: the parameters of the module, with their names.

    Attributes:
        all: the optimizer's parameters in the module's order, the order in which
            ``clip_grad_norm_(module.parameters())`` adds up norms. A new list whenever they have changed.
        shards: by id of a parameter, the process groups that hold its other shards.
    """

    def __init__(self, optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]) -> None:
        self._optimizer = optimizer
        self._position = {id(p): i for i, (_, p) in enumerate(named)}
        self._names = {id(p): name for name, p in named}
        self._ids: list[tuple[int, bool]] | None = None
        self.all: list[Tensor] = []
        self.shards: Shards = {}
        self.refresh()

    def name_of(self, p: Tensor) -> str:
        """What to call a parameter in an error."""
        name = self._names.get(id(p))
        return f"a parameter of shape {tuple(p.shape)}" if name is None else f"parameter {name!r}"

    def refresh(self) -> bool:
        """Read the optimizer's groups again; returns whether parameters were added, removed, frozen or unfrozen."""
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        ids = [(id(p), p.requires_grad) for p in params]
        if ids == self._ids:
            return False
        self._ids = ids
        params.sort(key=lambda p: self._position.get(id(p), len(self._position)))
        self.all = params
        self.shards = {id(p): shard_groups(p) for p in params}
        return True

    def sharing(self) -> list[RuleOptimizer]:
        """The optimizer, or those in the chain, whose matrices several ranks share. All ranks step them together."""
        every = self._optimizer.optimizers if isinstance(self._optimizer, Chain) else [self._optimizer]
        return [one for one in every if isinstance(one, RuleOptimizer) and one.sharing_group is not None]
