"""The tiers by themselves: random programs, a rule of one's own, and rules that break the rules."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import offbeat
from offbeat.engine.cpu.kernel import cpu_kernel
from offbeat.engine.foreach import run_foreach
from offbeat.engine.loop import run_loop
from offbeat.engine.trace import TypedProgram, trace
from offbeat.rules.checks import learning_rate
from offbeat.rules.ops import maximum, minimum, sign, sqrt, where
from tests.cases import ONE_A_RULE, make_params, set_gradients

COEFFICIENTS = {"a": 0.75, "b": -1.25}

BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (abs(y) + 1.0),
    "max": maximum,
    "min": minimum,
    "where": lambda x, y: where(x > 0, y, x),
    "choose": lambda x, y: where(x < y, x, 0.5),
    "equal": lambda x, y: where(x == y, 2.0, x),
    "unequal": lambda x, y: where(x != 0, x, y),
    "at least": lambda x, y: where(x >= y, x, y),
    "at most": lambda x, y: where(x >= 0.0, y, x),
}
UNARY = {
    "neg": lambda x: -x,
    "abs": abs,
    "sqrt": lambda x: sqrt(abs(x)),
    "sign": sign,
    "scaled": lambda x: 3.0 * x,
    "shifted": lambda x: x - 0.5,
    "reversed": lambda x: 2.0 - x,
    "inverse": lambda x: 1.0 / (abs(x) + 1.0),
}
MIXED = {
    "a times": lambda x, c: c * x,
    "plus scaled": lambda x, c: x + c * x,
    "switch": lambda x, c: where(c > 0, x, -x),
}


@st.composite
def programs(draw):
    """A list of instructions over p, g, s, t and the coefficients, and which values come out."""
    steps = []
    for i in range(draw(st.integers(2, 14))):
        earlier = st.integers(0, 3 + i)
        kind = draw(st.sampled_from(["binary", "unary", "mixed", "axpy"]))
        if kind == "binary":
            steps.append((kind, draw(st.sampled_from(sorted(BINARY))), draw(earlier), draw(earlier)))
        elif kind == "unary":
            steps.append((kind, draw(st.sampled_from(sorted(UNARY))), draw(earlier), 0))
        elif kind == "axpy":
            steps.append((kind, draw(st.sampled_from(["+", "-"])), draw(earlier), draw(earlier)))
        else:
            steps.append((kind, draw(st.sampled_from(sorted(MIXED))), draw(earlier), draw(st.sampled_from("ab"))))
    outputs = [draw(st.integers(0, 3 + len(steps))) for _ in range(3)]
    return tuple(steps), tuple(outputs)


def make_update(steps, outputs):
    def update(p, g, s, t, a, b):
        values = [p, g, s, t]
        coefficients = {"a": a, "b": b}
        for kind, name, x, y in steps:
            if kind == "binary":
                values.append(BINARY[name](values[x], values[y]))
            elif kind == "unary":
                values.append(UNARY[name](values[x]))
            elif kind == "axpy":
                product = coefficients["a"] * values[y]
                values.append(values[x] + product if name == "+" else values[x] - product)
            else:
                values.append(MIXED[name](values[x], coefficients[y]))
        return tuple(values[i] for i in outputs)

    return update


def rule_of(update):
    nothing: dict[str, Any] = {}
    return offbeat.Rule("Test", (), lambda h: (), lambda h: nothing, lambda h, s: nothing, update)


def run_kernel(program, columns):
    kernel = cpu_kernel(TypedProgram(program, (torch.float64,) * len(columns)))
    numel = array("q", [t.numel() for t in columns[0]])
    addresses = [array("q", [t.data_ptr() for t in column]) for column in columns]
    kernel(addresses, numel, array("q", [0, 0]), array("d", COEFFICIENTS.values()), sum(numel))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
@example(((("binary", "add", 0, 0), ("unary", "abs", 0, 0)), (1, 0, 0)))  # inputs come out in other places
@example(((("mixed", "switch", 2, "a"), ("binary", "add", 2, 0)), (0, 0, 4)))  # a choice that is its operand
def test_all_tiers_agree_on_any_program(program):
    """Above all: no tier overwrites a value that is still needed, whatever reads what and in which order."""
    update = make_update(*program)
    rule = rule_of(update)
    traced = trace(rule, ("s", "t"), ("a", "b"), ())
    columns = [[torch.randn(7, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)] for _ in range(4)]
    gradients = [t.clone() for t in columns[1]]
    results = []
    for tier in ("loop", "foreach", "fused"):
        mine = [[t.clone() for t in column] for column in columns]
        mine[1] = columns[1]
        if tier == "loop":
            for row in zip(*mine, strict=True):
                run_loop(rule, ("p", "g", "s", "t"), row, COEFFICIENTS)
        elif tier == "foreach":
            run_foreach(TypedProgram(traced, (torch.float64,) * len(mine)), mine, COEFFICIENTS)
        else:
            run_kernel(traced, mine)
        results.append([t for i, column in enumerate(mine) if i != 1 for t in column])
    for tier in results[1:]:
        for ours, reference in zip(tier, results[0], strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(t, old) for t, old in zip(columns[1], gradients, strict=True)), "a gradient was changed"


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_choices_by_coefficients_may_leave_numbers(flag):
    def update(p, g, s, a, b):
        chosen = where(a > 0.5, 4.0, g * g)
        root = sqrt(chosen) - 1.0
        kept = where(root > 0, p, g)
        return p - b * (root * g), where(a > 0.5, 3.0, s + root * kept)

    rule = rule_of(update)
    program = trace(rule, ("s",), ("a", "b"), ())
    columns = [[torch.randn(5, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)] for _ in range(3)]
    results = []
    for tier in ("loop", "foreach"):
        mine = [[t.clone() for t in column] for column in columns]
        if tier == "loop":
            scalars = {"a": torch.tensor(flag, dtype=torch.float64), "b": 0.5}
            for row in zip(*mine, strict=True):
                run_loop(rule, ("p", "g", "s"), row, scalars)
        else:
            run_foreach(TypedProgram(program, (torch.float64,) * 3), mine, {"a": flag, "b": 0.5})
        results.append([t for column in mine for t in column])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["RMSprop", "Rprop", "SGD"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_tensors_that_are_converted_are_joined(name, dtype):
    """In whatever layout they are, and if some are empty or have no gradient."""

    def params():
        torch.manual_seed(0)
        made = [torch.randn(shape).to(dtype) for shape in [(3, 4), (), (0, 2), (7,), (2, 1, 3)] * 4]
        made += [torch.randn(3, 5).to(dtype).t(), torch.randn(2, 3, 4, 4).to(dtype, memory_format=torch.channels_last)]
        return [p.requires_grad_() for p in made]

    def train(foreach):
        ours = params()
        optimizer = getattr(offbeat, name)(ours, lr=0.01, foreach=foreach)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            for i, p in enumerate(ours):
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
                if (i + step) % 5 == 0:
                    p.grad = None
            optimizer.step()
        return [*ours, *(t for p in ours for t in optimizer.state[p].values() if t.dim())]

    for a, b in zip(train(True), train(False), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-3)


# A user's own rule: heavy-ball with a sign, in one piece.
def signed(p, g, memory, *, lr, keep, rest):  # type: ignore[no-untyped-def]
    memory = keep * memory + rest * sign(g)
    return p - lr * memory, memory


SIGNED = offbeat.Rule(
    name="Signed",
    hyper=(learning_rate(0.1),),
    slots=lambda h: (offbeat.Slot("memory"),),
    structure=lambda h: {},
    coefficients=lambda h, s: {"lr": h.lr, "keep": 0.5, "rest": 1 - 0.5},
    update=signed,
)


class Signed(offbeat.RuleOptimizer, rule=SIGNED): ...


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_few_and_large_tensors_get_the_same_bits_as_many_small_ones(case, dtype):
    """For a few tensors numbers are given to torch as they are, and large ones are cut."""
    few, many = (make_params(dtype, shapes=[(400, 700), (33,), (2, 5)]) for _ in range(2))
    pieces = [part.detach().clone().requires_grad_() for p in many for part in p.split(7)]
    optimizers = [case.ours([p], foreach=True, **case.hyper) for p in few]
    whole = case.ours(pieces, foreach=True, **case.hyper)
    for step in range(3):
        set_gradients(step, few, many)
        for one, g in zip(pieces, (part for p in many for part in p.grad.split(7)), strict=True):
            one.grad = g.clone()
        for optimizer in (*optimizers, whole):
            optimizer.step()
    state = [optimizer.state[p] for p, optimizer in zip(few, optimizers, strict=True)]
    parts = iter(pieces)
    for p, mine in zip(few, state, strict=True):
        ours = [next(parts) for _ in p.split(7)]
        assert torch.equal(p, torch.cat(ours))
        for key, value in mine.items():
            if value.dim():
                assert torch.equal(value, torch.cat([whole.state[one][key] for one in ours])), key


@pytest.mark.parametrize("tier", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_rule_of_ones_own_is_one_function_and_one_line(tier):
    p = torch.ones(3, requires_grad=True)
    optimizer = Signed([p], **tier)
    value, memory = 1.0, 0.0
    for g in (2.0, -1.0, 5.0, 0.0):
        p.grad = torch.full((3,), g)
        optimizer.step()
        memory = 0.5 * memory + 0.5 * ((g > 0) - (g < 0))
        value -= 0.1 * memory
        torch.testing.assert_close(p.detach(), torch.full((3,), value))
    again = Signed([p], **tier)
    again.load_state_dict(optimizer.state_dict())
    fn = offbeat.as_functional(Signed, [torch.ones(2)])
    fn.step([torch.ones(2)])
    pure = offbeat.as_pure(Signed, lr=0.1)
    new, _ = pure.update(torch.ones(2), torch.ones(2), pure.init(torch.ones(2)))
    torch.testing.assert_close(new, torch.full((2,), 0.95))


COMPARISONS = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


@pytest.mark.parametrize("tier", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("operands", ["tensors", "constant", "coefficient"])
def test_every_comparison_works_in_every_tier(name, operands, tier):
    compare = COMPARISONS[name]

    def update(p, g, c):
        other = {"tensors": p, "constant": 0.0, "coefficient": c.limit}[operands]
        return (where(compare(g, other), p - 10.0, p + g),)

    rule = offbeat.Rule(
        "Compares", (learning_rate(0.1),), lambda h: (), lambda h: {}, lambda h, s: {"limit": 1.0}, update
    )

    class Compares(offbeat.RuleOptimizer, rule=rule): ...

    values, grads = [0.0, 1.0, 1.0, 2.0], [0.0, 1.0, 0.0, -3.0]
    p = torch.tensor(values, requires_grad=True)
    optimizer = Compares([p], **tier)
    p.grad = torch.tensor(grads)
    optimizer.step()
    others = {"tensors": values, "constant": [0.0] * 4, "coefficient": [1.0] * 4}[operands]
    expected = [v - 10 if compare(g, o) else v + g for v, g, o in zip(values, grads, others, strict=True)]
    assert p.tolist() == expected


def constant(p, g, *, a):
    return (0.0,)


def branches(p, g, *, a):
    return (p - g if p > 0 else p,)


def combines(p, g, *, a):
    return (p - (1 - a) * g,)


def forgets(p, g, *, a):
    return p - a * g, g


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (branches, "cannot branch on a value"),
        (combines, "double precision"),
        (forgets, "returned 2 values"),
        (constant, "depends on none"),
    ],
)
def test_rules_that_break_the_rules_are_told(update: Any, message: str):
    with pytest.raises(TypeError, match=message):
        trace(rule_of(update), (), ("a",), ())


@pytest.mark.parametrize("tier", [{"foreach": True}, {"foreach": False}, {}])
def test_nan_in_the_state_stays(tier):
    """Also where a new value does not depend on the old one but for that."""
    p, q = (torch.ones(3, requires_grad=True) for _ in range(2))
    ours = offbeat.Adam([p], betas=(0.0, 0.99), **tier)
    theirs = torch.optim.Adam([q], betas=(0.0, 0.99))
    for gradient in ([1.0, float("inf"), float("nan")], [1.0, 1.0, 1.0]):
        p.grad, q.grad = torch.tensor(gradient), torch.tensor(gradient)
        ours.step()
        theirs.step()
    torch.testing.assert_close(ours.state[p]["exp_avg"], theirs.state[q]["exp_avg"], equal_nan=True)
    assert ours.state[p]["exp_avg"].isnan().any()
