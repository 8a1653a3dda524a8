"""torch.optim's own functions, such as ``torch.optim.rmsprop.rmsprop``, called with a rule's state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from offbeat.rules.rule import Values

#: Where torch's functions take the parts of a pair, the pair's name and the index.
_PARTS = {
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
    "etaminus": ("etas", 0),
    "etaplus": ("etas", 1),
    "step_size_min": ("step_sizes", 0),
    "step_size_max": ("step_sizes", 1),
}


def options_of(function: Callable[..., None], h: Values) -> dict[str, Any]:
    """The keyword arguments of a function, with which it runs its for-loop. It also counts the step.

    Args:
        h: the hyperparameters, as numbers.
    """
    return {"foreach": False} | {name: _option(h, name) for name in arguments(function)[1]}


def is_known(function: Callable[..., None], h: Values) -> bool:
    """Whether the function takes no other options than the rule has. A later release of torch may add some."""
    try:
        options_of(function, h)
    except AttributeError:
        return False
    return True


@functools.cache
def arguments(function: Callable[..., None]) -> tuple[list[str], list[str]]:
    """The keys of the state of which a function takes lists, in order, and the names of its options."""
    keys, options = [], []
    for name, one in list(inspect.signature(function).parameters.items())[2:]:
        if one.kind is one.KEYWORD_ONLY or name in ("maximize", "decoupled_weight_decay"):
            options.append(name)
        elif one.default is one.empty:  # "exp_avgs", "momentum_buffer_list", "state_steps"
            keys.append(name.removeprefix("state_").removesuffix("_list").removesuffix("s"))
    return keys, options


def _option(h: Values, name: str) -> Any:
    pair, index = _PARTS.get(name, (name, None))
    value = getattr(h, pair)
    return value if index is None else value[index]
