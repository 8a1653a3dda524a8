"""Options that are accepted, refused, and in which words."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat

pytestmark = pytest.mark.xdist_group("options_refused")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(**options):
    model = nn.Linear(3, 2)
    return offbeat.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        make()
    with pytest.raises(RuntimeError, match="init_process_group"):
        offbeat.PeriodicModelAverager(2)


@pytest.mark.parametrize("wrap", [offbeat.DiLoCo, offbeat.SlowMo])
def test_options_of_the_level_that_are_arguments_too(alone, wrap):
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    (level,) = wrap(inner, model, deadline=7.0, nonfinite="skip")._levels
    assert (level.deadline, level.nonfinite) == (7.0, "skip")
    with pytest.raises(ValueError, match="deadline is given twice"):
        wrap(inner, model, deadline=7.0, level={"deadline": 8.0})
    with pytest.raises(ValueError, match="nonfinite"):
        wrap(inner, model, nonfinite="ignore")
    with pytest.raises(ValueError, match="every is given twice, as an argument and in level="):
        wrap(inner, model, level={"every": 8})
    with pytest.raises(TypeError, match=r"level must be a dictionary of options of offbeat.Level, but got 8"):
        wrap(inner, model, level=8)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fragments": None}, TypeError, "lists of parameter names that are not empty, but got None"),
        ({"fragments": ("strided", 2, 3)}, TypeError, "lists of parameter names"),
        ({"level": {"anchor_dtype": "bf16"}}, TypeError, "anchor_dtype must be a torch.dtype"),
        ({"level": {"ordered": "yes"}}, TypeError, "ordered must be True or False"),
        ({"outer": lambda groups: offbeat.SGD([nn.Parameter(torch.ones(2))], lr=1.0)}, ValueError, "would never move"),
        ({"outer": torch.optim.LBFGS}, TypeError, r"a LBFGS, whose step\(\) needs a closure"),
    ],
)
def test_options_of_diloco_that_make_no_sense(alone, options, error, words):
    model = nn.Linear(3, 2)
    with pytest.raises(error, match=words):
        offbeat.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)


@pytest.mark.parametrize("name", ["LocalSGD", "SlowMo", "DiLoCo"])
def test_classes_that_have_levels_of_their_own_take_no_others(name):
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'levels'"):
        getattr(offbeat, name)(offbeat.SGD(model.parameters()), model, levels=[offbeat.Level()])


def test_levels_that_are_none(alone):
    model = nn.Linear(3, 2)
    with pytest.raises(TypeError, match=r"levels must be an offbeat.Level or a list of them, but got 3"):
        offbeat.Replica(torch.optim.SGD(model.parameters(), lr=0.1), model, 3)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"every": 0}, ValueError, "every must be at least 1 step, but got 0"),
        ({"every": 2.5}, TypeError, "every must be a number of steps or a function"),
        ({"every": True}, TypeError, "every must be a number"),
        ({"every": {}}, ValueError, "at least one level"),
        ({"every": {4: 1, 2: 1}}, ValueError, r"ascending order, but got \[4, 2\]"),
        ({"every": {2: 3}}, ValueError, "cannot be split into blocks of 3"),
        ({"every": {2: "site"}}, ValueError, "pass that DeviceMesh as mesh="),
        ({"every": {2: 1.5}}, TypeError, "a size, a process group"),
        ({"every": [(1, 2, 3)]}, TypeError, "pairs"),
        ({"warmup": -1}, ValueError, "warmup must be at least 0 steps, but got -1"),
        ({"warmup": 1.5}, TypeError, "warmup must be a number of steps"),
        ({"delay": -1}, ValueError, "delay must be at least 0"),
        ({"delay": 9}, ValueError, "delay=9 is longer than the 8 steps between averages"),
        ({"delay": 3, "every": {2: 1, 8: 1}}, ValueError, "longer than the 2 steps"),
        ({"delay": True}, TypeError, "delay must be a number"),
        ({"subgroup": "rack"}, ValueError, "subgroup must be 'node'"),
        ({"snapshot": "disk"}, ValueError, "snapshot must be 'device' or 'cpu'"),
        ({"bucket_mb": 0}, ValueError, "bucket_mb must be a positive number"),
        ({"bucket_mb": float("inf")}, ValueError, "bucket_mb must be a positive number"),
        ({"reduce_dtype": torch.int32}, ValueError, "floating-point"),
        ({"reduce_dtype": "float32"}, TypeError, "reduce_dtype must be a torch.dtype such as torch.float32"),
        ({"weighted": "no"}, TypeError, "weighted must be True or False, but got 'no'"),
        ({"sync_init": 1}, TypeError, "sync_init must be True or False, but got 1"),
        ({"mesh": 3}, TypeError, "mesh must be a DeviceMesh, but got 3"),
        ({"group": 3}, TypeError, "group must be a process group or None, but got 3"),
        ({"subgroup": 3}, TypeError, "group must be a process group or None, but got 3"),
        ({"buffers": "mean"}, ValueError, "buffers must be one of"),
        ({"state": "mean"}, ValueError, "state must be one of"),
    ],
)
def test_options_that_make_no_sense(alone, options, error, words):
    with pytest.raises(error, match=words):
        make(**options)


def test_what_cannot_be_wrapped(alone):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module"):
        offbeat.LocalSGD(optimizer, [1])
    with pytest.raises(TypeError, match="opt must be"):
        offbeat.LocalSGD(model, model)
    with pytest.raises(TypeError, match="pass the optimizer that it wraps"):
        offbeat.LocalSGD(offbeat.LocalSGD(optimizer, model), model)
    with pytest.raises(TypeError, match="averager must have"):
        offbeat.PostLocalSGDOptimizer(optimizer, None)
    with pytest.raises(TypeError, match=r"optim must be a torch\.optim\.Optimizer"):
        offbeat.PostLocalSGDOptimizer(model, offbeat.PeriodicModelAverager(2))


def test_one_rank_trains_as_without(alone):
    """An average of one changes nothing, at once or late."""
    results = []
    for options in ({}, {"delay": 2, "every": 3}, {"every": {2: 1, 4: 1}}, None):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if options is not None:
            optimizer = offbeat.LocalSGD(optimizer, model, warmup=2, **options)
        for step in range(7):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if options is not None:
            optimizer.finish()
            assert optimizer.bytes_sent == 0
            assert optimizer.steps == 7
        results.append(model.weight.detach().clone())
    assert all(torch.equal(one, results[-1]) for one in results)


def test_it_is_an_optimizer_but_not_a_copy(alone):
    local = make(every=2)
    assert isinstance(local, torch.optim.Optimizer)
    assert repr(local).startswith("LocalSGD (")
    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(local)
    scaler = torch.amp.GradScaler("cpu")
    model = nn.Linear(3, 2)
    local = offbeat.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(local, lambda: 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outer_lr": float("inf")}, "outer_lr must be a finite number"),
        ({"outer_lr": float("nan")}, "outer_lr must be a finite number"),
        ({"outer_lr": -0.1}, "outer_lr must be a finite number that is not negative, but got -0.1"),
        ({"outer_momentum": 1.0}, "outer_momentum must be at least 0 and below 1, but got 1.0"),
    ],
)
def test_outer_options_with_which_anchors_would_not_stay_finite(options, message):
    def replica(rank, peers):
        model = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match=message):
            offbeat.DiLoCo(offbeat.SGD(model.parameters(), lr=0.1), model, group=peers, subgroup=None, **options)
        names = {"outer_lr": "slow_lr", "outer_momentum": "slow_momentum"}
        slow = {names[name]: value for name, value in options.items()}
        with pytest.raises(ValueError, match=message.replace("outer", "slow")):
            offbeat.SlowMo(offbeat.SGD(model.parameters(), lr=0.1), model, group=peers, subgroup=None, **slow)

    offbeat.Simulation(1).run(replica)


def test_what_would_not_be_used_raises():
    def replica(rank, peers):
        model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        inner = offbeat.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="none of the parameters of the module that LocalSGD was given"):
            offbeat.LocalSGD(inner, other, group=peers, subgroup=None)
        with pytest.raises(ValueError, match=r"reduce_dtype=torch\.bfloat16 is narrower than all parameters"):
            offbeat.LocalSGD(inner, model, group=peers, subgroup=None, reduce_dtype=torch.bfloat16)
        local = offbeat.LocalSGD(inner, model, group=peers, subgroup=None, weighted=True)
        for amount in (True, torch.ones(2), "8"):
            with pytest.raises(TypeError, match="must be one number"):
                local.seen(amount)
        local.seen(torch.tensor(3))

    offbeat.Simulation(1).run(replica)


def test_optimizers_that_communicate_by_themselves_are_refused(alone):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class Mine(ZeroRedundancyOptimizer):
        pass

    model = nn.Linear(3, 2)
    for cls in (ZeroRedundancyOptimizer, Mine):
        inner = cls(model.parameters(), torch.optim.SGD, lr=0.1)
        for wrap in (offbeat.LocalSGD, offbeat.DiLoCo, offbeat.SlowMo):
            with pytest.raises(TypeError, match=r"ZeroRedundancyOptimizer exchanges its ranks' updates"):
                wrap(inner, model)
