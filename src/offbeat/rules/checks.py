"""Hyperparameters that many rules share, with their checks. Messages start like those of torch.optim."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor

from offbeat.rules.rule import Hyper

__all__ = ["above_zero", "at_least", "betas", "boolean", "eps", "learning_rate", "number", "pair", "weight_decay"]


def require_number(label: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a real number or a tensor of one element."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {label} must be 1-element, but it has shape {tuple(value.shape)}")
    elif not isinstance(value, Real) and (isinstance(value, str) or not hasattr(value, "__float__")):
        raise TypeError(f"Invalid {label}: {value!r} (must be a number, not {type(value).__name__})")


def in_range(
    label: str, low: float = 0.0, below: float | None = None, high: float | None = None
) -> Callable[[Any], None]:
    """A check for ``low <= value`` and, if given, ``value < below`` or ``value <= high``. NaN does not pass."""

    def check(value: Any) -> None:
        require_number("lr" if label == "learning rate" else label.removesuffix(" value"), value)
        ok = low <= value and (below is None or value < below) and (high is None or value <= high)
        if not ok:
            rule = f"at least {low:g}"
            rule += (
                f" and below {below:g}" if below is not None else f" and at most {high:g}" if high is not None else ""
            )
            raise ValueError(f"Invalid {label}: {value} (must be {rule})")

    return check


def number(name: str, default: float, doc: str, *, label: str | None = None, **limits: Any) -> Hyper:
    """A number within limits."""
    return Hyper(name, default, in_range(label or f"{name} value", **limits), doc)


def above_zero(name: str, default: float, doc: str, *, label: str | None = None) -> Hyper:
    """A number greater than 0."""

    def check(value: Any) -> None:
        require_number(name, value)
        if not value > 0.0:
            raise ValueError(f"Invalid {label or name + ' value'}: {value} (must be greater than 0)")

    return Hyper(name, default, check, doc)


def at_least(name: str, default: float, doc: str, *, says: str | None = None, low: float = 0) -> Hyper:
    """A number of at least ``low``, with the message of torch.optim's newer classes, which calls it ``says``."""

    def check(value: Any) -> None:
        require_number(name, value)
        if not low <= value:
            raise ValueError(f"{says or name} should be >= {low:g} but is: {value}")

    return Hyper(name, default, check, doc)


def anything(name: str, default: float, doc: str) -> Hyper:
    """A number without limits, as in torch.optim."""
    return Hyper(name, default, lambda value: require_number(name, value), doc)


def learning_rate(default: float) -> Hyper:
    """The learning rate: a number of at least 0, or a tensor of one element."""
    return number("lr", default, "learning rate, a number or a tensor of one element", label="learning rate")


def eps(default: float) -> Hyper:
    """The term added to a denominator."""
    return number("eps", default, "term added to the denominator for numerical stability", label="epsilon value")


def weight_decay(default: float, doc: str = "weight decay (L2 penalty)") -> Hyper:
    """The weight decay."""
    return number("weight_decay", default, doc)


def boolean(name: str, doc: str, default: bool = False) -> Hyper:
    """A switch."""

    def check(value: Any) -> None:
        if value is None or isinstance(value, str) or not hasattr(value, "__bool__"):
            raise TypeError(f"Invalid {name} value: {value!r} (must be True or False)")

    return Hyper(name, default, check, doc, "bool")


def pair(name: str, value: Any) -> None:
    """Raise unless ``value`` is a sequence of two."""
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != 2:
        raise ValueError(f"Invalid {name}: {value!r} (must be a pair)")


def betas(default: tuple[float, float], doc: str) -> Hyper:
    """Two decay rates in [0, 1)."""

    def check(value: Any) -> None:
        pair("betas", value)
        for i, beta in enumerate(value):
            require_number(f"betas[{i}]", beta)
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {i}: {beta} (must be at least 0 and below 1)")
        if isinstance(value[0], Tensor) != isinstance(value[1], Tensor):
            raise ValueError("betas must be either both floats or both Tensors; convert one of them")

    return Hyper("betas", default, check, doc, "tuple[float | Tensor, float | Tensor]")
