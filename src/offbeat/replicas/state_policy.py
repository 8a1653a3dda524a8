"""What averaging does to optimizer state: keep it, average it, or reset it to its initial values.

The rule of an optimizer says which keys there are and what they start from; the torch.optim class of the same name has
the same. For any other optimizer the keys are known once it has state, and a reset sets them to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.engine.eight_bit import CODE_DTYPES
from offbeat.engine.first_step import mark_before_first_step as mark_unbegun
from offbeat.engine.options import hyperparameters
from offbeat.engine.precision import kept_slots
from offbeat.optim.base import RuleOptimizer
from offbeat.optim.lookup import rule_class
from offbeat.replicas.options import State
from offbeat.rules.rule import FLAGS, Rule, Slot, Values

__all__ = ["check_keys_of_state", "check_state", "keys_of_state", "reset_state", "tensors_to_average"]

STATES: tuple[str, ...] = get_args(State)

#: What :func:`keys_of_state` reports for a key of the policy.
_ABSENT, _PRESENT, _NOT_RESETTABLE = 0, 1, 2


def check_state(state: str | Mapping[str, str], delay: int, optimizer: Optimizer) -> None:
    """Raise if this is not a policy for the state of this optimizer, as far as its keys are known."""
    policies = dict(state) if isinstance(state, Mapping) else {"": state}
    for key, policy in policies.items():
        where = f"state[{key!r}]" if key else "state"
        if policy not in STATES:
            raise ValueError(f"{where} must be one of {', '.join(map(repr, STATES))}, but got {policy!r}")
        if policy == "average" and delay:
            raise ValueError(
                f"{where}='average' cannot be used with delay={delay}, because adding a delayed difference can make a "
                "second moment negative; use delay=0, or keep or reset the state"
            )
    rule = _rule_of(optimizer, inherited=False)
    if rule is None:
        return
    slots = [slot for group in optimizer.param_groups for slot in kept_slots(rule, _hyper(group))]
    known = {_plain_key(slot) for slot in slots}
    for key in state if isinstance(state, Mapping) else ():
        if key not in known:
            raise _no_such_key(key, type(optimizer).__name__, known)
    for slot in slots:
        if slot.form in CODE_DTYPES and _policy(state, _plain_key(slot)) == "average":
            raise _codes(_plain_key(slot), optimizer)


def tensors_to_average(
    optimizer: Optimizer, policy: str | Mapping[str, str], params: Mapping[str, Tensor]
) -> list[tuple[str, Tensor]]:
    """The optimizer state to average, by name, for these parameters by name.

    Step counters belong to each rank: ``"average"`` for all state leaves Python numbers as they are, and 0-d tensors
    under keys that are 0-d for every parameter. A moment of a 0-d parameter is averaged.
    """
    if policy != "average" and not (isinstance(policy, Mapping) and "average" in policy.values()):
        return []
    begin = getattr(optimizer, "init_state", None)
    if begin is not None:
        begin()  # state must not depend on which gradients this rank has seen
    entries = [optimizer.state.get(p, {}) for p in params.values()]
    sized = {key for entry in entries for key, v in entry.items() if isinstance(v, Tensor) and v.dim() > 0}
    named = []
    for name, p in params.items():
        for key, value in sorted(optimizer.state.get(p, {}).items()):
            if _policy(policy, key.removesuffix("_8bit")) != "average" or value is None:
                continue
            if key.endswith("_8bit"):
                raise _codes(key.removesuffix("_8bit"), optimizer)
            if isinstance(value, (list, dict, tuple)):
                raise TypeError(
                    f"state {key!r} of {type(optimizer).__name__} is a {type(value).__name__} and cannot be averaged; "
                    "use state='keep' or 'reset'"
                )
            if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
                continue
            if value.dim() == 0 and key not in sized and not isinstance(policy, Mapping):
                continue
            named.append((f"state {key!r} of {name}", value))
    return named


def keys_of_state(optimizer: Optimizer, policy: str | Mapping[str, str]) -> dict[str, Any]:
    """Which keys of the policy this rank's optimizer state has, for optimizers without a known rule.

    Ranks tell each other, so that a misspelt key raises on all of them, also where one rank has no state yet.

    Returns:
        ``"known"`` (all keys), ``"keys"`` (for each key of the policy whether it is there and can be reset) and the
        optimizer's name; empty if there is nothing to check.
    """
    if not isinstance(policy, Mapping) or _rule_of(optimizer, inherited=False) is not None:
        return {}
    entries = [entry for entry in optimizer.state.values() if isinstance(entry, dict)]
    known = {str(key) for entry in entries for key in entry}
    fixed = {
        key
        for entry in entries
        for key, value in entry.items()
        if policy.get(key) == "reset" and not _is_resettable(value)
    }
    keys = {key: _NOT_RESETTABLE if key in fixed else int(key in known) for key in sorted(policy)}
    return {"optimizer": type(optimizer).__name__, "known": sorted(known), "keys": keys}


def check_keys_of_state(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a key of the policy is found on no rank, or cannot be reset.

    Args:
        rows: what :func:`keys_of_state` has returned on each rank.
    """
    known = {key for row in rows for key in row.get("known", ())}
    for key in rows[0].get("keys", ()) if known else ():  # without any state yet, nothing can be said
        state = max(row["keys"][key] for row in rows)
        if state == _ABSENT:
            raise _no_such_key(key, rows[0]["optimizer"], known)
        if state == _NOT_RESETTABLE:
            raise TypeError(
                f"state {key!r} of {rows[0]['optimizer']} is neither a tensor nor a number, so it has no known initial "
                "value; reset all state with state='reset', or keep this key"
            )


