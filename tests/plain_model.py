"""Levels, outer steps, fragments, delays, mixing, codecs, policies and uneven ends, in a few dozen lines of float64.

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
        return 0.0 if self.mixing is None else self.mixing

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
    state: str = "keep"
    buffers: str = "average"
    more: list[int] = field(default_factory=list)  # further steps of each rank
    sync: int | None = None  # the step before which sync() is called
    infinite: tuple[int, int] | None = None  # the step and the rank that have an infinite gradient

    def last(self, rank: int) -> int:
        """The number of steps of a rank."""
        return self.steps + (self.more[rank] if self.more else 0)


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
        self.register_buffer("stat", torch.zeros(3, dtype=torch.float64))
        self.is_averaged = case.buffers != "keep"

    def vector(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters()])

    def row(self) -> Tensor:
        """The parameters, and the buffer if rounds change it."""
        return torch.cat([self.vector(), self.stat]) if self.is_averaged else self.vector()


def noise(count: int, step: int, rank: int) -> Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(131 * step + rank))


def gradient(case: Case, x: Tensor, step: int, rank: int) -> Tensor:
    if case.infinite == (step, rank):
        return torch.full_like(x, float("inf"))
    return 0.3 * x + noise(x.numel(), step, rank)


def next_buffer(stat: Tensor, step: int, rank: int) -> Tensor:
    return 0.5 * stat + noise(3, step, rank + 50)


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
    case = Case(ranks, shapes, levels, rnd.choice([0, 0, 1, 3]), steps, amounts, options, rnd.random() < 0.5)
    return with_policies(case, rnd, rnd.choice(["", "", "infinite", "ends", "sync"]), any_delays)


def with_policies(case: Case, rnd: random.Random, how: str, any_delays: bool) -> Case:
    """Draw what becomes of state and buffers.

    Args:
        case: what has been drawn so far; changed where :func:`simulate` does not know it together with ``how``.
        rnd: draws.
        how: ``"ends"`` (ranks have unequal numbers of steps), ``"sync"`` (at will), ``"infinite"`` (a replica is left
            out once) or none of these.
        any_delays: whether :func:`simulate` is not asked.
    """
    levels = case.levels
    if how == "infinite" and (case.ranks == 1 or len(levels) > 1):
        how = "ends"
    for one in levels:
        if how in ("ends", "sync") and not any_delays:
            one.delay = 0
        if how in ("ends", "infinite"):
            one.codec = one.feedback = None
        if how == "infinite":
            one.cut, one.options["nonfinite"] = [[name for names in one.cut for name in names]], "leave_out"
    if how == "ends":
        case.more = [rnd.randint(0, 7) for _ in range(case.ranks)]
    if how == "sync" and case.warmup + 1 < case.steps:
        case.sync = rnd.randint(case.warmup + 1, case.steps - 1)
    if how == "infinite":
        case.infinite = (rnd.randint(case.warmup, case.steps - 1), rnd.randrange(case.ranks))
    is_late, has_parts = any(one.delay for one in levels), any(len(one.cut) > 1 for one in levels)
    states = ["keep"]
    if not (is_late or has_parts):
        states += ["reset"] if any(one.kept for one in levels) else ["reset", "average", "average"]
    case.state, case.buffers = rnd.choice(states), rnd.choice(["average", "average", "broadcast", "keep"])
    return case


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
    how = {**case.options, "weighted": case.amounts is not None, "state": case.state, "buffers": case.buffers}
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
    last = case.steps + more[rank] if more else case.last(rank)
    for step in range(last + 4):
        if step in saves:
            file = io.BytesIO()
            torch.save((net.state_dict(), replica.state_dict()), file)
            net, replica = build(case, peers)
            model, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            net.load_state_dict(model)
            replica.load_state_dict(state)
        if step == case.sync:
            replica.sync()
        if step == last:
            replica.finish()
            found.append(net.row())
            anchors = [flat(replica.anchors(i)) for i in range(len(case.levels))]
        net.stat.copy_(next_buffer(net.stat, step, rank))
        vector = gradient(case, net.vector(), step, rank)
        for p, part in zip(net.parameters(), vector.split([p.numel() for p in net.parameters()]), strict=True):
            p.grad = part.view(p.shape)
        if case.amounts is not None:
            replica.seen(amount(case, step, rank))
        replica.step()
        found.append(net.row())
    replica.sync()
    return [*found, net.row()], anchors


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


class World:
    """All replicas: parameters, momenta and buffers, which rank is at its end, and whose parameters have moved."""

    def __init__(self, case: Case, start: Tensor) -> None:
        self.case = case
        self.x = [start.clone() for _ in range(case.ranks)]
        self.momenta = [torch.zeros_like(start) for _ in range(case.ranks)]
        self.stats = [torch.zeros(3, dtype=torch.float64) for _ in range(case.ranks)]
        self.done: set[int] = set()

    def row(self, rank: int) -> Tensor:
        return torch.cat([self.x[rank], self.stats[rank]]) if self.case.buffers != "keep" else self.x[rank].clone()


@dataclass
class Taken:
    """What one group of a level exchanges: values and buffers when the round began, and what it has brought."""

    group: list[int]
    weights: list[float]
    x: dict[int, Tensor]
    stats: dict[int, Tensor]
    value: Tensor
    lost: dict[int, Tensor] | None = None

    @property
    def shares(self) -> list[float]:
        return [weight / sum(self.weights) for weight in self.weights]


def mean_of(taken: Taken, values: Any) -> Tensor:
    """Those without a weight may hold anything."""
    pairs = zip(taken.shares, taken.group, strict=True)
    return sum(share * values[rank] for share, rank in pairs if share)


class State:
    """One level at work: by fragment its places in the vectors, and by group and fragment its outer optimizers."""

    def __init__(self, one: One, world: World, places: dict[str, list[int]]) -> None:
        case = world.case
        self.one, self.world = one, world
        self.groups = [list(range(first, first + one.size)) for first in range(0, case.ranks, one.size)]
        self.parts = [torch.tensor([i for name in names for i in places[name]]).long() for names in one.cut]
        start = world.x[0]
        self.outers = [[Outer(one.outer, start[part]) for part in self.parts] for _ in self.groups if one.outer]
        self.lost: list[dict[int, Tensor]] = [{} for _ in self.parts]
        self.seen = [[0.0] * case.ranks for _ in self.parts]
        self.flights: dict[int, tuple[int, Any]] = {}

    def weight(self, f: int, rank: int) -> float:
        """Equal unless weighted; none for a rank that has not moved, or is not finite."""
        if not self.seen[f][rank] or not self.world.x[rank].isfinite().all():
            return 0.0
        return self.seen[f][rank] if self.world.case.amounts is not None else 1.0

    def exchange(self, f: int) -> list[Taken]:
        """What each group does, if anybody in it has moved."""
        one, part, x, rounds = self.one, self.parts[f], self.world.x, []
        for g, group in enumerate(self.groups):
            weights = [self.weight(f, rank) for rank in group]
            if not any(weights):
                continue
            stats = {rank: self.world.stats[rank].clone() for rank in group}
            taken = Taken(group, weights, {rank: x[rank][part] for rank in group}, stats, torch.zeros(0))
            rounds.append(taken)
            if one.codec is None:
                taken.value = mean_of(taken, taken.x)
                continue
            values = [(self.outers[g][f].anchor - taken.x[rank]).float() for rank in group]
            if len(group) > 1:
                values = [value * share for value, share in zip(values, taken.shares, strict=True)]
                if one.feedback is not None:
                    values = [v + one.feedback * self.lost[f].get(r, 0.0) for r, v in zip(group, values, strict=True)]
            decoded, lost = coded_sum(make_codec(one.codec), values)
            taken.value, taken.lost = decoded.double(), dict(zip(group, lost, strict=True))
        return rounds

    def land(self, f: int, rounds: list[Taken], below: list[State], final: bool = False) -> None:
        """Move anchors, parameters, momenta and buffers.

        Args:
            f: the fragment.
            rounds: what its groups have exchanged.
            below: the levels below.
            final: whether all wait for this round.
        """
        one, part, x = self.one, self.parts[f], self.world.x
        for taken in rounds:
            done = self.world.done
            left_out = [r for r, w in zip(taken.group, taken.weights, strict=True) if not w and r not in done]
            kept = {rank: 0.0 if final or rank in done else one.kept for rank in taken.group}
            kept.update(dict.fromkeys(left_out, 0.0))
            for rank in left_out:
                self.world.momenta[rank] = self.world.momenta[rank].nan_to_num(0.0, 0.0, 0.0)
            self.land_buffers(f, taken)
            self.land_state(taken)
            if one.outer is None:
                for rank in taken.group:
                    moved = x[rank][part] + (1 - kept[rank]) * (taken.value - taken.x[rank])
                    x[rank][part] = moved if kept[rank] or (one.delay and rank not in left_out) else taken.value
                for low in below:
                    low.follow(taken.group, part, x[taken.group[0]][part], 0.0)
                continue
            outer = self.outers[self.groups.index(taken.group)][f]
            outer.move(outer.anchor - taken.value if taken.lost is None else taken.value)
            self.lost[f].update(taken.lost or {})
            self.take_anchor(f, taken.group, kept, below, 0.0 if final else one.kept)

    def take_anchor(self, f: int, group: list[int], kept: dict[int, float], below: list[State], follow: float) -> None:
        anchor, part, x = self.outers[self.groups.index(group)][f].anchor, self.parts[f], self.world.x
        for rank in group:
            x[rank][part] = kept[rank] * x[rank][part] + (1 - kept[rank]) * anchor if kept[rank] else anchor
        for low in below:
            low.follow(group, part, anchor, follow)

    def land_buffers(self, f: int, taken: Taken) -> None:
        """They travel with the first fragment, and values replace those that are there."""
        how = self.world.case.buffers
        if f or how == "keep" or len(taken.group) == 1:
            return
        first = next(rank for rank, w in zip(taken.group, taken.weights, strict=True) if w)
        for rank in taken.group:
            self.world.stats[rank] = mean_of(taken, taken.stats) if how == "average" else taken.stats[first].clone()

    def land_state(self, taken: Taken) -> None:
        momenta, how = self.world.momenta, self.world.case.state
        mean = mean_of(taken, momenta)
        for rank in taken.group if how != "keep" else ():
            momenta[rank] = mean.clone() if how == "average" else torch.zeros_like(momenta[rank])

    def follow(self, group: list[int], part: Tensor, anchor: Tensor, kept: float) -> None:
        """Move the anchors of these ranks as the level above has moved the parameters."""
        for g, outers in enumerate(self.outers):
            if self.groups[g][0] in group:
                (mine,) = outers  # lower levels have one fragment
                whole = torch.empty_like(mine.anchor)
                whole[self.parts[0]] = mine.anchor
                whole[part] = kept * whole[part] + (1 - kept) * anchor
                mine.anchor = whole[self.parts[0]]


def simulate(case: Case) -> tuple[list[list[Tensor]], list[Tensor] | None]:
    """Every rank's parameters after every step; and after finish() with uneven ends."""
    net, places, start = Net(case), {}, 0
    for name, p in net.named_parameters():
        places[name] = list(range(start, start + p.numel()))
        start += p.numel()
    world = World(case, net.vector())
    states = [State(one, world, places) for one in case.levels]
    longest = max(case.last(rank) for rank in range(case.ranks))
    history = []
    for step in range(longest + 100 if case.more else longest):
        if step == case.sync:
            sync(states)
        world.done = {rank for rank in range(case.ranks) if step >= case.last(rank)}
        train_all(world, states, step)
        if step >= case.warmup and agree(states, step, step + 1 - case.warmup) and case.more:
            return history, [world.row(rank) for rank in range(case.ranks)]
        history.append([world.row(rank) for rank in range(case.ranks)])
    return history, None


