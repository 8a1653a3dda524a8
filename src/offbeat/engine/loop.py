"""The loop tier: calls the rule's own function on the tensors of one parameter after the other.

The other tiers are tested against it. It accepts tensors that they do not, and autograd can differentiate through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from offbeat.engine.eight_bit import decode, encode, round_stochastically, scaled_columns
from offbeat.engine.tensors import compute_dtype, cut, match_layout
from offbeat.rules.rule import Rule

#: Elements computed at once, which bounds the size of temporaries.
CHUNK = 1 << 16


def run_loop(
    rule: Rule,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    scalars: Mapping[str, Any],
    *,
    differentiable: bool = False,
) -> None:
    """Update one parameter in place.

    Args:
        names: the names of the tensors.
        tensors: p, g and the state.
        scalars: coefficients and structure.
        differentiable: whether autograd records the update.
    """
    if differentiable:
        # Autograd saves the inputs, and the originals are overwritten below.
        inputs = [tensors[0].clone(), tensors[1], *(t.clone() for t in tensors[2:])]
        _write([tensors[0], *tensors[2:]], evaluate(rule, names, inputs, scalars))
        return
    small = tensors[0].numel() <= 2 * CHUNK
    for piece in [tensors] if small else cut(tensors, CHUNK):
        _write([piece[0], *piece[2:]], evaluate(rule, names, piece, scalars))


def evaluate(
    rule: Rule, names: Sequence[str], tensors: Sequence[Tensor], scalars: Mapping[str, Any]
) -> Sequence[Tensor]:
    """The new parameter and state, in the dtype in which they are computed. Changes nothing."""
    compute = compute_dtype(t.dtype for t in tensors)
    inputs = {name: t if t.dtype == compute else t.to(compute) for name, t in zip(names, tensors, strict=True)}
    return rule.apply(inputs, scalars)


def run_compact(
    rule: Rule,
    names: Sequence[str],
    form: tuple[str, ...],
    columns: Sequence[Tensor],
    scales: Sequence[Tensor],
    scalars: Mapping[str, Any],
) -> None:
    """Update one parameter with compact storage of the parameter or its state: decode, update, encode."""
    scale = dict(zip(scaled_columns(form), scales, strict=True))
    columns, errors = columns[: len(form)], columns[-1]
    values = [decode(t, scale[i], form[i]) if i in scale else t.float() for i, t in enumerate(columns)]
    if form[0] == "kahan":
        values[0] = values[0] + errors.float()
    results = evaluate(rule, names, values, scalars)
    for i, new in zip([0, *range(2, len(form))], results, strict=True):
        t = columns[i]
        if i in scale:
            encode(match_layout(new, t), t, scale[i], form[i])
        elif form[i] == "stochastic":
            t.copy_(round_stochastically(match_layout(new, t), scalars["rounding_step"], i))
        else:
            t.copy_(new)
        if form[i] == "kahan":
            errors.copy_(new - t.float())


def _write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    # A rule may return an input as the new value of another ("the previous gradient is now this one").
    sources = [
        value.clone() if any(value is other for other in targets if other is not target) else value
        for target, value in zip(targets, values, strict=True)
    ]
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
