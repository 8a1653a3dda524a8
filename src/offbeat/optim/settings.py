"""A group's options as the tiers take them, worked out once as long as they stay what they are."""

from __future__ import annotations

from numbers import Number
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, dtype

from offbeat.optim.precision import check_precision, kept_slots
from offbeat.rules.rule import FLAGS, PRECISION, Rule, Values

__all__ = ["Settings", "SettingsCache", "has_tensors", "hyperparameters", "kernel_shape", "on_host"]


class Settings(NamedTuple):
    """Hyperparameters, everything about them that decides which kernel runs, and whether some are tensors."""

    h: Values
    shape: tuple[Any, ...]
    has_tensors: bool


def hyperparameters(group: dict[str, Any]) -> Values:
    """A group's options as attributes. Tensors become numbers, unless autograd watches them or they are on a device."""
    h = Values(**{name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")})
    watched = bool(h.differentiable)
    for name, value in vars(h).copy().items():
        if isinstance(value, Tensor) and value.numel() == 1:
            setattr(h, name, _scalar(value, watched))
        elif name == "betas" and any(isinstance(b, Tensor) for b in value):
            setattr(h, name, tuple(_scalar(b, watched) if isinstance(b, Tensor) else b for b in value))
    return h


def _plain(value: Any) -> Any:
    """Lists as tuples, and numbers of any library as Python's."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    if isinstance(value, Number) and not isinstance(value, (int, float, complex)):
        return float(value)  # type: ignore[arg-type]
    return value


def _scalar(value: Tensor, watched: bool) -> Any:
    return value.squeeze() if watched or value.device.type != "cpu" else value.item()


def has_tensors(h: Values) -> bool:
    """Whether a hyperparameter is a tensor."""
    return any(isinstance(value, Tensor) for value in _values(h))


def on_host(h: Values, stand_in: float | None = None) -> Values:
    """The same with numbers for tensors, which waits for the device; or with ``stand_in``, which does not."""
    if not has_tensors(h):
        return h

    def number(value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.item() if stand_in is None else stand_in
        return tuple(map(number, value)) if isinstance(value, tuple) else value

    return Values(**{name: number(value) for name, value in vars(h).items()})


def _values(h: Values) -> list[Any]:
    return [one for value in vars(h).values() for one in (value if isinstance(value, tuple) else (value,))]


def kernel_shape(rule: Rule, h: Values) -> tuple[Any, ...]:
    """Everything about a group that decides which kernel runs."""
    flags = (h.foreach, h.fused, h.differentiable, h.capturable, *(vars(h).get(name) for name in PRECISION))
    return flags, rule.structure(h), [slot.key for slot in kept_slots(rule, h)], has_tensors(h)


class SettingsCache:
    """The settings of groups. They are compared with the live groups every time; nothing goes stale."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._known: dict[int, tuple[dict[str, Any], Settings]] = {}

    def of(self, group: dict[str, Any]) -> Settings:
        """What this group says now."""
        if (known := self._known.get(id(group))) is not None:
            before, settings = known
            # The very same objects, which cannot change in place, say the same; this is quicker than to compare.
            same_names = len(group) == len(before) + 1 + ("param_names" in group) and before.keys() <= group.keys()
            if same_names and all(map(is_, map(group.get, before), before.values())):
                return settings
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        constant = all(map(_is_constant, options.values()))  # a tensor may change in place
        if known is not None and constant and before == options:
            self._known[id(group)] = (options, settings)
            return settings
        check_precision(self._rule, options)
        h = hyperparameters({**FLAGS, **options})
        settings = Settings(h, kernel_shape(self._rule, h), has_tensors(h))
        if constant:
            if len(self._known) > 64:  # groups come and go
                self._known.clear()
            self._known[id(group)] = (options, settings)
        else:
            self._known.pop(id(group), None)
        return settings


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, (bool, int, float, str, type(None), dtype))
