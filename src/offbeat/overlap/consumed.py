"""The placeholder in ``.grad`` once a gradient has been used and freed.

None would not do: ``torch.nn.utils.clip_grad_norm_`` and ``GradScaler`` silently skip parameters without a gradient,
and a second backward pass would start from nothing. The placeholder takes no memory and raises when it is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from offbeat import _torch
from offbeat.engine.tensors import is_dtensor, local
from offbeat.passes import current_pass, is_nested

__all__ = ["ConsumedGradient", "Placeholders", "is_stale", "lift", "receive", "settle"]

_FORGOTTEN = "call optimizer.zero_grad() after every step, before the next backward()"
_UNANNOUNCED = (
    "call optimizer.step() before the next backward pass; if several belong to one step, announce the backward passes "
    "of a step with overlap(..., accumulate=N) or `with handle.accumulate():`, so that only the last one updates"
)
_NESTED = "use checkpoint(use_reentrant=False), which runs no backward pass inside backward"
_READING = "read or change gradients during backward, with hooks on tensors, or call handle.remove() and step after it"
#: By words in the name of the operation that was tried.
_REMEDIES = {
    # torch reads what a DTensor is cut into before it says which operator is asked for.
    "several DTensors": "clear gradients with optimizer.zero_grad(), without set_to_none=False, and clip with "
    "overlap(..., clip_norm=)",
    "unscale": "pass the GradScaler as overlap(..., scaler=)",
    "norm": "clip with overlap(..., clip_norm=); handle.last_norm is the norm then (clip_norm=math.inf only measures)",
    "clamp": "clip by norm instead of by value, with overlap(..., clip_norm=)",
}
_ADD, _COPY = torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default


class ConsumedGradient(Tensor):
    """Takes the place of a gradient. Its shape, dtype and device can be read; everything else raises.

    It can be set to zero, as ``zero_grad(set_to_none=False)`` does. It then stands for zeros without allocating them,
    until a gradient is added to it. What is added to it after its step and before it is cleared is dropped: the sum is
    not known any more, and the next step refuses a placeholder that was not cleared.

    Attributes:
        owner: what to call the parameter in an error.
        is_zero: whether it has been set to zero.
        is_old: whether the step that used the gradient is over.
        added: the gradient that has been added since.
        sparse_dims: the number of sparse dimensions of the gradient; 0 if it was dense.
    """

    owner: str
    is_zero: bool
    is_old: bool
    added: Tensor | None
    sparse_dims: int
    _param: weakref.ref[Tensor]

    @staticmethod
    def __new__(cls, param: Tensor, owner: str) -> ConsumedGradient:
        """Make one with the shape, dtype and device of a parameter."""
        made: ConsumedGradient = _torch.shape_only(ConsumedShard if is_dtensor(param) else cls, param)
        made.owner, made.sparse_dims, made._param = owner, 0, weakref.ref(param)
        made.renew()
        return made

    def renew(self, gradient: Tensor | None = None) -> None:
        """Stand for a gradient that has just been used; None for one of which only this placeholder is left."""
        self.is_zero, self.added, self.is_old = False, None, False
        self._pass = current_pass()
        if gradient is not None and not isinstance(gradient, ConsumedGradient):
            self.sparse_dims = gradient.sparse_dim() if gradient.is_sparse else 0

    def zeros(self) -> Tensor:
        """What it stands for once it has been set to zero, sparse if the gradient was."""
        if not self.sparse_dims:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        rows, rest = self.shape[: self.sparse_dims], self.shape[self.sparse_dims :]
        index = torch.empty((len(rows), 0), dtype=torch.int64, device=self.device)
        values = torch.empty((0, *rest), dtype=self.dtype, device=self.device)
        return torch.sparse_coo_tensor(index, values, self.shape, check_invariants=True)

    def refuse(self, what: str) -> NoReturn:
        """Raise: something was tried that needs the gradient."""
        remedy = next((remedy for word, remedy in _REMEDIES.items() if word in what), _READING)
        if current_pass() != -1:
            nested = is_nested() or self._pass == current_pass()
            remedy = _FORGOTTEN if self.is_old else _NESTED if nested else _UNANNOUNCED
            what = "adding to it"
        raise RuntimeError(
            f"the gradient of {self.owner} was used and freed by offbeat.overlap during backward(), so {what} is not "
            f"possible any more; {remedy}"
        )

    __torch_function__ = _torch.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _torch.ZERO_OPERATORS:
            for one in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                if isinstance(one, ConsumedGradient):
                    one.is_zero, one.added = True, None
                else:
                    one.zero_()
            return args[0] if isinstance(args[0], Tensor) else None
        first = args[0] if args else None
        if func is _ADD and isinstance(first, ConsumedGradient) and first.is_zero and not isinstance(args[1], cls):
            if first.added is not None:
                first.added = first.added + args[1] if args[1].is_sparse else args[1] + first.added
            elif args[1].is_sparse:
                first.added = first.zeros() + args[1]
            else:
                first.added = args[1] + 0.0  # adding to 0.0 turns -0.0 into 0.0, as adding to real zeros would
            return first
        if func in (_ADD, _COPY) and _is_dropped(first) and not isinstance(args[1], cls):
            return first  # autograd or DDP, in a pass whose gradients are dropped
        if func is _COPY and isinstance(first, ConsumedGradient) and first.is_zero and not isinstance(args[1], cls):
            # DDP, for a parameter that only other ranks have used: the sum of what all of them have.
            first.added = args[1].clone()
            return first
        if func is _COPY and isinstance(first, Tensor) and not isinstance(first, cls) and _is_dropped(args[1]):
            return first.zero_()  # DDP's bucket, in such a pass
        if func is _COPY and isinstance(first, Tensor) and not isinstance(first, cls) and args[1].is_zero:
            # DDP, when it makes its buckets anew with gradient_as_bucket_view=True.
            return first.zero_() if args[1].added is None else first.copy_(args[1].added)
        leaves = _torch.pytree.tree_leaves((args, kwargs))
        return next(one for one in leaves if isinstance(one, ConsumedGradient)).refuse(_name_of(func))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ConsumedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def _name_of(operator: Any) -> str:
    """An operator in words: ``aten.mul.Tensor`` is called mul."""
    return f"computing {str(operator).removeprefix('aten.').split('.')[0]} of it"


class ConsumedShard(ConsumedGradient):
    """Takes the place of the gradient of a DTensor. FSDP2 asks whether it is one, and adds to its shard."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._param())

    @property
    def device_mesh(self) -> Any:
        """The parameter's."""
        return getattr(self._param(), "device_mesh", None)

    @property
    def placements(self) -> Any:
        """The parameter's."""
        return getattr(self._param(), "placements", None)


