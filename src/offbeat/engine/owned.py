"""The gradient of a matrix that has been reduced to its owner: only the owner has it.

``.grad`` must not hold numbers then: a norm, a check for infinity or a log would silently differ between ranks. It
holds an :class:`OwnedGradient` instead, on every rank.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor

from offbeat import _torch

__all__ = ["OwnedGradient", "gradient_of", "reduced_gradient"]


class OwnedGradient(Tensor):
    """Stands in for a gradient that only one rank has. Its shape, dtype and device can be read.

    A ``GradScaler`` unscales it like any gradient; all ranks learn whether one of them found an infinity. After it is
    set to zero, ``.grad`` holds ordinary zeros. All other operations raise.

    Attributes:
        held: the gradient on its owner, and zeros elsewhere.
    """

    held: Tensor
    _param: weakref.ref[Tensor]
    _group: Any

    @staticmethod
    def __new__(cls, param: Tensor, held: Tensor, group: Any) -> OwnedGradient:
        """Stand in for ``held``, the gradient of ``param``. The ranks of ``group`` agree on whether all is finite."""
        made: OwnedGradient = _torch.shape_only(cls, param)
        made.held = held
        made._param, made._group = weakref.ref(param), group
        return made

    __torch_function__ = _torch.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _torch.ZERO_OPERATORS:
            for one in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                (one._give_back() if isinstance(one, cls) else one).zero_()
            return args[0]
        if func is _torch.UNSCALE_OPERATOR and func is not None:
            grads, found, inverse = args
            func([one.held if isinstance(one, cls) else one for one in grads], found, inverse)
            group = next(one._group for one in grads if isinstance(one, cls))
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            return None
        raise RuntimeError(
            f"the gradient of this matrix has been reduced to the rank that owns it, so {func} cannot be computed from "
            "it on every rank. Call optimizer.zero_grad() before the next backward(), and accumulate gradients under "
            "no_sync(). To clip by norm, call clip_grad_norm_() of the handle that offbeat.reduce_to_owners() "
            "returned, or use offbeat.overlap(..., clip_norm=). To read gradients, call remove() of that handle"
        )

    def _give_back(self) -> Tensor:
        p = self._param()
        if p is not None and p.grad is self:
            p.grad = self.held
        return self.held

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OwnedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def gradient_of(p: Tensor) -> Tensor | None:
    """The gradient behind ``p.grad``: zeros if it has been reduced to another rank."""
    g = p.grad
    return g.held if isinstance(g, OwnedGradient) else g


def reduced_gradient(p: Tensor) -> Tensor | None:
    """Like :func:`gradient_of`, but raises if the gradient has not been reduced to its owner."""
    if p.grad is not None and not isinstance(p.grad, OwnedGradient):
        raise RuntimeError(
            f"the gradient of a matrix of shape {tuple(p.shape)} has not been reduced to its owner: it was set by "
            "hand, its backward pass ran under no_sync() or around DistributedDataParallel, or the matrix was not in "
            "the module, or frozen, when that was made. Run the last backward pass of a step through the "
            "DistributedDataParallel module, outside of no_sync(), with all matrices of the optimizer in the module"
        )
    return gradient_of(p)
