"""What every optimizer makes of fixed inputs, to the bit: proof that a change has not changed any number.

Run it before and after the change, and compare::

    python -m tests.digest before.json
    python -m tests.digest after.json
    python -m tests.digest --compare before.json after.json

The file maps the name of each case to a SHA-256 of its parameters and state after a few steps, or to the class of the
error it raises. ``--only PREFIX`` runs the cases whose names begin so. Nothing but the public names of the library is
used, so that the very same file runs on both sides. Digests are those of one machine, compiler and version of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests import overlap_loops, sync_reference
from tests.cases import CASES, ONE_A_RULE, SHAPES, TIERS, Case, make_params, set_gradients
from tests.ranks import run_ranks

#: Names, and what makes the tensors and numbers to digest.
Cases = Iterator[tuple[str, Callable[[], Any]]]

STEPS = 7
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
#: (step, parameter) pairs without a gradient; one parameter begins late, and pauses.
NONE_AT = ((0, 4), (2, 0), (3, 4), (5, 1))
#: More than one block of 256 for what is stored in 8 bits.
COMPACT_SHAPES = [(3, 4), (), (0,), (7,), (1, 1300), (32, 64)]
#: Triton's interpreter takes milliseconds for each block of a kernel.
TRITON_SHAPES = [(3, 4), (), (0,), (7,), (1, 33)]
TRITON_TIERS = {name: TIERS[name] for name in ("fused", "default")}
STATES = (None, torch.float32, torch.bfloat16, "8bit")
ROUNDINGS = (None, "stochastic", "kahan")
WITH_TORCH = [case for case in ONE_A_RULE if case.name != "Lion"]
ADAMW = Case("AdamW", {"lr": 0.01})
MOMENTUM = Case("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5})
RMSPROP = Case("RMSprop", {"lr": 0.01, "momentum": 0.9})


def digest(value: Any) -> str:
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        _feed_tensor(sha, value)
    elif isinstance(value, dict):
        sha.update(f"dict {len(value)};".encode())
        for key in sorted(value, key=repr):
            sha.update(f"{key!r}:".encode())
            _feed(sha, value[key])
    elif isinstance(value, (list, tuple)):
        sha.update(f"list {len(value)};".encode())
        for one in value:
            _feed(sha, one)
    elif value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        sha.update(f"{value!r};".encode())
    else:
        raise TypeError(f"there is no digest of a {type(value).__name__}")


def _feed_tensor(sha: Any, t: Tensor) -> None:
    t = t.detach()
    if hasattr(t, "to_local"):
        t = t.to_local()
    if t.layout != torch.strided:
        t = t.coalesce()
        _feed(sha, [str(t.layout), t.indices(), t.values()])
        return
    sha.update(f"{t.dtype} {tuple(t.shape)};".encode())
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    if t.is_floating_point():
        # A compiler may choose which of two NaNs their sum is.
        t = t.masked_fill(t.isnan(), float("nan"))
    sha.update(t.resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def outcome(run: Callable[[], Any]) -> str:
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = run()
    except Exception as error:
        return f"raises {type(error).__name__}"
    return digest(result)


def collect(cases: Cases, prefix: str) -> dict[str, str]:
    return {name: outcome(run) for name, run in cases if name.startswith(prefix)}


def short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def written(options: dict[str, Any]) -> str:
    return ",".join(f"{key}={short(value)}" for key, value in options.items()) or "default"


# One loop for most cases.


def usual(step: int, params: list[Tensor]) -> None:
    set_gradients(step, params, none_at=NONE_AT)


def every_time(step: int, params: list[Tensor]) -> None:
    set_gradients(step, params)


def in_turns(step: int, params: list[Tensor]) -> None:
    """As in a mixture of experts."""
    set_gradients(step, params, none_at=tuple((step, i) for i in range(len(params)) if (i + step) % 3))


def late(step: int, params: list[Tensor]) -> None:
    """All but the first two begin in the middle, and go on."""
    set_gradients(step, params, none_at=tuple((step, i) for i in range(2, len(params)) if step < i))


def one_group(case: Case, params: list[Tensor]) -> Any:
    return params


def in_groups(case: Case, params: list[Tensor]) -> Any:
    """Three groups that differ in numbers and in the update itself."""
    last = {"params": params[4:], "maximize": not case.hyper.get("maximize", False)}
    if "weight_decay" in inspect.signature(case.ours).parameters:
        last["weight_decay"] = 0.05 if not case.hyper.get("weight_decay") else 0.0
    return [{"params": params[:2]}, {"params": params[2:4], "lr": 0.003}, last]


def decay(optimizer: Any) -> None:
    """As a scheduler does it: tensors in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.9)
        else:
            group["lr"] *= 0.9


def nothing(*args: Any) -> None: ...


def plain_step(optimizer: Any, step: int) -> None:
    optimizer.step()


def loop(
    make: Callable[[list[Tensor]], Any],
    params: list[Tensor],
    *,
    steps: int = STEPS,
    gradients: Callable[[int, list[Tensor]], None] = usual,
    eager: bool = False,
    reload_at: int | None = None,
    between: Callable[[int, Any, list[Tensor]], None] = nothing,
    step: Callable[[Any, int], None] = plain_step,
    with_gradients: bool = False,
) -> Any:
    """A training loop without a model.

    Args:
        eager: whether all state is made before the first step.
        reload_at: after which step state goes to a new optimizer.
        between: called before each step.
        with_gradients: whether gradients are part of the result.
    """
    optimizer = make(params)
    if eager:
        optimizer.init_state()
    for number in range(steps):
        between(number, optimizer, params)
        gradients(number, params)
        step(optimizer, number)
        decay(optimizer)
        if number == reload_at:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(params)
            optimizer.load_state_dict(saved)
    return params, optimizer.state_dict()["state"], [p.grad for p in params] if with_gradients else None


