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
    "more. To clip by norm, give overlap(..., clip_norm=); to scale the loss, overlap(..., scaler=); to run several "
    "backward passes before a step, announce them with accumulate= or `with handle.accumulate():`; to read gradients, "
    "call handle.remove() and step after backward; for checkpoint() use use_reentrant=False"
)


class ConsumedGradient(Tensor):
    """Stands where a gradient was. Reading its shape, dtype and device works; everything else raises."""

    @staticmethod
    def __new__(cls, param: Tensor) -> ConsumedGradient:
        """One of a parameter's shape, dtype and device."""
        made: ConsumedGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device
        )
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise RuntimeError(_MESSAGE.format(what=func))

    @property
    def _local_tensor(self) -> NoReturn:
        """FSDP2 adds to the shard in here."""
        raise RuntimeError(_MESSAGE.format(what="adding to it"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ConsumedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"
