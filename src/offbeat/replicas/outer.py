r"""Anchors, and the outer optimizer that moves them.

The anchor :math:`a` of a level is the same on every rank, to the bit. A round gives the outer optimizer the
pseudo-gradient :math:`a - \bar x`, where :math:`\bar x` is the mean of the replicas' parameters; whatever the outer
optimizer makes of it is the new anchor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.optim.base import RuleOptimizer
from offbeat.optim.optimizers import SGD
from offbeat.replicas.contents import Item, local_part
from offbeat.replicas.hello import OuterOptions
from offbeat.replicas.level import Level

__all__ = ["Outer"]


class Outer:
    """The anchors of one level and the optimizer that moves them.

    Args:
        level: its options.
        groups: returns the inner optimizer's groups as lists of parameter names, with their learning rates.

    Attributes:
        anchors: by the parameter's name.
        optimizer: the outer optimizer, or None before the first local step. One group for each group of the inner one.
    """

    def __init__(self, level: Level, groups: Callable[[], list[tuple[list[str], Any]]]) -> None:
        assert level.outer is not None
        self._level, self._groups = level, groups
        self.anchors: dict[str, Tensor] = {}
        self.optimizer: Optimizer | None = None
        self._names: list[list[str]] = []
        self._rates: dict[str, float] = {}
        #: Names of anchors that ranks have not compared yet.
        self.unchecked: set[str] = set()

    @torch.no_grad()
    def make(self, params: Mapping[str, Tensor]) -> None:
        """Make the outer optimizer, with the parameters' present values as anchors. Does nothing if it is there."""
        if self.optimizer is not None:
            return
        groups = [[name for name in names if name in params] for names, _ in self._groups()]
        self._make([names for names in groups if names], {name: self._anchor(p) for name, p in params.items()})

    def check_params(self, params: Mapping[str, Tensor]) -> None:
        """Raise if there are parameters without an anchor: they were unfrozen or added since anchors were made."""
        missing = [name for name in params if name not in self.anchors]
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise RuntimeError(
                f"{missing[0]!r}{more} began to train after the outer optimizer was made, so that there is "
                "no anchor for it; nothing was changed. Make the optimizer after "
                "the last parameter is unfrozen or added; a new one loads the old one's state_dict(), and parameters "
                "without an anchor start from the model"
            )

    def _make(self, names: list[list[str]], anchors: dict[str, Tensor]) -> None:
        groups: list[dict[str, Any]] = [{"params": [anchors[name] for name in group]} for group in names]
        assert self._level.outer is not None
        optimizer = self._level.outer(groups)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"outer must return a torch.optim.Optimizer, but it returned {optimizer!r}")
        self._check_optimizer(optimizer, groups)
        self.optimizer, self.anchors, self._names, self.unchecked = optimizer, anchors, names, set(anchors)

    def _check_optimizer(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Raise if the optimizer that ``outer`` has made cannot move the anchors that it was given."""
        anchors = [id(a) for group in groups for a in group["params"]]
        if [id(a) for group in optimizer.param_groups for a in group["params"]] != anchors:
            raise ValueError(
                f"outer returned a {type(optimizer).__name__} that does not have the parameters it was given, so that "
                "anchors would never move; make it with the argument of outer, as in "
                "outer=lambda groups: offbeat.SGD(groups, lr=0.7)"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TypeError(
                f"outer returned a {type(optimizer).__name__}, whose step() needs a closure, but there is none for an "
                "outer step; use another optimizer, such as offbeat.SGD"
            )

    def _anchor(self, p: Tensor) -> Tensor:
        part = local_part(p)
        device = torch.device("cpu") if self._level.anchor == "cpu" else part.device
        dtype = self._level.anchor_dtype if part.is_floating_point() else None
        pins = device.type == "cpu" and part.device.type == "cuda"
        return torch.empty_like(part, dtype=dtype or part.dtype, device=device, pin_memory=pins).copy_(part)

    def items(self, names: Sequence[str]) -> list[Item]:
        """The anchors of these parameters."""
        return [Item(name, self.anchors[name]) for name in names]

    @torch.no_grad()
    def refresh(self, params: Mapping[str, Tensor]) -> None:
        """Take the parameters' present values as anchors."""
        for name in params.keys() & self.anchors.keys():  # for others check_params() raises at the next step
            self.anchors[name].copy_(local_part(params[name]))
        self.unchecked.update(self.anchors)

    def note_rates(self) -> None:
        """Remember the inner learning rates, if the outer optimizer asks for them: the last ones that are not zero."""
        if self.optimizer is not None and any("inner_lr" in group for group in self.optimizer.param_groups):
            groups = self._groups()
            if any(names and rate is None for names, rate in groups):
                raise ValueError(
                    "the outer optimizer needs the inner optimizer's learning rate, but a group of the inner one has "
                    "no 'lr'; use an inner optimizer that has one, or another outer optimizer, as DiLoCo does"
                )
            found = {name: float(rate) for names, rate in groups for name in names}
            self._rates.update({name: rate for name, rate in found.items() if rate > 0 or name not in self._rates})

    def reset(self) -> None:
        """Forget the state of the outer optimizer; anchors are taken at the next local step."""
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def part_of(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Anchors and outer state of these parameters, for a replica that is behind. Not copied."""
        assert self.optimizer is not None
        return {
            "anchors": {name: self.anchors[name] for name in names},
            "state": {name: dict(self.optimizer.state.get(self.anchors[name]) or {}) for name in names},
        }

    @torch.no_grad()
    def take_part(self, part: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace anchors and outer state by another replica's :meth:`part_of`."""
        assert self.optimizer is not None
        for name, value in part["anchors"].items():
            anchor = self.anchors[name]
            anchor.copy_(value)
            self.optimizer.state.pop(anchor, None)
            state = part["state"][name]
            if state:  # as torch.optim keeps it: step counters on the CPU, the rest beside the anchor
                self.optimizer.state[anchor] = {
                    key: value.to(anchor.device) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in state.items()
                }
        self.unchecked.difference_update(part["anchors"])

    @torch.no_grad()
    def move(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """One step of the outer optimizer with these pseudo-gradients, for the anchors of some parameters."""
        self._step(names, gradients)
        self._end_step()

    def _step(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        anchors = [self.anchors[name] for name in names]
        gradients = [g.to(device=a.device, dtype=a.dtype) for a, g in zip(anchors, gradients, strict=True)]
        rule = _with_rule(self.optimizer)
        if rule is not None:
            rule.step_params(anchors, gradients)
            return
        assert self.optimizer is not None
        for a, g in zip(anchors, gradients, strict=True):
            a.grad = g
        try:
            self.optimizer.step()
        finally:
            for a in anchors:
                a.grad = None

    def _end_step(self) -> None:
        """Once a round, call ``step()`` without gradients: hooks run, and schedulers see that there was a step."""
        rule = _with_rule(self.optimizer)
        if rule is not None:
            rule.step()

    @torch.no_grad()
    def move_to(self, names: Sequence[str], means: Sequence[Tensor], limit: int) -> None:
        """One step of the outer optimizer, given the means of the replicas' parameters.

        Args:
            limit: the most bytes of pseudo-gradients to have at once.
        """
        by_name = dict(zip(names, means, strict=True))
        if self._takes_the_mean():
            for name, mean in by_name.items():  # exactly the mean: a - (a - mean) would be rounded
                self.anchors[name].copy_(mean)
            self._end_step()
            return
        chunks = list(_chunks(names, {name: a.nbytes for name, a in self.anchors.items()}, limit))
        differences = _Differences([[self.anchors[name] for name in some] for some in chunks])
        for some in chunks:
            self._step(some, differences.of([(self.anchors[name], by_name[name]) for name in some]))
        self._end_step()

    def _takes_the_mean(self) -> bool:
        """Whether the outer optimizer is plain SGD with a learning rate of 1."""
        if type(self.optimizer) not in (SGD, torch.optim.SGD):  # a subclass may do anything in its step
            return False
        assert self.optimizer is not None
        return all(
            float(group["lr"]) == 1 and not group["momentum"] and not group["weight_decay"] and not group["maximize"]
            for group in self.optimizer.param_groups
        )

    def _set_inner_rates(self) -> None:
        """Tell an outer optimizer that asks for it (``inner_lr``) the inner optimizer's learning rates."""
        assert self.optimizer is not None
        if not any("inner_lr" in group for group in self.optimizer.param_groups):
            return
        self.note_rates()
        present = {name for names, _ in self._groups() for name in names}
        for group, names in zip(self.optimizer.param_groups, self._names, strict=True):
            noted = [name for name in names if name in self._rates]
            # The rate of a frozen one is of the last step before that; it will do only if all are frozen.
            chosen = next((name for name in noted if name in present), next(iter(noted), None))
            if chosen is not None:  # else all of them were frozen before the first step
                group["inner_lr"] = self._rates[chosen]

    def options(self, names: Sequence[str]) -> OuterOptions:
        """The numbers among the outer optimizer's options now, for the anchors of some parameters."""
        assert self.optimizer is not None
        self._set_inner_rates()
        groups = self._group_of()
        numbers = {id(group): _numbers(group) for group in groups.values()}
        runs = groupby(names, key=lambda name: id(groups.get(name)))
        return [(len(list(same)), numbers.get(group, {})) for group, same in runs]

    @contextmanager
    def using(self, names: Sequence[str], options: OuterOptions) -> Iterator[None]:
        """Temporarily use the outer options this round started with, for these parameters."""
        groups, changed = self._group_of(), []
        by_name = zip(names, (group for count, group in options for _ in range(count)), strict=False)
        pairs = {(id(groups[name]), id(wanted)): (groups[name], wanted) for name, wanted in by_name if name in groups}
        for group, wanted in pairs.values():
            for key in [key for key in wanted if key in group and _number(group[key]) != wanted[key]]:
                changed.append((group, key, group[key], wanted[key]))
                group[key] = wanted[key]
        try:
            yield
        finally:
            for group, key, before, used in changed:
                if group[key] is used:  # else a hook of the step has set it
                    group[key] = before

    def _group_of(self) -> dict[str, dict[str, Any]]:
        assert self.optimizer is not None
        pairs = zip(self._names, self.optimizer.param_groups, strict=True)
        return {name: group for names, group in pairs for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Anchors, the state of the outer optimizer, and the inner learning rates that it may ask for."""
        return {
            "anchors": {name: a.clone() for name, a in self.anchors.items()},
            "groups": [list(names) for names in self._names],
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "rates": dict(self._rates),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`. Parameters that have no anchor in it start from their present values.

        The outer optimizer stays the same object, so that schedulers keep working.
        """
        self.make(params)
        assert self.optimizer is not None
        saved_names = [name for names in state["groups"] for name in names]
        for name, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][name] if name in state["anchors"] else local_part(params[name]))
        self.unchecked = set(self.anchors)
        self._rates = dict(state.get("rates", {}))
        self.optimizer.state.clear()
        saved = _renumbered(state["optimizer"], saved_names, self._names, self.optimizer)
        # torch.optim's own would go on to write into the tensors of the checkpoint.
        self.optimizer.load_state_dict(saved if isinstance(self.optimizer, RuleOptimizer) else deepcopy(saved))

    def check_state_dict(self, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
        """Raise if this cannot be loaded."""
        if isinstance(self.optimizer, RuleOptimizer):
            saved = {_plain(key) for entry in state["optimizer"]["state"].values() for key in entry}
            # With the options that loading takes over: momentum may have been switched on after the first step.
            groups = [*self.optimizer.param_groups, *state["optimizer"]["param_groups"]]
            known = {_plain(slot.key) for group in groups for slot in self.optimizer._slots(group)}
            if saved - known:
                raise ValueError(
                    f"the checkpoint has state of another outer optimizer, {sorted(saved - known)}, and here it is a "
                    f"{type(self.optimizer).__name__.lstrip('_')}; nothing was changed. Load it with the outer "
                    "optimizer it was saved with"
                )
        for name, anchor in state["anchors"].items():
            found = tuple(local_part(params[name]).shape) if name in params else tuple(anchor.shape)
            if found != tuple(anchor.shape):
                raise ValueError(
                    f"the checkpoint has an anchor for {name!r} of shape {tuple(anchor.shape)}, but this model has "
                    f"{found}; nothing was changed. Load the checkpoint into the model it was saved from"
                )


def _with_rule(optimizer: Optimizer | None) -> RuleOptimizer | None:
    """The optimizer if its step is its rule and nothing else; None if a subclass has a step of its own."""
    if not isinstance(optimizer, RuleOptimizer):
        return None
    return optimizer if inspect.unwrap(type(optimizer).step) is inspect.unwrap(RuleOptimizer.step) else None


def _plain(key: str) -> str:
    """The key of a state in any ``state_dtype``."""
    return key.removesuffix("_8bit").removesuffix("_scale")


def _renumbered(
    saved: Mapping[str, Any], names: Sequence[str], groups: Sequence[Sequence[str]], optimizer: Optimizer
) -> dict[str, Any]:
    """The state dict of an outer optimizer, for the parameters that it has here.

    Args:
        saved: the state dict.
        names: those of its parameters, in order.
        groups: the names of the parameters of each group here.
        optimizer: the outer optimizer here, whose options are kept by groups that were not saved.
    """
    old = {name: i for i, name in enumerate(names)}
    group_of = {i: group for group in saved["param_groups"] for i in group["params"]}
    state, new_groups, place = {}, [], 0
    for group, here in zip(groups, optimizer.param_groups, strict=True):
        numbers = range(place, place + len(group))
        place += len(group)
        known = [old[name] for name in group if name in old]
        options = group_of[known[0]] if known else here
        new_groups.append({**options, "params": list(numbers)})
        for number, name in zip(numbers, group, strict=True):
            if old.get(name) in saved["state"]:
                state[number] = saved["state"][old[name]]
    return {**saved, "state": state, "param_groups": new_groups}


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {key: _number(value) for key, value in group.items() if key != "params"}
    return {key: number for key, number in numbers.items() if number is not None}


def _number(value: Any) -> Any:
    """A number, or a tuple of numbers, as every rank has it; None if it is something else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    if isinstance(value, (tuple, list)):
        parts = tuple(map(_number, value))
        return None if None in parts else parts
    return None


class _Differences:
    """Differences of tensors in memory that is used again: freed and taken anew, the allocator would keep it.

    Args:
        chunks: the tensors that are needed at the same time.
    """

    def __init__(self, chunks: Sequence[Sequence[Tensor]]) -> None:
        sizes: dict[Any, int] = {}
        for chunk in chunks:
            here: dict[Any, int] = {}
            for a in chunk:
                here[a.device, a.dtype] = here.get((a.device, a.dtype), 0) + a.numel()
            sizes.update({kind: max(size, sizes.get(kind, 0)) for kind, size in here.items()})
        self._memory = {
            (device, dtype): torch.empty(n, dtype=dtype, device=device) for (device, dtype), n in sizes.items()
        }

    def of(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Each first tensor minus its second; until the next call."""
        found, used = [], dict.fromkeys(self._memory, 0)
        for a, b in pairs:
            kind, b = (a.device, a.dtype), b.to(device=a.device, dtype=a.dtype)
            view = self._memory[kind][used[kind] : used[kind] + a.numel()]
            used[kind] += a.numel()
            found.append(torch.sub(a, b, out=view.view(a.shape)) if a.is_contiguous() else a - b)
        return found


def _chunks(names: Sequence[str], sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Runs of names of at most ``limit`` bytes; always the same, so that an optimizer sees the same lists again."""
    found: list[str] = []
    total = 0
    for name in names:
        if found and total + sizes[name] > limit:
            yield found
            found, total = [], 0
        found.append(name)
        total += sizes[name]
    if found:
        yield found
