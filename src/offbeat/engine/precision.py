"""Parameters and state in fewer bits: the options, and the state that they lead to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offbeat.engine.eight_bit import CODE_DTYPES, decode_exactly, encode, scales_for
from offbeat.engine.first_step import is_before_first_step
from offbeat.engine.gradients import shard_like
from offbeat.engine.tensors import distributed_like, is_dense, is_dtensor, local, match_layout, same_layout
from offbeat.rules.rule import Rule, Slot, Values

EIGHT = "8bit"
_ROUNDINGS = (None, "stochastic", "kahan")
_STATES = (None, torch.float32, torch.bfloat16, EIGHT)


def precision_options(rule: Rule) -> tuple[str, ...]:
    """The options a rule takes."""
    if not rule.surface.precision:
        return ()
    return ("state_dtype", "rounding") if rule.compact else ("rounding",)


def check_precision(rule: Rule, options: Mapping[str, Any]) -> None:
    """Raise if an option has an invalid value, or if the options exclude each other."""
    state, rounding = options.get("state_dtype"), options.get("rounding")
    if rounding not in _ROUNDINGS:
        raise ValueError(f"rounding must be None, 'stochastic' or 'kahan', but got {rounding!r}")
    if state not in _STATES:
        raise ValueError(f"state_dtype must be None, torch.float32, torch.bfloat16 or '8bit', but got {state!r}")
    if rounding is not None and not rule.surface.precision:
        raise ValueError(f"rounding={rounding!r} is not possible for {rule.name}; leave rounding out")
    if state is not None and not rule.compact:
        raise ValueError(
            f"state_dtype={state!r} is not possible for {rule.name}, which keeps its state in the parameter's dtype; "
            "leave state_dtype out"
        )
    if (state or rounding) and options.get("differentiable"):
        raise ValueError("differentiable=True needs full precision; leave state_dtype and rounding out")


def is_compact(h: Values) -> bool:
    """Return whether state or parameters are stored in a compact form."""
    return vars(h).get("state_dtype") is not None or vars(h).get("rounding") is not None


def kept_slots(rule: Rule, h: Values) -> tuple[Slot, ...]:
    """The state that is stored for a parameter: scalars, state tensors, rounding errors, then scales."""
    slots = rule.slots(h)
    if not is_compact(h):
        return slots
    state, rounding = vars(h).get("state_dtype"), vars(h).get("rounding")
    scalars = [slot for slot in slots if slot.scalar]
    if (rounding or state in (torch.bfloat16, EIGHT)) and not any(slot.key == "step" for slot in scalars):
        # Random bits must differ between steps, and be the same when a step is repeated.
        scalars.append(Slot("step", scalar=True))
    tensors, scales = [], []
    for slot in slots:
        if slot.scalar:
            continue
        if state == EIGHT:
            form = "unsigned8" if slot.positive else "signed8"
            # With other names, because torch.optim would read the codes as numbers.
            tensors.append(replace(slot, key=f"{slot.key}_8bit", form=form, dtype=CODE_DTYPES[form]))
            scales.append(Slot(f"{slot.key}_scale", scalar=False, form="scales", dtype=torch.float32))
        elif state == torch.bfloat16:
            tensors.append(replace(slot, form="stochastic", dtype=state))
        else:
            tensors.append(replace(slot, dtype=state))
    if rounding == "kahan":
        tensors.append(Slot("compensation", form="compensation"))
    return (*scalars, *tensors, *scales)


def formats(h: Values, slots: Sequence[Slot]) -> tuple[str, ...]:
    """The forms in which p, g and the rule's state tensors are stored; empty if all are plain."""
    if not is_compact(h):
        return ()
    state = [slot.form for slot in slots if not slot.scalar and slot.form not in ("compensation", "scales")]
    forms = (vars(h).get("rounding") or "plain", "plain", *state)
    return forms if any(form != "plain" for form in forms) else ()


def check_compact(h: Values, p: Tensor, sparse: bool) -> None:
    """Raise if the options for storage do not fit a parameter."""
    rounding = vars(h).get("rounding")
    if rounding is not None and p.dtype != torch.bfloat16:
        raise RuntimeError(
            f"rounding={rounding!r} needs bfloat16 parameters, but got one of {p.dtype}; leave rounding out for its "
            "group"
        )
    if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise RuntimeError(
            f"state_dtype needs parameters of float32 or half precision, but got one of {p.dtype}; leave state_dtype "
            "out for its group"
        )
    if sparse:
        raise RuntimeError("sparse gradients need full precision; leave state_dtype and rounding out for their group")


