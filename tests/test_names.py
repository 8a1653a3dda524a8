"""Misspelt options raise and name the option that was meant."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings

import pytest
import torch

import offbeat


def make():
    model = torch.nn.Linear(2, 2)
    return model, offbeat.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda m, o: offbeat.AdamW(m.parameters(), weight_deacy=0.1), "weight_decay"),
        (lambda m, o: offbeat.SGD(m.parameters(), nestrov=True), "nesterov"),
        (lambda m, o: offbeat.overlap(o, m, clip_nrm=1.0), "clip_norm"),
        (lambda m, o: offbeat.LocalSGD(o, m, weigthed=True), "weighted"),
        (lambda m, o: offbeat.Replica(o, m, [], bufers="keep"), "buffers"),
        (lambda m, o: offbeat.SlowMo(o, m, slow_momentun=0.5), "slow_momentum"),
        (lambda m, o: offbeat.SlowMo(o, m, sub_group=None), "subgroup"),  # an option of Replica
        (lambda m, o: offbeat.DiLoCo(o, m, outer_Ir=0.7), "outer_lr"),
        (lambda m, o: offbeat.DiLoCo(o, m, nonfinit="skip"), "nonfinite"),
        (lambda m, o: offbeat.DiLoCo(o, m, level={"dead_line": 3}), "deadline"),
        (lambda m, o: offbeat.Level(evry=4), "every"),
        (lambda m, o: offbeat.PostLocalSGDOptimizer(o, averger=None), "averager"),
        (lambda m, o: offbeat.as_functional(offbeat.SGD, [], momentm=0.9), "momentum"),
    ],
)
def test_a_misspelt_option_raises_with_the_one_that_was_meant(call, meant):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '[^']+'; did you mean '{meant}'"):
        call(*make())


@pytest.mark.parametrize("name", ["eager", "undo"])
def test_options_that_are_gone_say_what_to_do_instead(name):
    instead = {"eager": "use delay=.* leave eager out", "undo": "leave it out"}[name]
    calls = [
        lambda m, o: offbeat.LocalSGD(o, m, **{name: True}),
        lambda m, o: offbeat.SlowMo(o, m, **{name: True}),
        lambda m, o: offbeat.DiLoCo(o, m, **{name: True}),
        lambda m, o: offbeat.Replica(o, m, offbeat.Level(every=4), **{name: True}),
        lambda m, o: offbeat.Level(every=4, **{name: True}),
        lambda m, o: offbeat.PeriodicModelAverager(4, **{name: True}),
        lambda m, o: offbeat.HierarchicalModelAverager({4: 2}, **{name: True}),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"no longer takes {name}: .*{instead}"):
            call(*make())


def test_a_name_like_no_other_raises_with_all_options():
    with pytest.raises(TypeError, match="'zzz' \\(it takes params, lr, betas"):
        offbeat.AdamW([torch.ones(1)], zzz=1)


def test_a_misspelt_key_of_a_group_warns():
    with pytest.warns(UserWarning, match="no option 'weight_deacy'.*did you mean 'weight_decay'"):
        optimizer = offbeat.AdamW([{"params": [torch.ones(1)], "weight_deacy": 0.1}])
    with pytest.warns(UserWarning, match="no option 'beta'.*did you mean 'betas'"):
        optimizer.add_param_group({"params": [torch.ones(2)], "beta": (0.9, 0.9)})


@pytest.mark.parametrize(
    "key", ["name", "lr_scale", "initial_lr", "max_lr", "base_momentum", "layer", "weight_decay_mult"]
)
def test_other_keys_of_a_group_are_the_users_own(key):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert offbeat.SGD([{"params": [torch.ones(1)], key: 1.0}]).param_groups[0][key] == 1.0


def test_what_the_check_needs_changes_nothing_else():
    """Signatures, copies, subclasses with options of their own."""
    assert list(inspect.signature(offbeat.Level).parameters)[0] == "every"
    assert list(inspect.signature(offbeat.LocalSGD).parameters)[:3] == ["opt", "module", "every"]
    assert list(inspect.signature(offbeat.overlap).parameters)[:2] == ["optimizer", "module"]
    level = offbeat.Level(every=4)
    assert copy.deepcopy(level) == pickle.loads(pickle.dumps(level)) == level

    class Wide(offbeat.Level):
        def __init__(self, mine=None, **options):
            self.__dict__["mine"] = mine
            super().__init__(**{k: v for k, v in options.items() if k != "every_day"})

    assert Wide(mine=1, every_day=2, every=3).every == 3
