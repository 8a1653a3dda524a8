"""The gradient hook and the averager must warm up together, and here they learn of each other.

Both see the parameters: the hook in DDP's buckets, the averager in its argument. Between a hook that has gone local
and an averager that has not begun, nobody would average anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["check_warmup", "hook_state", "note_hook"]

#: By parameter, a weak reference to the state of the hook that reduces its gradients.
_states: Any = WeakIdKeyDictionary()

#: How often a hook has been noted: what was not found before need not be looked for again.
_noted = 0


def note_hook(state: Any, params: Iterable[Tensor]) -> None:
    """A hook with this state reduces gradients of these parameters."""
    global _noted
    _noted += 1
    me = weakref.ref(state)
    for p in params:
        _states[p] = me


def hook_state(params: Iterable[Any]) -> Any:
    """The state of the hook that reduces these parameters' (or groups') gradients, or None."""
    for one in params:
        for p in one["params"] if isinstance(one, dict) else [one]:
            found = _states.get(p) if isinstance(p, Tensor) else None
            state = found() if found is not None else None
            if state is not None:
                return state
    return None


def check_warmup(averager: Any, params: Iterable[Any], looked: int) -> int:
    """Raise if the hook and the averager do not warm up for the same steps.

    Args:
        looked: what this returned the last time, 0 at first.
    """
    if looked == _noted:
        return looked
    state = hook_state(params)
    if state is None:
        return _noted
    if state.start_localSGD_iter != averager.warmup_steps:
        raise ValueError(
            f"the gradient hook leaves warm-up after {state.start_localSGD_iter} steps (start_localSGD_iter) and the "
            f"averager after {averager.warmup_steps} (warmup_steps): between the two nothing would be averaged, or "
            "both; give them the same number, or use offbeat.LocalSGD, which has one counter"
        )
    if averager.step < averager.warmup_steps and state.iter > averager.step + 1:
        raise RuntimeError(
            f"the gradient hook has counted {state.iter} backward passes and the averager {averager.step + 1} steps: "
            "the hook would leave warm-up first and nothing would be averaged in between; accumulate gradients under "
            "no_sync(), call average_parameters() at every step, or use offbeat.LocalSGD, which has one counter"
        )
    return 0