@torch.no_grad()
def reset_state(optimizer: Optimizer, policy: str | Mapping[str, str]) -> None:
    """Set state back to its initial values, in place, where the policy says so."""
    rule = _rule_of(optimizer)
    if policy == "reset" and (rule is None or not rule.surface.eager_state):
        optimizer.state.clear()
    elif policy == "reset" or (isinstance(policy, Mapping) and "reset" in policy.values()):
        by_rule: set[str] = set()
        if rule is not None:
            for group in optimizer.param_groups:
                by_rule.update(slot.key for slot in kept_slots(rule, _hyper(group)))
                _reset_group(rule, optimizer, group, lambda key: _policy(policy, key) == "reset")
        for entry in optimizer.state.values():
            for key in [key for key in entry if key not in by_rule and _policy(policy, key) == "reset"]:
                _fill(entry, key, 0.0)


def _reset_group(rule: Rule, optimizer: Optimizer, group: dict[str, Any], wanted: Callable[[str], bool]) -> None:
    h = _hyper(group)
    kept = kept_slots(rule, h)
    # A rule that treats its first step differently and counts no steps recognizes state that has not begun by a mark.
    tensors = [slot.key for slot in rule.slots(h) if not slot.scalar]
    begins_anew = rule.first_step_differs(h) and all(map(wanted, tensors))
    counts = any(slot.key == "step" for slot in kept)
    slots = [slot for slot in kept if wanted(_plain_key(slot)) or (begins_anew and slot.key == "step")]
    for p in group["params"]:
        entry = optimizer.state.get(p) or {}
        for slot in slots:
            if begins_anew and not isinstance(optimizer, RuleOptimizer):
                entry.pop(slot.key, None)  # torch.optim's way to say so
            elif begins_anew and not counts and isinstance(entry.get(slot.key), Tensor):
                mark_unbegun(entry[slot.key])
                entry[slot.key] = entry[slot.key]  # counted as a change, so that the next step looks at it
            else:
                _fill(entry, slot.key, _initial(slot, h))


def _fill(entry: dict[str, Any], key: str, number: float) -> None:
    value = entry.get(key)
    if isinstance(value, Tensor):
        if number == 0:
            value.zero_()  # also for sparse tensors and for 8-bit codes
        else:
            value.fill_(complex(number, number) if value.is_complex() else number)
        entry[key] = value
    elif value is not None and _is_resettable(value):
        entry[key] = type(value)(number)


def _initial(slot: Slot, h: Values) -> float:
    # State in a dtype of its own starts at zero, and so do 8-bit codes and their scales.
    return 0.0 if slot.dtype is not None else float(slot.initial(h))


def _is_resettable(value: Any) -> bool:
    return value is None or (isinstance(value, (Tensor, int, float)) and not isinstance(value, bool))


def _rule_of(optimizer: Optimizer, *, inherited: bool = True) -> Rule | None:
    """The rule of this optimizer, if it has one.

    Args:
        inherited: also for a subclass of a torch.optim class. It starts its parent's state as its parent does, but it
            may have more.
    """
    for cls in type(optimizer).__mro__ if inherited else [type(optimizer)]:
        with suppress(TypeError):
            return rule_class(cls).rule
    return None


def _hyper(group: dict[str, Any]) -> Values:
    return hyperparameters({**FLAGS, **group})


def _plain_key(slot: Slot) -> str:
    """The rule's own name for a slot: 8-bit state is stored as ``KEY_8bit`` and ``KEY_scale``."""
    if slot.form == "scales":
        return slot.key.removesuffix("_scale")
    return slot.key.removesuffix("_8bit") if slot.form in CODE_DTYPES else slot.key


def _policy(policy: str | Mapping[str, str], key: str) -> str | None:
    return policy.get(key) if isinstance(policy, Mapping) else policy


def _no_such_key(key: str, optimizer: str, known: set[str]) -> ValueError:
    there = f"it has {', '.join(map(repr, sorted(known)))}" if known else "its hyperparameters need none"
    return ValueError(
        f"state[{key!r}] is for optimizer state that {optimizer} does not have: {there}; correct the "
        "key or leave it out"
    )


def _codes(key: str, optimizer: Optimizer) -> TypeError:
    return TypeError(
        f"state {key!r} of {type(optimizer).__name__} is stored as 8-bit codes, which cannot be averaged; keep or "
        "reset it, or use another state_dtype"
    )
