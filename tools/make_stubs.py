"""Writes ``src/offbeat/optim/optimizers.pyi``: the optimizer classes as type checkers and editors see them.

Signatures and docstrings of these classes are made from their rules when Python runs. Type checkers do not run Python.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

from offbeat.optim import optimizers
from offbeat.optim.base import RuleOptimizer
from offbeat.optim.signature import OPTION_TYPES

STUB = Path(optimizers.__file__).with_suffix(".pyi")

HEAD = '''"""{doc}"""

# Written by tools/make_stubs.py from the rules. Change those, and run it again.

from typing import Literal

import torch
from torch import Tensor

from offbeat._types import Params
from offbeat.optim.base import RuleOptimizer

__all__ = [
{names}
]
'''


def stub() -> str:
    """The whole file."""
    names = "\n".join(f'    "{name}",' for name in optimizers.__all__)
    classes = [getattr(optimizers, name) for name in optimizers.__all__]
    classes.sort(key=lambda cls: inspect.getsourcelines(cls)[1])
    return HEAD.format(doc=optimizers.__doc__, names=names) + "".join(map(_class, classes))


def _class(cls: type[RuleOptimizer]) -> str:
    types = {hyper.name: hyper.type for hyper in cls.rule.hyper} | OPTION_TYPES | {"params": "Params"}
    parts, star = ["    self,"], False
    for one in inspect.signature(cls).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not star:
            parts.append("    *,")
            star = True
        default = "" if one.default is one.empty else f" = {one.default!r}"
        parts.append(f"    {one.name}: {types[one.name]}{default},")
    init = "\n".join(["def __init__(", *parts, ") -> None: ..."])
    # Its own only: torch sets step() on the class when the first optimizer is made.
    own = [made for name, made in vars(cls).items() if getattr(made, "__qualname__", "") == f"{cls.__name__}.{name}"]
    methods = [_method(made) for made in own if not made.__name__.startswith("_")]
    body = "\n".join([_docstring(cls), "", init, *methods])
    (base,) = cls.__bases__
    return f"\nclass {cls.__name__}({base.__name__}):\n{textwrap.indent(body, '    ')}\n"


def _method(function: Any) -> str:
    signature = str(inspect.signature(function)).replace("'", "")
    return f"def {function.__name__}{signature}:\n{textwrap.indent(_docstring(function), '    ')}"


def _docstring(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    prefix = "r" if "\\" in text else ""
    return f'{prefix}"""{text}{chr(10) if chr(10) in text else ""}"""'


if __name__ == "__main__":
    STUB.write_text(stub())
