"""What stands in ``.grad`` once a gradient has been used and freed: something that cannot be mistaken for one.

None would not do. ``torch.nn.utils.clip_grad_norm_`` and ``GradScaler`` pass over parameters without a gradient in
silence, and a second backward would start from nothing. This takes no memory and raises when it is touched.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = ["ConsumedGradient"]

_MESSAGE = (
    "the gradient of this parameter was used and freed by offbeat.overlap during backward(), so {what} cannot work any "
    "more. Before the next backward() call optimizer.zero_grad(). To run several backward passes before a step, "
    "announce them with accumulate= or `with handle.accumulate():`. To clip by norm, give overlap(..., clip_norm=); to "
    "scale the loss, overlap(..., scaler=); to read gradients, call handle.remove() and step after backward. With "
    "checkpoint() use use_reentrant=False"
)
_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)
_ADD = torch.ops.aten.add_.Tensor


class ConsumedGradient(Tensor):
    """Stands where a gradient was. Reading its shape, dtype and device works; everything else raises.

    Except that it can be set to zero, as ``zero_grad(set_to_none=False)`` does. It then stands for zeros without having
    the memory, until a gradient is added to it.

    Attributes:
        is_zero: whether it has been set to zero.
        added: the gradient that was added since.
    """

    is_zero: bool
    added: Tensor | None

    @staticmethod
    def __new__(cls, param: Tensor) -> ConsumedGradient:
        """One of a parameter's shape, dtype and device."""
        made: ConsumedGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device
        )
        made.renew()
        return made

    def renew(self) -> None:
        """Stand for a gradient that has been used just now."""
        self.is_zero, self.added = False, None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _ZERO:
            for one in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                if isinstance(one, ConsumedGradient):
                    one.is_zero, one.added = True, None
                else:
                    one.zero_()
            return args[0]
        first = args[0] if args else None
        if func is _ADD and isinstance(first, ConsumedGradient) and first.is_zero and not isinstance(args[1], cls):
            # Zeros plus it, to the sign of a zero.
            first.added = args[1] + 0.0 if first.added is None else first.added + args[1]
            return first
        raise RuntimeError(_MESSAGE.format(what=func))

    @property
    def _local_tensor(self) -> NoReturn:
        """FSDP2 adds to the shard in here."""
        raise RuntimeError(_MESSAGE.format(what="adding to it"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ConsumedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"
