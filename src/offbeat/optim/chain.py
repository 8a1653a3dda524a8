"""``Chain``: several optimizers as one, each with its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NoReturn, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat import _torch
from offbeat._types import Group
from offbeat.engine.choice import Choice
from offbeat.optim.base import RuleOptimizer
from offbeat.optim.checkpoint import check_state_dict, numbered
from offbeat.optim.merged import MergedState, merged_state_dict, places, split_state_dict

__all__ = ["Chain"]

Loss = TypeVar("Loss")


class Chain(Optimizer):
    """Several optimizers as one :class:`torch.optim.Optimizer`, for models whose parameters need different rules.

    Schedulers, ``GradScaler``, hooks, trainers, checkpoints, :func:`offbeat.overlap`, :class:`offbeat.LocalSGD` and
    :func:`offbeat.as_functional` accept it like any optimizer. ``param_groups`` contains the groups of all optimizers,
    in order. They are the live groups: a learning rate that is set there takes effect.

    Args:
        optimizers: the optimizers, from offbeat, torch.optim or elsewhere. No two may share a parameter.

    Attributes:
        optimizers: the optimizers, in order.
        report: which parameter each optimizer got and why, from :func:`offbeat.muon_with_adamw`; otherwise empty.

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> split = offbeat.split_parameters(model)
        >>> optimizer = offbeat.Chain([offbeat.Muon(split.matrices, lr=0.02), offbeat.AdamW(split.rest, lr=1e-3)])
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> scheduler.step()
        >>> [round(group["lr"], 4) for group in optimizer.param_groups]
        [0.018, 0.0009]

    Limits: an optimizer that evaluates its closure several times (LBFGS) cannot be part of a chain. If an optimizer
    that is not made from a rule raises in its step, those before it have stepped. A checkpoint has torch.optim's
    format, with the groups of all optimizers; it loads into a chain of the same optimizers in the same order.
    """

    optimizers: tuple[Optimizer, ...] = ()
    report: str = ""

    def __init__(self, optimizers: Iterable[Optimizer], *_more: NoReturn) -> None:
        if _more or isinstance(optimizers, Optimizer):
            raise TypeError("Chain takes one list of optimizers; write Chain([first, second])")
        members = tuple(optimizers)
        _check(members)
        self._start(members)

    def _start(self, optimizers: tuple[Optimizer, ...]) -> None:
        self.optimizers = optimizers
        self._groups: list[dict[str, Any]] = []
        self._places: dict[int, tuple[int, int, int]] = {}
        self._view = MergedState(self)
        super().__setstate__({})  # sets up hooks; the chain itself has no parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, in order: always the same list object, updated on every access."""
        self._groups[:] = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return self._groups

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:  # type: ignore[override]
        """The state of all parameters. Writing to it writes to the optimizer that owns the parameter."""
        return self._view

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The options that all optimizers have, with the values of the first."""
        first, *others = (optimizer.defaults for optimizer in self.optimizers)
        return {key: value for key, value in first.items() if all(key in other for other in others)}

    def owner(self, p: Tensor) -> Optimizer:
        """The optimizer that the parameter ``p`` belongs to."""
        return self.optimizers[self._owner(p)]

    def by_owner(self, params: Sequence[Tensor], *lists: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Split parameters, and further lists, by the optimizer that owns them.

        Args:
            params: the parameters.
            lists: further lists of the same length, such as the gradients, which are split in the same way.

        Returns:
            A tuple for each optimizer that owns some of them: the optimizer, its parameters, and its part of each list.
        """
        split: dict[int, list[list[Any]]] = {}
        for row in zip(params, *lists, strict=True):
            for column, value in zip(split.setdefault(self._owner(row[0]), [[] for _ in row]), row, strict=True):
                column.append(value)
        return [(self.optimizers[at], *columns) for at, columns in split.items()]

    def _owner(self, p: Tensor) -> int:
        """The index of the optimizer that owns the parameter. Groups may change, so a cached index is checked first."""
        for _ in range(2):
            if (place := self._places.get(id(p))) is not None:
                which, group, at = place
                groups = self.optimizers[which].param_groups
                if group < len(groups) and at < len(groups[group]["params"]) and groups[group]["params"][at] is p:
                    return which
            self._places = places(self.optimizers)
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is in none of the {len(self.optimizers)} optimizers of this chain; "
            "add it with chain.optimizers[i].add_param_group"
        )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers. The gradients of offbeat's optimizers are checked before any optimizer steps.

        Optimizers that work on whole matrices step first. They exchange work with other ranks, which can fail; then no
        other optimizer has stepped yet. The rest follow in the order of the chain.

        Args:
            closure: re-evaluates the model and returns the loss; called once, with gradients enabled.

        Returns:
            The closure's result, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if len(self.optimizers) > 1 and not _torch.is_creating_state():
            for optimizer in self.optimizers:
                if isinstance(optimizer, RuleOptimizer):
                    optimizer.check_gradients()
        for optimizer in sorted(self.optimizers, key=lambda optimizer: not _has_matrices(optimizer)):
            optimizer.step()
        return loss

    def step_params(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None], *, clip: Tensor | float | None = None
    ) -> None:
        """Update some parameters with gradients that are passed in; see :meth:`offbeat.AdamW.step_params`.

        Args:
            params: parameters of any of the optimizers.
            grads: one gradient for each; None leaves a parameter and its state alone.
            clip: a factor for the gradients of this update.

        Raises:
            TypeError: an optimizer that owns one of the parameters has no ``step_params``.
        """
        work = self.by_owner(list(params), list(grads))
        for optimizer, *_ in work:
            if not hasattr(optimizer, "step_params"):
                raise TypeError(
                    f"{type(optimizer).__name__} cannot update some of its parameters with gradients that are passed "
                    f"in; use offbeat.{type(optimizer).__name__}, or set .grad and call step()"
                )
        for optimizer, own_params, own_grads in work:
            optimizer.step_params(own_params, own_grads, clip=clip)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def init_state(self) -> None:
        """Allocate the state of all optimizers that have ``init_state``. Changes nothing else."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "init_state"):
                optimizer.init_state()

    def share_matrices(self, process_group: Group | None = None, *, exact: bool = False) -> None:
        """Share the work of whole matrices among ranks; see :meth:`offbeat.Muon.share_matrices`."""
        having = [cast(RuleOptimizer, optimizer) for optimizer in self.optimizers if _has_matrices(optimizer)]
        if not having:
            raise TypeError("no optimizer of this chain has matrices to share; leave share_matrices() out")
        for optimizer in having:
            optimizer.share_matrices(process_group, exact=exact)

    def tiers(self) -> list[Choice]:
        """For each group, the tier that runs it and the reason; see :meth:`offbeat.AdamW.tiers`."""
        choices: list[Choice] = []
        for optimizer in self.optimizers:
            unknown = Choice("none", f"{type(optimizer).__name__} is not made from a rule")
            choices += optimizer.tiers() if hasattr(optimizer, "tiers") else [unknown] * len(optimizer.param_groups)
        return choices

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to one of the optimizers.

        Args:
            param_group: as for :meth:`torch.optim.Optimizer.add_param_group`, with one more key: ``"optimizer"``, the
                index in :attr:`optimizers` of the optimizer that gets the group.

        Example:
            >>> import torch, offbeat
            >>> chain = offbeat.Chain([offbeat.SGD([torch.zeros(1)]), offbeat.AdamW([torch.zeros(2)])])
            >>> chain.add_param_group({"params": [torch.zeros(3)], "lr": 0.5, "optimizer": 1})
            >>> [group["lr"] for group in chain.param_groups]
            [0.001, 0.001, 0.5]
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        group = dict(param_group)
        at = group.pop("optimizer", None)
        if not isinstance(at, int) or not 0 <= at < len(self.optimizers):
            names = ", ".join(f"{i}: {type(optimizer).__name__}" for i, optimizer in enumerate(self.optimizers))
            raise ValueError(
                f"a group for a chain needs the key 'optimizer', the index of the optimizer that gets it ({names}), "
                f"but got {at!r}; or call chain.optimizers[i].add_param_group"
            )
        params = group.get("params")
        group["params"] = params = [params] if isinstance(params, Tensor) else list(params or ())
        taken = places(self.optimizers)
        for p in (p[1] if isinstance(p, tuple) else p for p in params):
            if id(p) in taken:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is already in optimizer {taken[id(p)][0]} of the chain; "
                    "leave it out of the new group"
                )
        self.optimizers[at].add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume exactly, in torch.optim's format, with all parameters numbered consecutively."""
        for hook in _torch.state_dict_hooks(self, "state_dict_pre"):
            hook(self)
        result = merged_state_dict(self.optimizers)
        for post in _torch.state_dict_hooks(self, "state_dict_post"):
            changed = post(self, result)
            result = result if changed is None else changed
        return result

    @_torch.untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of a chain of the same optimizers. If one of them raises, nothing changes."""
        state_dict = dict(state_dict)
        for hook in _torch.state_dict_hooks(self, "load_state_dict_pre"):
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_state_dict(state_dict, type(self).__name__)
        parts = split_state_dict(numbered(state_dict), self.optimizers)
        before = [(optimizer.state, optimizer.param_groups) for optimizer in self.optimizers]
        try:
            for optimizer, part in zip(self.optimizers, parts, strict=True):
                optimizer.load_state_dict(part)
        except BaseException:
            for optimizer, (state, groups) in zip(self.optimizers, before, strict=True):
                if optimizer.param_groups is not groups:
                    optimizer.__setstate__({"state": state, "param_groups": groups})
            raise
        for post in _torch.state_dict_hooks(self, "load_state_dict_post"):
            post(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers, "report": self.report}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "optimizers" in state:
            self._start(tuple(state["optimizers"]))
            self.report = state.get("report", "")
        else:
            super().__setstate__(state)

    def __repr__(self) -> str:
        lines = "\n".join(repr(optimizer) for optimizer in self.optimizers)
        return "Chain (\n" + "".join(f"    {line}\n" for line in lines.splitlines()) + ")"


def _check(optimizers: tuple[Any, ...]) -> None:
    if not optimizers:
        raise ValueError("a chain needs at least one optimizer")
    seen: dict[int, int] = {}
    for i, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"a chain takes optimizers, but item {i} is a {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                f"{type(optimizer).__name__} (item {i}) evaluates a closure several times and cannot be part of a "
                "chain; step it by itself"
            )
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if seen.setdefault(id(p), i) != i:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is in optimizer {seen[id(p)]} and in optimizer {i} of the "
                    "chain; give it to one of them"
                )


def _has_matrices(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, RuleOptimizer) and optimizer.has_matrices