def trained(
    case: Case, options: dict[str, Any], dtype: Any, *, shapes: Any = SHAPES, arrange: Any = one_group, **how: Any
) -> Any:
    def make(params: list[Tensor]) -> Any:
        return case.ours(arrange(case, params), **copy.deepcopy({**case.hyper, **options}))

    return loop(make, make_params(dtype, shapes=shapes), **how)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reload": {"reload_at": 3},
    "init_state": {"eager": True, "reload_at": 2},
    "groups": {"arrange": in_groups, "reload_at": 4},
}


def table() -> Cases:
    """Every case, dtype, tier and variant."""
    for case, dtype, tier, variant in product(CASES, DTYPES, TIERS, VARIANTS):
        name = f"table/{case}/{short(dtype)}/{tier}/{variant}"
        yield name, partial(trained, case, TIERS[tier], dtype, **VARIANTS[variant])


# Options and tensors that are not the usual ones.


def rule_and_tier(name: str, run: Any, dtypes: Any = (torch.float32,), cases: Any = ONE_A_RULE) -> Cases:
    """``run(case, tier's options, dtype)`` for each."""
    for case, dtype, tier in product(cases, dtypes, TIERS):
        yield f"odd/{name}/{case}/{short(dtype)}/{tier}", partial(run, case, TIERS[tier], dtype)


def with_tensor_lr(case: Case, options: Any, dtype: Any, shape: Any = (), **how: Any) -> Any:
    lr = torch.full(shape, case.hyper.get("lr", 0.01), dtype=torch.float64)
    return trained(case, {**options, "lr": lr}, dtype, **how)


def flipped(case: Case, options: Any, dtype: Any) -> Any:
    return trained(case, {**options, "maximize": not case.hyper.get("maximize", False)}, dtype)


def capturable(case: Case, options: Any, dtype: Any) -> Any:
    return trained(case, {**options, "capturable": True}, dtype)


def differentiable(case: Case, options: Any, dtype: Any) -> Any:
    """Several steps, and derivatives of their result by where it began, gradients' size and learning rate."""
    start = make_params(dtype, shapes=[(4,), (2, 3)])
    fixed = make_params(dtype, seed=1, shapes=[(4,), (2, 3)])
    lr = torch.tensor(case.hyper.get("lr", 0.01), dtype=torch.float64, requires_grad=True)
    size = torch.tensor(1.5, dtype=dtype, requires_grad=True)
    params = [p.clone() for p in start]
    optimizer = case.ours(params, **{**case.hyper, **options, "lr": lr, "differentiable": True})
    for step in range(4):
        for p, g in zip(params, fixed, strict=True):
            p.grad = size * g.detach() * (step + 1)
        optimizer.step()
    total = sum((p * p).sum() for p in params)
    found = torch.autograd.grad(total, [*start, lr, size], allow_unused=True)
    return params, optimizer.state_dict()["state"], list(found)


