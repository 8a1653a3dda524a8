"""A group's options as the tiers take them, worked out once as long as they stay what they are."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from offbeat.rules.rule import FLAGS, Rule, Values

__all__ = ["Settings", "SettingsCache", "hyperparameters", "kernel_shape"]


class Settings(NamedTuple):
    """Hyperparameters, and everything about them that decides which kernel runs."""

    h: Values
    shape: tuple[Any, ...]


def hyperparameters(group: dict[str, Any]) -> Values:
    """A group's options as attributes. Tensors become numbers unless the step must not leave the device."""
    h = Values(**group)
    symbolic = h.differentiable or h.capturable
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            setattr(h, name, value.squeeze() if symbolic else value.item())
        elif name == "betas" and any(isinstance(b, Tensor) for b in value):
            setattr(h, name, tuple(b.squeeze() if symbolic else b.item() for b in value))
    return h


def kernel_shape(rule: Rule, h: Values) -> tuple[Any, ...]:
    """Everything about a group that decides which kernel runs."""
    flags = (h.foreach, h.fused, h.differentiable, h.capturable)
    return flags, rule.structure(h), [slot.key for slot in rule.slots(h)]


class SettingsCache:
    """The settings of groups. They are compared with the live groups every time; nothing goes stale."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._known: dict[int, tuple[dict[str, Any], Settings]] = {}

    def of(self, group: dict[str, Any]) -> Settings:
        """What this group says now."""
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        known = self._known.get(id(group))
        if known is not None and known[0] == options:
            return known[1]
        h = hyperparameters({**FLAGS, **options})
        settings = Settings(h, kernel_shape(self._rule, h))
        if all(map(_is_constant, options.values())):  # a tensor may change in place
            if len(self._known) > 64:  # groups come and go
                self._known.clear()
            self._known[id(group)] = (options, settings)
        else:
            self._known.pop(id(group), None)
        return settings


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, (bool, int, float, str, type(None)))