def train_all(world: World, states: list[State], step: int) -> None:
    """A step of all ranks that have data left."""
    case, training = world.case, [rank for rank in range(world.case.ranks) if rank not in world.done]
    gradients = {rank: gradient(case, world.x[rank], step, rank) for rank in training}
    if step < case.warmup:
        gradients = dict.fromkeys(training, sum(gradients.values()) / case.ranks)
    for rank, g in gradients.items():
        world.stats[rank] = next_buffer(world.stats[rank], step, rank)
        world.momenta[rank] = MOMENTUM * world.momenta[rank] + g
        world.x[rank] = world.x[rank] - RATE * world.momenta[rank]
    for state in states:
        for seen in state.seen:
            seen[:] = [n + amount(case, step, r) if r in gradients else n for r, n in enumerate(seen)]
        if step == case.warmup - 1:
            for outers in state.outers:
                for outer, part in zip(outers, state.parts, strict=True):
                    outer.anchor = world.x[0][part]


def agree(states: list[State], step: int, made: int) -> bool:
    """What all levels do after a step. Returns whether that was the last round: no rank has data left."""
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
        for f, (begun, rounds) in list(state.flights.items()):
            if step - begun >= state.one.delay or (i, f) in due:
                del state.flights[f]
                state.land(f, rounds, states[:i])
    is_over = len(states[0].world.done) == states[0].world.case.ranks
    for i, f in due:
        is_last = is_over and i == len(states) - 1
        for part in range(len(states[i].parts)) if is_last else [f]:
            begin(states, i, part, step, final=is_last)
        if is_last:
            return True
    return False


def begin(states: list[State], i: int, f: int, step: int, *, final: bool) -> None:
    """A round of one fragment."""
    state = states[i]
    rounds = state.exchange(f)
    if final:
        for group in state.groups if state.outers and not rounds else ():
            state.take_anchor(f, group, dict.fromkeys(group, 0.0), states[:i], 0.0)
    if state.one.delay and not final:
        state.flights[f] = (step, rounds)
    else:
        state.land(f, rounds, states[:i], final)
    for low in [*states[:i], state]:  # their parameters have been exchanged
        for seen, part in zip(low.seen, low.parts, strict=True):
            if set(part.tolist()) <= set(state.parts[f].tolist()) and (low is not state or part is state.parts[f]):
                for taken in rounds:
                    for rank in taken.group:
                        seen[rank] = 0.0


def sync(states: list[State]) -> None:
    """All replicas are equal afterwards."""
    for f in range(len(states[-1].parts)):
        begin(states, len(states) - 1, f, 0, final=True)