def sparse_cases() -> Cases:
    cases = [
        Case("SGD", {"lr": 0.1}),
        Case("SGD", {"lr": 0.1, "momentum": 0.9}),
        Case("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
        Case("Adagrad", {"lr": 0.1}),
        Case("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "maximize": True}),
        ADAMW,
    ]

    def gradients(step: int, params: list[Tensor]) -> None:
        set_gradients(step, params)
        for p in params[:2]:
            values = p.grad[:4]
            p.grad = torch.sparse_coo_tensor([[0, 2, 2, 5]], values, p.shape, check_invariants=True)

    run = partial(trained, shapes=[(7, 3)] * 3, gradients=gradients, reload_at=3)
    yield from rule_and_tier("sparse", run, (torch.float32, torch.float64), cases)


def strided_params(dtype: Any) -> list[Tensor]:
    shapes = [(5, 3), (4, 6, 5, 5), (4, 6, 5, 5), (8, 10), (8, 10), (1, 5, 1)]
    a, b, c, d, e, f = (p.detach() for p in make_params(dtype, shapes=shapes))
    views = [
        a.t(),
        b.contiguous(memory_format=torch.channels_last),
        c.permute(2, 0, 3, 1),
        d[::2, 1:7:3],
        e[:, 2],
        f.transpose(0, 1),
    ]
    return [view.detach().requires_grad_() for view in views]


def strided(kind: str, case: Case, options: Any, dtype: Any) -> Any:
    def gradients(step: int, params: list[Tensor]) -> None:
        set_gradients(step, params)
        for p in params:
            if kind == "same":
                p.grad = torch.empty_like(p, requires_grad=False).copy_(p.grad)
            elif kind == "expanded":
                p.grad = p.grad.reshape(-1)[:1].expand(p.shape)

    def make(params: list[Tensor]) -> Any:
        return case.ours(params, **{**case.hyper, **options})

    return loop(make, strided_params(dtype), gradients=gradients, reload_at=2, steps=4)


def mixed(case: Case, options: Any, dtype: Any, **how: Any) -> Any:
    dtypes = (dtype, torch.bfloat16, torch.float64, torch.float16, dtype, torch.complex64)
    params = [p for d in dtypes for p in make_params(d, shapes=[(6,), (2, 3)])]
    if options.get("fused"):
        params = [p for p in params if not p.is_complex()]
    return loop(lambda ps: case.ours(ps, **{**case.hyper, **options}), params, **how)


def added(case: Case, options: Any, dtype: Any) -> Any:
    """Groups that join while it runs."""

    def between(step: int, optimizer: Any, params: list[Tensor]) -> None:
        if step in (2, 4):
            new = make_params(dtype, seed=step, shapes=[(4,), (3, 3)])
            params.extend(new)
            optimizer.add_param_group({"params": new, "lr": 0.05 / step})

    return trained(case, options, dtype, between=between)


def clipped(case: Case, options: Any, dtype: Any, **how: Any) -> Any:
    """Gradients times a number, and zero afterwards, in all combinations."""
    extras: list[dict[str, Any]] = [
        {"clip": 0.25},
        {"clip": torch.tensor(0.3)},
        {"zero_grad": True},
        {},
        {"clip": 0.5, "zero_grad": True},
        {"clip": torch.tensor([0.7], dtype=torch.float64), "zero_grad": True},
        {"clip": 0.1},
    ]

    def step(optimizer: Any, number: int) -> None:
        optimizer.step(**extras[number])

    return trained(case, options, dtype, step=step, with_gradients=True, **how)


def scaled(case: Case, options: Any, dtype: Any, **how: Any) -> Any:
    """With a GradScaler that finds two overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scaler.scale(torch.zeros(1))

    def gradients(step: int, params: list[Tensor]) -> None:
        usual(step, params)
        for p in params:
            if p.grad is not None:
                p.grad.mul_(scaler.get_scale())
        if step in (1, 4):
            params[3].grad[0] = float("inf")

    def step(optimizer: Any, number: int) -> None:
        scaler.step(optimizer)
        scaler.update()

    return trained(case, options, dtype, gradients=gradients, step=step, with_gradients=True, **how)


def scheduled(case: Case, options: Any, dtype: Any) -> Any:
    """torch's OneCycleLR, which moves momentum or betas too."""
    schedulers: list[Any] = []

    def make(params: list[Tensor]) -> Any:
        optimizer = case.ours(params, **{**case.hyper, **options})
        momentum = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
        schedulers[:] = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12, cycle_momentum=momentum)]
        return optimizer

    def between(step: int, optimizer: Any, params: list[Tensor]) -> None:
        schedulers[0].step()

    return loop(make, make_params(dtype), between=between)


def spoilt(case: Case, options: Any, dtype: Any) -> Any:
    """Gradients that are not finite, very large, very small, and zero."""
    values = torch.tensor([1.0, float("nan"), float("inf"), -1.0, 0.0, -0.0, 1e30, 1e-30, 1e-42, -float("inf")])

    def gradients(step: int, params: list[Tensor]) -> None:
        for p in params:
            p.grad = values.roll(step if step > 3 else 0).to(p.dtype)

    return trained(case, options, dtype, shapes=[(10,), (10,)], gradients=gradients)


def large(layout: str, case: Case, options: Any, dtype: Any) -> Any:
    """More than the pieces that tensors are cut into."""
    (values,) = (p.detach() for p in make_params(dtype, shapes=[(1100, 1000)]))
    if layout == "transposed":
        values = values.t().contiguous().t()
    elif layout == "gaps":
        values = torch.zeros(1100, 2000, dtype=dtype)[:, ::2].copy_(values)
    params = [values.requires_grad_(), *make_params(dtype, shapes=[(3,)])]
    return loop(lambda ps: case.ours(ps, **case.hyper, **options), params, gradients=every_time, steps=2)


def from_torch(case: Case, options: Any, dtype: Any) -> Any:
    """A checkpoint of torch.optim's class, in the middle."""
    params = make_params(dtype)
    theirs = case.reference(params)
    for step in range(3):
        usual(step, params)
        theirs.step()

    def make(params: list[Tensor]) -> Any:
        optimizer = case.ours(params, **{**case.hyper, **options})
        optimizer.load_state_dict(theirs.state_dict())
        return optimizer

    return loop(make, params)


def by_name(case: Case, options: Any, dtype: Any) -> Any:
    """State that is matched by parameters' names."""
    named = [(f"p{i}", p) for i, p in enumerate(make_params(dtype))]
    params = [p for _, p in named]
    optimizer = case.ours(named, **{**case.hyper, **options})
    for step in range(STEPS):
        usual(step, params)
        optimizer.step()
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = case.ours(list(reversed(named)), **{**case.hyper, **options})
            optimizer.load_state_dict(saved)
    return params, optimizer.state_dict()["state"]


def copied(case: Case, options: Any, dtype: Any) -> Any:
    params = make_params(dtype)
    optimizer = case.ours(params, **{**case.hyper, **options})
    for step in range(STEPS):
        usual(step, params)
        optimizer.step()
        if step == 3:
            params, optimizer = copy.deepcopy((params, optimizer))
    return params, optimizer.state_dict()["state"]


def repeated(case: Case, options: Any, dtype: Any) -> Any:
    """A parameter that stands in its group twice."""
    return trained(case, options, dtype, arrange=lambda case, params: [*params, params[0], params[3]])


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    os.environ["OFFBEAT_NO_COMPILER"] = "1"
    try:
        yield
    finally:
        del os.environ["OFFBEAT_NO_COMPILER"]


def uncompiled(case: Case, options: Any, dtype: Any, **how: Any) -> Any:
    """Where there is no compiler torch's own operators may run."""
    with without_compiler():
        return trained(case, options, dtype, **how)


