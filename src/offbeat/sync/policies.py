"""What happens to optimizer state and to module buffers when replicas are averaged."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.sync.items import FIRST, MEAN, Item

__all__ = ["BUFFERS", "STATES", "buffer_items", "check_buffers", "check_state", "reset_state", "state_items"]

STATES = ("keep", "average", "reset")
BUFFERS = ("average", "broadcast", "keep")

#: State that does not begin at zero, so that one key of it cannot be reset without its rule.
_NOT_ZERO = ("sum", "step_size", "eta", "mu", "ax", "mu_product")


def check_state(state: str | Mapping[str, str], delay: int) -> None:
    """Raise if this is not a policy for optimizer state."""
    policies = dict(state) if isinstance(state, Mapping) else {"": state}
    for key, policy in policies.items():
        where = f"state[{key!r}]" if key else "state"
        if policy not in STATES:
            raise ValueError(f"{where} must be one of {', '.join(map(repr, STATES))}, but got {policy!r}")
        if policy == "average" and delay:
            raise ValueError(
                f"{where}='average' and delay={delay} do not go together: a difference that arrives late can make a "
                "second moment negative; use delay=0, or keep or reset the state"
            )
        if policy == "reset" and key in _NOT_ZERO:
            raise ValueError(f"{where}='reset' is not known to begin at zero; reset the whole state with state='reset'")


def check_buffers(buffers: str) -> None:
    """Raise if this is not a policy for buffers."""
    if buffers not in BUFFERS:
        raise ValueError(f"buffers must be one of {', '.join(map(repr, BUFFERS))}, but got {buffers!r}")


def state_items(optimizer: Optimizer, policy: str | Mapping[str, str], params: Mapping[str, Tensor]) -> list[Item]:
    """The optimizer state to average, of these parameters by name.

    A number of steps is a rank's own and no one's mean: ``"average"`` for all state leaves 0-d tensors and plain
    numbers alone.
    """
    if policy != "average" and not (isinstance(policy, Mapping) and "average" in policy.values()):
        return []
    begin = getattr(optimizer, "init_state", None)
    if begin is not None:
        begin()  # state must not depend on which gradients this rank has seen
    items = []
    if isinstance(policy, Mapping) and optimizer.state:
        known = {key for entry in optimizer.state.values() for key in entry}
        for key in policy.keys() - known:
            warnings.warn(
                f"state[{key!r}] says what to do with state that {type(optimizer).__name__} does not have; it has "
                f"{', '.join(map(repr, sorted(known)))}",
                stacklevel=2,
            )
    for name, p in params.items():
        for key, value in sorted(optimizer.state.get(p, {}).items()):
            wanted = policy.get(key) == "average" if isinstance(policy, Mapping) else True
            if not wanted or value is None:
                continue
            if key.endswith("_8bit"):
                raise TypeError(
                    f"state {key!r} of {type(optimizer).__name__} holds codes, and their mean means nothing; use "
                    "state='keep' or 'reset', or a state_dtype that holds numbers"
                )
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


@torch.no_grad()
def reset_state(optimizer: Optimizer, policy: str | Mapping[str, str]) -> None:
    """Begin state anew where the policy says so."""
    if policy == "reset":
        optimizer.state.clear()
    elif isinstance(policy, Mapping):
        keys = [key for key, value in policy.items() if value == "reset"]
        for entry in optimizer.state.values():
            for key in keys:
                value = entry.get(key)
                if isinstance(value, Tensor):
                    value.zero_()
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    entry[key] = type(value)(0)


def buffer_items(module: torch.nn.Module, policy: str, skip: Any = ()) -> list[Item]:
    """The module's persistent buffers to exchange; whole numbers (a count of batches) become the first rank's."""
    if policy == "keep":
        return []
    items, seen = [], set()
    for prefix, part in module.named_modules():
        for key, buffer in part._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if buffer is None or key in part._non_persistent_buffers_set or name in skip or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            number = buffer.is_floating_point() or buffer.is_complex()
            how = MEAN if policy == "average" and number else FIRST
            # A number of batches goes on counting while an average is under way; a flag or a place does not.
            items.append(Item(f"buffer {name!r}", buffer, how, late=key == "num_batches_tracked"))
    return items
