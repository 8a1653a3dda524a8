"""``state_dict`` and ``load_state_dict``: torch.optim's format, in both directions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.engine.gradients import check_alike, check_kind, check_shape
from offbeat.engine.member import kept_keys
from offbeat.engine.precision import converted, in_numbers
from offbeat.engine.scalars import new_scalars, scalar_dtype
from offbeat.engine.state import State
from offbeat.engine.tensors import has_values, is_dtensor, local, part_placements
from offbeat.rules.rule import PRECISION, Slot, Values

__all__ = ["check_state_dict", "loaded", "numbered", "packed"]


def packed(optimizer: Optimizer, slots: Callable[[dict[str, Any]], tuple[Slot, ...]]) -> dict[str, Any]:
    """The state dict before hooks: plain dictionaries, with numbers in place of parameters."""
    number: dict[int, int] = {}
    groups = []
    start = 0
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"], start):
            number.setdefault(id(p), i)
        start += len(group["params"])
        groups.append({key: _name_dtype(value) for key, value in group.items() if key != "params"})
        groups[-1]["params"] = [number[id(p)] for p in group["params"]]
    state: dict[Any, Any] = {}
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            state[key] = value
        elif id(key) in number:
            # The scales of 8-bit state belong to one rank's shard, so other ranks could not load the codes.
            state[number[id(key)]] = in_numbers(value) if is_dtensor(key) else dict(value)
    for group in groups:
        for slot in slots(group):
            if slot.saved is not None:
                for i in group["params"]:
                    if slot.key in state.get(i, ()):
                        state[i][slot.key] = slot.saved(state[i][slot.key])
    return {"state": state, "param_groups": groups}


def check_state_dict(state_dict: dict[str, Any], class_name: str) -> None:
    """Raise if this is not an optimizer's state dict, or if a wrapper saved it, whose entries would be ignored.

    A wrapper adds a dictionary of its own, with its name under ``"wrapper"``, which may be the only item of a tuple.

    Args:
        class_name: the class name of the optimizer that loads the state dict.
    """
    if "param_groups" not in state_dict:
        inside = [key for key, value in state_dict.items() if isinstance(value, dict) and "param_groups" in value]
        hint = f"pass state_dict[{inside[0]!r}]" if inside else "pass what optimizer.state_dict() returned"
        keys = ", ".join(map(repr, list(state_dict)[:4]))
        raise ValueError(f"this is not the state dict of an optimizer: its keys are {keys}; {hint}")
    for key, value in state_dict.items():
        value = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        name = value.get("wrapper") if isinstance(value, dict) and key not in ("state", "param_groups") else None
        if isinstance(name, str):
            raise ValueError(
                f"this is the state dict of a {name} around the optimizer, and {class_name} would ignore its step "
                f"counter and all else in {key!r}, so warm-up would start again; call load_state_dict() of the {name}, "
                "or pass a state dict with only 'state' and 'param_groups'"
            )


def numbered(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with the numbers of parameters as keys of its state.

    ``torch.distributed.checkpoint`` makes strings of them in some of its forms, and leaves out what is empty.
    """
    state = state_dict.get("state", {})
    return {**state_dict, "state": {int(k) if isinstance(k, str) and k.isdigit() else k: v for k, v in state.items()}}