def new_storage(optimizer: Any, params: list[Tensor]) -> None:
    params[0].data = params[0].data.clone()


def other_layout(optimizer: Any, params: list[Tensor]) -> None:
    params[4].data = params[4].data.t().contiguous().t()


def replaced_state(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].clone() + 1


def state_of_another_dtype(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].double()


def counter_changed(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.state[params[0]]["step"].fill_(50)


def counter_replaced(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.state[params[0]]["step"] = torch.tensor(50.0)


def cleared_state(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.state.clear()


def popped_state(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.state.pop(params[0])


def another_dictionary(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.state = defaultdict(dict)


def reordered(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.param_groups[0]["params"].reverse()


def removed(optimizer: Any, params: list[Tensor]) -> None:
    del optimizer.param_groups[0]["params"][0]


def appended(optimizer: Any, params: list[Tensor]) -> None:
    params.append(torch.ones(3, dtype=params[0].dtype, requires_grad=True))
    optimizer.param_groups[0]["params"].append(params[-1])


CHANGES = (
    new_storage, other_layout, replaced_state, state_of_another_dtype, counter_changed, counter_replaced, cleared_state,
    popped_state, another_dictionary, reordered, removed, appended,
)  # fmt: skip

#: Options that change while an optimizer is in use.
LIVE: list[tuple[Case, dict[str, Any]]] = [
    (ADAMW, {"betas": (0.5, 0.9)}),
    (ADAMW, {"betas": [0.5, 0.9]}),
    (ADAMW, {"eps": 1e-3}),
    (ADAMW, {"weight_decay": 0}),
    (ADAMW, {"amsgrad": True}),
    (ADAMW, {"maximize": True}),
    (ADAMW, {"foreach": True, "fused": None}),
    (ADAMW, {"foreach": False, "fused": None}),
    (ADAMW, {"state_dtype": "8bit", "fused": None}),
    (ADAMW, {"state_dtype": torch.bfloat16, "fused": None}),
    (MOMENTUM, {"momentum": 0.5}),
    (MOMENTUM, {"momentum": 0}),
    (MOMENTUM, {"dampening": 0, "nesterov": True}),
    (MOMENTUM, {"weight_decay": 0.1}),
    (Case("SGD", {"lr": 0.1}), {"momentum": 0.9}),
    (Case("RMSprop", {"lr": 0.01}), {"momentum": 0.9}),
    (Case("RMSprop", {"lr": 0.01}), {"centered": True}),
    (Case("RAdam", {"lr": 0.01}), {"betas": (0.9, 0.5)}),
    (Case("NAdam", {"lr": 0.01}), {"momentum_decay": 0.1}),
    (Case("Rprop", {}), {"etas": (0.25, 1.5), "step_sizes": (1e-4, 0.1)}),
    (Case("ASGD", {}), {"t0": 2, "lambd": 0.1}),
    (Case("Adagrad", {"lr": 0.1}), {"lr_decay": 0.5}),
    (Case("Adadelta", {}), {"rho": 0.5}),
]


def changed(change: Any, case: Case, options: Any, dtype: Any, **how: Any) -> Any:
    """Something is done to the optimizer's tensors before the fifth step."""

    def between(step: int, optimizer: Any, params: list[Tensor]) -> None:
        if step == 4:
            change(optimizer, params)

    # nn.Parameter, as state of a plain tensor that was copied could not be found again.
    params = [nn.Parameter(p.detach()) for p in make_params(dtype)]
    return loop(
        lambda ps: case.ours(list(ps), **case.hyper, **options), params, between=between, gradients=every_time, **how
    )


def changes() -> Cases:
    for change in CHANGES:
        yield from rule_and_tier(f"changes/{change.__name__}", partial(changed, change), cases=[ADAMW])
    for case, new in LIVE:

        def change(optimizer: Any, params: list[Tensor], new: Any = new) -> None:
            optimizer.param_groups[0].update(new)

        yield from rule_and_tier(f"live/{written(new)}", partial(changed, change), cases=[case])


def odd() -> Cases:
    wide = (torch.float32, torch.float64, torch.bfloat16)
    yield from rule_and_tier("tensor_lr", partial(with_tensor_lr, reload_at=3), wide)
    yield from rule_and_tier("tensor_lr_of_shape_1", partial(with_tensor_lr, shape=(1,)))
    yield from rule_and_tier("maximize", flipped, cases=CASES)
    yield from rule_and_tier("capturable", capturable)
    yield from rule_and_tier("differentiable", differentiable, (torch.float32, torch.float64), CASES)
    yield from sparse_cases()
    for kind in ("same", "contiguous", "expanded"):
        yield from rule_and_tier(f"strided/{kind}", partial(strided, kind), (torch.float32, torch.bfloat16))
    yield from rule_and_tier("late", partial(trained, gradients=late), wide)
    yield from rule_and_tier("late_init_state", partial(trained, gradients=late, eager=True), wide)
    yield from rule_and_tier("turns", partial(trained, gradients=in_turns, steps=9), wide, CASES)
    yield from rule_and_tier("mixed", partial(mixed, reload_at=3))
    yield from rule_and_tier("added", added, wide)
    yield from rule_and_tier("clip", clipped, wide)
    yield from rule_and_tier("scaler", scaled)
    yield from rule_and_tier("scheduler", scheduled)
    yield from rule_and_tier("spoilt", spoilt, wide)
    for layout in ("contiguous", "transposed", "gaps"):
        yield from rule_and_tier(f"large/{layout}", partial(large, layout), cases=[RMSPROP])
    yield from rule_and_tier("from_torch", from_torch, (torch.float32, torch.float64), WITH_TORCH)
    yield from rule_and_tier("by_name", by_name)
    yield from rule_and_tier("copied", copied)
    yield from rule_and_tier("repeated", repeated)
    for variant, how in VARIANTS.items():
        yield from rule_and_tier(f"uncompiled/{variant}", partial(uncompiled, **how), wide)
    yield from changes()


# Parameters and state in fewer bits.


def compact_options(case: Case, refused: bool = False) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """For the options a rule takes: a name, the parameters' dtype, the options; also those a step refuses."""
    states = STATES if "state_dtype" in inspect.signature(case.ours).parameters else (None,)
    for dtype, state, rounding in product((torch.bfloat16, torch.float32), states, ROUNDINGS):
        options: dict[str, Any] = {"state_dtype": state, "rounding": rounding}
        options = {key: value for key, value in options.items() if value is not None}
        if options and (refused or dtype == torch.bfloat16 or rounding is None):
            yield f"{short(dtype)}/{written(options)}", dtype, options


def converted(case: Case, path: tuple[Any, ...], dtype: Any) -> Any:
    """State goes from one form to another through checkpoints."""
    params = make_params(dtype, shapes=COMPACT_SHAPES)
    saved: Any = None
    found = []
    for number, state in enumerate(path):
        optimizer = case.ours(params, **case.hyper, **({} if state is None else {"state_dtype": state}))
        if saved is not None:
            optimizer.load_state_dict(saved)
        for step in range(3):
            usual(3 * number + step, params)
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        found.append(saved["state"])
    return params, found


def laid_out(case: Case, options: Any) -> Any:
    """Codes of a tensor whose dimensions are not in order, and loaded into one whose are."""
    params = [p for p in strided_params(torch.float32) if p.dim() > 1]
    first = loop(lambda ps: case.ours(ps, **case.hyper, **options), params, steps=3, gradients=every_time)
    saved = case.ours(params, **case.hyper, **options).state_dict()
    saved["state"] = first[1]
    plain = [p.detach().contiguous().requires_grad_() for p in params]

    def make(ps: list[Tensor]) -> Any:
        optimizer = case.ours(ps, **case.hyper, **options)
        optimizer.load_state_dict(saved)
        return optimizer

    return first, loop(make, plain, steps=3, gradients=every_time)


def compact() -> Cases:
    for case, tier in product(ONE_A_RULE, TIERS):
        for name, dtype, options in compact_options(case, refused=True):
            run = partial(trained, case, {**options, **TIERS[tier]}, dtype, shapes=COMPACT_SHAPES)
            yield f"compact/{case}/{name}/{tier}/plain", run
            yield f"compact/{case}/{name}/{tier}/init_state", partial(run, eager=True, reload_at=3)
    cases = [MOMENTUM, Case("Adam", {"lr": 0.01, "amsgrad": True}), ADAMW, Case("Lion", {"lr": 0.01})]
    for case, dtype in product(cases, (torch.float32, torch.bfloat16)):
        for path in product(STATES, STATES, (None,)):
            name = "->".join(map(short, path))
            yield f"compact/converted/{case}/{short(dtype)}/{name}", partial(converted, case, path, dtype)
    for case in cases:
        yield f"compact/layout/{case}", partial(laid_out, case, {"state_dtype": "8bit"})


# Kernels for GPUs, through Triton's interpreter.


def triton() -> Cases:
    small = {"shapes": TRITON_SHAPES, "steps": 3}
    for case, tier in product(ONE_A_RULE, TRITON_TIERS):
        options = TRITON_TIERS[tier]
        for dtype in (torch.float32, torch.bfloat16):
            start = f"triton/{case}/{short(dtype)}/{tier}"
            yield f"{start}/plain", partial(trained, case, options, dtype, reload_at=1, **small)
            yield f"{start}/tensor_lr", partial(with_tensor_lr, case, options, dtype, **small)
        start = f"triton/{case}/float32/{tier}"
        yield f"{start}/clip", partial(clipped, case, options, torch.float32, **small)
        yield f"{start}/scaler", partial(scaled, case, options, torch.float32, **small)
        yield f"{start}/turns", partial(trained, case, options, torch.float32, gradients=in_turns, **small)
        yield (
            f"triton/{case}/float64/{tier}/groups",
            partial(trained, case, options, torch.float64, arrange=in_groups, eager=True, **small),
        )
    small = {"shapes": [(3, 4), (), (0,), (300,)], "steps": 3}
    for case, tier in product([MOMENTUM, ADAMW, Case("Lion", {"lr": 0.01})], TRITON_TIERS):
        for name, dtype, options in compact_options(case):
            yield (
                f"triton/compact/{case}/{name}/{tier}",
                partial(trained, case, {**options, **TRITON_TIERS[tier]}, dtype, reload_at=1, **small),
            )
    for case, rounding in product(ONE_A_RULE, ("stochastic", "kahan")):
        yield (
            f"triton/rounding/{case}/{rounding}",
            partial(trained, case, {"rounding": rounding}, torch.bfloat16, **small),
        )


def interpreted(prefix: str) -> dict[str, str]:
    """In a process of its own: Triton decides whether it interprets when it is imported."""
    if not any(name.startswith(prefix) for name, _ in triton()):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "triton.json"
        command = [sys.executable, "-m", "tests.digest", str(out), "--interpreted", "--only", prefix]
        subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
        found: dict[str, str] = json.loads(out.read_text())
        return found


# Gradients that are handed in, and updates that change nothing.


def explicit(case: Case, options: Any, dtype: Any, one_by_one: bool) -> Any:
    params = make_params(dtype)
    given = [p.detach().clone() for p in params]
    optimizer = offbeat.as_functional(case.ours, [] if one_by_one else given, **case.hyper, **options)
    for step in range(STEPS):
        usual(step, params)
        if one_by_one:
            for p, q in reversed(list(zip(params, given, strict=True))):
                optimizer.step_param(q, p.grad)
        else:
            optimizer.step([p.grad for p in params])
        decay(optimizer)
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return given, optimizer.state_dict()["state"]


def functional() -> Cases:
    for case, dtype, tier in product(ONE_A_RULE, (torch.float32, torch.float64), TIERS):
        for name in ("step", "step_param"):
            run = partial(explicit, case, TIERS[tier], dtype, name == "step_param")
            yield f"functional/{case}/{short(dtype)}/{tier}/{name}", run


def without_effects(case: Case, dtype: Any) -> Any:
    """Also derivatives by the learning rate and by the gradients' size."""
    usual_params = make_params(dtype)
    pure = offbeat.as_pure(case.ours, **case.hyper)
    params: Any = {str(i): p.detach() for i, p in enumerate(usual_params)}
    state = pure.init(params)
    lr = torch.tensor(case.hyper.get("lr", 0.01), dtype=torch.float64, requires_grad=True)
    size = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    for step in range(STEPS):
        usual(step, usual_params)
        gradients = {
            str(i): p.grad if p.grad is None else (p.grad * size).to(dtype) for i, p in enumerate(usual_params)
        }
        hyper: dict[str, Any] = {} if step == 0 else {"lr": 0.01 / step} if step < 4 else {"lr": lr}
        params, state = pure.update(params, gradients, state, **hyper)
    total = sum(p.abs().sum() for p in params.values())
    return params, state, list(torch.autograd.grad(total, [lr, size], allow_unused=True))


def pure() -> Cases:
    for case, dtype in product(CASES, DTYPES):
        yield f"pure/{case}/{short(dtype)}", partial(without_effects, case, dtype)


# Updates while backward runs.


def overlapped_loop(cell: Any, make: Any, overlapped: bool, rank: int, world: int) -> Any:
    result = overlap_loops.train(cell, make, overlapped, rank, world)
    # How many gradients are used early is a matter of timing where there are several ranks.
    return {key: value for key, value in result.items() if key != "early"}


def overlap_cells(where: str, rank: int, world: int) -> Cases:
    make = overlap_loops.OPTIMIZERS["offbeat.AdamW"]
    for cell in overlap_loops.CELLS:
        if cell.where == where:
            yield f"overlap/{cell}", partial(overlapped_loop, cell, make, True, rank, world)


def overlap_rules() -> Cases:
    """Other rules and forms of state, and loops without overlap, in one process."""
    adamw = overlap_loops.OPTIMIZERS["offbeat.AdamW"]
    for cell in overlap_loops.CELLS:
        if cell.where == "plain":
            yield f"overlap/without/{cell}", partial(overlapped_loop, cell, adamw, False, 0, 1)
    kinds: list[tuple[Case, dict[str, Any]]] = [(case, {}) for case in ONE_A_RULE]
    kinds += [(ADAMW, TIERS["loop"]), (ADAMW, TIERS["foreach"]), (ADAMW, TIERS["fused"]), (MOMENTUM, TIERS["fused"])]
    kinds += [(ADAMW, {"state_dtype": "8bit"}), (MOMENTUM, {"state_dtype": torch.bfloat16})]
    for (case, options), feature in product(kinds, ("step", "accumulate", "clip_previous", "clip_bucket", "reload")):
        make = partial(case.ours, **case.hyper, **options)
        cell = overlap_loops.Cell("plain", feature)
        yield f"overlap/rules/{case}/{written(options)}/{feature}", partial(overlapped_loop, cell, make, True, 0, 1)


# Replicas that are averaged now and then.

INNER: dict[str, Any] = {
    "SGD": lambda params: offbeat.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: offbeat.AdamW(params, lr=0.01),
}


def model_with_buffers() -> nn.Module:
    return nn.Sequential(sync_reference.make(), nn.BatchNorm1d(3, dtype=torch.float64))


def in_shards(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replica", "shard"))
    return fully_shard(model, mesh=mesh["shard"])


def whole(model: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def contents(model: nn.Module, optimizer: Any) -> Any:
    return whole(model), list(model.buffers()), optimizer.state_dict()["state"]


def replicas(
    rank: int,
    world: int,
    inner: Any,
    *,
    build: Any = sync_reference.make,
    wrap: Any = None,
    overlap: bool = False,
    reload_at: int | None = None,
    uneven: bool = False,
    node: bool = False,
    dtype: Any = torch.float64,
    **options: Any,
) -> Any:
    """LocalSGD for 13 steps, and to its end.

    Args:
        uneven: whether ranks have different amounts of data.
        node: whether the two ranks of a pair go on averaging gradients.
    """
    pairs = dist.new_subgroups(group_size=2)[0] if node else None

    def arrange() -> tuple[nn.Module, nn.Module, Any, Any]:
        model = build().to(dtype)
        module = wrap(model) if wrap is not None else model
        optimizer = inner(model.parameters())
        handle = offbeat.overlap(optimizer, module) if overlap else None
        return model, module, offbeat.LocalSGD(optimizer, module, subgroup=pairs, **options), handle

    model, module, local, handle = arrange()
    history = []
    for step in range(13 - 2 * rank * uneven):
        sync_reference.loss(module, sync_reference.batch(step, rank, dtype)).backward()
        if options.get("weighted"):
            local.seen(1 + rank + step % 3)
        local.step()
        local.zero_grad()
        history.append(whole(model))
        if step == reload_at:
            saved, values = copy.deepcopy(local.state_dict()), model.state_dict()
            model, module, local, handle = arrange()
            model.load_state_dict(values)
            local.load_state_dict(saved)
    before = copy.deepcopy(local.state_dict()["state"])
    local.finish()
    if handle is not None:
        handle.remove()
    return history, before, contents(model, local), local.steps, local.syncs


def growing(step: int) -> int:
    return 1 if step < 3 else 2 if step < 8 else 5


#: LocalSGD's options and those of :func:`replicas`.
SYNC: dict[str, dict[str, Any]] = {
    "every": {"every": 3},
    "warmup": {"every": 4, "warmup": 3},
    "ddp": {"every": 4, "warmup": 3, "wrap": DistributedDataParallel},
    "overlapped": {"every": 3, "warmup": 4, "wrap": DistributedDataParallel, "overlap": True},
    "overlapped_alone": {"every": 3, "overlap": True},
    "delay": {"every": 4, "warmup": 2, "delay": 2},
    "delay_cpu": {"every": 4, "delay": 2, "snapshot": "cpu", "undo": "memory"},
    "delay_overlapped": {"every": 3, "warmup": 2, "delay": 2, "wrap": DistributedDataParallel, "overlap": True},
    "delay_reload": {"every": 4, "warmup": 2, "delay": 2, "reload_at": 7},
    "reload": {"every": 4, "warmup": 3, "reload_at": 5},
    "function": {"every": growing},
    "state_average": {"every": 3, "warmup": 2, "state": "average"},
    "state_reset": {"every": 3, "warmup": 2, "state": "reset"},
    "delay_state_reset": {"every": 3, "warmup": 2, "delay": 2, "state": "reset"},
    "buffers_average": {"every": 3, "build": model_with_buffers},
    "buffers_broadcast": {"every": 3, "build": model_with_buffers, "buffers": "broadcast"},
    "buffers_keep": {"every": 3, "build": model_with_buffers, "buffers": "keep"},
    "weighted": {"every": 3, "weighted": True},
    "small_buckets": {"every": 3, "warmup": 2, "bucket_mb": 0.0002},
    "bfloat16": {"every": 3, "warmup": 2, "dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "uneven": {"every": 3, "uneven": True},
}
SYNC_THREE = {
    kind: SYNC[kind]
    for kind in ("warmup", "ddp", "delay", "reload", "state_average", "weighted", "small_buckets", "uneven")
}
#: By key of state, which optimizers do not share.
SYNC_STATE: dict[str, Any] = {
    "SGD": {"momentum_buffer": "average"},
    "AdamW": {"exp_avg": "reset", "exp_avg_sq": "average"},
}
SYNC_FOUR: dict[str, dict[str, Any]] = {
    "warmup": SYNC["warmup"],
    "nodes": {"every": 4, "warmup": 3, "node": True},
    "nodes_ddp": {"every": 4, "warmup": 3, "node": True, "wrap": DistributedDataParallel},
    "levels": {"every": {2: 2, 4: 4}, "warmup": 2},
    "levels_as_pairs": {"every": ((2, 2), (4, 4))},
    "levels_of_functions": {"every": [(lambda step: 2, 2), (lambda step: 6, 4)]},
    "levels_state_average": {"every": {2: 2, 6: 4}, "state": "average"},
    "levels_delay": {"every": {2: 2, 4: 4}, "delay": 1},
    "shards": {"every": 3, "warmup": 2, "wrap": in_shards},
    "shards_delay": {"every": 3, "warmup": 2, "wrap": in_shards, "delay": 1},
    "shards_overlapped": {"every": 3, "wrap": in_shards, "overlap": True},
}


def averaged(rank: int, world: int, inner: Any, make_averager: Any) -> Any:
    """An averager by itself."""
    model = sync_reference.make()
    optimizer, averager = inner(model.parameters()), make_averager()
    history = []
    for step in range(11):
        sync_reference.train(model, optimizer, range(step, step + 1), rank)
        averager.average_parameters(model.parameters() if step % 2 else optimizer.param_groups)
        history.append(whole(model))
    return history, contents(model, optimizer), averager.step


def post_local(rank: int, world: int, inner: Any, make_averager: Any, warmup: int) -> Any:
    """torch's three parts under our names, with a checkpoint in the middle."""
    subgroup, _ = dist.new_subgroups(group_size=1)

    def arrange() -> tuple[nn.Module, nn.Module, Any]:
        model = sync_reference.make()
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(offbeat.PostLocalSGDState(None, subgroup, warmup), offbeat.post_local_sgd_hook)
        return model, ddp, offbeat.PostLocalSGDOptimizer(inner(model.parameters()), make_averager())

    model, ddp, optimizer = arrange()
    history = sync_reference.train(ddp, optimizer, range(6), rank)
    saved, values = copy.deepcopy(optimizer.state_dict()), model.state_dict()
    model, ddp, optimizer = arrange()
    model.load_state_dict(values)
    optimizer.load_state_dict(saved)
    history += sync_reference.train(ddp, optimizer, range(6, 13), rank)
    return history, contents(model, optimizer), optimizer.averager.step


def averager_kinds(world: int) -> dict[str, tuple[Any, int]]:
    """What makes an averager, and its warm-up."""
    kinds: dict[str, tuple[Any, int]] = {
        "periodic": (partial(offbeat.PeriodicModelAverager, 4, 3), 3),
        "periodic_small_buckets": (partial(offbeat.PeriodicModelAverager, 3, bucket_mb=0.0002, undo="memory"), 0),
    }
    levels = OrderedDict([(2, 1), (4, world)] if world % 2 else [(2, 2), (4, world)])
    kinds["hierarchical"] = partial(offbeat.HierarchicalModelAverager, levels, 2), 2
    return kinds


def sync(rank: int, world: int) -> Cases:
    for name, inner in INNER.items():
        for kind, options in {2: SYNC, 3: SYNC_THREE, 4: SYNC_FOUR}[world].items():
            yield f"sync/{world}/local/{name}/{kind}", partial(replicas, rank, world, inner, **options)
        yield (
            f"sync/{world}/local/{name}/state_by_key",
            partial(replicas, rank, world, inner, every=3, state=SYNC_STATE[name]),
        )
        for kind, (make_averager, warmup) in averager_kinds(world).items():
            start = f"sync/{world}/{kind}/{name}"
            yield f"{start}/averager", partial(averaged, rank, world, inner, make_averager)
            yield f"{start}/optimizer", partial(post_local, rank, world, inner, make_averager, warmup)


# Parameters in shards.


def shards(case: Case, options: Any, dtype: Any, rank: int, world: int) -> Any:
    """FSDP2: shards of unequal size, and on some ranks none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 31), nn.Tanh(), nn.Linear(31, 1)).to(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = case.ours(model.parameters(), **case.hyper, **options)
    for step in range(STEPS):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = case.ours(model.parameters(), **case.hyper, **options)
            optimizer.load_state_dict(saved)
    return list(model.parameters()), optimizer.state_dict()["state"]


def sharded(rank: int, world: int) -> Cases:
    for case, dtype, tier in product(ONE_A_RULE, (torch.float32, torch.bfloat16), TIERS):
        yield (
            f"sharded/{case}/{short(dtype)}/{tier}",
            partial(shards, case, TIERS[tier], dtype, rank, world),
        )
    for case in (ADAMW, MOMENTUM):
        for name, dtype, options in compact_options(case):
            yield f"sharded/compact/{case}/{name}", partial(shards, case, options, dtype, rank, world)


def on_one_rank(rank: int, world: int, cases: Any, prefix: str) -> dict[str, str]:
    return collect(cases(rank, world), prefix)


def on_ranks(cases: Any, world: int, prefix: str) -> dict[str, str]:
    """What each rank has, under names of its own."""
    if not any(name.startswith(prefix) for name, _ in cases(0, world)):
        return {}
    ranks = run_ranks(on_one_rank, world, cases, prefix, seconds=300)
    return {f"{name}/rank {rank}": value for rank, found in enumerate(ranks) for name, value in found.items()}


def locally(*cases: Any) -> Callable[[str], dict[str, str]]:
    return lambda prefix: collect(chain.from_iterable(make() for make in cases), prefix)


#: From the cases' prefix to their digests.
PARTS: dict[str, Callable[[str], dict[str, str]]] = {
    "table": locally(table),
    "odd": locally(odd),
    "compact": locally(compact),
    "triton": interpreted,
    "functional": locally(functional),
    "pure": locally(pure),
    "overlap, one process": locally(partial(overlap_cells, "plain", 0, 1), overlap_rules),
    "overlap, DDP": partial(on_ranks, partial(overlap_cells, "ddp"), 2),
    "overlap, FSDP2": partial(on_ranks, partial(overlap_cells, "fsdp2"), 2),
    "sync, 2 ranks": partial(on_ranks, sync, 2),
    "sync, 3 ranks": partial(on_ranks, sync, 3),
    "sync, 4 ranks": partial(on_ranks, sync, 4),
    "sharded": partial(on_ranks, sharded, 2),
}


def run_all(prefix: str) -> dict[str, str]:
    results: dict[str, str] = {}
    for part, run in PARTS.items():
        start = time.perf_counter()
        found = run(prefix)
        if found:
            errors = sum(value.startswith("raises") for value in found.values())
            seconds = time.perf_counter() - start
            print(f"{part}: {len(found)} cases in {seconds:.0f} s, of which {errors} raise", flush=True)
        results |= found
    return results


def compare(before: str, after: str) -> int:
    """Prints what is not the same; returns how many cases."""
    a, b = (json.loads(Path(file).read_text()) for file in (before, after))
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    for name in names:
        if name in a and name in b:
            print(f"differs: {name}: {a[name]} / {b[name]}")
        else:
            print(f"only in {before if name in a else after}: {name}")
    print(f"{len(names)} of {len(a.keys() | b.keys())} cases differ or are on one side only")
    return len(names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", help="file for the digests")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only cases whose names begin so")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two files of digests")
    parser.add_argument("--interpreted", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compare:
        return 1 if compare(*arguments.compare) else 0
    if arguments.out is None:
        parser.error("give a file for the digests, or --compare two of them")
    torch.set_num_threads(1)
    results = collect(triton(), arguments.only) if arguments.interpreted else run_all(arguments.only)
    Path(arguments.out).write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
