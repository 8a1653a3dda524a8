"""Checks that the communication hook and the averager have the same warm-up.

They find each other by their parameters: the hook sees them in DDP's buckets, the averager in its argument. If the hook
left warm-up before the averager, neither gradients nor parameters would be averaged in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from offbeat import _torch

__all__ = ["check_warmup", "hook_state", "note_hook"]

#: For each parameter a weak reference to the state of the hook that reduces its gradient.
_states: Any = _torch.weak_table()

#: How often hooks have been registered; as long as it is the same, no new hook can be found.
_noted = 0


def note_hook(state: Any, params: Iterable[Tensor]) -> None:
    """Register the state of the hook that reduces the gradients of these parameters."""
    global _noted
    _torch.require("warmup")
    _noted += 1
    me = weakref.ref(state)
    for p in params:
        _states[p] = me


def hook_state(params: Iterable[Any]) -> Any:
    """The state of the hook that reduces the gradients of these parameters or parameter groups, or None."""
    for one in params:
        for p in one["params"] if isinstance(one, dict) else [one]:
            found = _states.get(p) if isinstance(p, Tensor) else None
            state = found() if found is not None else None
            if state is not None:
                return state
    return None


def check_warmup(averager: Any, params: Iterable[Any], looked: int) -> int:
    """Raise if the hook and the averager do not have the same warm-up.

    Args:
        looked: what the last call returned; 0 at first.
    """
    if looked == _noted:
        return looked
    state = hook_state(params)
    if state is None:
        return _noted
    if state.start_localSGD_iter != averager.warmup_steps:
        raise ValueError(
            f"the communication hook leaves warm-up after {state.start_localSGD_iter} steps (start_localSGD_iter), but "
            f"the averager after {averager.warmup_steps} (warmup_steps), so that in between nothing or both would be "
            "averaged; use the same number, or offbeat.LocalSGD, which has one counter"
        )
    if averager.step < averager.warmup_steps and state.iter > averager.step + 1:
        raise RuntimeError(
            f"the communication hook has counted {state.iter} backward passes, but the averager {averager.step + 1} "
            "steps, so that the hook would leave warm-up first and nothing would be averaged in between; accumulate "
            "gradients under no_sync(), call average_parameters() at every step, or use offbeat.LocalSGD, which has "
            "one counter"
        )
    return 0
