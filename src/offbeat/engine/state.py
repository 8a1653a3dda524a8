"""The state of each parameter: a dictionary that counts its changes.

The engine keeps tables of addresses between steps. ``optimizer.state`` can be read and written like torch.optim's
nested dictionary. Every change of an entry is counted, so the engine never uses a stale table.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.engine.eight_bit import scales_for
from offbeat.engine.options import has_tensors
from offbeat.engine.scalars import new_scalars, scalar_dtype
from offbeat.engine.tensors import distributed_part, is_dtensor, local
from offbeat.rules.rule import Slot, Values


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.clock[0] += 1
        return method(self, *args, **kwargs)

    return wrapper


class ParamState(dict[str, Any]):
    """One parameter's state."""

    def __init__(self, items: Any = (), clock: list[int] | None = None) -> None:
        super().__init__(items)
        self.clock = clock if clock is not None else [0]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    __setitem__ = _counted(dict.__setitem__)
    __delitem__ = _counted(dict.__delitem__)
    __ior__ = _counted(dict.__ior__)
    update = _counted(dict.update)
    pop = _counted(dict.pop)
    popitem = _counted(dict.popitem)
    clear = _counted(dict.clear)
    setdefault = _counted(dict.setdefault)


class State(defaultdict[Any, Any]):
    """``optimizer.state``: maps each parameter to a :class:`ParamState`. One clock counts all changes."""

    def __init__(self, items: Iterable[tuple[Any, Any]] = ()) -> None:
        self.clock = [0]
        self.kept: list[Any] = []  # objects that must live as long as the state
        super().__init__(dict)
        for key, value in items:
            self[key] = value

    def __missing__(self, key: Any) -> ParamState:
        self[key] = {}
        entry: ParamState = self[key]
        return entry

    def __setitem__(self, key: Any, value: Any) -> None:
        self.clock[0] += 1
        if isinstance(value, dict) and isinstance(key, Tensor):
            value = ParamState(value, self.clock)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As for a dictionary; counts every entry as a change."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As for a dictionary; counts a new entry as a change."""
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> State:
        self.update(other)
        return self

    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        """A shallow copy, as a plain ``defaultdict(dict)``. Changes of the copy are not counted."""
        return _plain_state(list(self.items()))

    __copy__ = copy  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> Any:
        return _plain_state, (list(self.items()),)

    __delitem__ = _counted(defaultdict.__delitem__)
    pop = _counted(defaultdict.pop)
    popitem = _counted(defaultdict.popitem)
    clear = _counted(defaultdict.clear)


def _plain_state(items: list[tuple[Any, Any]]) -> defaultdict[Any, Any]:
    """State as a plain dictionary, for pickles and copies. An optimizer that loads it wraps it again."""
    state: defaultdict[Any, Any] = defaultdict(dict)
    state.update(items)
    return state


def new_state(
    slots: Sequence[Slot],
    h: Values,
    params: Sequence[Tensor],
    state: State,
    others: Mapping[int, dict[str, Any]] | None = None,
) -> tuple[list[dict[str, Any]], list[tuple[Tensor, str, Tensor]]]:
    """The state of each parameter with missing entries added, and a list of the added ones. ``state`` is not changed.

    ``others`` contains entries, by the parameter's id, that replace those in ``state``.
    """
    entries = [dict((others or {}).get(id(p)) or state.get(p) or {}) for p in params]
    created: list[tuple[Tensor, str, Tensor]] = []
    for slot in slots:
        lacking = [
            i
            for i, entry in enumerate(entries)
            if not isinstance(entry.get(slot.key), Tensor) and slot.shape_for(params[i].shape) is not None
        ]
        if slot.scalar:
            values = _scalars(slot, h, [params[i] for i in lacking], [entries[i].get(slot.key) for i in lacking])
        else:
            values = [_like(slot, h, params[i]) for i in lacking]
        for i, value in zip(lacking, values, strict=True):
            entries[i][slot.key] = value
            created.append((params[i], slot.key, value))
    return entries, created


def _like(slot: Slot, h: Values, p: Tensor) -> Tensor:
    if slot.form == "scales":
        shard = local(p)
        return torch.zeros(scales_for(shard.numel()), dtype=slot.dtype, device=shard.device)
    value = slot.initial(h) if slot.dtype is None else 0.0
    if slot.shape is not None:
        shape = slot.shape_for(p.shape) or ()
        if is_dtensor(p):
            return distributed_part(p, shape, functools.partial(slot.follows, tuple(p.shape)), float(value))
        return p.detach().new_full(shape, float(value))
    unit = complex(1, 1) if p.is_complex() else 1.0
    if h.differentiable and isinstance(value, Tensor):
        return torch.full_like(p, unit, memory_format=torch.preserve_format) * value
    return torch.full_like(p, unit * float(value), dtype=slot.dtype, memory_format=torch.preserve_format)


def _scalars(slot: Slot, h: Values, params: Sequence[Tensor], present: Sequence[Any]) -> list[Tensor]:
    """Stored scalars for these parameters. A Python number from an old checkpoint is the initial value."""
    dtype = scalar_dtype(h.fused and slot.key == "step")
    initial = slot.initial(h)
    if h.differentiable and isinstance(initial, Tensor):
        return [initial.to(dtype).clone() for _ in params]
    values = [float(initial if old is None else old) for old in present]
    # On the parameter's device if a step must not wait for the device, as with a learning rate that is there.
    stays_there = has_tensors(h) and h.fused is None and h.foreach is None and not h.differentiable
    there = h.capturable or h.fused or stays_there
    devices = [p.device if there else torch.device("cpu") for p in params]
    result: list[Any] = [None] * len(params)
    for device in set(devices):
        where = [i for i, d in enumerate(devices) if d == device]
        for i, t in zip(where, new_scalars([values[i] for i in where], dtype, device), strict=True):
            result[i] = t
    return result
