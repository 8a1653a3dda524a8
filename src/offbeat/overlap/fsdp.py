"""FSDP2's units: the parameters that are gathered, reduced and therefore stepped together."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from offbeat.overlap.passes import current_pass

__all__ = ["Unit", "fsdp_units"]


class ModuleHook:
    """A hook on a module that a copy of the module, pickled or not, does not have."""

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _get_nothing, ()


def _get_nothing() -> Any:
    return _nothing


def _nothing(*args: Any) -> None:
    """What copies get."""


class _CountCalls(ModuleHook):
    """A hook before forward."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, module: Any, args: Any) -> None:
        unit = self._unit() if not torch.compiler.is_compiling() else None
        # A recomputation during backward is no call.
        if unit is not None and torch.is_grad_enabled() and current_pass() == -1:
            unit.calls += 1


class Unit:
    """A set of parameters that FSDP2 reduces in one go.

    Attributes:
        size: how many parameters it has.
        calls: how often its module has been called since the last backward pass.
    """

    def __init__(self, modules: list[torch.nn.Module], size: int) -> None:
        self._modules = modules
        self.size = size
        self.calls = 0

    def count_calls(self) -> list[Any]:
        """Count calls that backward will come back to; returns the hooks."""
        modules, self._modules = self._modules, []
        return [module.register_forward_pre_hook(_CountCalls(self)) for module in modules]


def fsdp_units(module: torch.nn.Module) -> dict[int, Unit]:
    """By parameter, the unit it is reduced with. Raises for what cannot be overlapped."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    units: dict[int, Unit] = {}
    if fsdp is None:
        return units
    for part in module.modules():
        if not isinstance(part, fsdp.FSDPModule):
            continue
        state: Any = part._get_fsdp_state()
        found = getattr(state, "_fsdp_param_groups", None)  # one, and of another name, before torch 2.12
        if found is None:
            found = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for group in found:
            if any(fsdp_param.offload_to_cpu for fsdp_param in group.fsdp_params):
                raise ValueError(
                    "fully_shard's CPUOffloadPolicy cannot be overlapped: a gradient is still on its way to the host "
                    "when its parameters would be updated; leave offload_policy out, or step after backward"
                )
            params = [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
            unit = Unit(list(group.modules), sum(p.requires_grad for p in params))
            units.update((id(p), unit) for p in params)
    return units
