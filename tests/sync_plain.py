"""Levels, outer steps, fragments, delays, mixing and codecs in a few dozen lines: all replicas as vectors of float64.

:func:`draw` makes random configurations, :func:`simulate` computes them here, and :func:`train` runs them in the
library.
"""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from offbeat.wire.codecs import make_codec

__all__ = ["Case", "draw", "simulate", "train"]

SHAPES = [(), (3,), (4, 5), (0, 3), (70,), (2, 3, 4), (40, 9), (1,), (600,)]
MOMENTUM, RATE = 0.5, 0.05


@dataclass
class One:
    """A level of a case."""

    every: int
    phase: int | None
    size: int
    outer: tuple[float, float, bool] | None
    cut: list[list[str]]
    delay: int
    mixing: float | None
    codec: Any
    feedback: float | None
    options: dict[str, Any]

    @property
    def kept(self) -> float:
        late = 0.5 if self.delay and self.outer is not None else 0.0
        return late if self.mixing is None else self.mixing

    def due(self, made: int) -> list[int]:
        """The fragments that are exchanged after so many local steps."""
        parts, start = len(self.cut), (self.phase or self.every) - self.every
        offsets = [start + self.every * (f + 1) // parts for f in range(parts)]
        return [f for f, o in enumerate(offsets) if made >= o and (made - o) % self.every == 0]


@dataclass
class Case:
    """What is drawn at random."""

    ranks: int
    shapes: list[tuple[tuple[int, ...], str]]
    levels: list[One]
    warmup: int
    steps: int
    amounts: list[float] | None
    options: dict[str, Any] = field(default_factory=dict)
    torch_inner: bool = False


class Net(nn.Module):
    """Parameters of many shapes and layouts."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for i, (shape, layout) in enumerate(case.shapes):
            t = torch.randn(shape, dtype=torch.float64, generator=generator)
            if layout == "transposed":
                t = t.t().contiguous().t() if t.dim() == 2 else t
            elif layout == "gaps" and t.dim():
                t = torch.stack([t, t], dim=-1)[..., 0]
            self.register_parameter(f"p{i}", nn.Parameter(t))

    def vector(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters()])


def gradient(x: Tensor, step: int, rank: int) -> Tensor:
    noise = torch.randn(x.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(131 * step + rank))
    return 0.3 * x + noise


def draw(seed: int, *, any_delays: bool = False) -> Case:
    """A case.

    Args:
        any_delays: also delays and fragments at lower levels, which :func:`simulate` does not know.
    """
    rnd = random.Random(seed)
    ranks = rnd.choice([1, 2, 2, 3, 4, 4, 6, 8])
    layouts = ["", "transposed", "gaps"]
    shapes = [(rnd.choice(SHAPES), rnd.choice(layouts)) for _ in range(rnd.randint(1, 5))] + [((3,), "")]
    names = [f"p{i}" for i in range(len(shapes))]
    count, sizes = rnd.choice([1, 1, 1, 2, 2, 3]), [ranks]
    for _ in range(count - 1):
        sizes.insert(0, rnd.choice([d for d in range(1, sizes[0] + 1) if sizes[0] % d == 0]))
    levels: list[One] = []
    for i, every in enumerate(sorted(rnd.sample(range(1, 10), count))):
        outer = rnd.choice([None, (1.0, 0.0, False), (0.7, 0.9, True), (0.5, 0.4, False), (0.6, 0.0, False)])
        is_free = count == 1 or any_delays or (i == count - 1 and outer is not None)
        above = outer is None and any(low.outer is not None for low in levels)
        delay = rnd.choice([0, rnd.randint(0, every)]) if is_free and not above else 0
        parts = rnd.randint(1, min(every, len(shapes))) if is_free and rnd.random() < 0.5 else 1
        rnd.shuffle(names)
        codec = rnd.choice([None, None, "bf16", "fp16", "int8", "int4", "int2", offbeat.TopK(0.2, bits=4)])
        codec = None if outer is None else codec
        levels.append(
            One(
                every,
                rnd.choice([None, None, 1, rnd.randint(1, 12)]),
                sizes[i],
                outer,
                [names[part::parts] for part in range(parts)],
                delay,
                rnd.choice([None, None, 0.0, 0.3]) if is_free and not above else None,
                codec,
                rnd.choice([None, 1.0, 0.9]) if codec is not None else None,
                {"ordered": rnd.random() < 0.5, "anchor": rnd.choice(["device", "cpu"])},
            )
        )
    amounts = [rnd.choice([1.0, 2.0, 5.5, 0.25]) for _ in range(11)] if rnd.random() < 0.25 else None
    options = {"bucket_mb": rnd.choice([0.0005, 0.01, 64]), "snapshot": rnd.choice(["device", "cpu"])}
    steps = rnd.randint(4, 20)
    return Case(ranks, shapes, levels, rnd.choice([0, 0, 1, 3]), steps, amounts, options, rnd.random() < 0.5)


def amount(case: Case, step: int, rank: int) -> float:
    return 1.0 if case.amounts is None else case.amounts[(7 * step + 3 * rank) % 11]


# The library


def build(case: Case, peers: Any) -> tuple[Net, offbeat.Replica]:
    net = Net(case)
    inner: Any = torch.optim.SGD if case.torch_inner else offbeat.SGD
    levels = []
    for one in case.levels:
        outer = None
        if one.outer is not None:
            lr, momentum, nesterov = one.outer
            outer = functools.partial(offbeat.SGD, lr=lr, momentum=momentum, nesterov=nesterov)
        levels.append(
            offbeat.Level(
                every=one.every, phase=one.phase, group=one.size, outer=outer, fragments=one.cut, delay=one.delay,
                mixing=one.mixing, codec=one.codec, error_feedback=one.feedback, **one.options,
            )
        )  # fmt: skip
    optimizer = inner(net.parameters(), lr=RATE, momentum=MOMENTUM)
    how = {**case.options, "weighted": case.amounts is not None}
    return net, offbeat.Replica(optimizer, net, levels, case.warmup, group=peers, subgroup=None, **how)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(one.reshape(-1) for one in tensors.values())])


def train(
    rank: int, peers: Any, case: Case, saves: Sequence[int] = (), more: Sequence[int] = ()
) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after every step, after ``finish()`` and after another epoch; and the anchors of each level.

    Args:
        saves: steps before which everything is saved and loaded into new objects.
        more: further steps of each rank.
    """
    net, replica = build(case, peers)
    found: list[Tensor] = []
    anchors: list[Tensor] = []
    last = case.steps + (more[rank] if more else 0)
    for step in range(last + 4):
        if step in saves:
            file = io.BytesIO()
            torch.save((net.state_dict(), replica.state_dict()), file)
            net, replica = build(case, peers)
            model, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            net.load_state_dict(model)
            replica.load_state_dict(state)
        if step == last:
            replica.finish()
            found.append(net.vector())
            anchors = [flat(replica.anchors(i)) for i in range(len(case.levels))]
        vector = gradient(net.vector(), step, rank)
        for p, part in zip(net.parameters(), vector.split([p.numel() for p in net.parameters()]), strict=True):
            p.grad = part.view(p.shape)
        if case.amounts is not None:
            replica.seen(amount(case, step, rank))
        replica.step()
        found.append(net.vector())
    replica.sync()
    return [*found, net.vector()], anchors


# In a few lines


class Outer:
    """Anchor and momentum of one fragment in one group."""

    def __init__(self, how: tuple[float, float, bool], anchor: Tensor) -> None:
        self.how, self.anchor, self.buffer = how, anchor.clone(), None

    def move(self, gradient: Tensor) -> None:
        lr, momentum, nesterov = self.how
        if momentum:
            self.buffer = gradient if self.buffer is None else momentum * self.buffer + gradient
            gradient = gradient + momentum * self.buffer if nesterov else self.buffer
        self.anchor = self.anchor - lr * gradient


def coded_sum(codec: Any, values: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What all ranks decode, and what each has lost. Sums of three and more are encoded again, part by part."""

    def through(x: Tensor) -> Tensor:
        data, out = torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8), torch.empty_like(x)
        codec.encode(x.contiguous(), data)
        codec.decode(data, out)
        return out

    if len(values) == 1:  # nothing travels
        return values[0], [torch.zeros_like(values[0])]
    decoded = [through(x) for x in values]
    lost = [x - d for x, d in zip(values, decoded, strict=True)]
    total = functools.reduce(torch.add, decoded)
    each = -(-total.numel() // (len(values) * codec.block)) * codec.block
    for rank in range(len(values)) if len(values) > 2 else ():
        place = slice(rank * each, (rank + 1) * each)
        again = through(total[place])
        lost[rank][place] += total[place] - again
        total[place] = again
    return total, lost


class State:
    """One level at work: by fragment its places in the vectors, and by group and fragment its outer optimizers."""

    def __init__(self, one: One, case: Case, places: dict[str, list[int]], start: Tensor) -> None:
        self.one = one
        self.groups = [list(range(first, first + one.size)) for first in range(0, case.ranks, one.size)]
        self.parts = [torch.tensor([i for name in names for i in places[name]]).long() for names in one.cut]
        self.outers = [[Outer(one.outer, start[part]) for part in self.parts] for _ in self.groups if one.outer]
        self.lost: list[dict[int, Tensor]] = [{} for _ in self.parts]
        self.seen = [[0.0] * case.ranks for _ in self.parts]
        self.flights: dict[int, tuple[int, Any]] = {}

    def exchange(self, f: int, x: list[Tensor]) -> list[Any]:
        """By group the mean, or what was decoded, and the values that it was made of."""
        one, part, found = self.one, self.parts[f], []
        for g, group in enumerate(self.groups):
            total, taken = sum(self.seen[f][rank] for rank in group), {rank: x[rank][part] for rank in group}
            shares = [self.seen[f][rank] / total for rank in group]
            if one.codec is None:
                mean = sum(share * taken[rank] for rank, share in zip(group, shares, strict=True))
                found.append((mean, None, taken))
                continue
            values = [(self.outers[g][f].anchor - taken[rank]).float() for rank in group]
            if len(group) > 1:
                values = [value * share for value, share in zip(values, shares, strict=True)]
                if one.feedback is not None:
                    values = [v + one.feedback * self.lost[f].get(r, 0.0) for r, v in zip(group, values, strict=True)]
            decoded, lost = coded_sum(make_codec(one.codec), values)
            found.append((decoded.double(), dict(zip(group, lost, strict=True)), taken))
        return found

    def land(self, f: int, found: list[Any], x: list[Tensor], below: list[State]) -> None:
        one, part = self.one, self.parts[f]
        for g, (group, (value, lost, taken)) in enumerate(zip(self.groups, found, strict=True)):
            if one.outer is None:
                for rank in group:
                    x[rank][part] += (1 - one.kept) * (value - taken[rank])
                for low in below:
                    low.follow(group, part, x[group[0]][part], 0.0)
                continue
            outer = self.outers[g][f]
            outer.move(outer.anchor - value if lost is None else value)
            self.lost[f].update(lost or {})
            for rank in group:
                x[rank][part] = one.kept * x[rank][part] + (1 - one.kept) * outer.anchor
            for low in below:
                low.follow(group, part, outer.anchor, one.kept)

    def follow(self, group: list[int], part: Tensor, anchor: Tensor, kept: float) -> None:
        """Move the anchors of these ranks as the level above has moved the parameters."""
        for g, outers in enumerate(self.outers):
            if self.groups[g][0] in group:
                (mine,) = outers  # lower levels have one fragment
                whole = torch.empty_like(mine.anchor)
                whole[self.parts[0]] = mine.anchor
                whole[part] = kept * whole[part] + (1 - kept) * anchor
                mine.anchor = whole[self.parts[0]]


def simulate(case: Case) -> list[list[Tensor]]:
    """Every rank's parameters after every step."""
    net, places, start = Net(case), {}, 0
    for name, p in net.named_parameters():
        places[name] = list(range(start, start + p.numel()))
        start += p.numel()
    x = [net.vector() for _ in range(case.ranks)]
    momenta: list[Any] = [None] * case.ranks
    states = [State(one, case, places, x[0]) for one in case.levels]
    history = []
    for step in range(case.steps):
        gradients = [gradient(x[rank], step, rank) for rank in range(case.ranks)]
        if step < case.warmup:
            gradients = [sum(gradients) / case.ranks] * case.ranks
        for rank, g in enumerate(gradients):
            momenta[rank] = g if momenta[rank] is None else MOMENTUM * momenta[rank] + g
            x[rank] = x[rank] - RATE * momenta[rank]
        for state in states:
            for seen in state.seen:
                seen[:] = [n + amount(case, step, rank) for rank, n in enumerate(seen)]
            if step == case.warmup - 1:
                for outers in state.outers:
                    for outer, part in zip(outers, state.parts, strict=True):
                        outer.anchor = x[0][part]
        if step >= case.warmup:
            agree(states, step, step + 1 - case.warmup, x)
        history.append([one.clone() for one in x])
    return history


def agree(states: list[State], step: int, made: int, x: list[Tensor]) -> None:
    """What all levels do after a step."""
    due: list[tuple[int, int]] = []
    is_covered = False
    for i, state in reversed(list(enumerate(states))):
        one = state.one
        if is_covered and one.outer is None:
            continue
        parts = one.due(made)
        due = [(i, f) for f in parts] + due
        is_covered = is_covered or bool(parts and len(one.cut) == 1 and (one.outer is None or not one.delay))
    for i, state in enumerate(states):
        for f, (begun, found) in list(state.flights.items()):
            if step - begun >= state.one.delay or (i, f) in due:
                del state.flights[f]
                state.land(f, found, x, states[:i])
    for i, f in due:
        state = states[i]
        found = state.exchange(f, x)
        for low in [*states[:i], state]:  # their parameters have been exchanged
            for seen, part in zip(low.seen, low.parts, strict=True):
                if set(part.tolist()) <= set(state.parts[f].tolist()) and (low is not state or part is state.parts[f]):
                    seen[:] = [0.0] * len(seen)
        if state.one.delay:
            state.flights[f] = (step, found)
        else:
            state.land(f, found, x, states[:i])
