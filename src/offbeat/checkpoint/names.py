"""Names of parameters, in place of the numbers that state dicts have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from offbeat._torch import unwrapped_name

__all__ = ["Names", "inner_module"]


def inner_module(module: nn.Module | None) -> nn.Module | None:
    """The module inside DistributedDataParallel, whose names do not begin with ``module.``."""
    return inner_module(module.module) if isinstance(module, DistributedDataParallel) else module


class Names:
    """The names of a model's parameters and of everything in its state dict, whatever it is wrapped in.

    Attributes:
        params: the parameters by name.
    """

    def __init__(self, model: nn.Module | None) -> None:
        module = inner_module(model)
        named = [] if module is None else [(unwrapped_name(name), p) for name, p in module.named_parameters()]
        self.params: dict[str, Tensor] = dict(named)
        self._of = {id(p): name for name, p in named}

    def groups(self, optimizer: Any) -> list[list[str]]:
        """The names of the parameters in each group of an optimizer; ``#3`` for one that the model does not have."""
        number: dict[int, int] = {}
        result, start = [], 0
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"], start):
                number.setdefault(id(p), i)
            start += len(group["params"])
            result.append([self._of.get(id(p), f"#{number[id(p)]}") for p in group["params"]])
        return result

    def find(self, key: Any) -> Tensor | None:
        """The parameter of this name, which may be the name inside a wrapper."""
        if not isinstance(key, str):
            return None
        key = unwrapped_name(key)
        return self.params.get(key, self.params.get(key.removeprefix("module.")))

    def to_names(self, state_dict: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
        """An optimizer's state dict with names as the keys of ``"state"`` and in ``"params"`` of each group."""
        if not _is_complete(state_dict) or not hasattr(optimizer, "param_groups"):
            return dict(state_dict)
        name: dict[Any, str] = {}
        groups = []
        for group, names in zip(state_dict["param_groups"], self.groups(optimizer), strict=True):
            name.update(zip(group["params"], names, strict=True))
            groups.append({**group, "params": names})
        state = {name.get(key, key): value for key, value in state_dict["state"].items()}
        return {**state_dict, "state": state, "param_groups": groups}

    def to_numbers(self, saved: Mapping[str, Any], optimizer: Any) -> tuple[dict[str, Any], list[str], list[str]]:
        """The state dict that an optimizer can load, and the parameters that are missing and unexpected in it.

        Parameters are found by name: groups may list them in another order. Without a model, here or when it was saved,
        they are found by their place. Where the groups are others, each group
        takes the options of the saved one with the same place in the list.
        """
        if not _is_complete(saved) or not hasattr(optimizer, "param_groups"):
            return dict(saved), [], []
        here = self.groups(optimizer)
        there = [list(group["params"]) for group in saved["param_groups"]]
        current = optimizer.state_dict()["param_groups"]
        missing, unexpected, groups = [], [], []
        number: dict[str, int] = {}
        for i, names in enumerate(here):
            known = there[i] if i < len(there) else []
            if len(known) == len(names) and any(all(n.startswith("#") for n in some) for some in (names, known)):
                names = known  # without a model here or there, parameters are in the same order
            missing += [f"optimizer group {i}: {name}" for name in names if name not in known]
            unexpected += [f"optimizer group {i}: {name}" for name in known if name not in names]
            group = dict(saved["param_groups"][i] if i < len(there) else current[i])
            number.update(zip(names, current[i]["params"], strict=True))
            if "param_names" in group:  # in the order of the parameters here
                group["param_names"] = current[i].get("param_names", names)
            groups.append({**group, "params": list(current[i]["params"])})
        for i in range(len(here), len(there)):
            unexpected += [f"optimizer group {i}: {name}" for name in there[i]]
        lost = {name for names in there for name in names} - set(number)
        state = {number.get(key, key): value for key, value in saved["state"].items() if key not in lost}
        return {**saved, "state": state, "param_groups": groups}, missing, unexpected


def _is_complete(state_dict: Mapping[str, Any]) -> bool:
    return "state" in state_dict and "param_groups" in state_dict
