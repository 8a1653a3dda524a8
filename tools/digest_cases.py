"""The cases of ``tools/digests.py``: random ones, and a table of those that stop in the middle.

Every option has a value here, so that a new default changes no case. An edit of this file changes cases: do not compare
digests from before it with digests from after it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch

__all__ = ["Case", "draw", "stopped_cases"]

SHAPES = [(), (3,), (4, 5), (0, 3), (70,), (2, 3, 4), (40, 9), (1,), (600,)]
OUTERS = [(1.0, 0.0, False), (0.7, 0.9, True), (0.5, 0.4, False), (0.6, 0.0, False)]  # lr, momentum, nesterov
CODECS = ["bf16", "fp16", "int8", "int4", "int2", ("topk", 0.2, 4), ("topk", 0.1, 2)]
INNERS = ["offbeat.SGD", "torch.SGD", "offbeat.AdamW", "torch.AdamW", "Chain"]
KEYS = {
    "SGD": {"momentum_buffer": "average"},
    "AdamW": {"exp_avg": "average", "exp_avg_sq": "reset"},
    "Chain": {"momentum_buffer": "average", "exp_avg": "reset"},
}
LEVEL: dict[str, Any] = {
    "every": 4, "phase": 4, "group": None, "outer": (0.7, 0.9, True), "fragments": 1, "delay": 0, "mixing": 0.0,
    "codec": None, "error_feedback": None, "deadline": None, "nonfinite": "raise", "anchor": "device",
    "anchor_dtype": None, "ordered": False,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "state": "keep", "buffers": "average", "weighted": False, "sync_init": False, "bucket_mb": 0.01,
    "reduce_dtype": None, "snapshot": "device", "mesh": None, "comm_hook": None, "subgroup": None,
}  # fmt: skip


@dataclass
class Case:
    """A configuration and what its ranks do."""

    kind: str = "Replica"
    ranks: int = 2
    params: list[tuple[tuple[int, ...], str, torch.dtype]] = field(default_factory=list)  # shape, layout, dtype
    levels: list[dict[str, Any]] = field(default_factory=lambda: [LEVEL])
    warmup: int = 0
    options: dict[str, Any] = field(default_factory=lambda: OPTIONS)
    inner: str = "offbeat.SGD"
    groups: int = 1
    has_norm: bool = False
    is_frozen: bool = False  # the last parameter
    amounts: list[float] = field(default_factory=lambda: [1.0])
    steps: int = 12
    more: list[int] = field(default_factory=lambda: [0] * 8)  # further steps, by rank
    saves: list[int] = field(default_factory=list)  # save and load before these steps
    syncs: list[int] = field(default_factory=list)  # call sync() before these steps
    halve_at: int | None = None  # halve the learning rate before this step
    no_gradient: int | None = None  # the rank whose first parameter never has a gradient
    infinite: tuple[int, int] | None = None  # the step and the rank that have an infinite gradient


def draw(seed: int) -> Case:
    """Draw a case. Odd seeds have delays and fragments at any level."""
    rnd, any_delays = random.Random(f"replicas {seed}"), seed % 2 == 1
    kind = rnd.choice(["Replica", "Replica", "Replica", "LocalSGD", "SlowMo", "DiLoCo"])
    ranks = rnd.choice([1, 2, 2, 2, 3, 3, 4, 4, 6, 8])
    dtypes = rnd.choice([[torch.float64], [torch.float32], [torch.bfloat16], [torch.float32, torch.bfloat16]])
    shapes = [*(rnd.choice(SHAPES) for _ in range(rnd.randint(1, 5))), (3,)]
    params = [(shape, rnd.choice(["", "transposed", "gaps"]), rnd.choice(dtypes)) for shape in shapes]
    names = [f"layer{i}.weight" for i in range(len(params))]
    count, sizes = rnd.choice([1, 1, 1, 2, 2, 3]) if kind in ("Replica", "LocalSGD") else 1, [ranks]
    for _ in range(count - 1):
        sizes.insert(0, rnd.choice([d for d in range(1, sizes[0] + 1) if sizes[0] % d == 0]))
    steps = rnd.randint(4, 18)
    infinite = (rnd.randrange(steps), rnd.randrange(ranks)) if rnd.random() < 0.1 else None
    levels: list[dict[str, Any]] = []
    for i, every in enumerate(sorted(rnd.sample(range(1, 10), count))):
        outer = rnd.choice([None, *OUTERS]) if kind == "Replica" else None if kind == "LocalSGD" else OUTERS[1]
        is_free = count == 1 or any_delays or (i == count - 1 and outer is not None)
        is_above = outer is None and any(low["outer"] is not None for low in levels)
        delay = rnd.choice([0, rnd.randint(0, every)]) if is_free and not is_above else 0
        parts = rnd.randint(1, min(every, len(params))) if is_free and rnd.random() < 0.5 else 1
        rnd.shuffle(names)
        cut = [names[part::parts] for part in range(parts)]
        fragments = 1 if kind == "LocalSGD" else rnd.choice([cut, cut, parts, ("strided", parts)])
        codec = rnd.choice([None, None, *CODECS]) if outer is not None else None
        # An error in one group of several would leave the others waiting.
        nonfinite = rnd.choice(["skip", "leave_out", "raise" if count == 1 else "skip"]) if infinite else "raise"
        levels.append({
            **LEVEL,
            "every": every,
            "phase": rnd.choice([every, every, 1, rnd.randint(1, 12)]),
            "group": None if i == count - 1 else sizes[i],
            "outer": outer,
            "fragments": fragments,
            "delay": delay,
            "mixing": rnd.choice([0.0, 0.5 if delay else 0.0, 0.3]) if is_free and not is_above else 0.0,
            "codec": codec,
            "error_feedback": rnd.choice([None, 1.0, 0.9]) if codec is not None else None,
            "nonfinite": "skip" if nonfinite == "leave_out" and parts > 1 else nonfinite,
            "anchor": rnd.choice(["device", "cpu"]),
            "anchor_dtype": rnd.choice([None, None, torch.float32, torch.float64]) if outer is not None else None,
            "ordered": rnd.random() < 0.5,
        })  # fmt: skip
    if kind == "LocalSGD":  # its levels share these
        for level in levels:
            level.update({name: levels[0][name] for name in ("delay", "mixing", "nonfinite")})
    inner = rnd.choice(INNERS)
    states: list[Any] = ["keep"]
    if all(level["fragments"] == 1 or level["fragments"] == ("strided", 1) for level in levels):
        states += ["reset"]
        if not any(level["delay"] or level["mixing"] for level in levels):
            states += ["average", "average", KEYS[inner.split(".")[-1]]]
    options = {
        **OPTIONS,
        "state": rnd.choice(states),
        "buffers": rnd.choice(["average", "broadcast", "keep"]),
        "weighted": rnd.random() < 0.25,
        "sync_init": rnd.random() < 0.15,
        "bucket_mb": rnd.choice([0.0005, 0.01, 64]),
        "reduce_dtype": rnd.choice([None, torch.float32, torch.float64]) if torch.bfloat16 in dtypes else None,
        "snapshot": rnd.choice(["device", "cpu"]),
    }  # fmt: skip
    return Case(
        kind, ranks, params, levels, rnd.choice([0, 0, 1, 3]), options, inner, rnd.choice([1, 1, 2]),
        has_norm=rnd.random() < 0.5,
        is_frozen=rnd.random() < 0.1,
        amounts=[rnd.choice([1.0, 2.0, 5.5, 0.25]) for _ in range(11)],
        steps=steps,
        more=[rnd.randint(0, 7) if steps % 2 else 0 for _ in range(ranks)],
        saves=sorted(rnd.sample(range(1, steps), min(3, steps - 1))) if rnd.random() < 0.5 else [],
        syncs=rnd.sample(range(1, steps), 1) if rnd.random() < 0.2 else [],
        halve_at=rnd.randrange(steps) if rnd.random() < 0.2 else None,
        no_gradient=rnd.randrange(ranks) if rnd.random() < 0.1 else None,
        infinite=infinite,
    )  # fmt: skip


def stopped_cases() -> dict[str, Case]:
    """Cases that stop in the middle, by name."""
    f32, bf16 = torch.float32, torch.bfloat16
    params = [((4, 5), "", f32), ((70,), "gaps", f32), ((40, 9), "transposed", f32), ((3,), "", f32)]
    base, low = Case(params=params, has_norm=True, steps=9), {**LEVEL, "every": 2, "phase": 2, "group": 2}
    mean, far = {**low, "outer": None, "phase": 1}, {**LEVEL, "every": 6, "phase": 6}

    def one(**options: Any) -> dict[str, Any]:
        return {"levels": [{**LEVEL, **options}]}

    late = {"delay": 3, "mixing": 0.5}
    changes: dict[str, dict[str, Any]] = {
        "mean": one(outer=None, phase=1),
        "outer": one(),
        "mean-in-flight": one(outer=None, phase=1, delay=2, mixing=0.3),
        "outer-in-flight": one(**late),
        "in-flight-whole-period": one(delay=4, mixing=0.0),
        "snapshot-in-flight": {**one(**late, anchor="cpu"), "options": {**OPTIONS, "snapshot": "cpu"}},
        "fragments": one(fragments=4),
        "fragments-in-flight": one(fragments=[[f"layer{i}.weight"] for i in (2, 0, 3, 1)], **late),
        "strided-in-flight": one(fragments=("strided", 2), delay=4, mixing=0.0),
        "int8-feedback": one(codec="int8", error_feedback=1.0),
        "int4-feedback-in-flight": one(codec="int4", error_feedback=0.9, **late),
        "topk-feedback-fragments": one(codec=("topk", 0.1, 2), error_feedback=1.0, fragments=2, **late),
        "bf16-codec-three": {**one(codec="bf16", ordered=True), "ranks": 3},
        "warmup": {**one(), "warmup": 12},
        "warmup-just-over": {**one(**late), "warmup": 8},
        "warmup-in-flight": {**one(**late), "warmup": 4},
        "two-levels-of-means": {"ranks": 4, "levels": [mean, {**far, "outer": None}]},
        "mean-below-outer-in-flight": {"ranks": 4, "levels": [mean, {**far, **late, "fragments": 2}]},
        "both-in-flight": {"ranks": 4, "levels": [{**low, "delay": 2}, {**far, **late}]},
        "three-levels": {"ranks": 8, "levels": [mean, {**low, "every": 4, "group": 4}, {**far, **late, "phase": 8}]},
        "weighted-in-flight": {**one(**late), "options": {**OPTIONS, "weighted": True}, "amounts": [1.0, 2.5, 4, 8]},
        "state-averaged": {**one(), "options": {**OPTIONS, "state": "average"}, "inner": "offbeat.AdamW"},
        "state-reset-in-flight": {**one(**late), "options": {**OPTIONS, "state": "reset"}, "inner": "torch.AdamW"},
        "bf16-in-flight": {
            **one(anchor_dtype=f32, codec="int8", error_feedback=1.0, **late),
            "params": [(shape, layout, bf16) for shape, layout, _ in params],
            "options": {**OPTIONS, "reduce_dtype": f32, "buffers": "broadcast"},
            "inner": "offbeat.AdamW",
        },
        "LocalSGD-in-flight": {**one(outer=None, delay=2, every=2), "kind": "LocalSGD", "inner": "Chain"},
        "SlowMo": {**one(fragments=2), "kind": "SlowMo", "groups": 2, "halve_at": 10},
        "DiLoCo-in-flight": {**one(codec="int4", error_feedback=1.0, fragments=2, **late), "kind": "DiLoCo"},
        "uneven-ends-in-flight": {**one(outer=None, **late), "ranks": 3, "inner": "Chain", "more": [0, 5, 2]},
    }  # fmt: skip
    return {name: replace(base, **change) for name, change in changes.items()}
