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
from offbeat.rules.rule import FLAGS, Rule, Slot, Values
from offbeat.sync.items import Item
from offbeat.sync.options import State
from offbeat.wire.peers import Peers

__all__ = ["FoundKeys", "check_state", "reset_state", "state_items"]

STATES: tuple[str, ...] = get_args(State)

#: What :class:`FoundKeys` reports for a key of the policy.
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
            raise _no_such_key(key, optimizer, known)
    for slot in slots:
        if slot.form in CODE_DTYPES and _policy(state, _plain_key(slot)) == "average":
            raise _codes(_plain_key(slot), optimizer)


def state_items(optimizer: Optimizer, policy: str | Mapping[str, str], params: Mapping[str, Tensor]) -> list[Item]:
    """The optimizer state to average, for these parameters by name.

    Step counters belong to each rank: ``"average"`` for all state leaves 0-d tensors and Python numbers as they are.
    """
    if policy != "average" and not (isinstance(policy, Mapping) and "average" in policy.values()):
        return []
    begin = getattr(optimizer, "init_state", None)
    if begin is not None:
        begin()  # state must not depend on which gradients this rank has seen
    items = []
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
            if value.dim() == 0 and not isinstance(policy, Mapping):
                continue
            items.append(Item(f"state {key!r} of {name}", value))
    return items


class FoundKeys:
    """Which keys of the policy this rank's optimizer state has, for optimizers without a known rule.

    Ranks exchange :attr:`columns` before an average, so that a misspelt key raises on all of them, also where one rank
    has no state yet.
    """

    def __init__(self, optimizer: Optimizer, policy: str | Mapping[str, str]) -> None:
        self._optimizer = optimizer
        self._keys: list[str] = []
        self._known: set[str] = set()
        self.columns: list[int] = []
        if not isinstance(policy, Mapping) or _rule_of(optimizer, inherited=False) is not None:
            return
        entries = [entry for entry in optimizer.state.values() if isinstance(entry, dict)]
        self._known = {key for entry in entries for key in entry}
        self._keys = sorted(policy)
        fixed = {
            key
            for entry in entries
            for key, value in entry.items()
            if policy.get(key) == "reset" and not _is_resettable(value)
        }
        found = [_NOT_RESETTABLE if key in fixed else int(key in self._known) for key in self._keys]
        self.columns = [int(bool(self._known)), *found]

    def check(self, columns: Sequence[int], peers: Peers) -> None:
        """Raise the same error on every rank if a key is found nowhere, or cannot be reset.

        Args:
            columns: the largest value on any rank, for each of :attr:`columns`.
        """
        if not columns or not columns[0]:  # no rank has state yet
            return
        for key, found in zip(self._keys, columns[1:], strict=True):
            if found == _ABSENT:
                everyone = peers.gather_objects(self._known)
                raise _no_such_key(key, self._optimizer, set().union(*everyone))
            if found == _NOT_RESETTABLE:
                raise TypeError(
                    f"state {key!r} of {type(self._optimizer).__name__} is neither a tensor nor a number, so it has no "
                    "known initial value; reset all state with state='reset', or keep this key"
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


def _no_such_key(key: str, optimizer: Optimizer, known: set[str]) -> ValueError:
    there = f"it has {', '.join(map(repr, sorted(known)))}" if known else "its hyperparameters need none"
    return ValueError(
        f"state[{key!r}] is for optimizer state that {type(optimizer).__name__} does not have: {there}; correct the "
        "key or leave it out"
    )


def _codes(key: str, optimizer: Optimizer) -> TypeError:
    return TypeError(
        f"state {key!r} of {type(optimizer).__name__} is stored as 8-bit codes, which cannot be averaged; keep or "
        "reset it, or use another state_dtype"
    )
