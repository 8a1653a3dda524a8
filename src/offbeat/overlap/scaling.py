"""Loss scaling: gradients are unscaled bucket by bucket, and the scaler decides whether to skip the step.

A step is skipped if any gradient is not finite, so updates wait until all gradients have been unscaled. The user or
``scaler.step`` calls the scaler's ``unscale_``, as without overlap. For an overlapped optimizer it does not unscale
again; it only reports whether a gradient was not finite.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from offbeat import _torch
from offbeat.engine.tensors import changes, local

__all__ = ["Scaling", "unscale"]


class Scaling:
    """Unscales the gradients of one overlapped optimizer for a :class:`torch.amp.GradScaler`.

    Args:
        finish: a bound method that unscales gradients that were in no bucket, and makes ranks agree.
    """

    def __init__(self, scaler: Any, optimizer: Optimizer, finish: Callable[[], None]) -> None:
        self.scaler = scaler
        self._optimizer = weakref.ref(optimizer)
        self._finish = weakref.WeakMethod(finish)
        self._found: dict[torch.device, Tensor] = {}
        self._inverse: Tensor | None = None
        self._states: Any = None
        self._done: dict[int, tuple[Tensor, int]] = {}  # by parameter: its unscaled gradient and its changes()
        self._had_amp = _torch.own_mark(optimizer)
        _Unscale.of(scaler).scalings.add(self)

    @property
    def is_finished(self) -> bool:
        """Whether the scaler has called ``unscale_`` in this step."""
        return self._states is not None

    @property
    def is_over(self) -> bool:
        """Whether the step is skipped: a gradient was not finite, or ``scaler.update()`` has been called since then."""
        if not self.is_finished:
            return False
        return _torch.scaler_states(self.scaler) is not self._states or any(map(bool, self._found.values()))

    def take_over(self) -> None:
        """Have the scaler not leave unscaling to the optimizer's own step: gradients are unscaled before it.

        Called when a backward pass brings its first gradient; a load since the last one may have changed this back.
        """
        optimizer = self._optimizer()
        if optimizer is not None and _torch.takes_scaled_gradients(optimizer):
            _torch.mark_scaled(optimizer, False)

    def begin(self) -> None:
        """Called before the first gradient of a step is unscaled."""
        self.take_over()
        scale = _torch.scale_of(self.scaler)
        if scale is None:
            raise RuntimeError(
                "backward() ran without scaling the loss, but overlap() was given a scaler; call "
                "scaler.scale(loss).backward()"
            )
        # Bit for bit as in GradScaler.unscale_.
        self._inverse = scale.double().reciprocal().float()

    def unscale(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, and note whether one is not finite."""
        if self._inverse is None:
            self.begin()
        assert self._inverse is not None
        for (device, _), some in _by_kind(grads).items():
            found = self._found.get(device)
            if found is None:
                found = self._found[device] = torch.zeros((), dtype=torch.float32, device=device)
            _torch.unscale_tensors(some, found, self._inverse.to(device))
        self._done.update((id(p), (g, changes(g))) for p, g in zip(params, grads, strict=True))

    def moved(self, p: Tensor) -> None:
        """Called when an unscaled gradient was copied into ``.grad`` without a change."""
        if id(p) in self._done and (g := p.grad) is not None:
            self._done[id(p)] = (g, changes(g))

    def check(self, params: Sequence[Tensor], name_of: Callable[[Tensor], str]) -> None:
        """Raise if an unscaled gradient was changed: the user expected it to be still scaled."""
        for p in params:
            found, g = self._done.get(id(p)), p.grad
            if found is not None and g is not None and (found[0] is not g or found[1] != changes(g)):
                raise RuntimeError(
                    f"the gradient of {name_of(p)} was changed between backward() and "
                    "scaler.unscale_(), but overlap() unscales gradients during backward; change gradients after "
                    "scaler.unscale_(optimizer). Call handle.reset() to drop this step"
                )

    def is_unscaled(self, p: Tensor) -> bool:
        """Whether this parameter's gradient has been unscaled in this step."""
        return id(p) in self._done

    def agree(self, groups: Sequence[Any], device: torch.device) -> None:
        """Have all ranks of these process groups skip the step if one of them does."""
        if not groups:
            return
        found = self._found.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
        for other in self._found.values():
            if other is not found:
                found.copy_(torch.maximum(found, other.to(device)))
        for group in groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)

    def found(self) -> bool:
        """Whether a gradient of this step is not finite."""
        state: dict[str, Any] = {}
        self.answer(state)
        return any(bool(found.item()) for found in state["found_inf_per_device"].values())

    def is_for(self, optimizer: Optimizer) -> bool:
        """Whether this is the overlapped optimizer, or a wrapper that shares its ``param_groups``."""
        mine = self._optimizer()
        return mine is not None and mine.param_groups is optimizer.param_groups

    def answer(self, state: dict[str, Any]) -> None:
        """Set a ``GradScaler``'s state of an optimizer as ``unscale_`` does."""
        finish = self._finish()
        if finish is not None:
            finish()
        self._states = _torch.scaler_states(self.scaler)
        state["found_inf_per_device"] = dict(self._found)
        state["stage"] = _torch.scaler_stage("UNSCALED")

    def reset(self) -> None:
        """Begin a new step."""
        self._found, self._inverse, self._states, self._done = {}, None, None, {}

    def remove(self) -> None:
        """Restore the scaler and the optimizer."""
        optimizer = self._optimizer()
        unscale = _Unscale.of(self.scaler)
        unscale.scalings.discard(self)
        if not unscale.scalings:
            del self.scaler.unscale_
        if optimizer is not None and _torch.own_mark(optimizer) is not None:
            _torch.mark_scaled(optimizer, self._had_amp)


