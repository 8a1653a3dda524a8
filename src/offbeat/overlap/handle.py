"""``overlap()``: hang an optimizer into the backward pass of its module."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.overlap.checks import check_module, check_options, check_parameters, owners
from offbeat.overlap.clipping import Clipping
from offbeat.overlap.core import Core
from offbeat.overlap.ddp import DdpSource, check_ddp
from offbeat.overlap.fsdp import fsdp_units
from offbeat.overlap.hooks import HookSource
from offbeat.overlap.scaling import Scaling

__all__ = ["Overlap", "overlap", "overlap_of"]


def overlap(
    optimizer: Optimizer,
    module: torch.nn.Module,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip: str = "exact",
    scaler: Any = None,
    comm_hook: Any = None,
    comm_state: Any = None,
    bucket_cap_mb: float | None = None,
) -> Overlap:
    """Update parameters during backward, as soon as their gradients are final; the training loop stays as it is.

    ``backward()`` updates, ``optimizer.step()`` finishes what is left and runs step hooks, ``zero_grad()`` and
    schedulers work as ever. The numbers are those of the same loop without overlap.

    Args:
        optimizer: any :class:`torch.optim.Optimizer` that updates each parameter by itself.
        module: the module whose parameters it has: plain, ``DistributedDataParallel``, or ``fully_shard``-ed.
        accumulate: backward passes that make one step. See also :meth:`Overlap.accumulate`; under DDP's ``no_sync()``
            and FSDP2's ``set_requires_gradient_sync(False)`` leave it at 1.
        clip_norm: largest norm of all gradients of this optimizer together; None does not clip.
        clip: ``"exact"`` waits with all updates until the norm is known; ``"previous"`` clips by the norm of the step
            before, ``"bucket"`` each bucket by its own norm, and neither waits.
        scaler: the :class:`torch.amp.GradScaler` the loss is scaled with. Updates wait until all gradients are
            known to be finite.
        comm_hook: a DDP communication hook to reduce buckets with, called with ``comm_state``.
        comm_state: see ``comm_hook``.
        bucket_cap_mb: without DDP and FSDP2, which have buckets of their own: a bucket is stepped when its gradients
            take this much memory. The default is 25 on the CPU and on a GPU a twentieth of all gradients (25 to 256).

    Returns:
        A handle; keep it to accumulate, to read the norm, or to :meth:`~Overlap.remove` the overlap.

    Example::

        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
        >>> handle = offbeat.overlap(optimizer, model, clip_norm=1.0, clip="previous")
        >>> for step in range(3):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> handle.last_norm.shape
        torch.Size([])
        >>> handle.remove()

    Limits: ``step()`` takes no closure. Once a bucket has been stepped its gradients cannot be read. See the page on
    overlap for what works together.
    """
    check_options(accumulate, clip_norm, clip, scaler, comm_hook, comm_state)
    if bucket_cap_mb is not None and (not isinstance(bucket_cap_mb, (int, float)) or not bucket_cap_mb > 0):
        raise ValueError(f"bucket_cap_mb must be a positive number of megabytes, but got {bucket_cap_mb!r}")
    outer = module
    module = getattr(module, "_orig_mod", module)  # torch.compile's
    check_module(module, comm_hook)
    check_parameters(optimizer, module, scaler)
    if isinstance(module, DistributedDataParallel):
        check_ddp(module, comm_hook)
    units = fsdp_units(module)
    clipping = None if clip_norm is None else Clipping(float(clip_norm), clip)
    core = Core(optimizer, list(module.parameters()), accumulate, clipping)
    source: Any
    if isinstance(module, DistributedDataParallel):
        source = DdpSource(core, module, comm_hook, comm_state)
    else:
        source = HookSource(
            core, module, outer, None if bucket_cap_mb is None else max(1, int(bucket_cap_mb * 2**20)), units
        )
    return Overlap(core, source, scaler)


def overlap_of(optimizer: Optimizer) -> Overlap | None:
    """The overlap this optimizer is in, if any."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            handle = owners.get(p)
            found: Overlap | None = handle() if handle is not None else None
            if found is not None and found._core is not None and found._core.optimizer is optimizer:
                return found
    return None


