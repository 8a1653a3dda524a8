"""What replicas say to each other before a round, and what all of them conclude from it.

:func:`decide` is pure: every rank has the same hellos and so comes to the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby
from typing import Any, Literal

from offbeat.replicas.compare import Disagreement, compare_options, names_of_ranks
from offbeat.replicas.state_policy import check_keys_of_state
from offbeat.wire.codecs import NotFinite
from offbeat.wire.peers import ExchangeError

__all__ = ["INNER_RATE", "Hello", "OuterOptions", "Rules", "Verdict", "decide", "merge"]

#: The numbers among the options of an outer optimizer, for the parameters of a fragment in order: how many in a row
#: have the same options, and these options.
OuterOptions = Sequence[tuple[int, Mapping[str, Any]]]

#: The option of an outer optimizer that is each rank's own: its inner optimizer's learning rate.
INNER_RATE = "inner_lr"


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a rank says before a round. Plain numbers and strings, so that it travels as JSON.

    Attributes:
        rank: who speaks.
        round: the step, the level and the fragment; this puts rounds in order.
        version: how many landings have moved the anchors of this fragment; -1 without anchors.
        lineage: a hash of all these landings.
        items: a digest of what is to be exchanged.
        state: a digest of the optimizer state to average.
        keys: the keys of that state, where no rule knows them.
        weight: this replica's weight in the mean.
        finite: whether all its numbers are finite.
        bad: some names of those that are not.
        moved: whether it has made a step since the last round.
        done: whether it has no data left.
        steps: how many steps it has made.
        unchecked: whether it has anchors that have not been compared with the others' yet.
        outer: the numbers among the outer optimizer's options.
        inner: the options of the inner optimizer's groups that should be the same everywhere, as strings.
    """

    rank: int
    round: tuple[int, ...]
    version: int = 0
    lineage: str = ""
    items: str = ""
    state: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    finite: bool = True
    bad: tuple[str, ...] = ()
    moved: bool = True
    done: bool = False
    steps: int = 0
    unchecked: bool = False
    outer: OuterOptions = ()
    inner: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The hello as numbers, strings, lists and dictionaries."""
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> Hello:
        """The hello that :meth:`as_json` has made this from.

        Raises:
            ExchangeError: it is not a hello.
        """
        names = {entry.name for entry in fields(Hello)}
        if not isinstance(value, dict) or value.keys() != names:
            raise ExchangeError(f"a rank sent something that is not a hello of this version of offbeat: {value!r:.200}")
        for name, is_right in _CHECKS.items():
            if not is_right(value[name]):
                raise ExchangeError(f"a rank sent a hello whose {name!r} is {value[name]!r:.80}")
        outer = tuple(
            (int(count), {key: _as_tuple(number) for key, number in group.items()}) for count, group in value["outer"]
        )
        return Hello(**{**value, "round": tuple(value["round"]), "bad": tuple(value["bad"]), "outer": outer})


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind  # a bool is no number here


def _are(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(type(entry) is kind for entry in value)


def _is_outer(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(row, (list, tuple)) and len(row) == 2 and type(row[0]) is int and row[0] > 0 and type(row[1]) is dict
        for row in value
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("rank", "version", "steps"), _is(int)),
    **dict.fromkeys(("lineage", "items", "state"), _is(str)),
    **dict.fromkeys(("finite", "moved", "done", "unchecked"), _is(bool)),
    "round": _are(int),
    "bad": _are(str),
    "keys": _is(dict),
    "inner": lambda value: type(value) is dict and _are(str)([*value.values()]),
    "outer": _is_outer,
    "weight": lambda value: type(value) in (int, float) and not value < 0,
}


def _as_tuple(number: Any) -> Any:
    return tuple(map(_as_tuple, number)) if isinstance(number, list) else number


def merge(hellos: Sequence[Hello]) -> Hello:
    """One hello for a replica of several ranks, each of which holds other shards."""
    first = hellos[0]
    if len(hellos) == 1:
        return first
    return replace(
        first,
        version=min(hello.version for hello in hellos),
        items="/".join(hello.items for hello in hellos),
        finite=all(hello.finite for hello in hellos),
        bad=tuple(dict.fromkeys(name for hello in hellos for name in hello.bad)),
        moved=any(hello.moved for hello in hellos),
        unchecked=any(hello.unchecked for hello in hellos),
    )


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a level decides.

    Attributes:
        nonfinite: what to do about replicas that are not finite.
        has_outer: whether the level has an outer optimizer.
        now: whether all replicas wait for this round and must be equal after it (``sync()``).
        may_be_last: whether this is the last round if no replica has data left.
    """

    nonfinite: Literal["raise", "leave_out", "skip"] = "raise"
    has_outer: bool = False
    now: bool = False
    may_be_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What all ranks have concluded from the hellos of a round.

    Attributes:
        weights: the weight of each replica; all are 0 if there is nothing to average.
        action: ``"average"``; ``"rest"`` if nobody has trained since the last round, so that the anchors stay;
            ``"skip"`` if nothing is to be exchanged this time.
        left_out: replicas of which nothing is kept, because they are not finite.
        behind: replicas that take the anchors and the outer state of ``source`` first.
        source: the first replica that has the newest anchors.
        fresh: whether no replica has anchors yet: the mean becomes the anchors.
        different_items: whether replicas have different things to exchange, which is an error.
        compare_anchors: whether some anchors have not been compared yet.
        average_state: whether all have the same kind of optimizer state.
        all_done: whether no replica has data left.
        most_steps: the largest number of steps that a replica has made.
        outer: the numbers among the outer optimizer's options that all use.
        notes: warnings, the same on every rank.
        differences: options of the inner optimizers that differ, with where they do: warned of once each.
    """

    weights: tuple[float, ...]
    action: Literal["average", "rest", "skip"] = "average"
    left_out: tuple[bool, ...] = ()
    behind: tuple[bool, ...] = ()
    source: int = 0
    fresh: bool = False
    different_items: bool = False
    compare_anchors: bool = False
    average_state: bool = True
    all_done: bool = False
    most_steps: int = 0
    outer: OuterOptions = ()
    notes: tuple[str, ...] = ()
    differences: tuple[tuple[str, str], ...] = ()

    @property
    def divisor(self) -> int | None:
        """The number of replicas with a weight if these weights are equal, else None."""
        counting = [weight for weight in self.weights if weight > 0]
        return len(counting) if counting and counting.count(counting[0]) == len(counting) else None

    def share(self, me: int) -> float:
        """The share of one replica in the mean, from 0 to 1."""
        total = sum(self.weights)
        return self.weights[me] / total if total else 0.0

    def is_first(self, me: int) -> bool:
        """Whether this replica is the first one with a weight."""
        return self.weights[me] > 0 and not any(self.weights[:me])


def decide(hellos: Sequence[Hello], rules: Rules) -> Verdict:
    """What follows from these hellos, one of each replica in order.

    Raises:
        Disagreement: replicas are at different steps, have other outer options, or anchors of another run.
        NotFinite: some are not finite, and the level's policy does not say how to go on.
        ValueError: no replica has a weight, or the weights are too large.
    """
    _check_rounds(hellos)
    if len({hello.items for hello in hellos}) > 1:
        return Verdict(weights=(0.0,) * len(hellos), different_items=True)
    check_keys_of_state([hello.keys for hello in hellos])
    outer = _outer_options(hellos)
    verdict = Verdict(
        weights=_weights(hellos, rules),
        left_out=_left_out(hellos, rules),
        average_state=len({hello.state for hello in hellos}) == 1,
        all_done=all(hello.done for hello in hellos),
        most_steps=max(hello.steps for hello in hellos),
        outer=outer,
        differences=_differences(hellos),
    )
    verdict = _judge_infinite(verdict, hellos, rules)
    if rules.has_outer:
        verdict = _judge_versions(verdict, hellos)
    if verdict.action == "skip":
        return verdict
    if not any(verdict.weights):
        if rules.now or (rules.may_be_last and verdict.all_done):
            verdict = replace(verdict, weights=_weights_of_last(hellos, verdict.behind))
        elif any(verdict.behind):
            return replace(verdict, action="skip")  # the others only take the anchors
        elif not verdict.all_done:
            raise ValueError(
                "no rank has a weight; with weighted=True call optimizer.seen(number of samples) before "
                "optimizer.step()"
            )
    if rules.has_outer and not verdict.fresh and not any(hello.moved for hello in hellos):
        return replace(verdict, action="rest")
    return verdict if any(verdict.weights) else replace(verdict, action="skip")


def _check_rounds(hellos: Sequence[Hello]) -> None:
    if len({hello.round for hello in hellos}) > 1:
        where = ", ".join(f"rank {hello.rank} at step {hello.round[0]}" for hello in hellos)
        raise Disagreement(
            f"ranks are at different steps: {where}; call step() equally often on every rank (and finish() on a rank "
            "that has no data left), and load checkpoints of the same step"
        )


def _weights(hellos: Sequence[Hello], rules: Rules) -> tuple[float, ...]:
    weights = tuple(
        0.0 if rules.nonfinite == "leave_out" and not hello.finite else float(hello.weight) for hello in hellos
    )
    if not math.isfinite(sum(weights)):
        raise ValueError(
            f"the weights of all ranks ({', '.join(map(str, weights))}) add up to {sum(weights)}, and no rank would "
            "count; give seen() smaller units from the start, such as batches instead of samples"
        )
    return weights


def _left_out(hellos: Sequence[Hello], rules: Rules) -> tuple[bool, ...]:
    return tuple(not hello.finite and (hello.weight == 0 or rules.nonfinite == "leave_out") for hello in hellos)


def _judge_infinite(verdict: Verdict, hellos: Sequence[Hello], rules: Rules) -> Verdict:
    """Apply the level's policy to replicas that have a weight and are not finite."""
    bad = [hello for hello in hellos if not hello.finite and hello.weight != 0]
    if not bad:
        return verdict
    where = "; ".join(f"on rank {hello.rank}: {', '.join(hello.bad)}" for hello in bad)
    if rules.nonfinite == "raise" or not any(verdict.weights):
        if all(name.startswith("state ") for hello in bad for name in hello.bad):
            raise NotFinite(
                f"some optimizer state is NaN or infinite ({where}), and state='average' would spread that to every "
                "replica; nothing was changed. It stays so until it is set anew, for example to zero in "
                "optimizer.state; nonfinite='leave_out' does that"
            )
        raise NotFinite(
            f"some parameters are NaN or infinite ({where}), and averaging would spread that to every replica; "
            "nothing was changed. Lower the learning rate, clip gradients, or choose nonfinite='leave_out' or 'skip'"
        )
    if rules.nonfinite == "skip":
        note = f"some parameters are NaN or infinite ({where}); this round was skipped"
        return replace(verdict, action="skip", notes=(*verdict.notes, note))
    note = f"some parameters are NaN or infinite ({where}); those ranks did not count in this round"
    return replace(verdict, notes=(*verdict.notes, note))


