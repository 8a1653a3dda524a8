"""Which parameters belong to a DDP module."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["is_inside_ddp"]

#: The DDP modules that have been given their module, or have been given to another module, since this file was loaded.
_modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _note(module: Any, name: str, submodule: Any) -> None:
    _modules.update(candidate for candidate in (module, submodule) if isinstance(candidate, DistributedDataParallel))


register_module_module_registration_hook(_note)


def is_inside_ddp(params: Sequence[Tensor]) -> bool:
    """Return whether a DDP module that is known reduces the gradient of one of these parameters.

    A copy of a DDP module, one that was unpickled and one that is older than this file are not known. Whoever must not
    miss these looks at :func:`offbeat._torch.running_ddp` in a forward pass, too.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return False
    ours = {id(p) for p in params}
    return any(id(p) in ours for ddp in list(_modules) for p in ddp.parameters())