class Overlap:
    """An optimizer that steps during backward. Made by :func:`overlap`."""

    def __init__(self, core: Core, source: Any, scaler: Any) -> None:
        self._core: Core | None = core
        self._source = source
        optimizer = core.optimizer
        core.hooks = (optimizer.register_step_pre_hook(self._finish), optimizer.register_step_pre_hook(self._hand_over))
        self._hooks = [*core.hooks, optimizer.register_step_post_hook(self._take_back)]
        if scaler is not None and scaler.is_enabled():
            core.scaling = Scaling(scaler, core.optimizer, self._finish_scaling)
        self._own()

    @property
    def last_norm(self) -> Tensor | None:
        """The norm of all gradients of the last step, before clipping: a 0-d tensor on their device.

        None without ``clip_norm`` and before the first step. ``clip_norm=float("inf")`` measures without clipping.
        """
        return self._core.clip.last if self._core is not None and self._core.clip is not None else None

    @property
    def scaling(self) -> Scaling | None:
        """How gradients are unscaled, if they are."""
        return self._alive().scaling

    @property
    def is_stepping(self) -> bool:
        """Whether a bucket is being stepped at this moment."""
        return self._core is not None and self._core.in_bucket

    def answer_for(self, wrapper: Optimizer) -> None:
        """Have the scaler take a wrapper around the optimizer for the optimizer."""
        scaling = self._alive().scaling
        if scaling is not None:
            scaling.answer_for(wrapper)

    def reduce_with(self, hook: Any) -> None:
        """Have DDP's buckets reduced by this communication hook from now on."""
        self._alive()
        self._source.reduce_with(hook)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this block add up gradients and step nothing; the next one outside does."""
        core = self._alive()
        core.announced += 1
        try:
            yield
        finally:
            core.announced -= 1

    def state_dict(self) -> dict[str, Any]:
        """What ``clip="previous"`` needs to go on exactly, besides the optimizer's own state dict."""
        return {"last_norm": self.last_norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`. Without it the first step with ``clip="previous"`` is exact."""
        core, norm = self._alive(), state_dict["last_norm"]
        if core.clip is not None:
            core.clip.last = None if norm is None else norm.clone().to(core.everyone[0].device)

    def reset(self) -> None:
        """Drop all gradients and begin a new step: the way out after a backward that failed or was refused.

        Parameters that have been updated stay as they are.
        """
        core = self._alive()
        with core.lock:
            core.reset(everything=True)
            self._source.begin_step()

    def remove(self) -> None:
        """Take all hooks away: the optimizer steps after backward again, and nothing refers to it or the module."""
        core = self._core
        if core is None:
            return
        with core.lock:
            if core.scaling is not None and core.scaling.is_over:
                core.reset()
            if self._source.is_running or core.is_open:
                raise RuntimeError(
                    "remove() was called between backward() and optimizer.step(), when a part of the parameters may "
                    "have been updated; call optimizer.step() first, or handle.reset() to drop what is left"
                )
            core.end_step()
            self._source.remove()
            for hook in self._hooks:
                hook.remove()
            if core.scaling is not None:
                core.scaling.remove()
            for p in core.everyone:
                owners.pop(p, None)
            self._core = self._source = None

    def _alive(self) -> Core:
        if self._core is None:
            raise RuntimeError("this overlap has been removed; call offbeat.overlap() again")
        return self._core

    def _own(self) -> None:
        me = weakref.ref(self)
        for p in self._alive().everyone:
            owners[p] = me

    def _look_at_groups(self) -> None:
        if self._alive().look_at_groups():
            self._source.look_at_params()
            self._own()

    def _finish_scaling(self) -> None:
        """The scaler asks whether the step may happen."""
        core = self._alive()
        with core.lock:
            self._look_at_groups()
            self._source.flush()
            core.finish_scaling()

    def _finish(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """First of all step hooks: gradients take their final form."""
        core = self._alive()
        if core.in_bucket or core.in_step:
            return
        asked = [name for name, value in kwargs.items() if value is not None and value is not False]
        if asked and asked != ["closure"]:
            raise RuntimeError(
                f"step({', '.join(f'{name}=' for name in asked)}) cannot be overlapped: gradients have been used "
                "before step() is called. Clip with overlap(..., clip_norm=), call zero_grad() after step(), "
                "and call step() without arguments"
            )
        if asked or any(argument is not None for argument in args[1:]):
            raise RuntimeError(
                "step(closure) cannot be overlapped: the closure's backward would update parameters and then be run "
                "again; call backward() yourself and step() without arguments"
            )
        with core.lock:
            self._look_at_groups()
            core.check_step()
            self._source.flush()
            core.finish()

    def _hand_over(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Last before the optimizer's own step, which then finds only what is left."""
        core = self._alive()
        if not (core.in_bucket or core.in_step):
            with core.lock:
                core.hand_over()
                self._source.begin_step()

    def _take_back(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        core = self._core
        if core is not None and not core.in_bucket:
            core.take_back()
