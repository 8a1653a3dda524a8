"""The tensors of an optimizer and its module that are averaged: parameters, buffers, optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat import _torch
from offbeat.engine.tensors import is_dtensor, is_plain, local
from offbeat.sync.buffer_policy import buffer_items
from offbeat.sync.items import Digest, Item
from offbeat.sync.state_policy import FoundKeys, reset_state, state_items
from offbeat.wire.peers import Peers

__all__ = ["Contents"]


class Contents:
    """The items of one optimizer and its module, the same on every rank.

    Parameters are included if they have ``requires_grad``, whether this rank has a gradient for them or not. A
    parameter that replicas have trained by themselves stays included: if it were frozen before the next average, ranks
    would keep different values.

    Args:
        state: policy for optimizer state.
        buffers: policy for the module's buffers.
    """

    def __init__(
        self, optimizer: Optimizer, module: torch.nn.Module, state: str | Mapping[str, str], buffers: str
    ) -> None:
        self.optimizer = optimizer
        self._module = module
        self._ignored: Any = ()
        if isinstance(module, DistributedDataParallel):
            self._module, self._ignored = module.module, module.parameters_to_ignore
        self._state, self._buffers = state, buffers
        self._ever: Any = _torch.weak_table()
        self._digest, self._state_digest = Digest(), Digest()
        self._names: dict[int, tuple[Tensor, str]] = {}
        self._trained: list[int] = []
        #: Names of buffers that may have infinite numbers.
        self.masks: set[str] = set()

    def params(self) -> dict[str, Tensor]:
        """Parameters by their name in the module, or by their position in the optimizer's groups."""
        return {name: p for name, p in self._by_name().items() if p.requires_grad or p in self._ever}

    def frozen(self) -> set[str]:
        """The names of parameters that are not averaged now, but would be if they had ``requires_grad``."""
        return {name for name, p in self._by_name().items() if not (p.requires_grad or p in self._ever)}

    def _by_name(self) -> dict[str, Tensor]:
        nobody = (None, "")
        if any(self._names.get(id(p), nobody)[0] is not p for p in self._all()):
            named = self._module.named_parameters(remove_duplicate=False)
            self._names = {id(p): (p, "") for p in self._all()}
            for name, p in reversed(list(named)):  # of tied weights the first name, as named_parameters() has it
                self._names[id(p)] = (p, name)
        names, found = self._names, {}
        for i, group in enumerate(self.optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                found[names[id(p)][1] or f"parameter {j} of group {i}"] = p
        return found

    def all_items(self) -> list[Item]:
        """Every parameter of the module and of the optimizer, trained or not, but for frozen ones of special kinds."""
        named = self._module.named_parameters()
        found: dict[str, Tensor] = {name: p for name, p in named if name not in self._ignored}
        known = {id(p) for p in found.values()}
        found |= {name: p for name, p in self._by_name().items() if id(p) not in known}
        return [Item(name, p) for name, p in found.items() if not self._is_frozen(p) or _has_plain_values(p)]

    def frozen_items(self) -> list[Item]:
        """Parameters that nobody trains, and that are never averaged."""
        return [item for item in self.all_items() if self._is_frozen(item.tensor)]

    def _is_frozen(self, p: Tensor) -> bool:
        return not (p.requires_grad or p in self._ever)

    def note_masks(self, peers: Peers) -> None:
        """Take note of buffers with infinite numbers before training, such as masks: these are as they should be.

        Only if these are in the same places on every rank: otherwise something has gone wrong on one of them. All ranks
        call it together.
        """
        mine = {item.name: found for item in self.buffers() if (found := _infinite_places(item.tensor)) is not None}
        everyone = peers.gather_objects(mine) if peers.size > 1 else [mine]
        self.masks = {name for name, places in mine.items() if all(one.get(name) == places for one in everyone)}

    def buffers(self) -> list[Item]:
        """Buffers to average."""
        return buffer_items(self._module, self._buffers, self._ignored)

    def groups(self) -> list[tuple[list[str], Any]]:
        """The optimizer's groups: the names of their parameters, and their learning rates."""
        names = {id(p): name for name, p in self.params().items()}
        return [
            ([names[id(p)] for p in group["params"] if id(p) in names], group.get("lr"))
            for group in self.optimizer.param_groups
        ]

    def state_items(self) -> list[Item]:
        """Optimizer state to average."""
        return state_items(self.optimizer, self._state, self.params())

    def found_keys(self) -> FoundKeys:
        """Which keys of the state policy the optimizer state has."""
        return FoundKeys(self.optimizer, self._state)

    def digests(self, items: list[Item], state: list[Item]) -> tuple[int, ...]:
        """Numbers that are equal on two ranks if their items and their state are."""
        return (*self._digest.of(items), *self._state_digest.of(state))

    def mark_trained(self) -> None:
        """Include the parameters that have ``requires_grad`` now in all averages from now on."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        now = list(map(id, trained))
        if now != self._trained:
            self._trained = now
            for p in trained:
                self._ever[p] = True

    def reset_state(self) -> None:
        """After an average: reset state where the policy says so."""
        reset_state(self.optimizer, self._state)

    @torch.no_grad()
    def mend_state(self) -> None:
        """Set numbers of the optimizer's state that are not finite to zero, after parameters were taken over."""
        for entry in self.optimizer.state.values():
            for value in entry.values() if isinstance(entry, dict) else ():
                if isinstance(value, Tensor) and value.is_floating_point():
                    part = local(value)
                    part.copy_(part.nan_to_num(0.0, 0.0, 0.0))

    def averaged(self) -> list[int]:
        """The positions of parameters that have been averaged, for a checkpoint."""
        return [i for i, p in enumerate(self._all()) if p in self._ever]

    def load_averaged(self, places: list[int]) -> None:
        """Load what :meth:`averaged` returned, in place of what there is."""
        params = self._all()
        self._ever, self._trained = _torch.weak_table(), []
        for i in places:
            if i < len(params):
                self._ever[params[i]] = True

    def _all(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def _has_plain_values(p: Tensor) -> bool:
    """Whether a frozen parameter can be compared: quantized, sparse and meta tensors, and other subclasses, cannot."""
    plain = p.layout is torch.strided and not p.is_quantized and p.device.type != "meta"
    return plain and (is_plain(p) or is_dtensor(p))


def _infinite_places(buffer: Tensor) -> tuple[int, int] | None:
    """The number of infinite numbers and a sum over their places; None if there are none."""
    part = local(buffer)
    if not part.is_floating_point() or not bool(part.isinf().any()):
        return None
    places = part.isinf().flatten().nonzero().flatten() + 1
    return len(places), int((places * part.flatten()[places - 1].sign().long()).sum())
