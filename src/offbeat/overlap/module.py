"""Buckets of a plain module: gradients in the order in which they arrive, up to a number of bytes."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat import _torch
from offbeat._warn import warn
from offbeat.ddp import is_inside_ddp
from offbeat.engine.tensors import local
from offbeat.frameworks import DDP_IN_FRAMEWORKS
from offbeat.overlap.module_hook import ModuleHook
from offbeat.overlap.source import Source, refuse_graph
from offbeat.overlap.step import Step
from offbeat.passes import current_pass, has_reentrant_checkpoint, is_nested, queue_callback

__all__ = ["ModuleSource"]

#: Bytes of gradients in a bucket. A bucket costs some tens of microseconds of CPU time, which a GPU waits for; so its
#: buckets are larger, but hold no more than a twentieth of all gradients.
_CAP, _CAP_CUDA = 25 << 20, 256 << 20


class ModuleSource(Source):
    """Gathers gradients in buckets and steps each bucket when it is full.

    Args:
        called: the module that the user calls: ``module``, or a compiled module around it.
        cap_bytes: the size of a bucket; None chooses one.
    """

    def __init__(self, step: Step, module: torch.nn.Module, called: torch.nn.Module, cap_bytes: int | None) -> None:
        super().__init__(step, module)
        self._cap_bytes = cap_bytes
        self._open: dict[Hashable, list[Tensor]] = {}
        self._bytes: dict[Hashable, int] = {}
        self._gathered: set[int] = set()
        self._gathering = False
        self._reentrant = False
        self._looked_at_graph = False
        self._looked_for_ddp = False
        self.parameters_changed()
        self._module_hooks: list[Any] = [
            called.register_forward_pre_hook(_RefuseDdp()),
            called.register_forward_hook(_LookForReentrance(weakref.ref(self))),
        ]

    @property
    def is_running(self) -> bool:
        """See :class:`Source`."""
        return self._pass is not None

    def parameters_changed(self) -> None:
        """See :class:`Source`."""
        super().parameters_changed()
        params = self.step.parameters.all
        self._sizes = {id(p): local(p).nbytes for p in params}
        self._cap = self._cap_bytes or min(max(sum(self._sizes.values()) // 20, _CAP), _CAP_CUDA)
        self._cap_cpu = self._cap_bytes or _CAP

    def look_at_graph(self, output: Any) -> None:
        """Called after forward; looks once whether backward will run a backward pass inside."""
        if torch.is_grad_enabled() and not self._looked_at_graph:
            self._looked_at_graph = True
            if has_reentrant_checkpoint(output):
                self._be_reentrant()

    def arrived(self, p: Tensor) -> None:
        """See :class:`Source`."""
        with self.step.lock:
            self._receive(p)
            now = current_pass()
            if now != self._pass:
                self._enter(now)
            if id(p) in self.step.stepped:
                raise RuntimeError(
                    f"{self.step.parameters.name_of(p)} received a second gradient in one backward pass, after it "
                    "had been updated with the first; was it used in a checkpoint(use_reentrant=True) that "
                    "overlap() could not see? Use use_reentrant=False"
                )
            if not self._gathering or id(p) in self._gathered or p not in self._arrivals:
                return
            refuse_graph(p.grad)
            self._gathered.add(id(p))
            self._add(p)

    def flush(self) -> None:
        """See :class:`Source`."""
        for key in list(self._open):
            self._hand_on(key)

    def end_pass(self) -> None:
        """Called at the end of a backward pass."""
        with self.step.lock:
            if not self._removed:
                self.flush()
            self._pass = None

    def begin_step(self) -> None:
        """See :class:`Source`."""
        super().begin_step()
        self._gathered.clear()
        self._open.clear()
        self._bytes.clear()

    def remove(self) -> None:
        """See :class:`Source`."""
        super().remove()
        for hook in self._module_hooks:
            hook.remove()

    def _enter(self, now: int) -> None:
        """Called when a gradient comes from another backward pass than the one before."""
        if now == -1:
            raise RuntimeError(
                "a gradient arrived outside of backward(), as after set_manual_backward_finalization(True); that "
                "cannot be overlapped, so leave the end of backward to torch"
            )
        if self.step.drops_gradients:
            self._gathering = False
            if not is_nested():
                self._begin(now)
            return
        self.step.gradients_arrive()
        if not self._looked_for_ddp:
            self._looked_for_ddp = True
            if is_inside_ddp(self.step.parameters.all):
                raise RuntimeError(
                    "overlapped parameters belong to a DistributedDataParallel module, which has not reduced their "
                    "gradients yet when they would be updated; pass the DistributedDataParallel module to overlap(): "
                    f"{DDP_IN_FRAMEWORKS}"
                )
        if is_nested():
            self._be_reentrant()
            self._gathering = False
            return
        self.step.begin_pass()
        self._refresh()
        self._gathering = self.step.accumulation.is_last_pass and not self._reentrant
        self._begin(now)

    def _begin(self, now: int) -> None:
        self._pass = now
        queue_callback(_end_of_pass(weakref.ref(self)))

    def _add(self, p: Tensor) -> None:
        """Add a gradient to a bucket, and step the bucket if it is full."""
        device = p.get_device()
        # Gradients that arrive on different streams of a device do not go into one kernel.
        key = device if not p.is_cuda else (device, _torch.raw_stream(device))
        self._open.setdefault(key, []).append(p)
        total = self._bytes[key] = self._bytes.get(key, 0) + self._sizes[id(p)]
        if total >= (self._cap if p.is_cuda else self._cap_cpu):
            self._hand_on(key)

    def _hand_on(self, key: Hashable) -> None:
        params = self._open.pop(key)
        self._bytes.pop(key, None)
        grads = [p.grad for p in params if p.grad is not None]
        if len(grads) == len(params) and self.step.bucket(params, grads):
            self.step.free(params)

    def _be_reentrant(self) -> None:
        if not self._reentrant:
            self._reentrant = True
            warn(
                "checkpoint(use_reentrant=True) runs a backward pass inside backward, so offbeat.overlap() makes all "
                "updates in optimizer.step(); with use_reentrant=False they overlap with backward"
            )


# torch holds on to what follows; none of it keeps the optimizer or the module alive.


def _end_of_pass(source: weakref.ref[ModuleSource]) -> Any:
    def end_of_pass() -> None:
        found = source()
        if found is not None:
            found.end_pass()

    return end_of_pass


class _LookForReentrance(ModuleHook):
    """A forward hook."""

    def __init__(self, source: weakref.ref[ModuleSource]) -> None:
        self._source = source

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        found = self._source() if not torch.compiler.is_compiling() else None
        if found is not None:
            found.look_at_graph(output)


class _RefuseDdp(ModuleHook):
    """A forward pre-hook."""

    def __call__(self, module: torch.nn.Module, args: Sequence[Any]) -> None:
        if not torch.compiler.is_compiling() and _torch.running_ddp() is not None:
            raise RuntimeError(
                "an overlapped module runs inside DistributedDataParallel, which has not reduced its gradients yet "
                "when its parameters would be updated; pass the DistributedDataParallel module to overlap(): "
                f"{DDP_IN_FRAMEWORKS}"
            )
