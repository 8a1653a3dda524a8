"""Hooks on modules that are not copied with the module."""

from __future__ import annotations

from typing import Any

__all__ = ["ModuleHook"]


class ModuleHook:
    """A hook on a module. Copies of the module, by ``deepcopy`` or ``pickle``, get a hook that does nothing."""

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _get_nothing, ()


def _get_nothing() -> Any:
    return _nothing


def _nothing(*args: Any) -> None:
    """The hook of copies."""