def loaded(
    optimizer: Optimizer, state_dict: dict[str, Any], slots: Callable[[dict[str, Any]], tuple[Slot, ...]]
) -> tuple[State, list[dict[str, Any]]]:
    """State and groups for ``optimizer`` from a state dict. Neither argument is changed.

    No memory of a parameter's state is shared. What is not a tensor or a plain container stays the same object, and so
    does all state that is not a parameter's.
    """
    groups = optimizer.param_groups
    saved = [{k: _find_dtype(v) for k, v in deepcopy(group).items()} for group in state_dict["param_groups"]]
    if len(groups) != len(saved):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved)}, "
            f"but the optimizer has {len(groups)}"
        )
    for i, (own, theirs) in enumerate(zip(groups, saved, strict=True)):
        if len(own["params"]) != len(theirs["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"group {i} has {len(theirs['params'])} parameters there and {len(own['params'])} here"
            )
    source = _match(groups, saved)
    state, new_groups = State(), []
    for own, theirs in zip(groups, saved, strict=True):
        fresh_group = {**theirs, "params": own["params"]}
        for name in PRECISION:  # this optimizer keeps its own storage options; loaded state is converted to them
            fresh_group.pop(name, None)
            if name in own:
                fresh_group[name] = own[name]
        if "param_names" in own and ("param_names" not in theirs or source.by_name):
            fresh_group["param_names"] = own["param_names"]
        new_groups.append(fresh_group)
        kept = slots(fresh_group)
        scalars = {slot.key for slot in kept if slot.scalar}
        tensors = {slot.key for slot in kept if not slot.scalar and slot.form != "scales"}
        like = {slot.key for slot in kept if slot.key in tensors and slot.shape is None}
        shaped = {slot.key: slot for slot in kept if slot.shape is not None}
        was, now = theirs.get("state_dtype"), fresh_group.get("state_dtype")
        for p in own["params"]:
            entry = state_dict["state"].get(source.of[id(p)])
            compact = was is not None or any(fresh_group.get(name) is not None for name in PRECISION)
            if entry and (compact or "compensation" in entry):
                entry = converted(entry, p, kept, was, now)
            if entry:
                there = tensors if all(slot.shape is None for slot in kept) else set(kept_keys(kept, p))
                _check_kind(entry, scalars, there - {"compensation"})
            if entry is not None:
                state[p] = {
                    k: _fit_shaped(p, shaped[k], v) if k in shaped else _fit(p, k, v, k in like, k in scalars)
                    for k, v in entry.items()
                }
        _side_by_side(state, own["params"], scalars, fresh_group)
    known = set(source.of.values())
    for key, value in state_dict["state"].items():
        if key not in known:
            state[key] = value  # as torch: it may hold what cannot be copied, or what must stay the same object
    return state, new_groups


def _name_dtype(value: Any) -> Any:
    """An option as it is saved: ``torch.distributed.checkpoint`` takes no dtypes, but their names."""
    return str(value) if isinstance(value, torch.dtype) else value


def _find_dtype(value: Any) -> Any:
    """An option as it was before it was saved."""
    if isinstance(value, str) and value.startswith("torch."):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else value
    return value


def _check_kind(entry: dict[str, Any], scalars: set[str], tensors: set[str]) -> None:
    """Raise if this is the state of another kind of optimizer. Entries that an option added later may be missing."""
    if scalars - entry.keys() or (tensors and not tensors & entry.keys()):
        raise ValueError(
            f"loaded state dict has state {sorted(entry)} for a parameter, but this optimizer keeps "
            f"{sorted(scalars | tensors)}; was it saved from another kind of optimizer?"
        )


def _match(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> Values:
    """The saved number of each parameter: matched by name if all groups have the same names, else by position."""
    by_name = all("param_names" in g for g in (*groups, *saved)) and all(
        set(own["param_names"]) == set(theirs["param_names"]) and len(set(own["param_names"])) == len(own["params"])
        for own, theirs in zip(groups, saved, strict=True)
    )
    numbers = {}
    for own, theirs in zip(groups, saved, strict=True):
        order = theirs["params"]
        if by_name:
            there = dict(zip(theirs["param_names"], theirs["params"], strict=True))
            order = [there[name] for name in own["param_names"]]
        numbers.update({id(p): i for p, i in zip(own["params"], order, strict=True)})
    return Values(by_name=by_name, of=numbers)


def _fit(p: Tensor, key: str, value: Any, is_tensor_slot: bool, is_scalar_slot: bool) -> Any:
    """A saved value as state of ``p``: on the device and with the strides of ``p``, in the dtype it was saved in."""
    if is_scalar_slot:
        return value
    if isinstance(value, Tensor):
        if not is_tensor_slot:
            return value.to(p.device, copy=True)
        check_alike(key, value, p)
        value = value.to_dense() if value.layout != torch.strided else value
        if is_dtensor(p):
            return value.detach().clone().redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
        copy = torch.empty_like(p, dtype=value.dtype, memory_format=torch.preserve_format, requires_grad=False)
        return copy.copy_(value)  # keeps the autograd history of state that has one
    return _fit_other(p, value)


def _fit_other(p: Tensor, value: Any) -> Any:
    """What the rule does not know: new containers of the same objects, as torch makes them."""
    if isinstance(value, Tensor):
        return value.to(p.device, copy=True)
    if type(value) is dict:
        return {key: _fit_other(p, item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_fit_other(p, item) for item in value)
    return value


def _fit_shaped(p: Tensor, slot: Slot, value: Any) -> Any:
    """The same for state of another shape than the parameter, which is cut as far as it follows the parameter."""
    if not isinstance(value, Tensor):
        return _fit_other(p, value)
    check_shape(slot.key, value, slot.shape_for(p.shape), p)
    check_kind(slot.key, value, p)
    if not is_dtensor(p):
        return value.to(p.device, copy=True)
    placements = part_placements(p, functools.partial(slot.follows, tuple(p.shape)))
    return value.detach().clone().redistribute(p.device_mesh, placements)  # type: ignore[attr-defined]


def _side_by_side(state: State, params: list[Tensor], scalars: set[str], group: dict[str, Any]) -> None:
    """Store a group's counters next to each other in memory. Old checkpoints have Python numbers for them."""
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
            if isinstance(value, Tensor) and not has_values(value):
                state[p][key] = value.to(device, dtype, copy=True)
                continue
            places.setdefault((device, dtype), []).append((p, float(value)))
        for (device, dtype), items in places.items():
            for (p, _), t in zip(items, new_scalars([v for _, v in items], dtype, device), strict=True):
                state[p][key] = t
