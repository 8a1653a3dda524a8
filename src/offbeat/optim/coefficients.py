"""Coefficients worked out on a device: by a kernel made from the rule's own functions, or by torch's operators."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.optim.scalars import Scalars
from offbeat.rules.ops import where
from offbeat.rules.rule import Rule, Slot, Values
from offbeat.tiers.number_source import number_source
from offbeat.tiers.numbers import NotTraceable, Number, trace_numbers
from offbeat.tiers.triton_kernel import NumberKernel

__all__ = ["DeviceNumbers", "device_rows"]


@dataclass(frozen=True)
class DeviceNumbers:
    """The kernel that works out a rule's coefficients, and the hyperparameters it takes.

    Those are inputs if the rule's functions can be traced with all of them; if they branch on one, all but the learning
    rate and tensors are fixed, and a change of them needs another kernel.
    """

    kernel: NumberKernel
    _numbers: tuple[str, ...]  # inputs from the host
    _tensors: tuple[str, ...]  # inputs from tensors
    _kinds: tuple[torch.dtype, ...]  # of these tensors
    _fixed: dict[str, Any]

    @staticmethod
    def make(
        rule: Rule,
        h: Values,
        slots: Sequence[Slot],
        counters: Sequence[Scalars],
        fresh: bool,
        names: tuple[str, ...],
        compute: torch.dtype,
        columns: int,
    ) -> DeviceNumbers | None:
        """For the coefficients ``names``, or None if the rule's functions cannot be traced at all."""
        values = _hyper(rule, h)
        stored = {f"s.{s.key}": c.tensors[0].dtype for s, c in zip(_scalars(slots), counters, strict=True)}
        if not all(dtype in (torch.float32, torch.float64) for dtype in stored.values()):
            return None
        needed = [name for name, value in values.items() if name == "lr" or isinstance(value, Tensor)]
        for inputs in (list(values), needed):
            work_out = functools.partial(_work_out, rule, h, slots, stored, fresh, tuple(inputs))
            try:
                program = trace_numbers((*stored, *inputs), work_out)
            except NotTraceable:
                continue
            tensors = {name: values[name].dtype for name in inputs if isinstance(values[name], Tensor)}
            source = functools.partial(
                number_source, program, tuple(stored.items()), tuple(tensors.items()), names, compute, columns
            )
            kernel = NumberKernel(source, compute, tuple(tensors.values()))
            numbers = tuple(name for name in inputs if name not in tensors)
            fixed = {name: value for name, value in _everything(rule, h).items() if name not in inputs}
            return DeviceNumbers(kernel, numbers, tuple(tensors), tuple(tensors.values()), fixed)
        return None

    def fits(self, h: Values) -> bool:
        """Whether the kernel is right for these hyperparameters."""
        if any(isinstance(_get(h, name), Tensor) for name in self._numbers):
            return False
        if any(isinstance(now := _get(h, name), Tensor) or now != value for name, value in self._fixed.items()):
            return False
        found = [_get(h, name) for name in self._tensors]
        return all(isinstance(t, Tensor) and t.dtype == k for t, k in zip(found, self._kinds, strict=True))

    def tail(self, h: Values) -> array[float]:
        """The inputs from the host."""
        return array("d", [_get(h, name) for name in self._numbers])

    def tensors(self, h: Values, device: torch.device) -> list[Tensor]:
        """The inputs from tensors."""
        return [_get(h, name).to(device) for name in self._tensors]


def _scalars(slots: Sequence[Slot]) -> list[Slot]:
    return [slot for slot in slots if slot.scalar]


def _hyper(rule: Rule, h: Values) -> dict[str, Any]:
    """All hyperparameters that are numbers."""
    return {
        name: value
        for name, value in _everything(rule, h).items()
        if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)
    }


def _everything(rule: Rule, h: Values) -> dict[str, Any]:
    """All hyperparameters, those in tuples by name and position (``betas.0``)."""
    found: dict[str, Any] = {}
    for hyper in rule.hyper:
        value = getattr(h, hyper.name)
        if isinstance(value, tuple):
            found |= {f"{hyper.name}.{i}": part for i, part in enumerate(value)}
        else:
            found[hyper.name] = value
    return found


def _get(h: Values, name: str) -> Any:
    name, _, position = name.partition(".")
    value = getattr(h, name)
    return value[int(position)] if position else value


