"""``overlap()``: hang an optimizer into the backward pass of its module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat import _torch, frameworks
from offbeat._names import checks_names
from offbeat._types import CommHook
from offbeat._warn import warn
from offbeat.overlap.checks import check_module, check_options, check_parameters, check_wrapper, owners
from offbeat.overlap.clipping import WAITS, Clip, Clipping
from offbeat.overlap.ddp import DdpSource, check_ddp
from offbeat.overlap.fsdp import FsdpSource, fsdp_units
from offbeat.overlap.module import ModuleSource
from offbeat.overlap.scaling import Scaling
from offbeat.overlap.source import Source
from offbeat.overlap.step import Step
from offbeat.overlap.step_hooks import Once, StepHooks, check_step_arguments, closure_of, with_closure

__all__ = ["Overlap", "overlap", "overlap_of"]


@checks_names
def overlap(
    optimizer: Optimizer,
    module: torch.nn.Module,
    *,
    accumulate: int | Callable[[], bool] = 1,
    clip_norm: float | None = None,
    clip: Clip = "exact",
    scaler: GradScaler | None = None,
    comm_hook: CommHook | None = None,
    comm_state: Any = None,
    bucket_cap_mb: float | None = None,
) -> Overlap:
    """Update parameters during backward, as soon as their gradients are final. The training loop stays as it is.

    ``backward()`` updates parameters, ``optimizer.step()`` updates those that are left and runs step hooks, and
    ``zero_grad()`` and schedulers work as usual. The numbers are those of the same loop without overlap.

    Args:
        optimizer: any :class:`torch.optim.Optimizer` whose update of a parameter does not depend on other parameters.
            Of the wrappers that Accelerate and Lightning make, the optimizer inside is overlapped.
        module: the module with the optimizer's parameters: plain, in ``DistributedDataParallel``, or with
            ``fully_shard``.
        accumulate: the number of backward passes in a step; or a function that returns, during a backward pass,
            whether more passes follow in the same step. See also :meth:`Overlap.accumulate`. With DDP's ``no_sync()``
            or FSDP2's ``set_requires_gradient_sync(False)``, leave it at 1.
        clip_norm: the largest norm of all gradients of this optimizer together. None does not clip.
        clip: ``"exact"`` clips by the norm of all gradients, and delays all updates until it is known, so that overlap
            gains nothing; it warns. ``"previous"`` clips by the norm of the previous step and ``"bucket"`` clips each
            bucket by its own norm; neither waits, and both are other algorithms than exact clipping.
        scaler: the :class:`torch.amp.GradScaler` that scales the loss. Updates are delayed until all gradients are
            known to be finite.
        comm_hook: a DDP communication hook that reduces buckets. It is called as ``comm_hook(comm_state, bucket)``.
        comm_state: see ``comm_hook``.
        bucket_cap_mb: the size of a bucket in megabytes of gradients, for modules without DDP and FSDP2, which have
            their own buckets. The default is 25 on the CPU, and a twentieth of all gradients (25 to 256) on a GPU.

    Returns:
        A handle. Keep it to accumulate gradients, to read their norm, or to :meth:`~Overlap.remove` the overlap.

    Example:
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

    ``step(closure)`` runs the closure once, after step pre-hooks, as torch's optimizers do.

    Limits: optimizers that evaluate their closure several times cannot be overlapped. Gradients cannot be read once
    their bucket has been stepped. The documentation of overlap lists which features work together.
    """
    _torch.require("overlap")
    check_options(accumulate, clip_norm, clip, scaler, comm_hook, comm_state, bucket_cap_mb)
    check_wrapper(optimizer, scaler)
    wrapper, optimizer = optimizer, frameworks.inner_optimizer(optimizer)
    called = frameworks.inner_module(module)
    module = _torch.inner_module(called)
    check_module(module, comm_hook)
    check_parameters(optimizer, module, scaler)
    if isinstance(module, DistributedDataParallel):
        check_ddp(module, comm_hook, comm_state)
    units = fsdp_units(module)
    clipping = None if clip_norm is None else Clipping(float(clip_norm), clip)
    inside = module.module if isinstance(module, DistributedDataParallel) else module
    scales = scaler is not None and scaler.is_enabled()
    if clipping is not None and clipping.mode == "exact" and not scales:
        warn(
            f"{WAITS} for the norm of all gradients, so overlap hides nothing and frees nothing during backward. Leave "
            "clip_norm out, or pass clip='previous', which clips by the norm of the step before and does not wait"
        )
    step = Step(optimizer, list(inside.named_parameters()), accumulate, clipping)
    cap = None if bucket_cap_mb is None else max(1, int(bucket_cap_mb * 2**20))
    source: Source
    if isinstance(module, DistributedDataParallel):
        source = DdpSource(step, module, comm_hook, comm_state)
    elif units:
        source = FsdpSource(step, module, called, cap, units)
    else:
        source = ModuleSource(step, module, called, cap)
    return Overlap(step, source, scaler, None if wrapper is optimizer else type(wrapper).__name__)


def overlap_of(optimizer: Optimizer) -> Overlap | None:
    """The handle of an overlapped optimizer, or None if it is not overlapped."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            handle = owners.get(p)
            found: Overlap | None = handle() if handle is not None else None
            if found is not None and found._step is not None and found._step.optimizer is optimizer:
                return found
    return None


