"""``state_dict`` and ``load_state_dict``: torch.optim's format, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.optim.gradients import is_dtensor, local
from offbeat.optim.scalars import new_scalars, scalar_dtype
from offbeat.optim.state import ParamState, State
from offbeat.rules.rule import Slot, Values

__all__ = ["loaded", "packed"]


def packed(optimizer: Optimizer, unstarted: Callable[[dict[str, Any], ParamState], bool]) -> dict[str, Any]:
    """The state dict before hooks: plain dictionaries, parameters by number.

    A tensor whose first step would overwrite it whatever it holds (``unstarted``) is saved as None, as
    torch.optim saves a momentum buffer that does not exist yet.
    """
    number: dict[int, int] = {}
    owner: dict[int, dict[str, Any]] = {}
    groups = []
    start = 0
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"], start):
            number.setdefault(id(p), i)
            owner.setdefault(id(p), group)
        start += len(group["params"])
        groups.append({key: value for key, value in group.items() if key != "params"})
        groups[-1]["params"] = [number[id(p)] for p in group["params"]]
    state: dict[Any, Any] = {}
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            state[key] = value
        elif id(key) in number:
            hollow = isinstance(value, ParamState) and unstarted(owner[id(key)], value)
            state[number[id(key)]] = {k: None if hollow else v for k, v in value.items()}
    return {"state": state, "param_groups": groups}


def loaded(
    optimizer: Optimizer, state_dict: dict[str, Any], slots: Callable[[dict[str, Any]], tuple[Slot, ...]]
) -> tuple[State, list[dict[str, Any]]]:
    """State and groups for ``optimizer`` from a state dict; neither of the two is changed or shared."""
    groups, saved = optimizer.param_groups, deepcopy(_without_state(state_dict))
    if len(groups) != len(saved):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved)}, "
            f"but the optimizer has {len(groups)}"
        )
    for i, (mine, theirs) in enumerate(zip(groups, saved, strict=True)):
        if len(mine["params"]) != len(theirs["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"group {i} has {len(theirs['params'])} parameters there and {len(mine['params'])} here"
            )
    source = _match(groups, saved)
    state, new_groups = State(), []
    for mine, theirs in zip(groups, saved, strict=True):
        fresh_group = {**theirs, "params": mine["params"]}
        if "param_names" in mine and ("param_names" not in theirs or source.by_name):
            fresh_group["param_names"] = mine["param_names"]
        new_groups.append(fresh_group)
        scalars = {slot.key for slot in slots(fresh_group) if slot.scalar}
        tensors = {slot.key for slot in slots(fresh_group) if not slot.scalar}
        for p in mine["params"]:
            entry = state_dict["state"].get(source.of[id(p)])
            if entry is not None:
                state[p] = {k: _fit(p, k, v, k in tensors, k in scalars) for k, v in entry.items()}
        _side_by_side(state, mine["params"], scalars, fresh_group)
    known = set(source.of.values())
    for key, value in state_dict["state"].items():
        if key not in known:
            state[key] = value
    return state, new_groups


def _without_state(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    return list(state_dict["param_groups"])


def _match(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> Values:
    """Which saved number each parameter has: by name where both sides have the same names, else by position."""
    here = {name: p for g in groups for name, p in zip(g.get("param_names", ()), g["params"], strict=False)}
    there = {name: i for g in saved for name, i in zip(g.get("param_names", ()), g["params"], strict=False)}
    total = sum(len(g["params"]) for g in groups)
    if here and here.keys() == there.keys() and len(here) == total:
        return Values(by_name=True, of={id(p): there[name] for name, p in here.items()})
    positions = {}
    for mine, theirs in zip(groups, saved, strict=True):
        for p, i in zip(mine["params"], theirs["params"], strict=True):
            positions[id(p)] = i
    return Values(by_name=False, of=positions)


def _fit(p: Tensor, key: str, value: Any, is_tensor_slot: bool, is_scalar_slot: bool) -> Any:
    """A saved value for use with ``p``: on its device and in its layout, in the dtype it was saved in."""
    if is_scalar_slot:
        return value
    if isinstance(value, Tensor):
        if not is_tensor_slot:
            return value.to(p.device, copy=True)
        if value.shape != p.shape:
            raise ValueError(
                f"loaded state dict has {key!r} of shape {tuple(value.shape)} for a parameter of shape "
                f"{tuple(p.shape)}; was it saved from another model?"
            )
        value = value.to_dense() if value.layout != torch.strided else value
        if is_dtensor(p) or is_dtensor(value):
            return value.detach().clone()
        copy = torch.empty_like(p, dtype=value.dtype, memory_format=torch.preserve_format, requires_grad=False)
        return copy.copy_(value.detach()) if not value.requires_grad else value
    return deepcopy(value)


def _side_by_side(state: State, params: list[Tensor], scalars: set[str], group: dict[str, Any]) -> None:
    """Store a group's counters next to each other, as numbers of an old checkpoint and as tensors of a new one."""
    on_device = group.get("capturable") or group.get("fused")
    for key in sorted(scalars):
        places: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, float]]] = {}
        for p in params:
            value = state[p].get(key) if p in state else None
            if value is None:
                continue
            dtype = value.dtype if isinstance(value, Tensor) else scalar_dtype()
            dtype = torch.float32 if on_device and key == "step" else dtype
            device = local(p).device if on_device else torch.device("cpu")
            places.setdefault((device, dtype), []).append((p, float(value)))
        for (device, dtype), items in places.items():
            for (p, _), t in zip(items, new_scalars([v for _, v in items], dtype, device), strict=True):
                state[p][key] = t
