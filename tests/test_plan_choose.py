"""Recommendations, the table of losses, and results on disk."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.plan import BenchResult, Machine, ResultError, Settings, compare, load_result, recommend, save_result
from offbeat.plan.choose import CANDIDATES
from offbeat.plan.cost import Setting
from offbeat.plan.losses import INNER, ROWS

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
GBIT = 1e9 / 8
RESULT = BenchResult(
    params=1000, step_seconds=0.1, replicas=2, bandwidth=1e8, latency=1e-3,
    machine=Machine(busy=1e-9, round=2e-3, local={"diloco/float32": 3e-9}),
    link=[{"collective": "all_reduce", "bytes": 8, "sent": 8, "seconds": 1e-3}], environment={"torch": "2.13.0"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("gbit", "name"),
    [
        (1000, "DDP"),  # 32 ms of gradients behind 67 ms of backward
        (400, "DiLoCo(every=32)"),  # 13 ms of DDP too many; a round of 80 ms in 3.2 s
        (50, 'DiLoCo(every=32, fragments=4, delay=1, codec="int4")'),
        (1, 'DiLoCo(every=64, fragments=8, delay=8, codec="int4")'),
        (0.2, 'DiLoCo(every=256, fragments=16, delay=16, codec="int4")'),
    ],
)
def test_the_least_loss_that_reaches_the_target_is_recommended(gbit, name):
    options = compare(Setting(1e9, 0.1, 2, gbit * GBIT))
    best = recommend(options)
    assert best.settings.name == name
    assert best.estimate.utilisation >= 0.95
    for option in options[: options.index(best)]:
        assert option.estimate.utilisation < 0.95


def test_where_nothing_reaches_the_target_the_best_is_recommended():
    options = compare(Setting(1e9, 0.1, 2, 0.001 * GBIT))
    best = recommend(options)
    assert best.estimate.utilisation == max(option.estimate.utilisation for option in options) < 0.95


@pytest.mark.parametrize("target", [0, -1, 1.01, float("nan")])
def test_a_target_is_a_part_of_the_time(target):
    with pytest.raises(ValueError, match="target"):
        recommend(compare(Setting(1e9, 0.1, 2, GBIT)), target)


class Recorder:
    """Stands in for the library, and keeps the options of what is made."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda inner, model, **options: self.calls.append(options)


def test_lines_to_paste_run_and_mean_what_they_say():
    recorder = Recorder()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for settings in CANDIDATES[1:]:
            model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
            names = {"offbeat": offbeat, "torch": torch, "model": model, "inner": offbeat.AdamW(model.parameters())}
            exec(settings.code, names)
            optimizer = names["optimizer"]
            assert type(optimizer).__name__ == settings.name.partition("(")[0]
            if settings.strategy == "diloco":
                outer = optimizer.outer.param_groups[0]
                assert {"outer_lr": outer["lr"], "outer_momentum": outer["momentum"]} == dict(settings.options)
            exec(settings.code, {**names, "offbeat": recorder})
            given = {"every": settings.period, **dict(settings.options)}
            given |= {"fragments": settings.fragments} if settings.fragments > 1 else {}
            given |= {"delay": settings.delay} if settings.delay else {}
            given |= {"codec": settings.codec} if settings.codec else {}
            assert recorder.calls.pop() == given
        names = {"offbeat": offbeat, "torch": torch, "model": torch.nn.Linear(2, 2)}
        exec(Settings("ddp", codec="int8").code, names)
        assert isinstance(names["model"], torch.nn.parallel.DistributedDataParallel)
        names["model"](torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(offbeat, "muon_with_adamw"), reason="the recipe is not there yet")
def test_the_inner_optimizer_to_paste_runs():
    names = {"offbeat": offbeat, "model": torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))}
    exec(INNER, names)
    assert isinstance(names["inner"], torch.optim.Optimizer)


def test_losses_are_those_of_the_tables():
    """Each row stands in the file it names, with these numbers."""
    for row in ROWS:
        page = (RESULTS / row.source).read_text()
        assert row.spread is not None
        numbers = (row.percent, *row.spread)
        # Pages with the unit in their heading have one digit.
        forms = [[f"{number:+.2f}%" for number in numbers], [f"{number:+.1f}" for number in numbers]]
        assert any(f"| {median} ({low} to {high}) |" in page for median, low, high in forms), row


def test_a_result_is_read_as_it_was_written(tmp_path):
    save_result(RESULT, tmp_path / "bench.json")
    assert load_result(tmp_path / "bench.json") == RESULT


def test_numbers_given_by_hand_replace_measured_ones():
    setting = RESULT.setting(bandwidth=5e6, replicas=None)
    assert (setting.bandwidth, setting.replicas, setting.params) == (5e6, 2, 1000)
    assert setting.machine == RESULT.machine


def test_one_process_has_measured_no_link():
    alone = replace(RESULT, bandwidth=None, latency=None)
    with pytest.raises(ResultError, match="one process"):
        alone.setting()
    assert alone.setting(bandwidth=1e6).latency == 0


def change(key, value):
    def changed(data):
        data[key] = value

    return changed


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("offbeat_bench", 99), "version 99 of the format and this offbeat reads version 1; measure again"),
        (lambda data: data.pop("offbeat_bench"), "is not a result of offbeat bench"),
        (lambda data: data.pop("params"), "damaged: .*params"),
        (change("extra", 1), "damaged: .*extra"),
        (change("step_seconds", -1), "damaged: step_seconds=-1"),
        (change("bandwidth", "fast"), "damaged: bandwidth='fast'"),
        (lambda data: data["machine"].update(busy=None), "damaged"),
        (change("machine", {"speed": 1}), "damaged"),
    ],
)
def test_a_result_that_is_damaged_or_of_another_version_is_refused(damage, message, tmp_path):
    path = tmp_path / "bench.json"
    save_result(RESULT, path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ResultError) as caught:
        load_result(path)
    assert re.search(message, str(caught.value))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe", b'"text"'])
def test_a_file_that_is_no_result_is_refused(content, tmp_path):
    path = tmp_path / "bench.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ResultError, match=r"bench\.json"):
        load_result(path)
