"""The state of several optimizers as one: a live view, and state dicts that are merged and split."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["MergedState", "merged_state_dict", "places", "split_state_dict"]


class Owners(Protocol):
    """Several optimizers; each parameter belongs to one of them."""

    optimizers: tuple[Optimizer, ...]

    def owner(self, p: Tensor) -> Optimizer:
        """The optimizer that a parameter belongs to."""


class MergedState(MutableMapping[Any, Any]):
    """``chain.state``: the state of all optimizers, live."""

    def __init__(self, chain: Owners) -> None:
        self._chain = chain

    def _home(self, key: Any) -> Any:
        """The state dictionary that contains the key, or else the one of the parameter's owner."""
        for optimizer in self._chain.optimizers:
            if key in optimizer.state:
                return optimizer.state
        return self._chain.owner(key).state if isinstance(key, Tensor) else self._chain.optimizers[0].state

    def __getitem__(self, key: Any) -> Any:
        return self._home(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._home(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._home(key)[key]

    def __contains__(self, key: object) -> bool:
        return any(key in optimizer.state for optimizer in self._chain.optimizers)

    def get(self, key: Any, default: Any = None) -> Any:
        """As for a dictionary; creates no entry."""
        return self._home(key)[key] if key in self else default

    def __iter__(self) -> Iterator[Any]:
        return (key for optimizer in self._chain.optimizers for key in list(optimizer.state))

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._chain.optimizers)

    def __repr__(self) -> str:
        return repr(dict(self))


def places(optimizers: Sequence[Optimizer]) -> dict[int, tuple[int, int, int]]:
    """For each parameter (by id): the index of its optimizer, of its group there, and its index in the group."""
    return {
        id(p): (which, number, at)
        for which, optimizer in enumerate(optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for at, p in enumerate(group["params"])
    }


def merged_state_dict(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The state dicts of the optimizers as one, with all parameters numbered consecutively."""
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    start = 0
    for optimizer in optimizers:
        state_dict = optimizer.state_dict()
        for group in state_dict["param_groups"]:
            result["param_groups"].append({**group, "params": [start + i for i in group["params"]]})
        for key, value in state_dict["state"].items():
            result["state"][start + key if isinstance(key, int) else key] = value
        start += sum(len(group["params"]) for group in optimizer.param_groups)
    return result


def split_state_dict(state_dict: dict[str, Any], optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """The state dict of each optimizer, with the parameters numbered from 0."""
    groups = list(state_dict["param_groups"])
    wanted = [len(optimizer.param_groups) for optimizer in optimizers]
    if len(groups) != sum(wanted):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(groups)}, but the optimizers of the "
            f"chain have {' + '.join(map(str, wanted))}"
        )
    parts: list[dict[str, Any]] = []
    for count in wanted:
        own_groups, groups = groups[:count], groups[count:]
        order = [i for group in own_groups for i in group["params"]]
        number = {key: at for at, key in reversed(list(enumerate(order)))}
        parts.append(
            {
                "state": {number[k]: value for k, value in state_dict["state"].items() if k in number},
                "param_groups": [{**group, "params": [number[i] for i in group["params"]]} for group in own_groups],
            }
        )
    known = {i for group in state_dict["param_groups"] for i in group["params"]}
    parts[0]["state"].update({k: value for k, value in state_dict["state"].items() if k not in known})
    return parts
