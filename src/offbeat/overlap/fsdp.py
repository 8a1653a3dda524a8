"""Buckets of a ``fully_shard``-ed module: the parameters that FSDP2 gathers and reduces together.

FSDP2 calls the hooks on parameters after its reduce-scatter, on the stream that reduced them.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.overlap.module import ModuleSource
from offbeat.overlap.module_hook import ModuleHook
from offbeat.overlap.step import Step
from offbeat.passes import current_pass

__all__ = ["FsdpSource", "Unit", "fsdp_units"]


class Unit:
    """A set of parameters that FSDP2 reduces at the same time.

    Attributes:
        modules: the modules that gather it when they are called.
        size: the number of its parameters that require a gradient.
        calls: the number of calls of its modules since the last backward pass.
    """

    def __init__(self, modules: list[torch.nn.Module], size: int) -> None:
        self.modules = modules
        self.size = size
        self.calls = 0


class FsdpSource(ModuleSource):
    """Each unit is a bucket. Its borders are the same on every rank, unlike those by the size of local shards.

    Args:
        units: by id of a parameter, its unit; from :func:`fsdp_units`.
    """

    def __init__(
        self,
        step: Step,
        module: torch.nn.Module,
        called: torch.nn.Module,
        cap_bytes: int | None,
        units: dict[int, Unit],
    ) -> None:
        super().__init__(step, module, called, cap_bytes)
        self._units = units
        self._module_hooks += _count_calls(list({id(unit): unit for unit in units.values()}.values()), called)

    def _add(self, p: Tensor) -> None:
        unit = self._units.get(id(p))
        if unit is None:
            super()._add(p)
            return
        for key in [key for key in self._open if key is not unit and not _may_come_again(key)]:
            self._hand_on(key)
        bucket = self._open.setdefault(unit, [])
        bucket.append(p)
        if len(bucket) == unit.size and not _may_come_again(unit):
            self._hand_on(unit)


def _may_come_again(key: Any) -> bool:
    """Whether FSDP2 may reduce a bucket again in this pass: it does so once for every call of a unit's module."""
    return isinstance(key, Unit) and key.calls > 1


def fsdp_units(module: torch.nn.Module) -> dict[int, Unit]:
    """By id of a parameter, the unit it is reduced with. Raises if the module cannot be overlapped."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    units: dict[int, Unit] = {}
    if fsdp is None:
        return units
    _refuse_manual_finalization(module)
    for part in module.modules():
        if not isinstance(part, fsdp.FSDPModule):
            continue
        for group in _torch.fsdp_groups(part):
            offloads = any(fsdp_param.offload_to_cpu for fsdp_param in group.fsdp_params)
            if offloads and not _torch.fsdp_waits_for_offload:
                raise ValueError(
                    f"fully_shard's CPUOffloadPolicy cannot be overlapped with torch {torch.__version__}: gradients "
                    "are still being copied to the CPU when their parameters would be updated; use torch 2.13 or "
                    "later, leave offload_policy out, or step after backward"
                )
            params = [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
            unit = Unit(list(group.modules), sum(p.requires_grad for p in params))
            units.update((id(p), unit) for p in params)
    return units


def _refuse_manual_finalization(module: torch.nn.Module) -> None:
    fsdp = sys.modules["torch.distributed.fsdp"]
    if any(isinstance(part, fsdp.FSDPModule) and _torch.fsdp_ends_by_hand(part) for part in module.modules()):
        raise ValueError(
            "set_manual_backward_finalization(True) cannot be overlapped: FSDP2 then writes gradients after backward, "
            "when parameters would have been updated; leave the end of backward to FSDP2 (a pipeline schedule of torch "
            "2.15 sets this too), or step after backward"
        )


def _count_calls(units: list[Unit], called: torch.nn.Module) -> list[Any]:
    """Count the calls of units that the next backward pass will go through; returns the hooks."""
    backward = _Backward(units)
    hooks: list[Any] = [
        called.register_forward_pre_hook(_BeginAnew(backward), prepend=True),
        called.register_forward_hook(_WatchBackward(backward)),
    ]
    for unit in units:
        hooks += [module.register_forward_pre_hook(_CountCall(unit)) for module in unit.modules]
        unit.modules = []
    return hooks


class _Backward:
    """Whether backward has run since calls were counted, with gradients reduced or not."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.has_run = False


class _BeginAnew(ModuleHook):
    """A forward pre-hook of the whole module."""

    def __init__(self, backward: _Backward) -> None:
        self._backward = backward

    def __call__(self, module: Any, args: Any) -> None:
        if torch.compiler.is_compiling() or current_pass() != -1:
            return
        _refuse_manual_finalization(module)
        if self._backward.has_run:
            self._backward.has_run = False
            for unit in self._backward.units:
                unit.calls = 0


class _WatchBackward(ModuleHook):
    """A forward hook of the whole module: backward has begun when its output receives a gradient."""

    def __init__(self, backward: _Backward) -> None:
        self._backward = backward

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and current_pass() == -1:
            for t in _torch.pytree.tree_leaves(output):
                if isinstance(t, Tensor) and t.requires_grad:
                    t.register_hook(self._begun)  # type: ignore[no-untyped-call]
                    return

    def _begun(self, grad: Tensor) -> None:
        self._backward.has_run = True


class _CountCall(ModuleHook):
    """A forward pre-hook of a unit's module. A recomputation during backward does not count."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, module: Any, args: Any) -> None:
        unit = self._unit() if not torch.compiler.is_compiling() else None
        if unit is not None and torch.is_grad_enabled() and current_pass() == -1:
            unit.calls += 1
