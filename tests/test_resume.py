"""Checkpoints: training goes on to the bit as if nothing had happened."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.harness import (
    adamw,
    batch,
    everyone,
    flat,
    loss,
    make,
    ranks,
    sgd,
    simulated,
    small,
    train,
    train_step,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("resume")


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


@ranks(2)
def test_save_load_go_on(rank, world):
    """In the middle of a period, of a delayed average, of warm-up: to the bit as if nothing had happened."""
    for options in (
        {"every": 4, "warmup": 3},
        {"every": 4, "warmup": 3, "delay": 3},
        {"every": 4, "warmup": 3, "delay": 3, "snapshot": "cpu"},
        {"every": lambda s: 3 if s < 8 else 5, "warmup": lambda s: s < 2, "delay": 2},
        {"every": 3, "weighted": True},
        {"every": {2: 1, 4: 2}, "delay": 1},
    ):
        for at in (2, 5, 9):
            finals = []
            for stop in (False, True):
                torch.manual_seed(0)
                model = Norm().double()
                ddp = DistributedDataParallel(model)
                local = offbeat.LocalSGD(adamw(model.parameters()), ddp, subgroup=None, **options)
                for step in range(16):
                    if stop and step == at:
                        saved = copy.deepcopy((model.state_dict(), local.state_dict()))
                        loss(ddp, batch(99, rank)).backward()  # what comes after is forgotten
                        local.step()
                        torch.manual_seed(1)
                        model = Norm().double()
                        ddp = DistributedDataParallel(model)
                        local = offbeat.LocalSGD(adamw(model.parameters()), ddp, subgroup=None, **options)
                        model.load_state_dict(saved[0])
                        local.load_state_dict(saved[1])
                    if options.get("weighted"):
                        local.seen(step + rank)
                    train(ddp, local, range(step, step + 1), rank)
                local.finish()
                finals.append(torch.cat([flat(model), model.norm.running_mean, model.norm.running_var]))
            assert torch.equal(*finals), (options, at)


@ranks(2)
def test_loading_what_others_saved(rank, world):
    model = make()
    local = offbeat.LocalSGD(adamw(model.parameters()), model, every=4, warmup=2, subgroup=None, delay=3)
    train(model, local, range(8), rank)
    saved = copy.deepcopy(local.state_dict())
    post = offbeat.PostLocalSGDOptimizer(adamw(make().parameters()), offbeat.PeriodicModelAverager(4, 2))
    with pytest.warns(UserWarning, match="in flight, which PostLocalSGDOptimizer cannot apply"):
        post.load_state_dict(saved)
    assert post.averager.step == 8
    plain = torch.optim.AdamW(make().parameters())
    plain.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    other = make()
    again = offbeat.LocalSGD(adamw(other.parameters()), other, every=4, warmup=2, subgroup=None)
    again.load_state_dict(post.state_dict())
    assert again.steps == 8
    with pytest.warns(UserWarning, match="does not contain a step counter"):
        again.load_state_dict(plain.state_dict())
    assert again.steps == 0
    # An average under way for another model: refused, and nothing is changed.
    small = nn.Linear(6, 3).double()
    one = offbeat.LocalSGD(adamw(small.parameters()), small, every=4, subgroup=None, delay=3)
    train(small, one, range(2), rank)
    before = copy.deepcopy(one.state_dict())
    with pytest.raises(ValueError, match=r"average in flight for '0\.weight'"):
        one.load_state_dict(saved)
    assert one.steps == 2
    assert str(one.state_dict()) == str(before)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(local)
    local.finish()


@ranks(2)
def test_copies_of_state(rank, world):
    """What state_dict() returned does not change when training goes on."""
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, subgroup=None, delay=3)
    train(model, local, range(2), rank)
    ((saved,),) = local.state_dict()["replica"][0]["tracks"]
    before = copy.deepcopy(saved)
    train(model, local, range(2, 7), rank)
    assert saved["flight"]["step"] == before["flight"]["step"] == 0
    for name, value in before["flight"]["values"].items():
        assert torch.equal(saved["flight"]["values"][name], value)
    local.finish()


def save(rank: int, world: int, options: dict[str, Any], steps: int) -> Any:
    model = make()
    local = offbeat.LocalSGD(offbeat.AdamW(model.parameters(), lr=0.01), model, subgroup=None, **options)
    for step in range(steps):
        loss(model, batch(step, rank)).backward()
        local.step()
        local.zero_grad()
    return copy.deepcopy((model.state_dict(), local.state_dict()))


def load(rank: int, world: int, options: dict[str, Any], saved: Any, steps: int) -> Any:
    model = make()
    local = offbeat.LocalSGD(offbeat.AdamW(model.parameters(), lr=0.01), model, subgroup=None, **options)
    state = saved[rank % len(saved)]
    model.load_state_dict(state[0])
    local.load_state_dict(state[1])
    start = local.steps
    for step in range(start, start + steps):
        loss(model, batch(step, rank)).backward()
        local.step()
        local.zero_grad()
    synced = [torch.equal(flat(model), one) for one in everyone(flat(model))]
    local.finish()
    return start, all(synced), flat(model), [v["step"].item() for v in local.state.values()]


@pytest.mark.parametrize(("world", "delay"), [(1, 2), (4, 0)])
def test_another_number_of_ranks_goes_on_where_two_were(world, delay):
    options = {"every": 4, "warmup": 1, "delay": delay}
    saved = run_ranks(save, 2, options, 6 if delay == 0 else 7)  # after an average, or with one under way
    results = run_ranks(load, world, options, saved, 8)
    assert [start for start, *_ in results] == [6 if delay == 0 else 7] * world
    assert all(torch.equal(one[2], results[0][2]) for one in results)
    if world == 1:  # what was under way is applied, although there is nobody left to average with
        ((track,),) = saved[0][1]["replica"][0]["tracks"]
        assert track["flight"] is not None
        forgotten = copy.deepcopy(saved)
        forgotten[0][1]["replica"][0]["tracks"][0][0]["flight"] = None
        without = run_ranks(load, world, options, forgotten, 8)
        assert not torch.equal(without[0][2], results[0][2])
    assert all(set(one[3]) == {results[0][0] + 8.0} for one in results)
    if delay == 0:
        # Everybody had the same parameters (an average had just been made) and after step 13 = 1 + 3 * 4 has again.
        assert all(synced for _, synced, *_ in results)


def through_dcp(rank: int, world: int, folder: str) -> Any:
    """torch's distributed checkpoints take the optimizer as it is, each rank under a name of its own."""
    import torch.distributed.checkpoint as dcp

    finals = []
    for stop in (False, True):
        model = make()
        local = offbeat.LocalSGD(offbeat.AdamW(model.parameters(), lr=0.01), model, every=4, subgroup=None, delay=3)
        for step in range(9):
            if stop and step == 6:
                contents = {f"model{rank}": model.state_dict(), f"optimizer{rank}": local.state_dict()}
                dcp.save(contents, checkpoint_id=folder)
                model = make(seed=3)
                local = offbeat.LocalSGD(
                    offbeat.AdamW(model.parameters(), lr=0.01), model, every=4, subgroup=None, delay=3
                )
                template = copy.deepcopy(contents)
                dcp.load(template, checkpoint_id=folder)
                model.load_state_dict(template[f"model{rank}"])
                local.load_state_dict(template[f"optimizer{rank}"])
            loss(model, batch(step, rank)).backward()
            local.step()
            local.zero_grad()
        local.finish()
        finals.append(flat(model))
    return torch.equal(*finals)


