"""FSDP2's units: the parameters that are gathered, reduced and therefore stepped together."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from offbeat.overlap.module_hook import ModuleHook
from offbeat.overlap.passes import current_pass

__all__ = ["Unit", "count_calls", "fsdp_units"]


class Unit:
    """A set of parameters that FSDP2 reduces in one go.

    Attributes:
        modules: those whose calls gather it.
        size: how many parameters it has.
        calls: how often its modules have been called since the last backward pass.
    """

    def __init__(self, modules: list[torch.nn.Module], size: int) -> None:
        self.modules = modules
        self.size = size
        self.calls = 0


def count_calls(units: list[Unit], outer: torch.nn.Module) -> list[Any]:
    """Count the calls of units that the next backward will come back to; returns the hooks."""
    passed = _Passed(units)
    hooks: list[Any] = [
        outer.register_forward_pre_hook(_BeginAnew(passed), prepend=True),
        outer.register_forward_hook(_WatchBackward(passed)),
    ]
    for unit in units:
        hooks += [module.register_forward_pre_hook(_CountCalls(unit)) for module in unit.modules]
        unit.modules = []
    return hooks


class _Passed:
    """Whether backward has come by since calls were counted, reduced or not (``set_requires_gradient_sync(False)``)."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.seen = False


class _BeginAnew(ModuleHook):
    """Before the module's forward."""

    def __init__(self, passed: _Passed) -> None:
        self._passed = passed

    def __call__(self, module: Any, args: Any) -> None:
        if not torch.compiler.is_compiling() and self._passed.seen and current_pass() == -1:
            self._passed.seen = False
            for unit in self._passed.units:
                unit.calls = 0


class _WatchBackward(ModuleHook):
    """After the module's forward: when a gradient of its output comes, backward has begun."""

    def __init__(self, passed: _Passed) -> None:
        self._passed = passed

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and current_pass() == -1:
            for t in tree_leaves(output):
                if isinstance(t, Tensor) and t.requires_grad:
                    t.register_hook(self._come)  # type: ignore[no-untyped-call]
                    return

    def _come(self, grad: Tensor) -> None:
        self._passed.seen = True


class _CountCalls(ModuleHook):
    """Before a unit's forward. A recomputation during backward is no call."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, module: Any, args: Any) -> None:
        unit = self._unit() if not torch.compiler.is_compiling() else None
        if unit is not None and torch.is_grad_enabled() and current_pass() == -1:
            unit.calls += 1


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