def _by_kind(grads: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """The values of gradients, by device and dtype."""
    kinds: dict[Any, list[Tensor]] = {}
    for g in grads:
        part = local(g)
        part = _torch.sparse_values(part) if part.layout == torch.sparse_coo else part
        kinds.setdefault((part.device, part.dtype), []).append(part)
    return kinds


@torch.no_grad()
def unscale(optimizer: Optimizer, scale: Tensor) -> None:
    """Divide all gradients of an optimizer by a scale, as ``GradScaler.unscale_`` does."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any(g.dtype == torch.float16 for g in grads):
        raise ValueError("Attempting to unscale FP16 gradients; keep parameters in float32 and use torch.autocast")
    inverse = scale.double().reciprocal().float()
    for (device, _), some in _by_kind(grads).items():
        ignored = torch.zeros((), dtype=torch.float32, device=device)
        _torch.unscale_tensors(some, ignored, inverse.to(device))


class _Unscale:
    """Replaces a scaler's ``unscale_``, and answers it for overlapped optimizers."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = weakref.ref(scaler)
        self.scalings: weakref.WeakSet[Scaling] = weakref.WeakSet()

    @staticmethod
    def of(scaler: Any) -> _Unscale:
        """That of this scaler, installed if it is not yet."""
        if not isinstance(vars(scaler).get("unscale_"), _Unscale):
            scaler.unscale_ = _Unscale(scaler)
        found: _Unscale = scaler.unscale_
        return found

    def __reduce__(self) -> Any:
        return _refuse_copy, ()

    def __deepcopy__(self, memo: Any) -> Any:
        return _copied

    def __call__(self, optimizer: Optimizer) -> None:
        scaler = self._scaler()
        assert scaler is not None
        scaling = next((one for one in self.scalings if one.is_for(optimizer)), None)
        state = _torch.scaler_states(scaler)[id(optimizer)]
        if scaling is None or not scaler.is_enabled() or state["stage"] is not _torch.scaler_stage("READY"):
            type(scaler).unscale_(scaler, optimizer)
        else:
            _torch.check_scale(scaler, "unscale_")
            scaling.answer(state)


def _refuse_copy() -> Any:
    return _copied


def _copied(optimizer: Optimizer) -> None:
    raise RuntimeError(
        "this GradScaler is a copy of one that was passed to offbeat.overlap(); create a new one and load its "
        "state_dict()"
    )