def test_distributed_checkpoints(tmp_path):
    assert run_ranks(through_dcp, 2, str(tmp_path)) == [True, True]


def resumed(optimizer_of, train, save_after, steps):
    """Parameters at the end, without a stop and with one after a step."""

    def run(rank, peers, models, save):
        model, optimizer = models[0], optimizer_of(models[0], peers)
        for step in range(steps):
            train(model, optimizer, step, rank)
            if save and step == save_after:
                file = io.BytesIO()
                torch.save((model.state_dict(), optimizer.state_dict()), file)
                file.seek(0)
                model, optimizer = models[1], optimizer_of(models[1], peers, resumes=True)
                for target, state in zip((model, optimizer), torch.load(file, weights_only=True), strict=True):
                    target.load_state_dict(state)
        return flat(model)

    return [simulated(run, make=lambda: (small(), small()), save=save) for save in (False, True)]


def backward(model, step, rank):
    loss(model, batch(step, rank, torch.float32)).backward()


def test_a_replica_that_was_left_out_of_a_round_in_flight_is_so_after_loading():
    def optimizer_of(model, peers, resumes=False):
        inner = offbeat.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return offbeat.DiLoCo(inner, model, every=4, delay=2, nonfinite="leave_out", group=peers, subgroup=None)

    def train(model, optimizer, step, rank):
        backward(model, step, rank)
        if rank == 1 and step == 3:
            model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()
        optimizer.zero_grad()

    never, stopped = resumed(optimizer_of, train, save_after=4, steps=12)
    assert all(parameters.isfinite().all() for parameters in never)
    assert all(map(torch.equal, never, stopped))


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_parameters_that_come_while_a_round_is_in_flight_are_not_in_it(how):
    def optimizer_of(model, peers, resumes=False):
        first = list(model.parameters())[:-1]
        inner = offbeat.SGD(first, lr=0.05)
        if how == "unfrozen":
            model[0].weight.requires_grad_(resumes)
        elif resumes:
            inner.add_param_group({"params": [model[2].bias], "lr": 0.01})
        return offbeat.LocalSGD(inner, model, every=4, delay=2, group=peers, subgroup=None)

    def train(model, optimizer, step, rank):
        backward(model, step, rank)
        optimizer.step()
        model.zero_grad()
        if step == 4:  # a round has begun
            if how == "unfrozen":
                model[0].weight.requires_grad_(True)
            else:
                optimizer.add_param_group({"params": [model[2].bias], "lr": 0.01})

    never, stopped = resumed(optimizer_of, train, save_after=5, steps=14)
    assert all(map(torch.equal, never, stopped))


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_parameters_that_come_after_the_outer_optimizer_was_made_raise(how):
    def replica(rank, peers, model):
        inner = offbeat.SGD(list(model.parameters())[:-1], lr=0.05)
        model[0].weight.requires_grad_(how != "unfrozen")
        diloco = offbeat.DiLoCo(inner, model, every=4, delay=2, group=peers, subgroup=None)
        train_step(diloco, model, 0, rank)
        if how == "unfrozen":
            model[0].weight.requires_grad_(True)
        else:
            diloco.add_param_group({"params": [model[2].bias], "lr": 0.01})
        before = flat(model)
        with pytest.raises((RuntimeError, ValueError)) as error:
            train_step(diloco, model, 1, rank)
        assert torch.equal(flat(model), before)
        return str(error.value)

    first, second = simulated(replica)
    assert first == second
    assert ("'0.weight'" if how == "unfrozen" else "'2.bias'") in first, first


