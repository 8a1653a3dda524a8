"""The options of an optimizer's groups, which must not change between ``backward()`` and ``step()``."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from offbeat._torch import version_of

__all__ = ["check_options_unchanged", "options_of"]

Options = list[dict[str, Any]]


def options_of(optimizer: Optimizer) -> Options:
    """The current options of each group; tensors by their version, since they change in place."""
    return [
        {
            key: (id(value), version_of(value)) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def check_options_unchanged(before: Options, optimizer: Optimizer) -> None:
    """Raise if options have changed. New groups are allowed."""
    now = options_of(optimizer)
    if before == now[: len(before)]:
        return
    changed = sorted({key for old, new in zip(before, now, strict=False) for key in new if old.get(key) != new[key]})
    raise RuntimeError(
        f"options of the optimizer ({', '.join(changed) or 'its groups'}) changed between backward() and step(), but "
        "parameters have already been updated with the old ones; change options before backward() or after step()"
    )