def converted(entry: Mapping[str, Any], p: Tensor, slots: Sequence[Slot], was: Any, now: Any) -> dict[str, Any]:
    """A saved entry, converted to the forms of these slots.

    Args:
        was: ``state_dtype`` of the optimizer that saved it.
        now: ``state_dtype`` of this one.
    """
    if is_dtensor(p) and any(key.endswith("_8bit") and not is_dtensor(value) for key, value in entry.items()):
        raise ValueError(
            "the loaded state dict has 8-bit state of a whole parameter, but the parameter is a DTensor, and blocks of "
            "8-bit codes cannot be sharded; load it into an optimizer of the whole model without state_dtype, and "
            "shard the state dict of that optimizer"
        )
    wanted = [slot.key for slot in slots]
    there = [entry[slot.key] for slot in slots if slot.form in CODE_DTYPES and slot.key in entry]
    placed = all(isinstance(t, Tensor) and is_dense(local(t)) and same_layout(local(t), local(p)) for t in there)
    if was == now and placed and all(key in entry or key == "compensation" for key in wanted):
        return {key: value for key, value in entry.items() if key != "compensation" or key in wanted}
    new: dict[str, Any] = {}
    numbers = {key: value for key, value in in_numbers(entry).items() if value is not None}
    bases = {slot.key.removesuffix("_8bit") for slot in slots if not slot.scalar}
    if any(base in entry and entry[base] is None for base in bases) and not bases & numbers.keys():
        return {}  # old versions of SGD save None before the first step
    for slot in slots:
        base = slot.key.removesuffix("_8bit")
        if slot.scalar and slot.key == "step" and "step" not in numbers:
            # Marked state has not seen a step. All shards have the mark, so all ranks decide in the same way.
            new["step"] = 0.0 if all(_is_mark(value) for key, value in numbers.items() if key in bases) else 1.0
        elif slot.form in CODE_DTYPES and base in numbers:
            x = shard_like(base, numbers[base], p)
            codes = torch.empty_like(p, dtype=slot.dtype, memory_format=torch.preserve_format, requires_grad=False)
            scales = torch.empty(scales_for(x.numel()), dtype=torch.float32, device=x.device)
            encode(match_layout(x, local(codes)), local(codes), scales, slot.form)
            new |= {slot.key: codes, f"{base}_scale": scales}
        elif slot.key in numbers and slot.form != "scales":
            value = numbers[slot.key]
            if not slot.scalar and isinstance(value, Tensor) and (was is not None or slot.dtype is not None):
                value = value.to(slot.dtype or p.dtype)
            new[slot.key] = value
    known = {*wanted, *new, *bases, "compensation", "step"}
    return new | {key: value for key, value in numbers.items() if key not in known}


def _is_mark(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and is_before_first_step(value)


def is_stored_otherwise(entry: Mapping[str, Any], slots: Sequence[Slot]) -> bool:
    """Return whether state is not stored as these slots require, because the options of a live group have changed."""
    wants_codes = any(slot.form in CODE_DTYPES for slot in slots)
    if wants_codes != any(key.endswith("_8bit") for key in entry):
        return any(slot.key.removesuffix("_8bit") in _bases(entry) for slot in slots if not slot.scalar)
    if "compensation" in entry and all(slot.key != "compensation" for slot in slots):
        return True
    for slot in slots:
        value = entry.get(slot.key)
        if slot.dtype is not None and isinstance(value, Tensor) and value.dtype != slot.dtype:
            return True
        if slot.scalar and slot.key == "step" and value is None and any(s.dtype is not None for s in slots):
            return True
    return False


def _bases(entry: Mapping[str, Any]) -> set[str]:
    return {key.removesuffix("_8bit") for key in entry}


def in_numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with 8-bit codes replaced by the numbers they stand for."""
    numbers: dict[str, Any] = {}
    for key, value in entry.items():
        base = key.removesuffix("_8bit").removesuffix("_scale")
        if key.endswith("_8bit") and isinstance(value, Tensor):
            kind = "signed8" if value.dtype == torch.int8 else "unsigned8"
            x = decode_exactly(local(value), entry[f"{base}_scale"], kind)
            numbers[base] = x if local(value) is value else distributed_like(value, x)
        elif not (key.endswith("_scale") and f"{base}_8bit" in entry):
            numbers[key] = value
    return numbers
