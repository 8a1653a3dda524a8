"""Hooks on modules that stay with the module they were put on."""

from __future__ import annotations

from typing import Any

__all__ = ["ModuleHook"]


class ModuleHook:
    """A hook on a module that a copy of the module, pickled or not, does not have."""

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _get_nothing, ()


def _get_nothing() -> Any:
    return _nothing


def _nothing(*args: Any) -> None:
    """What copies get."""
