"""What averaging does to a module's buffers: average, broadcast or keep them."""

from __future__ import annotations

from typing import Any, get_args

import torch

from offbeat._torch import persistent_buffers
from offbeat.sync.items import FIRST, MEAN, Item
from offbeat.sync.options import Buffers

__all__ = ["buffer_items", "check_buffers"]

BUFFERS: tuple[str, ...] = get_args(Buffers)


def check_buffers(buffers: str) -> None:
    """Raise if this is not a policy for buffers."""
    if buffers not in BUFFERS:
        raise ValueError(f"buffers must be one of {', '.join(map(repr, BUFFERS))}, but got {buffers!r}")


def buffer_items(module: torch.nn.Module, policy: str, skip: Any = ()) -> list[Item]:
    """The module's persistent buffers to exchange. Integer buffers take the first rank's value."""
    if policy == "keep":
        return []
    items, seen = [], set()
    for prefix, part in module.named_modules():
        for key, buffer in persistent_buffers(part):
            name = f"{prefix}.{key}" if prefix else key
            if name in skip or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            number = buffer.is_floating_point() or buffer.is_complex()
            how = MEAN if policy == "average" and number else FIRST
            # num_batches_tracked keeps counting during a delayed average, so the difference is added to it.
            items.append(Item(f"buffer {name!r}", buffer, how, late=key == "num_batches_tracked"))
    return items