def _judge_versions(verdict: Verdict, hellos: Sequence[Hello]) -> Verdict:
    """Find replicas that have missed a landing: they take the newest anchors, and do not count this time."""
    newest = max(hello.version for hello in hellos)
    if newest < 0:
        return replace(verdict, fresh=True)
    behind = tuple(hello.version < newest for hello in hellos)
    lineages = {hello.lineage for hello in hellos if hello.version == newest}
    if len(lineages) > 1:
        where = ", ".join(f"rank {hello.rank}: {hello.lineage or 'none'}" for hello in hellos)
        raise Disagreement(
            f"the anchors of replicas come from different rounds ({where}), although equally many; load the checkpoint "
            "of the same step of the same run on every rank"
        )
    verdict = replace(
        verdict,
        source=next(i for i, hello in enumerate(hellos) if hello.version == newest),
        compare_anchors=not any(behind) and any(hello.unchecked for hello in hellos),
    )
    if not any(behind):
        return verdict
    note = (
        f"{names_of_ranks([hello.rank for hello, is_late in zip(hellos, behind, strict=True) if is_late])} had missed "
        f"the end of a round, and took over the anchors of rank {hellos[verdict.source].rank}; what they had learned "
        "since was not averaged"
    )
    weights = tuple(0.0 if is_late else w for w, is_late in zip(verdict.weights, behind, strict=True))
    return replace(verdict, behind=behind, weights=weights, notes=(*verdict.notes, note))


