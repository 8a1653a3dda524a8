"""Loss scaling: gradients are unscaled bucket by bucket, and the scaler decides as ever.

Whether a step may happen is known when the last gradient has been looked at, so updates wait until then. The
scaler's ``unscale_`` is asked for this optimizer as it is for any other, by the user or by ``scaler.step``; for
an overlapped one the answer is there already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from offbeat.optim.gradients import local

__all__ = ["Scaling", "unscale"]


class Scaling:
    """One overlapped optimizer under a :class:`torch.amp.GradScaler`.

    Args:
        finish: unscales what no bucket brought, and makes ranks agree.
    """

    def __init__(self, scaler: Any, optimizer: Optimizer, finish: Callable[[], None]) -> None:
        self.scaler = scaler
        self._optimizer = weakref.ref(optimizer)
        self._finish = weakref.WeakMethod(finish)
        self._found: dict[torch.device, Tensor] = {}
        self._inverse: Tensor | None = None
        self._states: Any = None
        self._done: dict[int, tuple[Tensor, int]] = {}  # by parameter: its gradient and its version, unscaled
        self._had_amp = vars(optimizer).get("_step_supports_amp_scaling")
        _Unscale.of(scaler).answers[id(optimizer)] = self

    @property
    def is_finished(self) -> bool:
        """Whether the scaler has asked since the last step."""
        return self._states is not None

    @property
    def is_over(self) -> bool:
        """Whether ``scaler.update()`` has been called since: a step that was skipped is behind us."""
        return self.is_finished and self.scaler._per_optimizer_states is not self._states

    def begin(self) -> None:
        """Before the first gradient of a step."""
        optimizer = self._optimizer()
        if optimizer is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            # Gradients are unscaled before the step sees them, so the scaler must not leave that to the step.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if self.scaler._scale is None:
            raise RuntimeError(
                "a gradient arrived, but overlap()'s scaler has not scaled anything; call scaler.scale(loss).backward()"
            )
        # As GradScaler.unscale_ does it, to the bit.
        self._inverse = self.scaler._scale.double().reciprocal().float()

    def unscale(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, and look for numbers that are not finite."""
        if self._inverse is None:
            self.begin()
        assert self._inverse is not None
        for (device, _), some in _by_kind(grads).items():
            found = self._found.get(device)
            if found is None:
                found = self._found[device] = torch.zeros((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(some, found, self._inverse.to(device))
        self._done.update((id(p), (g, g._version)) for p, g in zip(params, grads, strict=True))

    def moved(self, p: Tensor) -> None:
        """An unscaled gradient lies in ``.grad`` now, unchanged."""
        if id(p) in self._done and p.grad is not None:
            self._done[id(p)] = (p.grad, p.grad._version)

    def check(self, params: Sequence[Tensor]) -> None:
        """Raise if an unscaled gradient is not what it was: whoever changed it took it for a scaled one."""
        for p in params:
            found = self._done.get(id(p))
            if found is not None and p.grad is not None and (found[0] is not p.grad or found[1] != p.grad._version):
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} was changed between backward() and "
                    "scaler.unscale_(), but overlap() unscales gradients during backward; change it after "
                    "scaler.unscale_(optimizer), and call handle.reset() to drop this step"
                )

    def is_unscaled(self, p: Tensor) -> bool:
        """Whether a bucket brought this parameter's gradient in this step."""
        return id(p) in self._done

    def agree(self, groups: Sequence[Any], device: torch.device) -> None:
        """Have all ranks of these groups skip the step if one of them must."""
        if not groups:
            return
        found = self._found.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
        for other in self._found.values():
            if other is not found:
                found.copy_(torch.maximum(found, other.to(device)))
        for group in groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)

    def found(self) -> bool:
        """Whether a number was not finite, as the scaler would be told."""
        state: dict[str, Any] = {}
        self.answer(state)
        return any(bool(found.item()) for found in state["found_inf_per_device"].values())

    def answer_for(self, wrapper: Optimizer) -> None:
        """Answer the scaler's question about an optimizer that wraps this one, too."""
        answers = _Unscale.of(self.scaler).answers
        answers[id(wrapper)] = self
        weakref.finalize(wrapper, answers.pop, id(wrapper), None).atexit = False

    def answer(self, state: dict[str, Any]) -> None:
        """What ``GradScaler.unscale_`` has to leave behind."""
        finish = self._finish()
        if finish is not None:
            finish()
        self._states = self.scaler._per_optimizer_states
        state["found_inf_per_device"] = dict(self._found)
        state["stage"] = OptState.UNSCALED

    def reset(self) -> None:
        """Begin a new step."""
        self._found, self._inverse, self._states, self._done = {}, None, None, {}

    def remove(self) -> None:
        """Leave scaler and optimizer as they were."""
        optimizer = self._optimizer()
        unscale = _Unscale.of(self.scaler)
        for key, value in list(unscale.answers.items()):
            if value is self:
                del unscale.answers[key]
        if not unscale.answers:
            del self.scaler.unscale_
        if optimizer is not None and "_step_supports_amp_scaling" in vars(optimizer):
            if self._had_amp is None:
                del optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
            else:
                optimizer._step_supports_amp_scaling = self._had_amp  # type: ignore[attr-defined]


def _by_kind(grads: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """The numbers of gradients, by device and dtype."""
    kinds: dict[Any, list[Tensor]] = {}
    for g in grads:
        part = local(g)
        part = part._values() if part.layout == torch.sparse_coo else part
        kinds.setdefault((part.device, part.dtype), []).append(part)
    return kinds


@torch.no_grad()
def unscale(optimizer: Optimizer, scale: Tensor) -> None:
    """Divide all gradients of an optimizer by a scale, as ``GradScaler.unscale_`` does."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any(g.dtype == torch.float16 for g in grads):
        raise ValueError("Attempting to unscale FP16 gradients: keep parameters in float32 and use torch.autocast")
    inverse = scale.double().reciprocal().float()
    for (device, _), some in _by_kind(grads).items():
        ignored = torch.zeros((), dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(some, ignored, inverse.to(device))


class _Unscale:
    """Stands before a scaler's ``unscale_`` and answers for overlapped optimizers."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = weakref.ref(scaler)
        self.answers: weakref.WeakValueDictionary[int, Scaling] = weakref.WeakValueDictionary()

    @staticmethod
    def of(scaler: Any) -> _Unscale:
        """The one that stands before this scaler, put there if need be."""
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
        scaling = self.answers.get(id(optimizer))
        state = scaler._per_optimizer_states[id(optimizer)]
        if scaling is None or not scaler.is_enabled() or state["stage"] is not OptState.READY:
            type(scaler).unscale_(scaler, optimizer)
        else:
            scaler._check_scale_growth_tracker("unscale_")
            scaling.answer(state)


def _refuse_copy() -> Any:
    return _copied


def _copied(optimizer: Optimizer) -> None:
    raise RuntimeError(
        "this GradScaler is a copy of one that offbeat.overlap() was given; make a new one and load its state_dict()"
    )