def _with_inputs(h: Values, inputs: Sequence[str], given: Mapping[str, Number]) -> Values:
    changed = dict(vars(h))
    for name in inputs:
        base, _, position = name.partition(".")
        if position:
            parts = list(changed[base])
            parts[int(position)] = given[name]
            changed[base] = tuple(parts)
        else:
            changed[base] = given[name]
    return Values(**changed)


def _work_out(
    rule: Rule,
    h: Values,
    slots: Sequence[Slot],
    stored: Mapping[str, torch.dtype],
    fresh: bool,
    inputs: tuple[str, ...],
    given: Mapping[str, Number],
) -> dict[str, Any]:
    """Coefficients, and stored numbers after the step, from symbolic ones before it."""
    h = _with_inputs(h, inputs, given)
    first: Any = given["s.step"] < 0.5 if "s.step" in stored else None
    kept: dict[str, Any] = {}
    for slot in _scalars(slots):
        kind, value = stored[f"s.{slot.key}"], given[f"s.{slot.key}"]
        late = slot.late and first is not None
        kept[slot.key] = _as_tensor(where(first, _rounded(slot.initial(h), kind), value) if late else value, kind)
    s = Values(step=1.0 if fresh else 2.0)
    s.set(**kept)
    if first is not None:
        s.set(step=given["s.step"] + 1)
    advanced = {key: _rounded(value, stored[f"s.{key}"]) for key, value in rule.advance(h, s).items()}
    # Coefficients are worked out in double precision.
    s.set(**{key: value.widened() for key, value in kept.items() if key != "step"})
    if rule.advance_first:
        s.set(**{key: value.widened() if isinstance(value, Number) else value for key, value in advanced.items()})
    found = dict(rule.coefficients(h, s))
    if first is not None:
        found |= {"first": where(first, 1.0, 0.0), "s.step": s.step, "rounding_step": s.step}
    found |= {f"initial_{slot.key}": slot.initial(h) for slot in slots if slot.late}
    return found | {f"s.{key}": value for key, value in advanced.items()}


def _as_tensor(value: Number, dtype: torch.dtype) -> Number:
    """A stored number as what it is: with a float32 tensor arithmetic is in float32."""
    return value if dtype == torch.float64 else value.narrowed()


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """Stored numbers round as they are stored."""
    if dtype == torch.float64:
        return value
    return value.narrowed() if isinstance(value, Number) else torch.tensor(value, dtype=dtype).item()


@torch.no_grad()
def device_rows(
    rule: Rule,
    h: Values,
    slots: Sequence[Slot],
    counters: Sequence[Scalars],
    fresh: bool,
    names: Sequence[str],
    rows: Tensor,
    active: Tensor | None = None,
) -> None:
    """Write coefficients to ``rows``, one for each parameter, and move counters on, with torch's operators.

    Args:
        fresh: whether parameters are at their first step, for rules that do not count.
        names: the coefficients, in order.
        active: whose counters move on, as a tensor of booleans (None: all).
    """
    wide = torch.float64
    scalars = _scalars(slots)
    old = {slot.key: c.vector() for slot, c in zip(scalars, counters, strict=True)}
    here = {key: values.to(rows.device, wide) for key, values in old.items()}
    first = here["step"] == 0 if "step" in here else None
    for slot in scalars:
        if slot.late and first is not None:
            initial = torch.as_tensor(slot.initial(h), device=rows.device).to(old[slot.key].dtype).to(wide)
            here[slot.key] = torch.where(first, initial, here[slot.key])
    s = Values(step=1.0 if fresh else 2.0)
    s.set(**here)
    if "step" in here:
        s.set(step=here["step"] + 1)
    advanced = {key: _as_stored(value, old[key], wide) for key, value in rule.advance(h, s).items()}
    if rule.advance_first:
        s.set(**advanced)
    found = dict(rule.coefficients(h, s))
    if first is not None:
        found |= {"first": first, "rounding_step": s.step}
    found |= {f"initial_{slot.key}": slot.initial(h) for slot in slots if slot.late}
    for i, name in enumerate(names):
        rows[:, i] = found[name]
    if "step" in here:
        advanced["step"] = s.step
    for slot, counter in zip(scalars, counters, strict=True):
        if slot.key in advanced:
            new = advanced[slot.key].to(old[slot.key])
            counter.assign(new if active is None else torch.where(active.to(new.device), new, old[slot.key]))


def _as_stored(value: Any, stored: Tensor, wide: torch.dtype) -> Tensor:
    found: Tensor = torch.as_tensor(value, device=stored.device)
    return found.to(stored.dtype).to(wide).expand(stored.shape)
