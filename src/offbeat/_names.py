"""Misspelt names of options: which one was meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

__all__ = ["ChecksNames", "check_names", "checks_names", "nearest"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def nearest(name: str, known: Iterable[str], least: float = 0.6) -> str | None:
    """The known name that is most like this one, if any is.

    Args:
        least: how alike they must be, from 0 to 1; see :mod:`difflib`.
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=least)
    return found[0] if found else None


#: Options that offbeat had once, and what to do instead.
REMOVED = {
    "undo": "a round changes parameters only once it has succeeded everywhere, so nothing is undone; leave it out",
    "eager": "use delay=, which exchanges in the background and lands the result so many steps later; leave eager out",
}


def check_names(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a name that is not known, and say which one is like it."""
    known = list(known)
    for name in given:
        if name not in known and name in REMOVED:
            raise TypeError(f"{where}() no longer takes {name}: {REMOVED[name]}")
        if name not in known:
            meant = nearest(name, known)
            maybe = "" if meant is None else f"; did you mean {meant!r}?"
            raise TypeError(
                f"{where}() got an unexpected keyword argument {name!r}{maybe} (it takes {', '.join(known)})"
            )


def checks_names(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function suggest a name for a misspelt one. (Python does it by itself from 3.13 on.)"""
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        check_names(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return call


class ChecksNames:
    """A base of classes of this library whose constructor suggests a name for a misspelt one."""

    if not TYPE_CHECKING:  # a type checker looks at __init__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls.__module__.startswith("offbeat."):  # a subclass elsewhere may take what its bases do not
                check_names(cls.__name__, kwargs, _keywords(cls))
            return super().__new__(cls)


@cache
def _keywords(cls: type) -> tuple[str, ...]:
    """The names of arguments, also of those that a class passes on to its bases."""
    found: dict[str, None] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
            # What a base cannot do without, a class passes on by itself.
            found |= {one.name: None for one in named if base is cls or one.default is not one.empty}
            if all(one.kind is not one.VAR_KEYWORD for one in parameters):
                break
    return tuple(found)
