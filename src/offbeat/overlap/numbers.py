"""Numbers that an optimizer keeps for all its parameters together, such as a step counter in a parameter group.

They are in its groups, in its state under keys that are not parameters, and in its attributes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.optim.optimizers import SGD

__all__ = ["Changes", "Numbers", "UnequalChanges", "differences", "shared_tables"]


class UnequalChanges(TypeError):
    """Buckets of one step have changed the same numbers in different ways."""


class Numbers:
    """Makes every bucket of a step begin with the numbers from before the step.

    One step over all parameters changes such a number once. So each bucket begins with the old numbers, all buckets
    must make the same change, and the step as a whole makes it once.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._after: dict[int, dict[str, Any]] = {}

    @contextmanager
    def bucket(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Run the step of a bucket in this block. The numbers are as before when it ends."""
        tables = shared_tables(self._optimizer)
        before = [dict(table) for table in tables]
        ids = set(map(id, params))
        concerned = [i for i, g in enumerate(self._optimizer.param_groups) if any(id(p) in ids for p in g["params"])]
        for table in tables:
            for key, value in table.items():
                table.write(key, _copied(value))
        try:
            yield
        finally:
            after = [dict(table) for table in shared_tables(self._optimizer)]
            for table, old in zip(shared_tables(self._optimizer), before, strict=True):
                for key in [key for key in table if key not in old]:
                    table.remove(key)
                for key, value in old.items():
                    table.write(key, value)
        for i in [*concerned, len(after) - 2, len(after) - 1]:
            expected = self._after.setdefault(i, after[i])
            if changed := differences(expected, after[i], reads_devices=False):
                raise UnequalChanges(
                    f"{type(self._optimizer).__name__}.step() changes {', '.join(changed)} of the optimizer by the "
                    "gradients that it is given, so buckets do not add up to a step; step after backward, or define "
                    "how to step a bucket with offbeat.register_overlapped"
                )

    def take(self) -> Changes | None:
        """The changes that the buckets since the last call have made; None if there were no buckets."""
        after, self._after = self._after, {}
        return Changes(self._optimizer, after) if after else None


class Changes:
    """The numbers after a step."""

    def __init__(self, optimizer: Optimizer, after: dict[int, dict[str, Any]]) -> None:
        self._optimizer, self._after = optimizer, after

    def write(self) -> None:
        """Give them to the optimizer."""
        tables = shared_tables(self._optimizer)
        last = max(self._after)  # the attributes; groups may have been added since
        for i, numbers in self._after.items():
            table = tables[i if i < last - 1 else i - last - 1]
            for key, value in numbers.items():
                now = table.get(key)
                if isinstance(now, Tensor) and isinstance(value, Tensor):
                    if now is not value:
                        now.copy_(value)
                else:
                    table.write(key, value)


class _Table(dict[str, Any]):
    """A copy of what a dictionary holds for all parameters together, and the way to change it."""

    def __init__(self, home: Any, left_out: Collection[str]) -> None:
        super().__init__((k, v) for k, v in home.items() if not isinstance(k, Tensor) and k not in left_out)
        self._home = home

    def write(self, key: str, value: Any) -> None:
        """Set an entry."""
        self._home[key] = value

    def remove(self, key: str) -> None:
        """Remove an entry."""
        del self._home[key]


def shared_tables(optimizer: Optimizer) -> list[_Table]:
    """What each group holds besides its parameters; then the state of no parameter; last the attributes."""
    own = vars(optimizer)
    methods = {key for key in own if callable(getattr(type(optimizer), key, None))}  # a scheduler wraps step()
    groups = [_Table(group, ("params", "param_names")) for group in optimizer.param_groups]
    return [*groups, _Table(optimizer.state, ()), _Table(own, {*_of_every_optimizer(), *methods})]


def differences(first: dict[str, Any], second: dict[str, Any], *, reads_devices: bool = True) -> list[str]:
    """The keys whose values differ.

    Args:
        reads_devices: whether to compare tensors that are not on the CPU, which waits for the device.
    """
    keys = {**first, **second}
    return [
        repr(key)
        for key in keys
        if key not in first or key not in second or not _same(first[key], second[key], reads_devices)
    ]


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """The names of attributes that every optimizer has, of torch's and of ours."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | frozenset(vars(SGD([torch.zeros(1)])))


def _copied(value: Any) -> Any:
    """A copy of numbers, alone or in plain containers. Everything else stays the same object."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() == 1 else value
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_copied, value))
    return value


def _same(first: Any, second: Any, reads_devices: bool) -> bool:
    if first is second:
        return True
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
            return False
        return not (reads_devices or first.device.type == "cpu") or torch.equal(
            torch.nan_to_num(first), torch.nan_to_num(second)
        )
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key], reads_devices) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second, [reads_devices] * len(first)))
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    return bool(first == second)
