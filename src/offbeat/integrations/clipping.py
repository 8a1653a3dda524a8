"""A framework's own call to clip gradients, answered by overlap, which clips them itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from offbeat.integrations.attached import Attached

__all__ = ["answer_clip", "attached_with", "overlapped_among"]


def attached_with(attached: Iterable[Attached], parameters: Sequence[Tensor]) -> list[Attached]:
    """Those that have some of these parameters."""
    asked = {id(p) for p in parameters}
    return [one for one in attached if any(id(p) in asked for group in one.inner.param_groups for p in group["params"])]


def overlapped_among(attached: Iterable[Attached], parameters: Sequence[Tensor]) -> Attached | None:
    """The overlapped optimizer that has some of these parameters, or None."""
    return next((one for one in attached_with(attached, parameters) if one.handle is not None), None)


def answer_clip(
    one: Attached, parameters: Sequence[Tensor], max_norm: float, norm_type: float, *, call: str
) -> Tensor | None:
    """The norm of the gradients of this step, which overlap clips in ``optimizer.step()``.

    Raises if the caller wants anything else than what overlap does.

    Args:
        max_norm: what the caller wants to clip to; infinity only asks for the norm.
        call: what the caller has called, for error messages.
    """
    assert one.handle is not None
    limit = one.handle.clip_norm
    if limit is None:
        raise RuntimeError(
            f"{call} was called, but overlap has used the gradients already; turn overlap on with the option "
            f"clip_norm={max_norm}"
        )
    own = {id(p) for group in one.inner.param_groups for p in group["params"] if p.requires_grad}
    if own != {id(p) for p in parameters if p.requires_grad}:
        raise RuntimeError(
            f"{call} was called with other parameters than those of the overlapped optimizer, but overlap clips by the "
            "norm of all its gradients; pass the parameters of the optimizer"
        )
    if float(norm_type) != 2.0:
        raise ValueError(f"{call} was called with norm_type={norm_type}, but overlap clips by the 2-norm only")
    if max_norm != limit and not math.isinf(max_norm):
        raise ValueError(
            f"{call} was called with a norm of {max_norm}, but overlap clips to clip_norm={limit}; give the same value"
        )
    return one.handle.norm()
