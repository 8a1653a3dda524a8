"""Buckets of a ``DistributedDataParallel`` module: reduced first, then stepped while backward goes on.

On the CPU a thread steps buckets while backward computes and gloo sends the next ones; on a GPU it is a stream. DDP
waits for both at the end of backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from offbeat import _torch
from offbeat.ddp import CodecState, CommHook, UserHook
from offbeat.overlap.arrivals import Arrivals
from offbeat.overlap.consumed import ConsumedGradient, lift, receive
from offbeat.overlap.module_hook import ModuleHook
from offbeat.overlap.source import Source, refuse_graph
from offbeat.overlap.step import Step
from offbeat.passes import current_pass, is_nested

__all__ = ["DdpSource", "check_ddp"]


def _refuse_manual_finalization(ddp: DistributedDataParallel) -> None:
    if getattr(ddp, "require_manual_backward_finalization", False):  # new in torch 2.15
        raise ValueError(
            "require_manual_backward_finalization=True cannot be overlapped: DistributedDataParallel then writes "
            "gradients after backward, when parameters would have been updated; set it to False"
        )


def _check_group(ddp: DistributedDataParallel, comm_state: Any) -> None:
    """Raise if a codec would average over ranks that do not belong to the module."""
    if isinstance(comm_state, CodecState) and comm_state.process_group is None:
        ranks, world = dist.get_process_group_ranks(ddp.process_group), dist.get_world_size()
        if len(ranks) != world:
            raise ValueError(
                f"CodecState(process_group=None) averages over all {world} ranks, and this DistributedDataParallel "
                f"module over ranks {ranks}; pass its process group to CodecState"
            )


def check_ddp(ddp: DistributedDataParallel, comm_hook: Any, comm_state: Any = None) -> None:
    """Raise if buckets of this module cannot be stepped, or not with this communication hook."""
    _check_group(ddp, comm_state)
    if ddp.mixed_precision is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=) cannot be overlapped; use torch.autocast, or fully_shard with a "
            "MixedPrecisionPolicy"
        )
    _refuse_manual_finalization(ddp)
    hook = CommHook.find(ddp, instead="pass it as overlap(..., comm_hook=, comm_state=)")
    if hook is not None and comm_hook is not None:
        if hook.reducer is not None and not isinstance(hook.reducer, UserHook):
            raise ValueError(hook.reducer.conflict)
        if hook.listeners:
            raise ValueError(
                "another optimizer is overlapped with this DistributedDataParallel module already, and a communication "
                "hook serves both; pass comm_hook= only in the first call of overlap()"
            )
    if _torch.uses_python_reducer(ddp):
        raise ValueError(
            "DDP's python reducer has no buckets and cannot be overlapped; set torch._dynamo.config.optimize_ddp to "
            "'ddp_optimizer'"
        )


class DdpSource(Source):
    """One optimizer's part of a DDP module's buckets. Listens to the module's :class:`~offbeat.ddp.CommHook`."""

    def __init__(self, step: Step, ddp: DistributedDataParallel, comm_hook: Any, comm_state: Any) -> None:
        super().__init__(step, ddp)
        self._running = False
        self._used_here: set[int] = set()
        self._lifted: list[tuple[Tensor, ConsumedGradient]] = []
        self._dropped: tuple[int, list[tuple[Tensor, ConsumedGradient]]] = (-1, [])
        self._module_hooks: list[Any] = []
        if ddp.gradient_as_bucket_view and (ddp.static_graph or not ddp.find_unused_parameters):
            me = weakref.ref(self)
            self._module_hooks += [
                ddp.register_forward_pre_hook(_BeforeForward(me)),
                ddp.register_forward_hook(_AfterForward(me), always_call=True),
            ]
        self._finds_unused = bool(ddp.find_unused_parameters or ddp.static_graph)
        # A pass under no_sync() has no buckets, and this rank may use only parameters of other optimizers in it.
        counts_others = self._finds_unused and step.accumulation.passes > 1
        self._others = Arrivals(self.other_arrived, ddp) if counts_others else None
        self._hook = CommHook.register(ddp)
        if not self._hook.listeners and isinstance(self._hook.reducer, UserHook):
            self._hook.release(self._hook.reducer)  # that of an overlap that has been removed
        if comm_hook is not None:
            self._hook.reduce_with(UserHook(comm_hook, comm_state))
        self._hook.add_listener(self)
        if isinstance(self._hook.reducer, UserHook):  # which may give ranks different gradients
            step.agree_over(ddp.process_group)
        self.parameters_changed()

    @property
    def is_running(self) -> bool:
        """See :class:`Source`."""
        return self._running

    def arrived(self, p: Tensor) -> None:
        """See :class:`Source`. DDP has not reduced the gradient yet."""
        stood_for_zeros = isinstance(p.grad, ConsumedGradient)  # which without overlap would be in the bucket
        self._receive(p)
        if self._drops():
            return
        refuse_graph(p.grad)
        if stood_for_zeros:
            self._hook.stand_in(p)
        self._used_here.add(id(p))
        self._count_pass()

    def other_arrived(self, p: Tensor) -> None:
        """Called when a gradient has been accumulated that is not of this optimizer."""
        self._check_not_removed()
        self._forget_skipped_step()
        if not self._drops():
            self._count_pass()

    def _count_pass(self) -> None:
        """Count the pass that is running, with ``accumulate=N``: every pass counts, under ``no_sync()`` too.

        It does not matter whether this rank has used a parameter of the optimizer, for others may have. Which ones are
        frozen is the same on all ranks.
        """
        if self.step.accumulation.passes == 1 or current_pass() == self._pass or is_nested():
            return
        if any(p.requires_grad for p in self.step.parameters.all):
            with self.step.lock:
                self.step.begin_pass()
            self._pass = current_pass()

    def parameters_changed(self) -> None:
        """See :class:`Source`."""
        super().parameters_changed()
        if self._others is not None:
            mine = {id(p) for p in self.step.parameters.all}
            self._others.cover(p for p in self._others.inside() if id(p) not in mine)

    def bucket_filled(self, params: Sequence[Tensor], index: int) -> Callable[[Sequence[Tensor]], None] | None:
        """See :class:`offbeat.ddp.Listener`.

        A parameter that this rank did not use may be unused on all ranks, and must then not be updated. DDP knows that
        only at the end of backward, so ``optimizer.step()`` updates it if it has a gradient then. Matrices that several
        ranks share wait for that on all ranks.
        """
        self._check_not_removed()
        self._forget_skipped_step()
        if self._drops():
            return None
        if index == 0:
            self._running = True
            with self.step.lock:
                self.step.gradients_arrive()
                self._refresh()
                if self.step.accumulation.passes == 1:
                    self.step.begin_pass()
                else:
                    self._count_pass()
        mine = [i for i, p in enumerate(params) if p in self._arrivals]
        if not mine or not self.step.accumulation.is_last_pass:
            return None
        ours = [params[i] for i in mine]
        together = self._stepped_together()
        now = [k for k, p in enumerate(ours) if id(p) in self._used_here and id(p) not in together]
        elsewhere = any(id(p) not in together for p in ours)

        def step_bucket(grads: Sequence[Tensor]) -> None:
            with self.step.lock:
                self.step.bucket(ours, [grads[i] for i in mine], now)
                self.step.stepped_elsewhere |= elsewhere

        return step_bucket

    def _stepped_together(self) -> set[int]:
        """Ids of parameters that all ranks must step at once, while each knows only what it has used itself."""
        if not self._finds_unused:
            return set()
        sharing = self.step.parameters.sharing()
        return {id(p) for one in sharing for group in one.param_groups for p in group["params"]}

    def pass_ended(self) -> None:
        """See :class:`offbeat.ddp.Listener`."""
        if self._removed:
            return
        with self.step.lock:
            self._running = False
            (_, stale), self._dropped = self._dropped, (-1, [])
            for p, placeholder in stale:
                p.grad = placeholder  # DDP has put what it reduced there
            if stale:
                return
            for p in self.step.parameters.all:
                receive(p)
            if self.step.accumulation.is_last_pass:
                self.step.free(list(self.step.stepped.values()))
            self.step.gradients_moved()

    def _drops(self) -> bool:
        """Whether the gradients of the pass that is running are dropped; see :attr:`Step.drops_gradients`."""
        now = current_pass()
        if self._dropped[0] != now:
            drops = self.step.drops_gradients
            every = self.step.parameters.all if drops else []
            self._dropped = (now, [(p, p.grad) for p in every if isinstance(p.grad, ConsumedGradient)])
        return bool(self._dropped[1])

    def before_forward(self) -> None:
        """Called before forward if gradients are views of buckets.

        DDP makes its buckets anew in an early forward pass, and copies gradients there. The user may clear them only
        after it: ``out = ddp(x); optimizer.zero_grad(); loss(out).backward()``.
        """
        self._lifted = lift(self.step.parameters.all)

    def after_forward(self, ddp: DistributedDataParallel) -> None:
        """Called after forward, also if it raised."""
        lifted, self._lifted = self._lifted, []
        for p, placeholder in lifted:
            if p.grad is None:
                p.grad = placeholder
        if _torch.has_final_buckets(ddp):
            self._remove_module_hooks()

    def _remove_module_hooks(self) -> None:
        for hook in self._module_hooks:
            hook.remove()
        self._module_hooks = []

    def failed(self, error: BaseException) -> None:
        """See :class:`offbeat.ddp.Listener`."""
        self.step.bucket_failed(error)

    def flush(self) -> None:
        """See :class:`Source`. DDP has waited for all buckets at the end of backward."""

    def settle(self) -> None:
        """See :class:`Source`."""
        self._hook.settle()

    def begin_step(self) -> None:
        """See :class:`Source`."""
        super().begin_step()
        self._used_here.clear()
        self._running = False

    def remove(self) -> None:
        """See :class:`Source`. A user's communication hook goes on reducing, or the numbers would change."""
        super().remove()
        if self._others is not None:
            self._others.remove()
        self._remove_module_hooks()
        self._hook.remove_listener(self)


# DDP holds on to what follows; none of it keeps the optimizer alive.


class _BeforeForward(ModuleHook):
    """A forward pre-hook."""

    def __init__(self, source: weakref.ref[DdpSource]) -> None:
        self._source = source

    def __call__(self, module: Any, args: Any) -> None:
        found = self._source() if not torch.compiler.is_compiling() else None
        if found is not None:
            found.before_forward()


class _AfterForward(ModuleHook):
    """A forward hook."""

    def __init__(self, source: weakref.ref[DdpSource]) -> None:
        self._source = source

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        found = self._source() if not torch.compiler.is_compiling() else None
        if found is not None:
            found.after_forward(module)
