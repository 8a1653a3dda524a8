"""A rule's hyperparameters as the signature and the docstring of an optimizer class."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat._types import Params
from offbeat.engine.precision import precision_options
from offbeat.rules.rule import FLAGS, Rule

__all__ = ["FLAG_DOCS", "OPTION_TYPES", "describe", "make_init", "signature"]

#: The types of options that are not hyperparameters, as annotations.
OPTION_TYPES = {
    "maximize": "bool",
    "foreach": "bool | None",
    "capturable": "bool",
    "differentiable": "bool",
    "fused": "bool | None",
    "state_dtype": 'torch.dtype | Literal["8bit"] | None',
    "rounding": 'Literal["stochastic", "kahan"] | None',
}

#: The meaning of options that are not hyperparameters.
FLAG_DOCS = {
    "maximize": "maximize the objective instead of minimizing it",
    "foreach": "True runs the foreach tier, False the loop tier; None lets the library choose",
    "capturable": "keep step counters and coefficients on the device, so that a step can be captured in a graph",
    "differentiable": "let autograd record the step",
    "state_dtype": (
        "how state is stored: None for the parameter's dtype, torch.float32, torch.bfloat16 (rounded stochastically, "
        "which is unbiased), or '8bit' (blocks of 256 elements share a scale)"
    ),
    "rounding": (
        "how bfloat16 parameters are rounded: None to nearest, 'stochastic' up or down at random, which is unbiased, "
        "'kahan' to nearest with the rounding error kept in a second tensor"
    ),
    "fused": "True runs the fused tier or raises, False never runs it; None lets the library choose",
}


def signature(rule: Rule) -> inspect.Signature:
    """torch.optim's signature: hyperparameters by position or keyword, most flags by keyword only."""
    parameter = inspect.Parameter
    either, keyword = parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY
    only, surface = rule.surface.keyword_only, rule.surface
    parts = [parameter("params", either)]
    parts += [parameter(h.name, either, default=h.default) for h in rule.hyper if h.name not in only]
    parts += [parameter(name, either, default=FLAGS[name]) for name in surface.positional]
    parts += [parameter(name, keyword, default=FLAGS[name]) for name in surface.flags if name not in surface.positional]
    parts += [parameter(h.name, keyword, default=h.default) for h in rule.hyper if h.name in only]
    parts += [parameter(name, keyword, default=None) for name in precision_options(rule)]
    return inspect.Signature(parts)


def make_init(cls: Any, rule: Rule) -> Callable[..., None]:
    """An ``__init__`` with the rule's signature and its types, as tools that make options of arguments read them."""
    types = {hyper.name: hyper.type for hyper in rule.hyper} | OPTION_TYPES | {"params": "Params"}
    known = {"Any": Any, "Literal": Literal, "Params": Params, "Tensor": Tensor, "torch": torch}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super(cls, self).__init__(*args, **kwargs)

    parts = [one.replace(annotation=eval(types[one.name], known)) for one in signature(rule).parameters.values()]
    made: Any = __init__
    made.__signature__ = inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parts], return_annotation=None
    )
    made.__annotations__ = {one.name: one.annotation for one in parts} | {"return": None}
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return made  # type: ignore[no-any-return]


def describe(rule: Rule, cls: type) -> str:
    """The class docstring: that of the rule's function or file, then the arguments and an example."""
    module: Any = sys.modules[rule.update.__module__]
    lines = [inspect.cleandoc(rule.update.__doc__ or module.__doc__ or rule.name), "", "Args:"]
    arguments = ["params: parameters, named parameters, or dictionaries that define groups."]
    arguments += [f"{h.name}: {h.doc} (default: {h.default})." for h in rule.hyper]
    arguments += [f"{name}: {FLAG_DOCS[name]} (default: {FLAGS[name]})." for name in rule.surface.flags]
    arguments += [f"{name}: {FLAG_DOCS[name]} (default: None)." for name in precision_options(rule)]
    lines += [textwrap.fill(argument, 112, initial_indent=" " * 4, subsequent_indent=" " * 8) for argument in arguments]
    lines += ["", "Example:"]
    model, example = rule.surface.example
    library = cls.__module__.startswith("offbeat.")
    lines += [
        "    >>> import torch" + (", offbeat" if library else ""),
        f"    >>> model = {model}",
        f"    >>> optimizer = {'offbeat.' if library else ''}{cls.__name__}(model.parameters(), lr=0.01)",
        f"    >>> model({example}).sum().backward()",
        "    >>> optimizer.step()",
        "    >>> optimizer.zero_grad()",
    ]
    return "\n".join(lines)
