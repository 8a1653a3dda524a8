"""Parameters and state in fewer bits: what they hold, that kernels do what torch's operators say, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch

import offbeat
from offbeat.engine.choice import uses_triton
from offbeat.engine.eight_bit import GROUP, decode, decode_exactly, encode, round_stochastically, scales_for
from tests.cases import make_params, set_gradients

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
SHAPES = [(3, 4), (), (0,), (7,), (130, 5), (1, 1300), (32, 64)]
RULES = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "Adam": {"lr": 0.01, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Lion": {"lr": 0.01},
}
MODES = [{}, {"fused": True}]


@pytest.fixture
def _kernels(monkeypatch):
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def there(params, dtype=None):
    return [p.detach().to(DEVICE, dtype, copy=True).requires_grad_() for p in params]


def give(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        p.grad = None if q.grad is None else q.grad.to(p.device, p.dtype, copy=True)


@pytest.mark.parametrize("kind", ["signed8", "unsigned8"])
def test_codes(kind):
    """The largest of a block is exact, zero is zero, what is not zero does not become it, errors are bounded."""
    torch.manual_seed(0)
    x = torch.randn(5, 301) * 10.0 ** torch.randint(-4, 5, (5, 1))
    x[2] = 0
    x[0, 0] = 1e-30
    x = x.abs() if kind == "unsigned8" else x
    codes = torch.empty_like(x, dtype=torch.int8 if kind == "signed8" else torch.uint8)
    scales = torch.empty(scales_for(x.numel()))
    encode(x, codes, scales, kind)
    y = decode(codes, scales, kind)
    blocks = torch.cat([x.flatten(), torch.zeros(-x.numel() % GROUP)]).view(-1, GROUP)
    assert torch.equal(scales, blocks.abs().amax(1))
    each = scales.repeat_interleave(GROUP)[: x.numel()].view(x.shape)
    # Between two codes lies at most this part of the largest, at a number that is u² or u⁴ of it.
    power, levels = (2, 127) if kind == "signed8" else (4, 255)
    u = (x.abs() / each).nan_to_num(0) ** (1 / power)
    bound = each * (power * (u + 0.5 / levels) ** (power - 1) * 0.5 / levels + 1e-6)
    smallest = each * (1 / 255) ** 4 * 1.001 if kind == "unsigned8" else 0
    assert ((x - y).abs() <= bound + smallest).all()
    assert (y[x == 0] == 0).all()
    if kind == "unsigned8":
        assert (y[x > 0] > 0).all()
    again = torch.empty_like(codes)
    encode(y, again, scales.clone(), kind)
    assert torch.equal(again, codes), "what stands in codes must stay as it is"
    exact, same = decode_exactly(codes, scales, kind), torch.empty_like(scales)
    torch.testing.assert_close(exact, y, rtol=1e-6, atol=0)
    encode(exact, again, same, kind)
    assert torch.equal(again, codes)
    assert torch.equal(same, scales), "numbers that have been written out and read again give the same scales"


def test_stochastic_rounding_is_right_on_average():
    x = torch.full((200_000,), 1.0 + 1 / 1024)  # an eighth of the way from 1 to the next bfloat16
    for step in (1, 2):
        y = round_stochastically(x, step, 0)
        assert set(y.float().unique().tolist()) == {1.0, 1.0078125}
        assert abs(y.double().mean().item() - x[0].item()) < 4 * 0.0078125 * (0.125 * 0.875 / 200_000) ** 0.5
    assert not torch.equal(round_stochastically(x, 1, 0), round_stochastically(x, 2, 0))
    assert not torch.equal(round_stochastically(x, 1, 0), round_stochastically(x, 1, 2))
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1.0, -2.5])
    assert torch.equal(round_stochastically(odd, 3, 0).nan_to_num(7.0), odd.bfloat16().nan_to_num(7.0))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float32, None), *((torch.bfloat16, rounding) for rounding in (None, "stochastic", "kahan"))],
    ids=str,
)
@pytest.mark.parametrize("state", [None, torch.float32, torch.bfloat16, "8bit"], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_the_kernel_does_what_the_loop_does(name, dtype, state, rounding, mode):
    options = {**RULES[name], "state_dtype": state, "rounding": rounding}
    ours = there(make_params(dtype, shapes=SHAPES))
    loop = there(ours)
    a = getattr(offbeat, name)(ours, **options, **mode)
    b = getattr(offbeat, name)(loop, **options, foreach=False)
    for step in range(4):
        set_gradients(step, loop, none_at=((2, 0),))
        give(ours, loop)
        a.step()
        b.step()
    assert uses_triton(a.tiers()[0], DEVICE), a.tiers()
    # Where maths differs in the last bit, rounding may go the other way.
    loose = dtype == torch.bfloat16 or state in (torch.bfloat16, "8bit")
    tolerance = 0.01 if loose else 1e-5
    for p, q in zip(ours, loop, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        mine, others = a.state[p], b.state[q]
        assert mine.keys() == others.keys()
        for key, value in mine.items():
            assert value.dtype == others[key].dtype, key
            if key.endswith("_8bit"):
                kind, scales = "signed8" if value.dtype == torch.int8 else "unsigned8", key.replace("_8bit", "_scale")
                numbers = decode(value, mine[scales], kind), decode(others[key], others[scales], kind)
                largest = mine[scales].max().item() if value.numel() else 0.0
                torch.testing.assert_close(*numbers, rtol=0.03, atol=0.02 * largest, msg=key)
            elif key == "compensation":
                together = p.double() + value.double(), q.double() + others[key].double()
                # A code that went the other way moves SGD's parameter by lr times its width, once a step from then on.
                width = (
                    2 / 127 * max((mine[k].max().item() for k in mine if k.endswith("_scale") and p.numel()), default=0)
                )
                moved = 4 * options["lr"] * width if state == "8bit" and name == "SGD" else 0.0
                torch.testing.assert_close(*together, rtol=1e-3 if state != "8bit" else 0.01, atol=2e-3 + moved)
            else:
                largest = value.abs().max().item() if value.numel() else 0.0
                torch.testing.assert_close(value, others[key].to(value.device), rtol=0.02, atol=0.02 * largest, msg=key)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("state", [torch.bfloat16, "8bit"], ids=str)
def test_the_same_random_numbers(state):
    """In float32 everything but the rounding is the same: kernel and loop then round alike, element by element."""
    ours, loop = there(make_params(torch.float32, shapes=SHAPES)), there(make_params(torch.float32, shapes=SHAPES))
    a = offbeat.SGD(ours, lr=0.1, momentum=0.5, state_dtype=state)
    b = offbeat.SGD(loop, lr=0.1, momentum=0.5, state_dtype=state, foreach=False)
    set_gradients(0, loop)
    give(ours, loop)
    a.step()
    b.step()
    for p, q in zip(ours, loop, strict=True):
        for key, value in a.state[p].items():
            assert torch.equal(value.cpu(), b.state[q][key].cpu()), key


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("mode", [{}, {"foreach": False}], ids=str)
def test_small_steps_add_up(mode):
    """Steps too small for bfloat16 are lost in it; not with compensation, and on average not by chance."""
    results = {}
    for rounding in (None, "stochastic", "kahan"):
        p = torch.ones(4096, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
        optimizer = offbeat.SGD([p], lr=2.0**-13, rounding=rounding, **mode)
        p.grad = torch.ones_like(p)
        for _ in range(64):
            optimizer.step()
        results[rounding] = p.double().mean().item()
    wanted = 1 - 64 * 2.0**-13
    assert results[None] == 1.0
    assert results["kahan"] == pytest.approx(wanted, abs=2.0**-9)
    assert results["stochastic"] == pytest.approx(wanted, abs=5e-4)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("options", [{"state_dtype": "8bit"}, {"state_dtype": torch.bfloat16}], ids=str)
def test_checkpoints_go_on_exactly(name, options):
    theirs = make_params(torch.float32, shapes=SHAPES)
    ours, other = there(theirs), there(theirs)
    a = getattr(offbeat, name)(ours, **RULES[name], **options)
    b = getattr(offbeat, name)(other, **RULES[name], **options)
    b.init_state()
    for step in range(5):
        set_gradients(step, theirs)
        give(ours, theirs)
        give(other, theirs)
        a.step()
        b.step()
        if step == 2:
            saved = copy.deepcopy(b.state_dict())
            b = getattr(offbeat, name)(other, **RULES[name], **options)
            b.load_state_dict(saved)
    for p, q in zip(ours, other, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", RULES)
def test_to_and_from_full_precision(name):
    cls = getattr(offbeat, name)
    params = make_params(torch.float32, shapes=SHAPES)
    full = cls(params, **RULES[name])
    for step in range(3):
        set_gradients(step, params)
        full.step()
    saved = full.state_dict()
    for option in ("8bit", torch.bfloat16):
        small = cls(params, **RULES[name], state_dtype=option)
        small.load_state_dict(saved)
        assert small.param_groups[0]["state_dtype"] == option
        there_again = cls(params, **RULES[name])
        there_again.load_state_dict(small.state_dict())
        assert "state_dtype" not in there_again.param_groups[0]
        for p in params:
            before, after = full.state[p], there_again.state[p]
            assert set(before) <= set(after)
            for key, value in before.items():
                assert after[key].dtype == value.dtype, key
                largest = value.abs().max().item() if value.numel() else 0.0
                # Of the largest: squares of 127 levels, fourth powers of 255, or eight bits of bfloat16.
                torch.testing.assert_close(after[key], value, rtol=0.01, atol=largest * 0.009, msg=key)
        set_gradients(3, params)
        small.step()
        there_again.step()


def test_torch_does_not_take_codes_for_numbers():
    params = make_params(torch.float32)
    small = offbeat.AdamW(params, state_dtype="8bit")
    set_gradients(0, params)
    small.step()
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(small.state_dict())
    with pytest.raises(KeyError):
        theirs.step()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("mode", [{}, {"foreach": False}], ids=str)
def test_codes_follow_the_layout(mode):
    """Blocks are blocks of memory: where a tensor is laid out anew, or loaded into one that is, codes are made anew."""
    size = 10.0 ** torch.arange(-4, 4, device=DEVICE).view(1, 8, 1, 1)
    torch.manual_seed(0)
    p = torch.randn(16, 8, 3, 3, device=DEVICE).to(memory_format=torch.channels_last).requires_grad_()
    optimizer = offbeat.AdamW([p], lr=0.01, state_dtype="8bit", **mode)
    for _ in range(3):
        p.grad = (torch.randn(16, 8, 3, 3, device=DEVICE) * size).to(memory_format=torch.channels_last)
        optimizer.step()

    def numbers(optimizer, p):
        entry = optimizer.state[p]
        return decode(entry["exp_avg_sq_8bit"], entry["exp_avg_sq_scale"], "unsigned8")

    before = numbers(optimizer, p)
    q = p.detach().contiguous().requires_grad_()
    other = offbeat.AdamW([q], lr=0.01, state_dtype="8bit", **mode)
    other.load_state_dict(optimizer.state_dict())
    # Its block's largest may be a stranger now: the error is a code's.
    largest = other.state[q]["exp_avg_sq_scale"].repeat_interleave(GROUP)[: q.numel()].view(q.shape)
    assert ((numbers(other, q) - before).abs() <= 0.016 * (before * largest**3) ** 0.25 + 1e-9 * largest).all()
    p.data = p.data.contiguous()
    p.grad = torch.zeros_like(p)
    expected = numbers(optimizer, p) * 0.999
    optimizer.step()
    largest = optimizer.state[p]["exp_avg_sq_scale"].repeat_interleave(GROUP)[: q.numel()]
    largest = largest.view(q.shape) if mode == {} else torch.full_like(q, largest.max().item())
    found = numbers(optimizer, p)
    assert ((found - expected).abs() <= 0.032 * (expected * largest**3) ** 0.25 + 1e-9 * largest).all()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    "path", [(None, "8bit", None), (None, torch.bfloat16, "8bit"), ("8bit", torch.float32)], ids=str
)
def test_options_of_a_live_group(name, path):
    """State is converted, not begun anew, and what is not needed any more is gone."""
    ours, full = make_params(torch.float32, shapes=SHAPES), make_params(torch.float32, shapes=SHAPES)
    a, b = getattr(offbeat, name)(ours, **RULES[name]), getattr(offbeat, name)(full, **RULES[name])
    step = 0
    for option in path:
        a.param_groups[0]["state_dtype"] = option
        for _ in range(2):
            set_gradients(step, ours, full)
            a.step()
            b.step()
            step += 1
        codes = any(key.endswith("_8bit") for key in a.state[ours[0]])
        assert codes == (option == "8bit")
        assert codes != any(key in a.state[ours[0]] for key in ("exp_avg", "momentum_buffer"))
    for p, q in zip(ours, full, strict=True):
        torch.testing.assert_close(p, q, rtol=0.05, atol=0.02)
    for option in ("4bit", torch.float16):
        a.param_groups[0]["state_dtype"] = option
        with pytest.raises(ValueError, match="state_dtype must be"):
            a.step()


def test_another_rounding_leaves_state_as_it_is():
    """Also state that was loaded in a dtype of its own."""
    p = torch.ones(300, dtype=torch.bfloat16).requires_grad_()
    p.grad = torch.ones_like(p)
    optimizer = offbeat.AdamW([p], rounding="kahan")
    optimizer.step()
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].float() + 1e-4
    for rounding in ("stochastic", None):
        optimizer.param_groups[0]["rounding"] = rounding
        optimizer.step()
        assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("mode", [{}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_spoil_their_block(bad, mode):
    p = torch.zeros(600, device=DEVICE).requires_grad_()
    optimizer = offbeat.SGD([p], lr=0.1, momentum=0.9, state_dtype="8bit", **mode)
    p.grad = torch.ones_like(p)
    p.grad[300] = bad
    optimizer.step()
    p.grad = torch.ones_like(p)
    optimizer.step()
    good = p.isfinite()
    assert good[:256].all()
    assert not good[256:512].any()
    assert good[512:].all()


def test_odd_checkpoints():
    p = torch.ones(300, dtype=torch.bfloat16).requires_grad_()
    p.grad = torch.ones_like(p)
    by_chance = offbeat.SGD([p], lr=0.1, rounding="stochastic")
    by_chance.step()
    kahan = offbeat.SGD([p], lr=0.1, rounding="kahan")
    kahan.load_state_dict(by_chance.state_dict())
    kahan.step()
    assert "compensation" in kahan.state[p]
    plain = offbeat.SGD([p], lr=0.1)
    plain.load_state_dict(kahan.state_dict())
    assert "compensation" not in plain.state[p]
    q = torch.zeros(300).requires_grad_()
    q.grad = torch.ones_like(q)
    options = {"lr": 1.0, "momentum": 0.9, "dampening": 0.5}
    waiting = offbeat.SGD([q], **options)
    waiting.init_state()
    small = offbeat.SGD([q], **options, state_dtype="8bit")
    small.load_state_dict(waiting.state_dict())
    small.step()  # the first gradient is not dampened
    torch.testing.assert_close(q, torch.full_like(q, -1.0))
    old = waiting.state_dict()
    old["state"][0] = {"momentum_buffer": None}
    offbeat.SGD([q], **options, state_dtype="8bit").load_state_dict(old)


def test_memory():
    """Bytes of state an element."""
    p = torch.zeros(4096, dtype=torch.bfloat16).requires_grad_()
    wanted = {None: 4, torch.float32: 8, torch.bfloat16: 4, "8bit": 2 + 2 * 4 / 256}
    for option, size in wanted.items():
        optimizer = offbeat.AdamW([p], state_dtype=option)
        optimizer.init_state()
        found = sum(t.nbytes for key, t in optimizer.state[p].items() if key != "step")
        assert found == 4096 * size, option


def test_a_model_learns_as_well():
    """The last losses of a small regression, with state in full precision and in fewer bits."""
    torch.manual_seed(0)
    x = torch.randn(512, 32)
    y = torch.tanh(x @ torch.randn(32, 64)) @ torch.randn(64, 4)
    losses = {}
    for option in (None, torch.bfloat16, "8bit"):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
        optimizer = offbeat.AdamW(model.parameters(), lr=0.01, state_dtype=option)
        for step in range(150):
            batch = torch.arange(64) + 64 * (step % 8)
            loss = torch.nn.functional.mse_loss(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            losses[option] = torch.nn.functional.mse_loss(model(x), y).item()
    assert losses[torch.bfloat16] == pytest.approx(losses[None], rel=0.1)
    assert losses["8bit"] == pytest.approx(losses[None], rel=0.1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("AdamW", {"state_dtype": "4bit"}, "must be None, torch.float32, torch.bfloat16 or '8bit'"),
        ("AdamW", {"rounding": "up"}, "must be None, 'stochastic' or 'kahan'"),
        ("AdamW", {"state_dtype": "8bit", "differentiable": True}, "needs full precision"),
    ],
)
def test_options_are_checked(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(offbeat, name)([torch.ones(3, requires_grad=True)], **options)
    good = offbeat.AdamW([torch.ones(3, requires_grad=True)])
    with pytest.raises(ValueError, match=message):
        good.add_param_group({"params": [torch.ones(3, requires_grad=True)], **options})


def test_parameters_are_checked():
    """Before anything has changed."""
    for p, options, message in (
        (torch.ones(3), {"rounding": "kahan"}, "needs bfloat16 parameters"),
        (torch.ones(3, dtype=torch.float64), {"state_dtype": "8bit"}, "half precision"),
    ):
        p.requires_grad_()
        p.grad = torch.ones_like(p)
        optimizer = offbeat.SGD([p], lr=0.1, momentum=0.9, **options)
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert (p == 1).all()
        assert not optimizer.state
    with pytest.raises(TypeError, match="state_dtype"):
        offbeat.RMSprop([torch.ones(3, requires_grad=True)], state_dtype="8bit")
    with pytest.raises(ValueError, match="leave state_dtype out"):
        offbeat.RMSprop([{"params": [torch.ones(3, requires_grad=True)], "state_dtype": "8bit"}])


def test_groups_may_differ():
    a, b = (torch.ones(300, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    optimizer = offbeat.AdamW([{"params": [a], "state_dtype": "8bit"}, {"params": [b], "rounding": "kahan"}], lr=0.1)
    for p in (a, b):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert set(optimizer.state[a]) == {"step", "exp_avg_8bit", "exp_avg_sq_8bit", "exp_avg_scale", "exp_avg_sq_scale"}
    assert set(optimizer.state[b]) == {"step", "exp_avg", "exp_avg_sq", "compensation"}
    assert optimizer.state[a]["exp_avg_8bit"].dtype == torch.int8
    assert "state_dtype" not in optimizer.param_groups[1]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    "options", [{"rounding": "stochastic"}, {"rounding": "kahan"}, {"state_dtype": "8bit"}], ids=str
)
def test_a_parameter_that_changed_while_it_had_no_gradient_is_checked_again(options):
    a, b = (torch.linspace(1, 2, 300, device=DEVICE).bfloat16().requires_grad_() for _ in range(2))
    optimizer = offbeat.AdamW([a, b], **options)
    for _ in range(2):
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        optimizer.step()
    b.grad = None
    b.data = b.data.double()
    optimizer.state[a]["note"] = 1  # tables are made anew
    optimizer.step()
    b.grad = torch.ones_like(b)
    before = b.detach().clone()
    with pytest.raises(RuntimeError, match="float64"):
        optimizer.step()
    assert torch.equal(b, before)
