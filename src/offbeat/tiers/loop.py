"""The loop tier: the rule's own function on tensors, one parameter after the other.

It is the reference the other tiers are tested against, it serves tensors the others cannot take, and it is
the differentiable form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.tiers.layout import flat, is_dense, same_layout

__all__ = ["evaluate", "run_loop"]

#: Elements handled at once: temporaries of the maths stay this small however large the tensor is.
CHUNK = 1 << 16


def run_loop(
    update: Callable[..., Sequence[Any]],
    names: Sequence[str],
    tensors: Sequence[Tensor],
    scalars: dict[str, Any],
    compute: torch.dtype,
    *,
    differentiable: bool = False,
) -> None:
    """Apply ``update`` in place to one parameter: ``tensors`` are p, g and the state, named by ``names``."""
    if differentiable:
        # Autograd keeps what it was given; the originals are about to be overwritten.
        inputs = [tensors[0].clone(), tensors[1], *(t.clone() for t in tensors[2:])]
        _write([tensors[0], *tensors[2:]], evaluate(update, names, inputs, scalars, compute))
        return
    for piece in _chunks(tensors):
        _write([piece[0], *piece[2:]], evaluate(update, names, piece, scalars, compute))


def evaluate(
    update: Callable[..., Sequence[Any]],
    names: Sequence[str],
    tensors: Sequence[Tensor],
    scalars: dict[str, Any],
    compute: torch.dtype,
) -> Sequence[Tensor]:
    """What ``update`` makes of these tensors, changing nothing."""
    inputs = {name: t if t.dtype == compute else t.to(compute) for name, t in zip(names, tensors, strict=True)}
    return update(**inputs, **scalars)


def _write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    # A rule may pass an input through to another place ("the last gradient is now the one before").
    sources = [
        value.clone() if any(value is other for other in targets if other is not target) else value
        for target, value in zip(targets, values, strict=True)
    ]
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    p = tensors[0]
    plain = p.numel() > 2 * CHUNK and all(
        type(t) in (Tensor, torch.nn.Parameter) and is_dense(t) and same_layout(p, t) for t in tensors
    )
    if not plain:
        yield tensors
        return
    lines = [flat(t.detach()) for t in tensors]
    for start in range(0, p.numel(), CHUNK):
        yield [line[start : start + CHUNK] for line in lines]
