"""A trial of an optimizer that overlap does not know: do buckets give what one step over all parameters gives?"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import random
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.engine.tensors import local
from offbeat.optim import RuleOptimizer
from offbeat.overlap.numbers import UnequalChanges, differences, shared_tables

__all__ = ["check_buckets", "check_kinds"]

#: Steps of a trial. Some optimizers do in the first what they do in no other.
_STEPS = 3
#: The largest size of a dimension in a trial.
_SIZE = 4

_PLAIN = (
    *(type(None), Number, str, bytes, Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(enum.Enum, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)


def check_kinds(optimizer: Optimizer) -> None:
    """Raise if the optimizer holds something for all its parameters that is neither a tensor nor a number.

    Such a thing, as a generator of random numbers, may change with every bucket, and could not be restored.
    """
    tables = shared_tables(optimizer)
    for i, table in enumerate(tables):
        for key, value in table.items():
            if not _is_plain(value, optimizer):
                where = f"option {key!r} of group {i}" if i < len(tables) - 2 else f"{key!r}"
                raise TypeError(
                    f"{type(optimizer).__name__} cannot be overlapped: its {where} is a {type(value).__name__}, which "
                    "its step may change once for every bucket instead of once for every step; step after backward, "
                    "or define how to step a bucket with offbeat.register_overlapped"
                )


@torch.no_grad()
def check_buckets(optimizer: Optimizer, steps: Callable[[Optimizer], tuple[Any, Any, Any]]) -> Exception | None:
    """Raise if buckets do not give what one step gives. Tries it with small tensors, and changes nothing.

    Args:
        steps: returns three functions for an optimizer: ``whole()`` steps all parameters, ``bucket(params, grads)``
            some, and ``end()`` ends a step made of buckets.

    Returns:
        The error that a step of the trial has raised, so that the question is open; or None.
    """
    name = type(optimizer).__name__
    with _no_trace(optimizer), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _seed()
            untouched = _random_state(optimizer)
            at_once, in_buckets = _small(optimizer), _small(optimizer)
            whole, _, _ = steps(at_once)
            _, bucket, end = steps(in_buckets)
            _run(at_once, lambda params, grads: _step_whole(whole, params, grads))
            draws = _random_state(optimizer)
            _run(in_buckets, lambda params, grads: _step_buckets(bucket, end, params, grads))
        except UnequalChanges:
            raise
        except Exception as error:
            return error
    if draws != untouched:
        raise TypeError(
            f"{name} cannot be overlapped: it draws random numbers for one parameter after the other, and buckets come "
            "in another order than its parameters; step after backward, or define how to step a bucket with "
            "offbeat.register_overlapped"
        )
    every = zip(shared_tables(at_once), shared_tables(in_buckets), strict=True)
    changed = [key for first, second in every for key in differences(first, second)]
    if changed:
        raise TypeError(
            f"{name} cannot be overlapped: {', '.join(dict.fromkeys(changed))} of the optimizer changes with every "
            "bucket, and not once in a step; step after backward, or define how to step a bucket with "
            "offbeat.register_overlapped"
        )
    for p, q in zip(_params(at_once), _params(in_buckets), strict=True):
        if not _alike(p, q) or not _alike_states(at_once.state.get(p, {}), in_buckets.state.get(q, {})):
            raise TypeError(
                f"{name} cannot be overlapped: its update of a parameter depends on other parameters (as by a norm of "
                "all gradients), so buckets do not add up to a step; turn that off in the optimizer, step after "
                "backward, or define how to step a bucket with offbeat.register_overlapped"
            )
    return None


def _is_plain(value: Any, optimizer: Optimizer) -> bool:
    """Whether a value is made of tensors, numbers, names and functions, in plain containers."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, types.MethodType):
        return value.__self__ is optimizer or _is_plain(value.__self__, optimizer)
    if isinstance(value, functools.partial):
        return all(_is_plain(item, optimizer) for item in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, dict):
        return all(_is_plain(item, optimizer) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(_is_plain(item, optimizer) for item in value)
    if dataclasses.is_dataclass(value):
        return all(_is_plain(getattr(value, field.name), optimizer) for field in dataclasses.fields(value))
    return False


@contextmanager
def _no_trace(optimizer: Optimizer) -> Iterator[None]:
    """Keep the generators of random numbers as they are."""
    devices = {p.get_device() for p in _params(optimizer) if p.is_cuda}
    before = random.getstate()
    try:
        with torch.random.fork_rng(sorted(devices)):
            yield
    finally:
        random.setstate(before)


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def _random_state(optimizer: Optimizer) -> list[Any]:
    """The state of the generators that steps may draw from."""
    devices = sorted({p.get_device() for p in _params(optimizer) if p.is_cuda})
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    return [random.getstate(), *(state.tolist() for state in states)]


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _small(optimizer: Optimizer) -> Optimizer:
    """A copy with small parameters."""
    made: Any = object.__new__(type(optimizer))
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {id(optimizer): made}
    memo.update((id(p), _small_param(p, generator)) for p in _params(optimizer))
    tables = shared_tables(optimizer)
    vars(made).update({key: copy.deepcopy(value, memo) for key, value in tables[-1].items()})
    made.defaults = copy.deepcopy(optimizer.defaults, memo)
    made.state = defaultdict(dict, {key: copy.deepcopy(value, memo) for key, value in tables[-2].items()})
    for p in _params(optimizer):
        if (state := _small_state(optimizer.state.get(p), p)) is not None:
            made.state[memo[id(p)]] = state
    made.param_groups = [
        {**{key: copy.deepcopy(value, memo) for key, value in table.items()}, "params": [memo[id(p)] for p in old]}
        for table, old in zip(tables[:-2], (group["params"] for group in optimizer.param_groups), strict=True)
    ]
    for group, old in zip(made.param_groups, optimizer.param_groups, strict=True):
        if "param_names" in old:
            group["param_names"] = list(old["param_names"])
    # Hooks of its own, which are none, and what our own optimizers work with.
    (RuleOptimizer if isinstance(made, RuleOptimizer) else Optimizer).__setstate__(made, {})
    result: Optimizer = made
    return result


def _small_param(p: Tensor, generator: torch.Generator) -> Tensor:
    part = local(p)
    values = torch.randn([min(size, _SIZE) for size in p.shape], generator=generator, dtype=torch.float64)
    device = part.device if part.device.type != "meta" else "cpu"
    made = torch.nn.Parameter(values.to(device, part.dtype), requires_grad=True)
    vars(made).update(vars(p))
    return made


def _small_state(state: Any, p: Tensor) -> dict[str, Any] | None:
    """A part of a parameter's state that fits the small one; None if there is none, so that a step makes it anew."""
    if not isinstance(state, dict):
        return None
    small: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() > 1:
            if local(value).shape != p.shape:
                return None
            small[key] = value[tuple(slice(_SIZE) for _ in p.shape)].clone()
        elif isinstance(value, (Tensor, Number, type(None))):
            small[key] = copy.deepcopy(value)
        else:
            return None
    return small


def _run(optimizer: Optimizer, step: Callable[[list[Tensor], list[Tensor]], None]) -> None:
    params, generator = _params(optimizer), torch.Generator().manual_seed(1)
    _seed()
    for _ in range(_STEPS):
        grads = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) * 3 for p in params]
        step(params, grads)


def _step_whole(whole: Callable[[], Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    whole()
    for p in params:
        p.grad = None


def _step_buckets(
    bucket: Callable[..., Any], end: Callable[[], Any], params: Sequence[Tensor], grads: Sequence[Tensor]
) -> None:
    """In two buckets, each with parameters of all groups as far as they have several."""
    for i in range(2):
        if params[i::2]:
            bucket(params[i::2], grads[i::2])
    end()


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        try:
            torch.testing.assert_close(first, second, equal_nan=True)
        except AssertionError:
            return False
    return True


def _alike_states(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(_alike(first[key], second[key]) for key in first)