def _weights_of_last(hellos: Sequence[Hello], behind: Sequence[bool]) -> tuple[float, ...]:
    """The weights of a round that must make replicas equal, although none has a weight.

    Those that have trained since the last round get one; if there are none, all do, because applying a delayed average
    may have rounded differently on each rank. Replicas that are not finite get none, and those behind none either.
    """
    if not any(hello.finite for hello in hellos):
        raise NotFinite(
            "every replica has parameters that are NaN or infinite, so there is nothing to agree on; nothing was "
            "changed. Load a checkpoint from before that"
        )
    usable = [hello.finite and not late for hello, late in zip(hellos, behind or [False] * len(hellos), strict=True)]
    moved = [hello.moved and ok for hello, ok in zip(hellos, usable, strict=True)]
    return tuple(float(ok) for ok in (moved if any(moved) else usable))


def _outer_options(hellos: Sequence[Hello]) -> OuterOptions:
    """The options that all use: those of the first replica that trains.

    Replicas that have no data left do not go on with their schedules. The inner learning rate is each rank's own, which
    may differ by a step of a schedule that a GradScaler has skipped on one of them; the first one's does for all.
    """
    training = [hello for hello in hellos if not hello.done]
    compare_options([hello.rank for hello in training], [_outer_in_words(hello.outer) for hello in training])
    return max(hellos, key=lambda hello: (not hello.done, hello.moved)).outer


def _outer_in_words(options: OuterOptions) -> dict[str, str]:
    words = {}
    for key in {key: None for _, group in options for key in group if key != INNER_RATE}:
        values = [group.get(key) for count, group in options for _ in range(count)]
        runs = [(value, len(list(same))) for value, same in groupby(values)]
        text = f"{runs[0][0]}" if len(runs) == 1 else ", ".join(f"{value} ({number} times)" for value, number in runs)
        words[f"{key!r} of the outer optimizer"] = text
    return words


def _differences(hellos: Sequence[Hello]) -> tuple[tuple[str, str], ...]:
    """Options of the inner optimizers that differ between replicas that train."""
    training = [hello for hello in hellos if not hello.done]
    words = []
    for name in {name: None for hello in training for name in hello.inner}:
        by_value: dict[str, list[int]] = {}
        for hello in training:
            by_value.setdefault(hello.inner.get(name, "not there"), []).append(hello.rank)
        if len(by_value) > 1:
            where = ", ".join(f"{value} on {names_of_ranks(ranks)}" for value, ranks in by_value.items())
            words.append((name, where))
    return tuple(words)
