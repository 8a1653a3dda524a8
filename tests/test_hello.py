"""What replicas conclude from their hellos: a table, without processes. And hellos that are malformed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest

from offbeat.replicas.compare import Disagreement
from offbeat.replicas.hello import Hello, Rules, decide, merge
from offbeat.wire.codecs import NotFinite
from offbeat.wire.peers import ExchangeError

FIRST = Hello(rank=0, round=(7, 0, 0), items="i", lineage="a", weight=2.0)
OUTER = Rules(has_outer=True)
LAST = Rules(may_be_last=True)


def hellos(*changes):
    """One hello for each of these changes, ranks in order."""
    return [replace(FIRST, rank=rank, **change) for rank, change in enumerate(changes)]


BAD = {"finite": False, "bad": ("w",)}
LATE = {"version": -1, "lineage": ""}
DONE = {"done": True, "weight": 0.0, "moved": False}
LR, MOMENTUM, INNER = ((3, {"lr": 0.7}),), ((3, {"lr": 0.7, "momentum": 0.9}),), ((3, {"inner_lr": 1.0}),)

#: Rules, what differs from the first hello on each rank, and the fields of the verdict that follow from it.
VERDICTS = [
    # All alike: the mean, by weight.
    (Rules(), [{}, {}], {"weights": (2.0, 2.0), "action": "average", "divisor": 2}),
    (Rules(), [{}, {"weight": 6.0}], {"weights": (2.0, 6.0), "divisor": None}),
    (Rules(), [{"weight": 0.0}, {}, {}], {"weights": (0.0, 2.0, 2.0), "divisor": 2, "left_out": (False,) * 3}),
    # Items differ: which one, is found out together.
    (Rules(), [{}, {"items": "j"}], {"different_items": True, "weights": (0.0, 0.0)}),
    # Some are not finite, by policy.
    (Rules(nonfinite="leave_out"), [{}, BAD], {"weights": (2.0, 0.0), "left_out": (False, True), "action": "average"}),
    (Rules(nonfinite="skip"), [{}, BAD], {"action": "skip", "left_out": (False, False)}),
    (Rules(), [{}, {**BAD, "weight": 0.0}], {"weights": (2.0, 0.0), "left_out": (False, True), "notes": ()}),
    # Versions differ: those behind take the newest anchors, and do not count.
    (OUTER, [{}, {}], {"behind": (), "compare_anchors": False, "fresh": False}),
    (OUTER, [{"version": 4, "lineage": "b"}, {"version": 5}], {"behind": (True, False), "weights": (0, 2)}),
    (OUTER, [LATE, {}, {}], {"behind": (True, False, False), "source": 1, "weights": (0.0, 2.0, 2.0)}),
    (OUTER, [{"version": 4, "unchecked": True}, {"version": 5}], {"compare_anchors": False}),
    (OUTER, [{"version": 5}, {"version": 4}, {"version": 5}], {"behind": (False, True, False), "source": 0}),
    (OUTER, [LATE, LATE], {"fresh": True, "action": "average", "behind": ()}),
    (OUTER, [{"version": 5}, {"version": 4, **BAD, "weight": 0}], {"behind": (False, True), "left_out": (False, True)}),
    # All that have a weight are behind: the others only take the anchors.
    (OUTER, [{"version": 5, "weight": 0.0}, {"version": 4}], {"behind": (False, True), "action": "skip"}),
    # Without an outer optimizer there is nothing to be behind with.
    (Rules(), [{"version": 0}, {"version": 3, "lineage": "b"}], {"behind": (), "weights": (2.0, 2.0)}),
    # Anchors that have not been compared yet are.
    (OUTER, [{}, {"unchecked": True}], {"compare_anchors": True, "action": "average"}),
    # Nobody has moved: no outer step.
    (OUTER, [{"moved": False}, {"moved": False}], {"action": "rest"}),
    (OUTER, [{"moved": False}, {}], {"action": "average"}),
    (Rules(), [{"moved": False}, {"moved": False}], {"action": "average"}),
    (OUTER, [{**LATE, "moved": False}, {**LATE, "moved": False}], {"action": "average", "fresh": True}),
    # Nobody has a weight, in sync() and the last round: those count that moved, or all finite ones.
    (Rules(now=True), [{"weight": 0}, {"weight": 0, "moved": False}], {"weights": (1.0, 0.0)}),
    (Rules(now=True), [{"weight": 0, "moved": False}, {"weight": 0, "moved": False}], {"weights": (1.0, 1.0)}),
    (Rules(now=True), [{"weight": 0, "moved": False}, {"weight": 0, "moved": False, **BAD}], {"weights": (1.0, 0.0)}),
    (LAST, [DONE, DONE], {"weights": (1.0, 1.0), "all_done": True, "action": "average"}),
    (LAST, [DONE, {**DONE, "moved": True}], {"weights": (0.0, 1.0), "all_done": True}),
    (LAST, [DONE, {**DONE, "weight": 2.0, "moved": True}], {"weights": (0.0, 2.0), "all_done": True}),
    (LAST, [DONE, {}], {"weights": (0.0, 2.0), "all_done": False}),
    (Rules(), [DONE, DONE], {"all_done": True, "action": "skip"}),  # not of the top level, which comes later
    (replace(LAST, has_outer=True), [DONE, DONE], {"all_done": True, "action": "rest"}),
    # Optimizer state differs in kind.
    (Rules(), [{"state": "x"}, {"state": "y"}], {"average_state": False, "action": "average"}),
    (Rules(), [{"state": "x"}, {"state": "x"}], {"average_state": True}),
    # Steps of the longest.
    (LAST, [{**DONE, "steps": 4}, {**DONE, "steps": 9}], {"most_steps": 9}),
    # Outer options: those of the first that trains; the inner rate is each rank's own.
    (OUTER, [{"outer": LR}, {"outer": LR}], {"outer": LR}),
    (OUTER, [{**DONE, "outer": LR}, {"outer": MOMENTUM}], {"outer": MOMENTUM}),
    (OUTER, [{"outer": INNER}, {"outer": ((3, {"inner_lr": 2.0}),)}], {"outer": INNER}),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "changes", "expected"), VERDICTS)
def test_verdicts(rules, changes, expected):
    verdict = decide(hellos(*changes), rules)
    assert {name: getattr(verdict, name) for name in expected} == expected
    # Every rank comes to it from what has travelled.
    sent = [Hello.from_json(json.loads(json.dumps(hello.as_json()))) for hello in hellos(*changes)]
    assert decide(sent, rules) == verdict


#: Rules, what differs, the error and its words.
ERRORS = [
    (Rules(), [{}, {"round": (8, 0, 0)}], Disagreement, "rank 0 at step 7, rank 1 at step 8"),
    (OUTER, [{}, {"lineage": "b"}], Disagreement, "rank 0: a, rank 1: b"),
    (OUTER, [{"outer": LR}, {"outer": MOMENTUM}], Disagreement, "'momentum' of the outer .*None on rank 0, 0.9"),
    (OUTER, [{"outer": LR}, {"outer": ((3, {"lr": 0.6}),)}], Disagreement, "0.7 on rank 0, 0.6 on rank 1"),
    (Rules(), [{}, BAD], NotFinite, "on rank 1: w.*nothing was changed"),
    (Rules(), [{}, {"finite": False, "bad": ("state exp_avg",)}], NotFinite, "state='average' would spread"),
    (Rules(nonfinite="leave_out"), [BAD, BAD], NotFinite, "on rank 0: w; on rank 1: w"),
    (Rules(now=True), [{**BAD, "weight": 0.0}, {**BAD, "weight": 0.0}], NotFinite, "every replica"),
    (Rules(), [{"weight": 0.0}, {"weight": 0.0}], ValueError, "no rank has a weight"),
    (Rules(), [{"weight": 1e308}, {"weight": 1e308}], ValueError, "add up to inf"),
    (Rules(), [{"weight": math.nan}, {}], ValueError, "add up to nan"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "changes", "error", "words"), ERRORS)
def test_errors(rules, changes, error, words):
    with pytest.raises(error, match=words):
        decide(hellos(*changes), rules)


def test_inner_options_that_differ_are_named_and_those_of_done_ranks_are_not():
    changes = [
        {"inner": {"lr of group 0": "0.1"}},
        {"inner": {"lr of group 0": "0.2"}},
        {"inner": {"lr of group 0": "0.1"}},
    ]
    ((name, words),) = decide(hellos(*changes), Rules()).differences
    assert (name, words) == ("lr of group 0", "0.1 on ranks 0, 2, 0.2 on rank 1")
    changes[1] = {**changes[1], "done": True}
    assert decide(hellos(*changes), Rules()).differences == ()


def test_the_warning_of_a_replica_behind_names_it():
    (note,) = decide(hellos({"version": 5}, {"version": 4}), OUTER).notes
    assert "rank 1 had missed the end of a round" in note
    assert "rank 0" in note


@pytest.mark.parametrize(
    ("weights", "shares", "first"),
    [
        ((1.0, 1.0, 1.0), (1 / 3, 1 / 3, 1 / 3), 0),
        ((0.0, 2.0, 2.0), (0.0, 0.5, 0.5), 1),
        ((1.0, 3.0), (0.25, 0.75), 0),
        ((0.0, 0.0), (0.0, 0.0), None),
    ],
)
def test_shares(weights, shares, first):
    verdict = replace(decide(hellos({}, {}), Rules()), weights=weights)
    assert tuple(map(verdict.share, range(len(weights)))) == pytest.approx(shares)
    assert [i for i in range(len(weights)) if verdict.is_first(i)] == ([] if first is None else [first])


def test_a_replica_of_several_ranks_says_one_hello():
    """It is as far as its last rank, as finite as its worst, and moved if any has."""
    several = hellos({"version": 3}, {"version": 2, "moved": False, **BAD, "items": "j", "unchecked": True})
    merged = merge(several)
    assert (merged.rank, merged.version, merged.items) == (0, 2, "i/j")
    assert (merged.finite, merged.bad, merged.moved, merged.unchecked) == (False, ("w",), True, True)
    assert merge(several[:1]) is several[0]


# What arrives


def test_a_hello_travels_as_json():
    hello = replace(
        FIRST, keys={"state": ["a"]}, bad=("x", "y"), outer=((2, {"betas": (0.9, 0.99)}),), inner={"lr": "0.1"},
        unchecked=True, done=True, steps=3,
    )  # fmt: skip
    assert Hello.from_json(json.loads(json.dumps(hello.as_json()))) == hello


MALFORMED = [
    None,
    [],
    "hello",
    {},
    {**asdict(FIRST), "more": 1},
    {name: value for name, value in asdict(FIRST).items() if name != "version"},
    *(
        {**asdict(FIRST), name: value}
        for name, value in (
            ("rank", "0"),
            ("rank", True),
            ("rank", 1.5),
            ("version", None),
            ("version", [3]),
            ("steps", "many"),
            ("lineage", 3),
            ("items", None),
            ("state", {}),
            ("finite", 1),
            ("moved", "yes"),
            ("done", None),
            ("weight", "1"),
            ("weight", None),
            ("weight", True),
            ("weight", -1.0),
            ("round", 7),
            ("round", [7, "0"]),
            ("round", [None]),
            ("bad", "w"),
            ("bad", [1]),
            ("keys", []),
            ("inner", ["lr"]),
            ("inner", {"lr": 0.1}),
            ("outer", {}),
            ("outer", [3]),
            ("outer", [[3]]),
            ("outer", [["3 times", {}]]),
            ("outer", [[3, ["lr"]]]),
            ("outer", [[-1, {}]]),
        )
    ),
]


@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: f"{value!r:.30}")
def test_what_is_not_a_hello_is_refused_by_name(value):
    with pytest.raises(ExchangeError, match="a rank sent"):
        Hello.from_json(value)