def _shard(gradient: ConsumedShard) -> Tensor:
    param = gradient._param()
    if param is not None and _is_dropped(gradient):
        return torch.zeros_like(local(param))
    if not gradient.is_zero or param is None:
        gradient.refuse("reading its shard")
    if gradient.added is None:
        gradient.added = torch.zeros_like(param, requires_grad=False)
    return local(gradient.added)


def _keep_shard(gradient: ConsumedShard, shard: Tensor) -> None:
    """``gradient._local_tensor += shard`` has added in place."""


def _no_spec(gradient: ConsumedShard) -> NoReturn:
    gradient.refuse("an operator over several DTensors")


setattr(ConsumedShard, _torch.LOCAL_TENSOR, property(_shard, _keep_shard))
setattr(ConsumedShard, _torch.SPEC, property(_no_spec))


def is_stale(gradient: Any) -> bool:
    """Whether this is the placeholder of an earlier step's gradient, which has not been cleared since."""
    return isinstance(gradient, ConsumedGradient) and gradient.is_old and not gradient.is_zero


def _is_dropped(gradient: Any) -> bool:
    """Whether a backward pass is running whose gradients for this placeholder are dropped."""
    return is_stale(gradient) and current_pass() != -1


def receive(p: Tensor) -> None:
    """Put a gradient that was added to a zeroed placeholder into ``p.grad``."""
    if isinstance(p.grad, ConsumedGradient) and p.grad.added is not None:
        p.grad = p.grad.added


def settle(params: Iterable[Tensor]) -> None:
    """Replace zeroed placeholders by what they stand for. Raises for a placeholder that was not zeroed."""
    for p in params:
        receive(p)
        if isinstance(p.grad, ConsumedGradient):
            if not p.grad.is_zero:
                raise RuntimeError(
                    f"the gradient of {p.grad.owner} was used and freed by offbeat.overlap in an earlier step, and was "
                    f"not cleared after it; {_FORGOTTEN}"
                )
            p.grad = p.grad.zeros() if p.grad.sparse_dims else torch.zeros_like(p)


def lift(params: Iterable[Tensor]) -> list[tuple[Tensor, ConsumedGradient]]:
    """Take placeholders that were not zeroed out of ``.grad``; returns them with their parameters."""
    found = [(p, p.grad) for p in params if isinstance(p.grad, ConsumedGradient) and not p.grad.is_zero]
    for p, _ in found:
        p.grad = None
    return found


class Placeholders:
    """The placeholders of one optimizer's parameters, kept to be put in place again in every step.

    Args:
        name_of: what to call a parameter in an error.
    """

    def __init__(self, name_of: Callable[[Tensor], str]) -> None:
        self._name_of = name_of
        self._made: dict[int, ConsumedGradient] = {}
        self._placed: set[int] = set()

    def place(self, params: Iterable[Tensor]) -> None:
        """Free these gradients and put placeholders into ``.grad``."""
        for p in params:
            placeholder = self._made.get(id(p))
            if placeholder is None:
                placeholder = self._made[id(p)] = ConsumedGradient(p, self._name_of(p))
            placeholder.renew(p.grad)
            try:
                p.grad = placeholder
            except RuntimeError:  # the parameter's shape or dtype has changed
                p.grad = self._made[id(p)] = ConsumedGradient(p, self._name_of(p))
            self._placed.add(id(p))

    def check(self, stepped: Mapping[int, Tensor]) -> None:
        """Raise if a placeholder that was put into ``.grad`` in this step is not there any more.

        Args:
            stepped: the parameters that have been updated in this step, by id.
        """
        for key in self._placed:
            p = stepped.get(key)
            if p is not None and (p.grad is not self._made[key] or self._made[key].is_zero):
                raise RuntimeError(
                    f"the gradient of {self._name_of(p)} was replaced or cleared between backward() and step(), but "
                    "the parameter has already been updated with it, which cannot be undone. Change gradients during "
                    "backward, with hooks on tensors; call handle.reset() to continue from here"
                )

    def begin_step(self) -> None:
        """Forget which placeholders are in place; those that are, are from an earlier step from now on."""
        for key in self._placed & self._made.keys():
            self._made[key].is_old = True
        self._placed.clear()

    def keep(self, ids: set[int]) -> None:
        """Forget the placeholders of all other parameters."""
        self._made = {key: one for key, one in self._made.items() if key in ids}
