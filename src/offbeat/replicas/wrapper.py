"""An optimizer around an optimizer: everything but ``step`` is the inner one's, live."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat import _torch, frameworks
from offbeat._names import ChecksNames
from offbeat.overlap.handle import overlap_of
from offbeat.overlap.scaling import unscale

__all__ = ["OptimizerWrapper"]

_SCALER = ("grad_scale", "found_inf")


class OptimizerWrapper(ChecksNames, Optimizer):
    """Any :class:`torch.optim.Optimizer`, wrapped.

    ``param_groups``, ``state`` and ``defaults`` are always the inner optimizer's own, and so is every public name that
    is not found here. Hooks registered here run around this ``step``, those of the inner optimizer around its own.
    """

    def __init__(self, optim: Optimizer) -> None:
        _torch.require("sync")
        frameworks.refuse_wrapped(optim, type(self).__name__)
        if not isinstance(optim, Optimizer):
            raise TypeError(f"optim must be a torch.optim.Optimizer, but got {type(optim).__name__}")
        self.optim: Optimizer = None  # type: ignore[assignment]  # not yet
        self._skipped: Any = False
        self._is_told = False
        super().__setstate__({})  # hooks, and step() made to run them; no parameters of our own
        self.optim = optim

    @contextmanager
    def _scaled_step(self) -> Iterator[None]:
        """A step that fails must not leave behind what the scaler lent it: the next one would take it for its own."""
        try:
            yield
        except BaseException:
            for name in _SCALER:
                vars(self).pop(name, None)
            raise

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step left parameters alone, because a GradScaler found gradients that are not finite."""
        return _is_set(self._skipped)

    @property
    def found_inf(self) -> Any:
        """What a GradScaler lends a step: whether this rank's gradients are not finite."""
        if "found_inf" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'found_inf'")
        return vars(self)["found_inf"]

    @found_inf.setter
    def found_inf(self, found: Any) -> None:
        vars(self)["found_inf"] = found
        around = vars(self).get("step")
        if around is not None:
            # Somebody has put a function around step() to see whether the scaler calls it, as Accelerate does.
            vars(self)["step"] = functools.partial(self._step_unseen, around)

    @found_inf.deleter
    def found_inf(self) -> None:
        del vars(self)["found_inf"]

    def _step_unseen(self, around: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a step, and only if it is not skipped let the function around it know."""
        vars(self)["step"] = around
        result = type(self).step(self, *args, **kwargs)
        if not self.step_was_skipped:
            self._is_told = True
            try:
                around(*args, **kwargs)
            finally:
                self._is_told = False
        return result

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """As torch's, which runs hooks; but does nothing while others are told of a step that has been made."""
        hooked = Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: OptimizerWrapper, *args: Any, **kwargs: Any) -> Any:
            return None if self._is_told else hooked(self, *args, **kwargs)

        return step

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's."""
        groups: list[dict[str, Any]] = self.optim.param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's."""
        defaults: dict[str, Any] = self.optim.defaults if self.optim is not None else {}
        return defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in _SCALER or name == "optim":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return repr(self.optim)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} holds process groups and cannot be pickled or copied; "
            "save its state_dict() and load that into a new one"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's."""
        self.optim.add_param_group(param_group)

    def _inner_state_dict(self) -> dict[str, Any]:
        for hook in _torch.state_dict_hooks(self, "state_dict_pre"):
            hook(self)
        found: dict[str, Any] = self.optim.state_dict()
        return found

    def _finish_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for hook in _torch.state_dict_hooks(self, "state_dict_post"):
            state_dict = hook(self, state_dict) or state_dict
        return state_dict

    def _begin_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = dict(state_dict)
        for hook in _torch.state_dict_hooks(self, "load_state_dict_pre"):
            state_dict = hook(self, state_dict) or state_dict
        return state_dict

    def _finish_load(self) -> None:
        for hook in _torch.state_dict_hooks(self, "load_state_dict_post"):
            hook(self)

    def _step_inner(self, closure: Callable[[], Any] | None) -> Any:
        """The inner optimizer's step, or none if a GradScaler has found this rank's gradients not finite."""
        found, scale = vars(self).get("found_inf"), vars(self).get("grad_scale")
        self._skipped = False
        if closure is not None:
            if found is not None:
                raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
            return self.optim.step(self._together(closure))
        if found is None:
            self._reduce_gradients(False)
            return self.optim.step()
        handle = overlap_of(self.optim)
        scaling = handle.scaling if handle is not None else None
        if scaling is not None:
            if scale is not None:  # the scaler has not asked yet
                found = scaling.found()
            found = _is_set(found)
        elif self._reduces_gradients or not _torch.takes_scaled_gradients(self.optim):
            if scale is not None:
                unscale(self.optim, scale)
            found = self._reduce_gradients(_is_set(found))
        else:
            inner: Any = self.optim
            inner.grad_scale, inner.found_inf = scale, found
            try:
                result = inner.step()
            finally:
                del inner.grad_scale, inner.found_inf
            self._skipped = found  # not asked here: it may be on a device
            return result
        self._skipped = found
        return None if found else self.optim.step()

    def _together(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, made to give ranks that average gradients the same."""
        return closure

    @property
    def _reduces_gradients(self) -> bool:
        """Whether gradients are averaged here, just before the inner step."""
        return False

    def _reduce_gradients(self, found: bool) -> bool:
        """Average gradients where that is done here; returns whether a number was not finite on any of the ranks."""
        return found


# Have a GradScaler call ``step()`` always: whether the inner step is skipped is this rank's affair, but what the
# wrapper does around it is every rank's. Whoever else asks is told about the optimizer inside: frameworks do not clip
# the gradients of optimizers that unscale them.
_torch.mark_wrapper(OptimizerWrapper, lambda wrapper: wrapper.optim)


def _is_set(found: Any) -> bool:
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    return bool(found.item()) if isinstance(found, torch.Tensor) else bool(found)
