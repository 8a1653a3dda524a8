"""Which parameters belong to a DDP module."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["is_inside_ddp"]

#: The DDP modules of the program. A module is noted when it gets the module that it wraps.
_modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

#: Whether there may be DDP modules that are older than this file. Without a process group none can be made.
_missed = dist.is_available() and dist.is_initialized()


def _note(module: Any, name: str, submodule: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        _modules.add(module)


register_module_module_registration_hook(_note)


def is_inside_ddp(params: Sequence[Tensor]) -> bool:
    """Whether any DDP module in the program reduces the gradient of one of these parameters."""
    global _missed
    if not (dist.is_available() and dist.is_initialized()):
        return False
    if _missed:  # once: in a large program there are millions of objects to look at
        _modules.update(one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel))
        _missed = False
    ours = {id(p) for p in params}
    return any(id(p) in ours for one in list(_modules) for p in one.parameters())
