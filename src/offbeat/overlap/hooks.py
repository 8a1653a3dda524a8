"""Buckets from hooks on parameters: plain modules, and FSDP2, which calls the hooks after its reduce-scatter."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from offbeat.optim.gradients import local
from offbeat.overlap.arrivals import Arrivals, refuse_graph
from offbeat.overlap.checks import refuse_inside_ddp
from offbeat.overlap.consumed import ConsumedGradient
from offbeat.overlap.core import Core
from offbeat.overlap.fsdp import Unit, count_calls
from offbeat.overlap.module_hook import ModuleHook
from offbeat.overlap.passes import current_pass, has_reentrant_checkpoint, is_nested, queue_callback

__all__ = ["HookSource"]

#: Bytes of gradients in a bucket. A bucket costs some tens of microseconds of host time, which a GPU waits for; so
#: there they are larger, but hold no more than a twentieth of all gradients.
_CAP, _CAP_CUDA = 25 << 20, 256 << 20


class HookSource:
    """Gathers gradients in the order in which they arrive, and hands them on when a bucket is full.

    Args:
        outer: what the user calls, a compiled module around ``module`` perhaps.
        units: by parameter, the FSDP2 unit it is reduced with. A unit is a bucket: its borders are the same on every
            rank, which those by size of the local shards are not.
    """

    def __init__(
        self,
        core: Core,
        module: torch.nn.Module,
        outer: torch.nn.Module,
        cap_bytes: int | None,
        units: dict[int, Unit],
    ) -> None:
        self.core = core
        self._given_cap = cap_bytes
        self._units = units
        self._open: dict[Any, list[Tensor]] = {}
        self._bytes: dict[Any, int] = {}
        self._pending: set[int] = set()
        self._pass: int | None = None
        self._step = core.steps
        self._gathering = False
        self._reentrant = False
        self._looked = False
        self._checked_ddp = False
        self._removed = False
        self._arrivals = Arrivals(self, module)
        self.look_at_params()
        me = weakref.ref(self)
        self._on_module = [
            outer.register_forward_pre_hook(_RefuseDdp()),
            outer.register_forward_hook(_LookForReentrance(me)),
        ]
        if units:
            self._on_module += count_calls(list({id(unit): unit for unit in units.values()}.values()), outer)

    def look_at_params(self) -> None:
        """The optimizer's parameters are others than before."""
        self._arrivals.cover(self.core.everyone)
        gradients = sum(local(p).nbytes for p in self.core.everyone)
        self._cap = self._given_cap or min(max(gradients // 20, _CAP), _CAP_CUDA)
        self._cap_cpu = self._given_cap or _CAP
        self._facts = {id(p): (p.get_device(), local(p).nbytes, self._units.get(id(p))) for p in self.core.everyone}

    def look_at_graph(self, output: Any) -> None:
        """Once, at the first forward: will a backward run inside backward?"""
        if torch.is_grad_enabled() and not self._looked:
            self._looked = True
            self._reentrant = self._reentrant or has_reentrant_checkpoint(output)
            if self._reentrant:
                _warn_of_reentrance()

    def arrived(self, p: Tensor) -> None:
        """A parameter's gradient is in its ``.grad``."""
        with self.core.lock:
            if self._removed:
                raise RuntimeError("a backward pass went on after handle.remove(); call remove() between steps")
            g = p.grad
            if isinstance(g, ConsumedGradient):
                self.core.receive(p)
                g = p.grad
            if self.core.is_new(self._step):
                self.begin_step()
            now = current_pass()
            if now != self._pass:
                self._enter(now)
            if id(p) in self.core.stepped:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} received a second gradient in one backward pass, after it "
                    "had been updated with the first; was it used in a checkpoint(use_reentrant=True) that "
                    "overlap() could not see? Use use_reentrant=False"
                )
            if not self._gathering or id(p) in self._pending or p not in self._arrivals:
                return
            refuse_graph(g)
            self._add(p)

    def flush(self) -> None:
        """Hand on all buckets, full or not."""
        for key in list(self._open):
            self._hand_on(key)

    def end_pass(self) -> None:
        """A backward pass is over."""
        with self.core.lock:
            if not self._removed:
                self.flush()
            self._pass = None

    def begin_step(self) -> None:
        """Gradients from here on belong to the next step."""
        self._pass, self._step = None, self.core.steps
        self._pending.clear()
        self._open.clear()
        self._bytes.clear()

    @property
    def is_running(self) -> bool:
        """Whether a backward pass is under way."""
        return self._pass is not None

    def remove(self) -> None:
        """Take all hooks away."""
        self._removed = True
        self._arrivals.remove()
        for hook in self._on_module:
            hook.remove()

    def _enter(self, now: int) -> None:
        """Gradients come from another pass than the last one did."""
        self.core.note_arrival()
        if not self._checked_ddp:
            self._checked_ddp = True
            refuse_inside_ddp(self.core.everyone)
        if is_nested():
            if not self._reentrant:
                self._reentrant = True
                _warn_of_reentrance()
            self._gathering = False
            return
        self.core.begin_pass()
        if self.core.look_at_groups():
            self.look_at_params()
        self._pass = now
        self._gathering = self.core.is_last_pass and not self._reentrant
        queue_callback(_end_of_pass(weakref.ref(self)))

    def _add(self, p: Tensor) -> None:
        self._pending.add(id(p))
        device, size, unit = self._facts[id(p)]
        if unit is not None:
            for key in [key for key in self._open if key != unit and not self._may_come_again(key)]:
                self._hand_on(key)
            bucket = self._open.setdefault(unit, [])
            bucket.append(p)
            if len(bucket) == unit.size and not self._may_come_again(unit):
                self._hand_on(unit)
            return
        # What arrives on different streams of a device does not go into one kernel.
        where: Any = device if not p.is_cuda else (device, torch._C._cuda_getCurrentRawStream(device))
        self._open.setdefault(where, []).append(p)
        total = self._bytes[where] = self._bytes.get(where, 0) + size
        if total >= (self._cap if p.is_cuda else self._cap_cpu):
            self._hand_on(where)

    def _may_come_again(self, key: Any) -> bool:
        """FSDP2 reduces once for every call of a unit's module, whatever has been added up by then."""
        return isinstance(key, Unit) and key.calls > 1

    def _hand_on(self, key: Any) -> None:
        params = self._open.pop(key)
        self._bytes.pop(key, None)
        grads = [p.grad for p in params if p.grad is not None]
        if len(grads) == len(params) and self.core.bucket(params, grads):
            self.core.free(params)


# The functions below are what torch holds on to. They do not keep optimizer or module alive.


def _end_of_pass(source: weakref.ref[HookSource]) -> Any:
    def end_of_pass() -> None:
        found = source()
        if found is not None:
            found.end_pass()

    return end_of_pass


class _LookForReentrance(ModuleHook):
    """A forward hook."""

    def __init__(self, source: weakref.ref[HookSource]) -> None:
        self._source = source

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        found = self._source() if not torch.compiler.is_compiling() else None
        if found is not None:
            found.look_at_graph(output)


class _RefuseDdp(ModuleHook):
    """A hook before forward."""

    def __call__(self, module: torch.nn.Module, args: Sequence[Any]) -> None:
        if not torch.compiler.is_compiling() and DistributedDataParallel._active_ddp_module is not None:
            raise RuntimeError(
                "an overlapped module runs inside DistributedDataParallel, where its gradients are not reduced when "
                "its parameters would be updated; give the DistributedDataParallel module to overlap() instead"
            )


def _warn_of_reentrance() -> None:
    warnings.warn(
        "checkpoint(use_reentrant=True) runs a backward inside backward, so offbeat.overlap holds all updates until "
        "optimizer.step(); with use_reentrant=False they overlap",
        stacklevel=3,
    )