class Overlap:
    """The handle of an overlapped optimizer. Made by :func:`overlap`.

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.SGD(model.parameters(), lr=0.1)
        >>> handle = offbeat.overlap(optimizer, model, clip_norm=float("inf"))  # measures and does not clip
        >>> with handle.accumulate():
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> model(torch.ones(1, 4)).sum().backward()  # updates with the sum of both
        >>> optimizer.step()
        >>> handle.last_norm
        tensor(6.3246)
        >>> handle.remove()
    """

    def __init__(self, step: Step, source: Source, scaler: GradScaler | None, wrapper: str | None = None) -> None:
        self._wrapper = wrapper  # the class of a framework's wrapper that the optimizer was found in
        self._step: Step | None = step
        self._source = source
        self._owned: list[Tensor] = []
        step.hooks = StepHooks(step.optimizer, self._before_hooks, self._after_hooks, self._take_back)
        if scaler is not None and scaler.is_enabled():
            step.scaling = Scaling(scaler, step.optimizer, self._finish_scaling)
        self._own(step.parameters.all)

    def __repr__(self) -> str:
        step = self._step
        if step is None:
            return "Overlap (removed)"
        inside = f", inside {self._wrapper}" if self._wrapper else ""
        lines = [
            f"optimizer: {type(step.optimizer).__name__}{inside}",
            f"module: {self._source.module_name}, {len(step.parameters.all)} parameters",
        ]
        if step.accumulation.passes > 1:
            lines.append(f"accumulate: {step.accumulation.passes} backward passes")
        if step.clip is not None:
            lines.append(f"clip: {step.clip.mode}, to a norm of {step.clip.limit:g}")
        if step.scaling is not None:
            lines.append(f"scaler: {type(step.scaling.scaler).__name__}")
        lines.append(f"steps: {step.count}")
        return "Overlap (\n" + "".join(f"    {line}\n" for line in lines) + ")"

    @property
    def last_norm(self) -> Tensor | None:
        """The norm of all gradients of the last step before clipping, a 0-d tensor on their device.

        It is None without ``clip_norm`` and before the first step. ``clip_norm=float("inf")`` measures without
        clipping.
        """
        return self._step.clip.last if self._step is not None and self._step.clip is not None else None

    def norm(self) -> Tensor | None:
        """The norm of the gradients of this step, between the last ``backward()`` and ``optimizer.step()``.

        A 0-d tensor on their device, or None without ``clip_norm`` and if there are no gradients. On an FSDP2 module
        call it on every rank. With a scaler, call ``scaler.unscale_(optimizer)`` first.
        """
        step = self._alive()
        if step.clip is None:
            return None
        with step.lock:
            self._refresh(step)
            self._source.flush()
            return step.norm()

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of all gradients together; None if they are not clipped."""
        return self._step.clip.limit if self._step is not None and self._step.clip is not None else None

    @property
    def scaling(self) -> Scaling | None:
        """What unscales gradients, or None without a scaler."""
        return self._alive().scaling

    @property
    def is_stepping(self) -> bool:
        """Whether a bucket is being stepped at this moment."""
        return self._step is not None and self._step.in_bucket

    @property
    def has_updated(self) -> bool:
        """Whether backward has updated parameters in a step that ``optimizer.step()`` has not finished."""
        return self._step is not None and bool(self._step.stepped)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this block add up gradients and update nothing; the next pass outside does."""
        accumulation = self._alive().accumulation
        accumulation.blocks += 1
        try:
            yield
        finally:
            accumulation.blocks -= 1

    def state_dict(self) -> dict[str, Any]:
        """What ``clip="previous"`` needs to go on exactly, in addition to the optimizer's own state dict."""
        return {"last_norm": self.last_norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`. Without it, the first step with ``clip="previous"`` is exact."""
        step, norm = self._alive(), state_dict["last_norm"]
        if step.clip is not None:
            step.clip.last = None if norm is None else norm.clone().to(step.parameters.all[0].device)

    def reset(self) -> None:
        """Drop all gradients and begin a new step, after a backward pass that failed or was refused.

        Parameters that have been updated stay as they are. Buckets of a ``DistributedDataParallel`` module that are
        still on their way are waited for. DDP itself cannot go on after a backward pass that failed halfway: call
        :meth:`remove` too, and wrap and overlap the module again.
        """
        step = self._alive()
        self._source.settle()  # without the lock, which a bucket on its way needs
        with step.lock:
            step.reset(drop_gradients=True)
            self._source.begin_step()

    def remove(self) -> None:
        """Remove all hooks, so that the optimizer steps after backward again."""
        step = self._step
        if step is None:
            return
        with step.lock:
            if step.was_skipped:
                step.reset()
            if self._source.is_running or step.is_open:
                raise RuntimeError(
                    "remove() was called between backward() and optimizer.step(), when some of the parameters may have "
                    "been updated; call optimizer.step() first, or handle.reset() to drop the rest of this step"
                )
            self._source.remove()
            if step.hooks is not None:
                step.hooks.remove()
            if step.scaling is not None:
                step.scaling.remove()
            self._own([])
            self._step = None
            del self._source

    def _alive(self) -> Step:
        if self._step is None:
            raise RuntimeError("this overlap has been removed; call offbeat.overlap() again")
        return self._step

    def _own(self, params: list[Tensor]) -> None:
        """Be the owner of these parameters, and of no others."""
        for p in self._owned:
            owners.pop(p, None)
        me = weakref.ref(self)
        for p in params:
            owners[p] = me
        self._owned = params

    def _refresh(self, step: Step) -> None:
        if step.refresh():
            self._source.parameters_changed()
        if self._owned is not step.parameters.all:
            self._own(step.parameters.all)

    def _finish_scaling(self) -> None:
        """Called when the scaler asks whether a gradient is not finite."""
        step = self._alive()
        with step.lock:
            self._refresh(step)
            self._source.flush()
            step.finish_scaling()

    def _finish(self, step: Step) -> None:
        """Step what is left of the buckets, and clip the other gradients."""
        with step.lock:
            self._refresh(step)
            step.check()
            self._source.flush()
            step.finish()

    def _before_hooks(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first step pre-hook: finish, unless a closure is going to bring more gradients."""
        step = self._alive()
        if step.in_bucket or step.in_step:
            return
        check_step_arguments(args, kwargs)
        if closure_of(args, kwargs) is None:
            self._finish(step)
        elif step.scaling is not None:
            raise RuntimeError(
                "step(closure) cannot be used with a GradScaler, which must look at the gradients before step() is "
                "called; run the closure yourself, then call scaler.step(optimizer)"
            )

    def _after_hooks(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The last step pre-hook: run the closure, and let the optimizer's own step see only what is left."""
        step = self._alive()
        if step.in_bucket or step.in_step:
            return None
        closure = closure_of(args, kwargs)
        # Without the lock: buckets may be stepped in another thread.
        changed = None if closure is None else with_closure(args, kwargs, Once(closure))
        if not step.is_finished:  # there is a closure, or a hook of the user's ran backward
            self._finish(step)
        with step.lock:
            step.hand_over()
            self._source.begin_step()
        return changed

    def _take_back(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The step post-hook."""
        if self._step is not None and not self._step.in_bucket:
            self._step.take_back()