def test_a_round_that_had_failed_before_saving_is_told_of_after_loading():
    def replica(rank, peers, models):
        def diloco(model):
            inner = offbeat.SGD(model.parameters(), lr=0.05)
            return offbeat.DiLoCo(inner, model, every=4, delay=3, group=peers, subgroup=None)

        model, optimizer = models[0], diloco(models[0])
        for step in range(5):
            backward(model, step, rank)
            if step == 3:
                model[0].bias.grad[0] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        model, optimizer = models[1], diloco(models[1])
        optimizer.load_state_dict(state)
        for step in range(5, 7):
            backward(model, step, rank)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            optimizer.zero_grad()
        return [str(warning.message) for warning in caught]

    (told,) = offbeat.Simulation(1).run(replica, make=lambda: (small(), small()))
    assert any("begun after step 3 had failed when this checkpoint was saved" in text for text in told)
    assert any("NaN or infinite" in text for text in told)


@pytest.mark.parametrize("way", ["sync", "sync_init"])
def test_diloco_from_a_local_sgd_checkpoint_in_mid_period(way):
    """Replicas differ, and there is no anchor: the error says so and names two ways out, which both work."""

    def replica(rank, peers, models):
        def options(model):
            return offbeat.SGD(model.parameters(), lr=0.05), model

        local = offbeat.LocalSGD(*options(models[0]), every=4, group=peers, subgroup=None)
        for step in range(3):
            train_step(local, models[0], step, rank)
        saved = copy.deepcopy((models[0].state_dict(), local.state_dict()))
        own = flat(models[0])

        def diloco(model, **more):
            optimizer = offbeat.DiLoCo(*options(model), every=4, group=peers, subgroup=None, **more)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            return optimizer

        optimizer = diloco(models[1])
        with pytest.raises(offbeat.Disagreement) as error:
            train_step(optimizer, models[1], 3, rank)
        if way == "sync":
            optimizer.sync()
            start = flat(models[1])
        else:
            models[2].load_state_dict(saved[0])
            optimizer = offbeat.DiLoCo(*options(models[2]), every=4, group=peers, subgroup=None, sync_init=True)
            start = flat(models[2])
        model = models[1] if way == "sync" else models[2]
        for step in range(3, 8 if way == "sync" else 7):  # to the end of a period
            assert train_step(optimizer, model, step, rank) is None
        return str(error.value), own, start, flat(model)

    (words, own, start, end), (others, theirs, other_start, other_end) = simulated(
        replica, make=lambda: (small(), small(), small())
    )
    assert words == others
    assert "saved by LocalSGD between two rounds" in words
    assert "sync()" in words
    assert "sync_init=True" in words
    assert "DistributedDataParallel" not in words
    assert not torch.equal(own, theirs)
    assert torch.equal(start, other_start)
    torch.testing.assert_close(start, (own + theirs) / 2 if way == "sync" else own)
    assert torch.equal(end, other_end)


def test_bytes_sent_goes_on_after_loading():
    def replica(rank, peers, models):
        def local_sgd(model):
            inner = offbeat.SGD(model.parameters(), lr=0.05)
            return offbeat.LocalSGD(inner, model, every=4, warmup=2, group=peers, subgroup=None)

        size = sum(p.numel() * p.itemsize for p in models[0].parameters())
        local = local_sgd(models[0])
        before = local.bytes_sent
        for step in range(2):
            train_step(local, models[0], step, rank)
        assert local.bytes_sent - before >= 2 * size  # gradients of warm-up; a ring of two ranks sends each byte once
        train_step(local, models[0], 2, rank)
        again = local_sgd(models[1])
        again.load_state_dict(local.state_dict())
        assert again.bytes_sent == local.bytes_sent
        assert again.syncs == local.syncs == 1

    simulated(replica, make=lambda: (small(), small()))
