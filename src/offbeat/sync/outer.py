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
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.optim.base import RuleOptimizer
from offbeat.sync.items import Item, local_part
from offbeat.sync.level import Level
from offbeat.sync.outer_options import Numbers, number_of, numbers_of

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
        #: Names of anchors whose parameters are not averaged now, and may change.
        self.away: set[str] = set()
        #: Names of anchors that ranks have not compared yet.
        self.unchecked: set[str] = set()

    @torch.no_grad()
    def follow(self, params: Mapping[str, Tensor]) -> None:
        """Take the current values as anchors of parameters that have none yet, or have not been averaged meanwhile."""
        for name in self.away.intersection(params):
            self._take_again(name, params[name])
        self.away = self.anchors.keys() - params.keys()
        if all(name in self.anchors for name in params):
            return
        new = {name: self._anchor(p) for name, p in params.items() if name not in self.anchors}
        groups = [[name for name in names if name in new] for names, _ in self._groups()]
        self._add([names for names in groups if names], new)

    def _take_again(self, name: str, p: Tensor) -> None:
        anchor = self.anchors[name].copy_(local_part(p))
        self.unchecked.add(name)
        if self.optimizer is not None and anchor in self.optimizer.state:
            del self.optimizer.state[anchor]

    @property
    def present(self) -> dict[str, Tensor]:
        """The anchors of parameters that are averaged."""
        return {name: a for name, a in self.anchors.items() if name not in self.away}

    @torch.no_grad()
    def mirror(self, other: Outer) -> None:
        """Have zeros in place of the anchors of another one, in the same groups."""
        groups = other._names[len(self._names) :]
        if groups:
            made = {name: other.anchors[name] for names in groups for name in names}
            new = {name: torch.empty_like(a, pin_memory=a.is_pinned()).zero_() for name, a in made.items()}
            self._add([list(names) for names in groups], new)

    def _add(self, groups: list[list[str]], new: Mapping[str, Tensor]) -> None:
        self.anchors.update(new)
        self.unchecked.update(new)
        made: list[dict[str, Any]] = [{"params": [new[name] for name in names]} for names in groups]
        if self.optimizer is None:
            assert self._level.outer is not None
            optimizer = self._level.outer(made)
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"outer must return a torch.optim.Optimizer, but it returned {optimizer!r}")
            self._check_made(optimizer, made)
            self.optimizer = optimizer
        else:
            now = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
            for group in made:  # with the options that are in force now, such as a scheduled learning rate
                self.optimizer.add_param_group({**now, **group})
        self._names += groups

    def _check_made(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Raise if the optimizer that ``outer`` has made cannot move the anchors that it was given."""
        given = [id(a) for group in groups for a in group["params"]]
        if [id(a) for group in optimizer.param_groups for a in group["params"]] != given:
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
        made = torch.empty_like(part, dtype=dtype or part.dtype, device=device, pin_memory=_pins(part, device))
        return made.copy_(part)

    def items(self, names: Sequence[str]) -> list[Item]:
        """The anchors of these parameters."""
        return [Item(name, self.anchors[name]) for name in names]

    def tensors(self, names: Sequence[str]) -> list[tuple[str, Tensor]]:
        """Everything that must be the same on every rank: anchors, and state tensors of the outer optimizer."""
        assert self.optimizer is not None
        found = [(name, self.anchors[name]) for name in names]
        for name in names:
            state = self.optimizer.state.get(self.anchors[name]) or {}
            found += [(f"{key} of {name}", t) for key, t in sorted(state.items()) if isinstance(t, Tensor)]
        return found

    @torch.no_grad()
    def refresh(self, params: Mapping[str, Tensor]) -> None:
        """Take the current values as anchors, also of parameters that have one."""
        self.follow(params)
        for name, p in params.items():
            self.anchors[name].copy_(local_part(p))
        self.unchecked.update(params)

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

    def state_of(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """A copy of the state of the outer optimizer for these anchors."""
        assert self.optimizer is not None
        states = {name: self.optimizer.state.get(self.anchors[name]) or {} for name in names}
        return {
            name: {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
            for name, state in states.items()
        }

    def take_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over another rank's :meth:`state_of`."""
        assert self.optimizer is not None
        for name, values in state.items():
            anchor = self.anchors[name]
            self.optimizer.state.pop(anchor, None)
            if values:  # tensors are on the device of the other rank's anchor
                self.optimizer.state[anchor] = {
                    key: value.to(anchor.device if value.dim() else value.device, copy=True)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in values.items()
                }

    @torch.no_grad()
    def move(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """One step of the outer optimizer with these pseudo-gradients, for the anchors of some parameters."""
        self._step(names, gradients)
        self._end_step()

    def _step(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        anchors = [self.anchors[name] for name in names]
        gradients = [g.to(device=a.device, dtype=a.dtype) for a, g in zip(anchors, gradients, strict=True)]
        if isinstance(self.optimizer, RuleOptimizer):
            self.optimizer.step_params(anchors, gradients)
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
        if isinstance(self.optimizer, RuleOptimizer):
            self.optimizer.step()

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
        if type(self.optimizer).__name__ != "SGD":
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

    def numbers(self, names: Sequence[str]) -> Numbers:
        """The numbers among the outer optimizer's options now, for the anchors of some parameters."""
        assert self.optimizer is not None
        self._set_inner_rates()
        groups = self._group_of()
        return numbers_of([groups.get(name, {}) for name in names])

    @contextmanager
    def using(self, names: Sequence[str], numbers: Numbers) -> Iterator[None]:
        """Work with what :meth:`numbers` has returned for these parameters, then or on another rank."""
        groups, changed = self._group_of(), []
        by_name = zip(names, (one for number, one in numbers for _ in range(number)), strict=False)
        pairs = {(id(groups[name]), id(one)): (groups[name], one) for name, one in by_name if name in groups}
        for group, wanted in pairs.values():
            for key in [key for key in wanted if key in group and number_of(group[key]) != wanted[key]]:
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
            "away": sorted(self.away),
            "groups": [list(names) for names in self._names],
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "rates": dict(self._rates),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`. What it has for parameters that are not here is left out.

        The outer optimizer stays the same object if its groups are the same, so that schedulers keep working.
        """
        groups = [[name for name in names if name in params] for names in state["groups"]]
        groups = [names for names in groups if names]
        if groups != self._names:
            self.anchors, self.optimizer, self._names = {}, None, []
            self._add(groups, {name: self._anchor(params[name]) for names in groups for name in names})
        for name, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][name])
        self.unchecked, self.away = set(self.anchors), set(state.get("away", [])) & self.anchors.keys()
        self._rates = dict(state.get("rates", {}))
        assert self.optimizer is not None
        self.optimizer.state.clear()
        saved = _without(state["optimizer"], state["groups"], set(params))
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


def _plain(key: str) -> str:
    """The key of a state in any ``state_dtype``."""
    return key.removesuffix("_8bit").removesuffix("_scale")


def _without(saved: Mapping[str, Any], groups: Sequence[Sequence[str]], kept: set[str]) -> dict[str, Any]:
    """A state dict of an optimizer, without the parameters whose names are not kept."""
    names = [name for group in groups for name in group]
    places = {old: new for new, old in enumerate(i for i, name in enumerate(names) if name in kept)}
    made = []
    for group in saved["param_groups"]:
        left = [places[i] for i in group["params"] if i in places]
        if left:
            made.append({**group, "params": left})
    return {
        **saved,
        "state": {places[i]: one for i, one in saved["state"].items() if i in places},
        "param_groups": made,
    }


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


def _pins(part: Tensor, device: torch.device) -> bool:
    return device.type == "cpu" and part.device.type == "cuda"


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
