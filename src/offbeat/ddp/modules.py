"""Which parameters belong to a DDP module."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["is_inside_ddp"]


def is_inside_ddp(params: Sequence[Tensor]) -> bool:
    """Whether any DDP module in the program reduces the gradient of one of these parameters."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    ours = {id(p) for p in params}
    return any(
        issubclass(type(one), DistributedDataParallel) and any(id(p) in ours for p in one.parameters())
        for one in gc.get_objects()
    )
