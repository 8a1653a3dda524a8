"""Gradients of whole matrices that reach only the rank that owns the matrix, in place of DDP's all-reduce."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat import _torch
from offbeat._torch import foreach_mul_, foreach_norm
from offbeat.ddp.bucket_to_owners import bucket_to_owners
from offbeat.ddp.comm_hook import CommHook
from offbeat.engine.agree import check_same_kinds, check_same_norms, norms_of_owners
from offbeat.engine.owned import OwnedGradient, gradient_of, reduced_gradient
from offbeat.optim import Chain, RuleOptimizer

__all__ = ["ReducedToOwners", "reduce_to_owners"]


def reduce_to_owners(optimizer: Optimizer, module: DistributedDataParallel, *, exact: bool = False) -> ReducedToOwners:
    """Send the gradient of each matrix to one rank, its owner, which transforms it for all. The loop stays as it is.

    DDP sends every gradient to every rank. A rule that works on whole matrices (Muon) needs that on one rank only: the
    owner keeps the momentum, makes the matrix orthogonal, and sends the update to the others. A rank then sends about
    6 bytes a parameter instead of 8, and does its share of the arithmetic. Other parameters are all-reduced as ever.

    Call it before or after :func:`offbeat.overlap`, which then steps matrices bucket by bucket during backward.

    Args:
        optimizer: a :class:`offbeat.Muon`, or a :class:`offbeat.Chain` that has one.
        module: the DDP module with its matrices. Every rank must call this, and every ``step()``, together.
        exact: send updates in the dtype in which they are computed. Otherwise wider ones are rounded to bfloat16, which
            is what Muon computes in by default.

    Returns:
        A handle: :meth:`~ReducedToOwners.clip_grad_norm_`, and :meth:`~ReducedToOwners.remove`.

    Example:
        >>> import torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> split = offbeat.split_parameters(model)
        >>> optimizer = offbeat.Chain([offbeat.Muon(split.matrices, lr=0.02), offbeat.AdamW(split.rest, lr=1e-3)])
        >>> ddp = torch.nn.parallel.DistributedDataParallel(model)
        >>> handle = offbeat.reduce_to_owners(optimizer, ddp)
        >>> ddp(torch.ones(3, 4)).sum().backward()
        >>> norm = handle.clip_grad_norm_(1.0)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> handle.remove()
        >>> dist.destroy_process_group()

    Limits: after backward, ``.grad`` of a matrix cannot be read. State of a matrix is current on its owner only; call
    ``optimizer.gather_state()`` on every rank before ``state_dict()``, which raises otherwise.
    """
    parts = _check(optimizer, module)
    handle = ReducedToOwners(optimizer, module, parts, exact)
    hook = CommHook.register(module)
    try:
        for one in parts:
            one.own_matrices(module.process_group, exact=exact)
        for one in parts:
            one.init_state()  # on every rank, so that nobody takes a step to create it
        handle.begin(hook)
    except BaseException:
        for one in parts:
            one.disown_matrices(gather=False)  # no step has changed any state
        raise
    return handle


def _check(optimizer: Any, module: Any) -> list[RuleOptimizer]:
    """The optimizers that have matrices. Raises if their gradients cannot be reduced to owners."""
    if not isinstance(module, DistributedDataParallel):
        raise TypeError(
            f"reduce_to_owners() takes a DistributedDataParallel module, but got {type(module).__name__}; FSDP2 needs "
            "no call, and without DDP there is nothing to reduce"
        )
    every = optimizer.optimizers if isinstance(optimizer, Chain) else [optimizer]
    parts = [one for one in every if isinstance(one, RuleOptimizer) and one.has_matrices]
    if not parts:
        raise TypeError(
            f"{type(optimizer).__name__} has no matrices whose gradients could be reduced to an owner; pass an "
            "offbeat.Muon, or an offbeat.Chain that has one"
        )
    if _torch.uses_python_reducer(module) or module.mixed_precision is not None:
        raise ValueError(
            "reduce_to_owners() needs the buckets of DistributedDataParallel, in the dtype of the parameters; leave "
            "mixed_precision= and DDP's python reducer out"
        )
    hook = CommHook.find(module, instead="as gradients are reduced either by it or to owners")
    if hook is not None and hook.reducer is not None:
        raise ValueError(f"{hook.reducer.conflict}; leave it or reduce_to_owners() out")
    inside = _inside(module)
    for one in parts:
        if one.sharing_group is not None:
            raise ValueError(
                f"{type(one).__name__} shares its matrices already; leave share_matrices() out, or call remove() of "
                "the handle that reduce_to_owners() returned before"
            )
        for p in _params(one):
            if id(p) not in inside:
                raise ValueError(
                    f"the optimizer has a matrix of shape {tuple(p.shape)} that the DistributedDataParallel module "
                    "does not reduce; pass the module whose parameters the optimizer has"
                )
            if not p.requires_grad:
                raise ValueError(
                    f"the optimizer has a frozen matrix of shape {tuple(p.shape)} (requires_grad=False), which "
                    "DistributedDataParallel does not reduce; leave it out of the optimizer, or unfreeze it before the "
                    "DistributedDataParallel module is made"
                )
    return parts


def _inside(ddp: DistributedDataParallel) -> set[int]:
    """Ids of the parameters that DDP reduces, if they require gradients."""
    ignored = ddp.parameters_to_ignore
    return {id(p) for name, p in ddp.module.named_parameters(remove_duplicate=False) if name not in ignored}


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class ReducedToOwners:
    """The handle of :func:`reduce_to_owners`. It reduces the buckets of the DDP module."""

    conflict = (
        "offbeat.reduce_to_owners() reduces the gradients of this DistributedDataParallel module already, and a bucket "
        "can be reduced only once; leave it out, or call remove() of its handle"
    )

    def __init__(
        self, optimizer: Optimizer, ddp: DistributedDataParallel, parts: list[RuleOptimizer], exact: bool
    ) -> None:
        self._optimizer, self._ddp = weakref.ref(optimizer), weakref.ref(ddp)
        self._parts = parts
        self._hook: CommHook | None = None
        self._watch: Any = None
        self._reduced: set[int] = set()  # ids of the matrices that this pass has reduced to their owners

    def begin(self, hook: CommHook) -> None:
        """Reduce the buckets of this hook's module."""
        if dist.get_world_size(self._module().process_group) > 1:
            hook.reduce_with(self)
            hook.add_listener(self)
            self._hook = hook
            self._watch = self._module().register_forward_hook(_watcher(weakref.ref(self)))

    def is_of(self, module: Any) -> bool:
        """Whether this handle reduces the gradients of ``module``, and not of one that it was copied to."""
        return self._ddp() is module

    def owner(self, p: Tensor) -> int | None:
        """The rank, in DDP's process group, that owns the parameter ``p``; None if its gradient is all-reduced."""
        for one in self._parts:
            if one.owners is not None and p in one.owners:
                return one.owners.of(p)
        return None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of the optimizer's parameters, as :func:`torch.nn.utils.clip_grad_norm_` does.

        Call it on every rank between ``backward()`` and ``step()``. Each matrix counts once: the ranks exchange one
        number for each. Parameters of the optimizer that are outside of the DDP module, or ignored by it, count
        too. DDP does not reduce their gradients; all ranks raise if they have different norms.

        Args:
            max_norm: the largest norm of all gradients together.
            error_if_nonfinite: raise RuntimeError if the norm is not finite.

        Returns:
            The norm of all gradients together, the same on every rank.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        here = {id(p): p for p in _params(optimizer)}
        every = [p for p in self._module().parameters() if here.pop(id(p), None) is not None] + list(here.values())
        inside = _inside(self._module())
        group = self._parts[0].sharing_group
        if group is not None:  # before anything that only some ranks would do
            check_same_kinds([type(p.grad).__name__ for p in every], group, every[0].device)
        params = [p for p in every if p.grad is not None]
        for p in params:
            if type(p.grad) is Tensor and self.owner(p) is not None:
                reduced_gradient(p)  # raises
        grads = [g for p in params if (g := gradient_of(p)) is not None]
        if not grads:
            return torch.zeros(())
        norms = list(foreach_norm(grads))
        outside = [norm for p, norm in zip(params, norms, strict=True) if id(p) not in inside]
        if outside and group is not None:
            check_same_norms(outside, group)
        for one in self._parts:
            if one.owners is not None:
                some = [i for i, p in enumerate(params) if p in one.owners and isinstance(p.grad, OwnedGradient)]
                if some:
                    mine = [one.owners.has(params[i]) for i in some]
                    found = norms_of_owners([norms[i] for i in some], mine, one.sharing_group)
                    for i, norm in zip(some, found, strict=True):
                        norms[i] = norm
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the norm of all gradients is {total.item()}; pass error_if_nonfinite=False to go on")
        kinds: dict[Any, list[Tensor]] = {}
        for g in grads:
            kinds.setdefault((g.device, g.dtype), []).append(g)
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for (device, _), some_grads in kinds.items():
            foreach_mul_(some_grads, coefficient.to(device))
        return total

    def remove(self) -> None:
        """Bring all state to all ranks and let DDP all-reduce gradients again. Every rank must call this together."""
        if self._has_gradients():
            raise RuntimeError(
                "remove() was called between backward() and zero_grad(), when only owners have gradients; call "
                "optimizer.step() and optimizer.zero_grad() first"
            )
        for one in self._parts:
            one.disown_matrices()
        if self._hook is not None:
            self._hook.release(self)
            self._hook.remove_listener(self)
            self._watch.remove()
            self._hook = None

    # As the reducer and a listener of the module's CommHook

    def reduce(self, bucket: Any) -> Future[Any]:
        """See :class:`offbeat.ddp.Reducer`."""
        ddp = self._module()
        if _torch.is_joining(ddp):
            raise RuntimeError(
                "join() cannot be used with reduce_to_owners(): a rank that has no more data would still own matrices; "
                "give all ranks the same number of batches"
            )
        params = bucket.parameters()
        if bucket.index() == 0:
            self._reduced.clear()  # those of a pass that failed
        owners = [self.owner(p) for p in params]
        assert self._hook is not None
        if self._hook.accumulates or all(owner is None for owner in owners):
            return self._hook.mean(bucket)
        self._reduced.update(id(p) for p, owner in zip(params, owners, strict=True) if owner is not None)
        return bucket_to_owners(bucket, owners, ddp.process_group)

    def bucket_filled(self, params: Sequence[Tensor], index: int) -> Callable[[Sequence[Tensor]], None] | None:
        """See :class:`offbeat.ddp.Listener`."""
        return None

    @property
    def accumulates(self) -> bool:
        """See :class:`offbeat.ddp.Listener`."""
        return False

    def pass_ended(self) -> None:
        """See :class:`offbeat.ddp.Listener`. From here on nobody but the step reads the gradients of matrices.

        A matrix that was in no bucket has this rank's own gradient, which stays as it is: the step refuses it.
        """
        reduced, self._reduced = self._reduced, set()
        if self._hook is None or self._hook.accumulates:
            return
        for one in self._parts:
            for p in _params(one):
                if id(p) in reduced and type(p.grad) is Tensor:
                    p.grad = OwnedGradient(p, p.grad, one.sharing_group)

    def failed(self, error: BaseException) -> None:
        """See :class:`offbeat.ddp.Listener`."""

    # Before a backward pass

    def watch(self, output: Any) -> None:
        """Look for a forgotten ``zero_grad()`` when backward reaches this output of the DDP module.

        DDP has begun no bucket then and can be used again. After ``forward()`` would be too early: many loops call
        ``zero_grad()`` between it and ``backward()``.
        """
        for t in _torch.pytree.tree_leaves(output):
            if isinstance(t, Tensor) and t.grad_fn is not None:
                t.register_hook(self._check_cleared)  # type: ignore[no-untyped-call]

    def _check_cleared(self, grad: Tensor) -> None:
        if self._has_gradients():
            raise RuntimeError(
                "the gradients of an earlier backward pass have been reduced to the owners of matrices, and this pass "
                "would add to them; call optimizer.zero_grad() before backward(), and accumulate gradients under "
                "no_sync()"
            )

    def _has_gradients(self) -> bool:
        return any(isinstance(p.grad, OwnedGradient) for one in self._parts for p in _params(one))

    def _module(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None
        return ddp


def _watcher(handle: weakref.ref[ReducedToOwners]) -> Callable[..., None]:
    """A forward hook. A function, and not a method, so that a copy of the module does not copy the handle."""

    def watch(module: Any, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not module.require_backward_grad_sync:
            return
        found = handle()
        if found is not None and found.is_of(module):
            found.watch(output)

    return watch
