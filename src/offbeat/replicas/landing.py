"""Applies the outcome of a round: the only place that writes parameters and anchors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.replicas.contents import Item, local_part
from offbeat.replicas.fragment import Fragment
from offbeat.replicas.round import Outcome

__all__ = ["land"]


@torch.no_grad()
def land(outcome: Outcome, fragment: Fragment, lower: Sequence[Fragment], *, mixing: float) -> None:
    """Move anchors and parameters as a round has said.

    Args:
        outcome: of a round that has not failed.
        fragment: what was exchanged.
        lower: the fragments of lower levels that have parameters in common with it; their anchors follow.
        mixing: how much of the local parameters stays.
    """
    for device, stream in outcome.streams.items():
        torch.cuda.current_stream(device).wait_stream(stream)
    params, outer = fragment.contents.params(), fragment.outer
    names = [name for name in outcome.names if name in params]
    kept = 0.0 if outcome.final else mixing
    kept_below = 0.0 if outcome.final_below else mixing
    if outcome.base is not None:
        _take_base(outcome, fragment, params, lower)
    if outcome.status == "rest":
        if outcome.final:  # a delayed landing may have been rounded differently on each replica
            _set_params(fragment, params, names, lower, 0.0, 0.0)
        return
    if outcome.status != "averaged":
        return
    if outer is not None and not outcome.fresh:
        _step_outer(outcome, fragment, params, names)
        _set_params(fragment, params, names, lower, kept, kept_below)
        _land_values(outcome, [item for item in fragment.buffers() if _has(outcome, item)], 0.0)
    else:
        items = [Item(name, params[name]) for name in names] + fragment.buffers()
        _land_values(outcome, [item for item in items if _has(outcome, item)], kept)
        if outcome.fresh and outer is not None:
            outer.refresh({name: params[name] for name in names})
        _lower_anchors_follow(params, names, lower)


def _has(outcome: Outcome, item: Item) -> bool:
    return outcome.values is not None and item.name in outcome.values


def _take_base(outcome: Outcome, fragment: Fragment, params: Mapping[str, Tensor], lower: Sequence[Fragment]) -> None:
    """Take over the anchors that this replica has missed."""
    assert outcome.base is not None
    assert fragment.outer is not None
    part, fragment.version, fragment.lineage = outcome.base
    fragment.outer.take_part(part)
    if outcome.status != "averaged":
        _set_params(fragment, params, [name for name in outcome.names if name in params], lower, 0.0, 0.0)


def _step_outer(outcome: Outcome, fragment: Fragment, params: Mapping[str, Tensor], names: list[str]) -> None:
    """One step of the outer optimizer, with the options that ranks have agreed on."""
    outer, limit = fragment.outer, fragment.reduction.bucket_bytes
    assert outer is not None
    with outer.using(outcome.names, outcome.outer):
        if outcome.gradients is not None and not (outcome.alone and not fragment.level.delay):
            outer.move(names, [outcome.gradients[name] for name in names])
        elif outcome.values is not None and outcome.gradients is None:
            outer.move_to(names, [outcome.values[name] for name in names], limit)
        else:  # the mean over one replica is its own parameters
            outer.move_to(names, [local_part(params[name]) for name in names], limit)


def _set_params(
    fragment: Fragment,
    params: Mapping[str, Tensor],
    names: Sequence[str],
    lower: Sequence[Fragment],
    kept: float,
    kept_below: float,
) -> None:
    """Move parameters, and the anchors of lower levels, to this level's anchors."""
    assert fragment.outer is not None
    below = {id(low.outer): low.outer for low in lower if low.outer is not None}
    for name in names:
        anchor = fragment.outer.anchors[name]
        targets = [(local_part(params[name]), kept)]
        targets += [(outer.anchors[name], kept_below) for outer in below.values() if name in outer.anchors]
        for target, part in targets:
            value = anchor.to(device=target.device, dtype=target.dtype)
            target.lerp_(value, 1 - part) if part else target.copy_(value)


def _lower_anchors_follow(params: Mapping[str, Tensor], names: Sequence[str], lower: Sequence[Fragment]) -> None:
    """After a mean that has replaced the parameters: so are the anchors of lower levels."""
    for outer in {id(low.outer): low.outer for low in lower if low.outer is not None}.values():
        for name in names:
            if name in outer.anchors:
                outer.anchors[name].copy_(local_part(params[name]))


def _land_values(outcome: Outcome, items: Sequence[Item], kept: float) -> None:
    """Assign means to items, or add differences to those that have moved on since."""
    if outcome.alone:  # so the values are what these items were, and not what they became
        return
    values = outcome.values
    assert values is not None
    together: dict[float, list[tuple[Tensor, Tensor]]] = {}
    for item in items:
        part, value = local_part(item.tensor), values[item.name]
        if outcome.final or not item.late or not values.are_differences:
            part.copy_(value, non_blocking=True)
            continue
        # Whole numbers are counters.
        share = 1 - kept if kept and (part.is_floating_point() or part.is_complex()) else 1
        if part.device == value.device:
            together.setdefault(share, []).append((part, value))
        else:  # one after the other, so that a copy in CPU memory is not brought back as a whole
            part.add_(value.to(part.device, non_blocking=True), alpha=share)
    for share, pairs in together.items():
        _torch.foreach_add_([part for part, _ in pairs], [value for _, value in pairs], alpha=share)
