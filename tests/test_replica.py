"""Outer optimizers, levels, fragments and delays in real processes, against a plain simulation in one."""

from __future__ import annotations

import copy
import functools
import io
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.replicas.level import Level
from offbeat.wire.peers import GroupPeers
from tests.harness import adamw, batch, close, everyone, flat, loss, make, sgd, train, write
from tests.ranks import run_ranks
from tests.scenarios import Scenarios

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("replica")]
scenario = Scenarios(__name__)

nesterov = functools.partial(offbeat.SGD, lr=0.7, momentum=0.9, nesterov=True)
plain_mean = functools.partial(offbeat.SGD, lr=1.0)


def fragments_of(model: nn.Module, parts: int) -> list[list[int]]:
    """Positions in the flat vector of consecutive fragments, as ``Level`` cuts them."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    names, starts, at = Level(every=8, fragments=parts).cut(sizes), {}, 0
    for name, size in sizes.items():
        starts[name], at = at, at + size
    return [[i for name in part for i in range(starts[name], starts[name] + sizes[name])] for part in names]


def simulate_outer(
    world: int, steps: int, inner: Any, every: int, outer: Any = nesterov, *, parts: int = 1, delay: int = 0,
    mixing: float = 0.0, before: Any = lambda models, step: None,
) -> list[list[torch.Tensor]]:  # fmt: skip
    """Every rank's parameters after every step of DiLoCo, in plain torch."""
    models = [make() for _ in range(world)]
    optimizers = [inner(model.parameters()) for model in models]
    places = fragments_of(models[0], parts)
    anchors = [flat(models[0])[place].clone() for place in places]
    outers = [outer([anchor]) for anchor in anchors]
    flights: dict[int, tuple[int, torch.Tensor]] = {}
    history = []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, batch(step, rank)).backward()
            optimizer.step()
        for part, place in enumerate(places):
            offset = every * (part + 1) // parts
            due = step + 1 >= offset and (step + 1 - offset) % every == 0
            if due and not delay:
                flights[part] = (step, sum(flat(model)[place] for model in models) / world)
            if part in flights and flights[part][0] == step:
                anchors[part].grad = anchors[part] - flights.pop(part)[1]
                outers[part].step()
                for model in models:
                    vector = flat(model)
                    vector[place] = mixing * vector[place] + (1 - mixing) * anchors[part]
                    write(model, vector)
            if due and delay:
                flights[part] = (step + delay, sum(flat(model)[place] for model in models) / world)
        history.append([flat(model) for model in models])
    return history


def version(replica: Any) -> int:
    """How many rounds have moved the anchors of the first fragment."""
    return replica.state_dict()["replica"][0]["tracks"][0][0]["rounds"]


OPTIONS = [
    ({}, {}),
    ({"outer": functools.partial(offbeat.Adam, lr=0.05)}, {"outer": functools.partial(torch.optim.Adam, lr=0.05)}),
    ({"outer": functools.partial(torch.optim.SGD, lr=0.5)}, {"outer": functools.partial(torch.optim.SGD, lr=0.5)}),
    ({"mixing": 0.25}, {"mixing": 0.25}),
    ({"delay": 3}, {"delay": 3}),
    ({"delay": 6, "mixing": 0.25}, {"delay": 6, "mixing": 0.25}),
    ({"fragments": 3}, {"parts": 3}),
    ({"fragments": 2, "delay": 2}, {"parts": 2, "delay": 2}),
    ({"fragments": 3, "delay": 6, "mixing": 0.5}, {"parts": 3, "delay": 6, "mixing": 0.5}),
    ({"level": {"anchor": "cpu", "anchor_dtype": torch.float64}}, {}),
    ({"level": {"ordered": True}}, {}),
]


@scenario(2, 3)
def test_diloco_is_what_it_says(rank, world):
    for ours, theirs in OPTIONS:
        model = make()
        rate = {} if "outer" in ours else {"outer_lr": 0.7, "outer_momentum": 0.9}
        diloco = offbeat.DiLoCo(
            adamw(model.parameters()), model, every=6, subgroup=None, bucket_mb=0.002, **rate, **ours
        )
        close(train(model, diloco, range(19), rank), simulate_outer(world, 19, adamw, 6, **theirs), rank)
        diloco.finish()
        assert all(torch.equal(one, flat(model)) for one in everyone(flat(model))), ours


@scenario(2, 3)
def test_outer_sgd_at_one_is_plain_averaging(rank, world):
    """To the bit, in every precision and for every way to exchange."""
    for dtype in (torch.float32, torch.bfloat16):
        for level in ({}, {"delay": 0, "anchor": "cpu"}, {"ordered": True}):
            finals = []
            for outer in (None, functools.partial(offbeat.SGD, lr=1.0)):
                model = make(dtype=dtype)
                plain = {"ordered": level.get("ordered", False)} if outer is None else level
                levels = [offbeat.Level(every=4, outer=outer, **plain)]
                replica = offbeat.Replica(sgd(model.parameters()), model, levels, subgroup=None)
                for step in range(9):
                    loss(model, batch(step, rank, dtype)).backward()
                    replica.step()
                    replica.zero_grad()
                finals.append(flat(model))
            assert torch.equal(*finals), (dtype, level)


@scenario(2)
def test_slow_momentum(rank, world):
    """SlowMo with an inner learning rate that changes, group by group."""
    model = make()
    params = list(model.parameters())
    inner = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.02}], lr=0.1, momentum=0.9)
    replica = offbeat.SlowMo(inner, model, every=4, slow_lr=0.8, slow_momentum=0.6, subgroup=None)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(replica, 0.9)
    models = [make() for _ in range(world)]
    inners = []
    for one in models:
        p = list(one.parameters())
        inners.append(torch.optim.SGD([{"params": p[:2]}, {"params": p[2:], "lr": 0.02}], lr=0.1, momentum=0.9))
    sizes = [sum(p.numel() for p in params[:2]), sum(p.numel() for p in params[2:])]
    anchor, slow = flat(models[0]), torch.zeros(sum(sizes), dtype=torch.float64)
    for step in range(13):
        train(model, replica, range(step, step + 1), rank)
        for i, (one, optimizer) in enumerate(zip(models, inners, strict=True)):
            train(one, optimizer, range(step, step + 1), i)
        if (step + 1) % 4 == 0:
            rates = zip(sizes, inners[0].param_groups, strict=True)
            rate = torch.cat([torch.full((n,), g["lr"], dtype=torch.float64) for n, g in rates])
            slow = 0.6 * slow + (anchor - sum(map(flat, models)) / world) / rate
            anchor = anchor - 0.8 * rate * slow
            for one in models:
                write(one, anchor)
        close([flat(model)], [[flat(one) for one in models]], rank)
        scheduler.step()
        for optimizer in inners:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9


@scenario(4)
def test_levels_of_both_kinds(rank, world):
    """Local SGD inside a site, DiLoCo between sites; and an outer optimizer at both levels."""
    for inside, between in ((None, {}), (functools.partial(offbeat.SGD, lr=0.5), {}), (None, {"delay": 2})):
        model = make()
        levels = [
            offbeat.Level(every=2, group=2, outer=inside),
            offbeat.Level(every=6, outer=nesterov, **between),
        ]
        replica = offbeat.Replica(adamw(model.parameters()), model, levels, subgroup=None)
        models = [make() for _ in range(world)]
        inners = [adamw(one.parameters()) for one in models]
        low, top = [flat(models[0]) for _ in range(2)], flat(models[0])
        moving = nesterov([top])
        flight = None
        mixing = 0.0
        for step in range(14):
            train(model, replica, range(step, step + 1), rank)
            for i, (one, optimizer) in enumerate(zip(models, inners, strict=True)):
                train(one, optimizer, range(step, step + 1), i)
            made = step + 1

            def land(mean, models=models, low=low, top=top, moving=moving, mixing=mixing):
                top.grad = top - mean
                moving.step()
                for one in models:
                    write(one, mixing * flat(one) + (1 - mixing) * top)
                for i in range(2):
                    low[i] = mixing * low[i] + (1 - mixing) * top

            if flight is not None and step == flight[0]:
                land(flight[1])
                flight = None
            if made % 2 == 0 and (made % 6 or inside is not None or between):
                for site in range(2):
                    pair = models[2 * site : 2 * site + 2]
                    mean = sum(map(flat, pair)) / 2
                    low[site] = mean if inside is None else low[site] - 0.5 * (low[site] - mean)
                    for one in pair:
                        write(one, low[site])
            if made % 6 == 0:
                mean = sum(map(flat, models)) / 4
                if between:
                    flight = (step + 2, mean)
                else:
                    land(mean)
            close([flat(model)], [[flat(one) for one in models]], rank)
        replica.finish()
        assert all(torch.equal(one, flat(model)) for one in everyone(flat(model)))


@scenario(4)
def test_a_slow_link_does_not_hold_up_lower_levels(rank, world):
    """While a round of all ranks is held up in the background, blocks go on averaging."""
    model = make()
    levels = [offbeat.Level(every=1, group=2), offbeat.Level(every=8, phase=1, outer=nesterov, delay=7)]
    replica = offbeat.Replica(sgd(model.parameters()), model, levels, subgroup=None)
    released, real = threading.Event(), GroupPeers.all_reduce

    def slow(self, tensor, op="sum"):
        if self.size == 4:
            assert threading.current_thread().name == "offbeat-rounds"
            assert released.wait(60)
        return real(self, tensor, op)

    GroupPeers.all_reduce = slow
    try:
        train(model, replica, range(6), rank)
        assert not released.is_set()
        rows = everyone(flat(model))
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[2], rows[3])
        assert not torch.equal(rows[0], rows[2])
        released.set()
        train(model, replica, range(6, 9), rank)
    finally:
        released.set()
        GroupPeers.all_reduce = real
    replica.finish()
    assert all(torch.equal(one, flat(model)) for one in everyone(flat(model)))


@scenario(4)
def test_levels_that_cross(rank, world):
    """Inside nodes often and across them rarely: every rank agrees with every other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "node"))
    for every in ({2: "node", 4: "site"}, {2: mesh["node"], 4: mesh["site"]}):
        model = make()
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every=every, mesh=mesh, subgroup=None)
        train(model, local, range(7), rank)
        local.finish()
        assert all(torch.equal(one, flat(model)) for one in everyone(flat(model)))
    for alone in ({4: 2}, {4: "site"}):
        with pytest.raises(ValueError, match="would never agree with the others"):
            offbeat.LocalSGD(sgd(model.parameters()), model, every=alone, mesh=mesh, subgroup=None)


CODED = ["bf16", "fp16", "int8", "int4", "int2", offbeat.TopK(0.25, bits=4)]


@scenario(2, 3)
def test_codecs_keep_replicas_equal(rank, world):
    """What is decoded is the same on every rank, to the bit; how far it is from dense depends on the codec."""
    dense = simulate_outer(world, 13, adamw, 4)[-1][rank]
    model = make()
    plain = offbeat.DiLoCo(adamw(model.parameters()), model, every=4, outer_lr=0.7, outer_momentum=0.9, subgroup=None)
    train(model, plain, range(13), rank)
    for codec in CODED:
        for feedback in (None, 0.9):
            model = make()
            diloco = offbeat.DiLoCo(
                adamw(model.parameters()), model, every=4, outer_lr=0.7, outer_momentum=0.9, codec=codec,
                error_feedback=feedback, subgroup=None, bucket_mb=0.01,
            )  # fmt: skip
            train(model, diloco, range(12), rank)
            assert all(torch.equal(one, flat(model)) for one in everyone(flat(model))), codec
            train(model, diloco, range(12, 13), rank)
            far = (flat(model) - dense).norm() / (dense - flat(make())).norm()
            assert far < {"bf16": 0.01, "fp16": 0.01, "int8": 0.03, "int4": 0.3}.get(codec, 1.2), (codec, far)
            residual = diloco.state_dict()["replica"][0]["tracks"][0][0]["residual"]
            assert (residual is not None) is (feedback is not None)
            assert 0 < diloco.bytes_sent < plain.bytes_sent


@scenario(2)
def test_save_load_go_on(rank, world):
    """At any step, also between sending and applying: to the bit as if nothing had happened."""
    for options in (
        {"every": 5},
        {"every": 5, "delay": 3},
        {"every": 6, "fragments": 3, "delay": 4},
        {"every": 5, "delay": 2, "codec": "int8", "error_feedback": 0.9},
        {"every": 4, "codec": offbeat.TopK(0.25), "error_feedback": 0.95, "warmup": 3},
        {"every": 4, "warmup": 3, "outer": functools.partial(offbeat.Adam, lr=0.05)},
    ):
        for at in (3, 7):
            finals = []
            for stop in (False, True):
                model = make()
                replica = offbeat.DiLoCo(adamw(model.parameters()), model, subgroup=None, **options)
                for step in range(13):
                    if stop and step == at:
                        file = io.BytesIO()
                        torch.save((model.state_dict(), replica.state_dict()), file)
                        train(model, replica, range(99, 100), rank)  # what comes after is forgotten
                        model = make(seed=1)
                        replica = offbeat.DiLoCo(adamw(model.parameters()), model, subgroup=None, **options)
                        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
                        model.load_state_dict(saved[0])
                        replica.load_state_dict(saved[1])
                        assert replica.steps == at
                    train(model, replica, range(step, step + 1), rank)
                syncs = replica.syncs
                replica.finish()
                finals.append((flat(model), syncs))
            assert torch.equal(finals[0][0], finals[1][0]), (options, at)
            assert finals[0][1] == finals[1][1]


@scenario(2)
def test_numbers_that_are_not_finite(rank, world):
    def replica(**options):
        model = make()
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        return model, offbeat.LocalSGD(inner, model, every=2, subgroup=None, **options)

    def steps(local, more):
        for _ in range(1 + bool(more)):
            local.step()

    for bad in (float("nan"), float("inf")):
        for more in ({}, {"delay": 1}):
            for policy in ("raise", "skip", "leave_out"):
                model, local = replica(nonfinite=policy, **more)
                with torch.no_grad():
                    model[0].bias[3] = bad if rank == 1 else 7.0
                    model[2].bias.fill_(float(rank))
                before = flat(model)
                if policy == "raise":
                    with pytest.raises(offbeat.NotFinite, match=r"on rank 1: 0\.bias"):
                        steps(local, more)
                else:
                    with pytest.warns(UserWarning, match=r"on rank 1: 0\.bias"):
                        steps(local, more)
                expected = everyone(before)[0] if policy == "leave_out" else before
                assert torch.equal(flat(model).nan_to_num(5), expected.nan_to_num(5)), (bad, more, policy)
    for amount in (float("inf"), float("nan"), -1.0):
        _, local = replica(weighted=True)
        with pytest.raises(ValueError, match="non-negative, finite"):
            local.seen(amount)
    # Coded differences: raised on every rank, and the next round works.
    model = make()
    diloco = offbeat.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.0), model, every=1, codec="int8", subgroup=None)
    diloco.step()
    with torch.no_grad():
        model[0].bias[0] = float("nan") if rank else 0.0
    with pytest.raises(offbeat.NotFinite):
        diloco.step()
    with torch.no_grad():
        model[0].bias[0] = 0.25
    diloco.step()
    assert torch.equal(*everyone(flat(model)))


@scenario(2)
def test_replicas_that_start_differently(rank, world):
    model = make(seed=rank)
    diloco = offbeat.DiLoCo(sgd(model.parameters()), model, every=4, subgroup=None)
    loss(model, batch(0, rank)).backward()
    with pytest.raises(offbeat.Disagreement, match=r"'0\.weight' of rank 1 differs .* sync_init=True"):
        diloco.step()
    model, expected = make(seed=rank), flat(make(seed=0))
    diloco = offbeat.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.0), model, every=4, subgroup=None, sync_init=True)
    diloco.step()
    assert torch.equal(flat(model), expected)


@scenario(2)
def test_nobody_commits_alone(rank, world):
    """One rank fails in the last bucket, or in the vote: no rank has changed, and the next round works on both."""
    real = GroupPeers.all_reduce
    for outer in (None, nesterov):
        for delay in (0, 1):
            for last in (False, True):
                for fits in (False, True):
                    model = make()
                    with torch.no_grad():
                        for p in model.parameters():
                            p.add_(0.0)
                    level = offbeat.Level(every=2, phase=1, outer=outer, delay=delay)
                    small = 64 if fits else 0.0005
                    replica = offbeat.Replica(sgd(model.parameters()), model, [level], subgroup=None, bucket_mb=small)
                    calls = [0]

                    def count(self, tensor, op="sum", calls=calls):
                        calls[0] += 1
                        return real(self, tensor, op)

                    # How many all-reduces a round has, the vote included.
                    GroupPeers.all_reduce = count
                    other = make()
                    probe = offbeat.Replica(sgd(other.parameters()), other, [level], subgroup=None, bucket_mb=small)
                    train(other, probe, range(1 + delay), rank)
                    whole, calls[0] = calls[0], 0

                    def fail(self, tensor, op="sum", calls=calls, whole=whole, last=last):
                        calls[0] += 1
                        if rank == 1 and calls[0] == whole - (0 if last else 1):
                            raise RuntimeError("no memory left")
                        return real(self, tensor, op)

                    GroupPeers.all_reduce = fail
                    errors = []
                    twin = make()
                    plain = sgd(twin.parameters())
                    try:
                        for step in range(1 + delay):
                            loss(model, batch(step, rank)).backward()
                            train(twin, plain, range(step, step + 1), rank)
                            try:
                                replica.step()
                            except RuntimeError as error:
                                errors.append(str(error))
                            replica.zero_grad()
                    finally:
                        GroupPeers.all_reduce = real
                    assert len(errors) == 1, errors
                    assert ("no memory" in errors[0]) is (rank == 1)
                    assert torch.equal(flat(model), flat(twin))
                    assert torch.equal(
                        *everyone(torch.cat([a.reshape(-1) for a in replica.anchors().values()] or [torch.zeros(1)]))
                    )
                    train(model, replica, range(1 + delay, 4 + delay), rank)
                    replica.finish()
                    assert torch.equal(*everyone(flat(model)))


@scenario(2)
def test_a_schedule_for_the_outer_optimizer(rank, world):
    model = make()
    diloco = offbeat.DiLoCo(sgd(model.parameters()), model, every=3, subgroup=None)
    assert diloco.outer.param_groups[0]["lr"] == 0.8
    assert diloco.replicas == 2
    scheduler = torch.optim.lr_scheduler.LambdaLR(diloco.outer, lambda round: 0.5**round)
    rates = []

    def outer(params):
        made = torch.optim.SGD(params, lr=0.8, momentum=0.6, nesterov=True)
        made.register_step_post_hook(lambda o, args, kwargs: o.param_groups[0].update(lr=o.param_groups[0]["lr"] / 2))
        return made

    expected = simulate_outer(world, 10, sgd, 3, outer)
    history = []
    for step in range(10):
        history += train(model, diloco, range(step, step + 1), rank)
        if (step + 1) % 3 == 0:
            scheduler.step()
            rates.append(diloco.outer.param_groups[0]["lr"])
    close(history, expected, rank)
    assert rates == [0.4, 0.2, 0.1]


@scenario(2)
def test_under_ddp_and_overlapped(rank, world):
    """Inside DDP with gradients averaged in warm-up only, with and without the overlapped step: the same numbers."""
    finals = []
    for overlapped in (False, True):
        model = make()
        ddp = DistributedDataParallel(model)
        inner = offbeat.AdamW(model.parameters(), lr=0.01)
        if overlapped:
            offbeat.overlap(inner, ddp)
        diloco = offbeat.DiLoCo(inner, ddp, every=4, warmup=3, delay=2, fragments=2, subgroup=None)
        finals.append(train(ddp, diloco, range(14), rank)[-1])
        diloco.finish()
        assert torch.equal(*everyone(flat(model)))
    assert torch.equal(*finals)


@scenario(2)
def test_ranks_with_less_data(rank, world):
    for options in ({}, {"delay": 2}, {"fragments": 2, "delay": 3}, {"codec": "int8"}):
        model = make()
        diloco = offbeat.DiLoCo(sgd(model.parameters()), model, every=4, subgroup=None, **options)
        train(model, diloco, range(9 if rank else 14), rank)
        diloco.finish()
        assert torch.equal(*everyone(flat(model))), options
        assert diloco.steps == 14


@scenario(2)
def test_replicas_have_agreed_after_finish(rank, world):
    """Also with mixing, where they have not after other rounds; so that any rank's state can be loaded on all."""
    model = make()
    diloco = offbeat.DiLoCo(sgd(model.parameters()), model, every=4, delay=2, subgroup=None)
    train(model, diloco, range(9 if rank == 0 else 7), rank)
    diloco.finish()
    assert torch.equal(*everyone(flat(model)))
    assert diloco.agreed
    saved = copy.deepcopy(everyone(diloco.state_dict())[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diloco.load_state_dict(saved)
    train(model, diloco, range(1), rank)
    assert not diloco.agreed


@scenario(2)
def test_peaks_fall_with_fragments(rank, world):
    """No round of a fragment sends more than its share of the parameters."""

    def sent(fragments):
        model = nn.Sequential(*(nn.Linear(30, 30) for _ in range(8)))
        diloco = offbeat.DiLoCo(
            torch.optim.SGD(model.parameters(), lr=0.0), model, every=8, fragments=fragments, subgroup=None
        )
        most, before = 0, diloco.bytes_sent
        for _ in range(16):
            diloco.step()
            most, before = max(most, diloco.bytes_sent - before), diloco.bytes_sent
        return most

    # Beside parameters every round sends one short message and a vote.
    whole, part = sent(1), sent(4)
    assert whole - part == 4 * 8 * 930 * 3 // 4
    assert 0 < part - 8 * 930 < 2500


@scenario(4)
def test_sharded_replicas(rank, world):
    """Two replicas of two shards each (FSDP2 inside a site): as two whole replicas that average inside."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    site = rank // 2
    for options in ({}, {"delay": 2}, {"fragments": 2, "delay": 1}, {"codec": "int8"}):
        model, whole = make(), [make(), make()]
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["shard"])
        diloco = offbeat.DiLoCo(adamw(model.parameters()), model, every=4, outer_lr=0.5, outer_momentum=0.9, **options)
        assert diloco.replicas == 2
        outer = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9, nesterov=True)
        expected = simulate_outer(
            2, 9, adamw, 4, outer, parts=options.get("fragments", 1), delay=options.get("delay", 0),
        )  # fmt: skip
        for step in range(9):
            loss(model, batch(step, site)).backward()
            diloco.step()
            diloco.zero_grad()
            now = torch.cat([p.full_tensor().reshape(-1) for p in model.parameters()]).detach()
            far = 1e-11 if "codec" not in options else 0.05
            torch.testing.assert_close(now, expected[step][site], rtol=far, atol=far)
        assert len(whole) == 2
        diloco.finish()
        now = torch.cat([p.full_tensor().reshape(-1) for p in model.parameters()]).detach()
        assert all(torch.equal(now, one) for one in everyone(now))


@scenario(4)
def test_sharded_replicas_decide_together(rank, world):
    """NaN in one shard, and a rank that fails in one: no shard goes on alone."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    for policy in ("raise", "skip", "leave_out"):
        for delay in (0, 1):
            model = make()
            fully_shard(model, mesh=mesh["shard"])
            level = {"nonfinite": policy}
            inner = torch.optim.SGD(model.parameters(), lr=0.0)
            diloco = offbeat.DiLoCo(inner, model, every=2, delay=delay, level=level)
            diloco.step()
            if rank == 0:
                with torch.no_grad():
                    model[0].weight._local_tensor[0, 0] = float("nan")
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                raised = False
                try:
                    for _ in range(1 + delay):
                        diloco.step()
                except offbeat.NotFinite:
                    raised = True
            assert raised is (policy == "raise")
            assert raised or any("NaN or infinite" in str(one.message) for one in seen)
            assert version(diloco) == (1 if policy == "leave_out" else 0)
            if policy == "leave_out":
                assert all(p.full_tensor().isfinite().all() for p in model.parameters())
    real = GroupPeers.all_reduce
    model = make()
    fully_shard(model, mesh=mesh["shard"])
    diloco = offbeat.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.0), model, every=2)
    diloco.step()

    def fail(self, tensor, op="sum"):
        if rank == 2:
            raise RuntimeError("no memory left")
        return real(self, tensor, op)

    GroupPeers.all_reduce = fail
    try:
        with pytest.raises(RuntimeError):
            diloco.step()
    finally:
        GroupPeers.all_reduce = real
    assert version(diloco) == 0
    for _ in range(2):
        diloco.step()
    assert version(diloco) == 1


@scenario(4)
def test_blocks_whose_ranks_end_at_different_steps(rank, world):
    """Anchors of a lower level stay equal in a block, and so does its outer state."""
    model = make()
    levels = [
        offbeat.Level(every=2, group=2, outer=functools.partial(offbeat.Adam, lr=0.05)),
        offbeat.Level(every=8, outer=nesterov, delay=4),
    ]
    replica = offbeat.Replica(sgd(model.parameters()), model, levels, subgroup=None)
    train(model, replica, range(9 if rank == 1 else 10), rank)
    replica.finish()
    lower = replica.outers[0]
    for name, anchor in replica.anchors(0).items():
        for one in (anchor, *(t for t in lower.state[anchor].values())):
            rows = everyone(one.clone())
            assert torch.equal(rows[rank], rows[rank // 2 * 2]), name


def saved_by_two(rank: int, world: int, options: dict[str, Any]) -> Any:
    model = make()
    diloco = offbeat.DiLoCo(adamw(model.parameters()), model, subgroup=None, **options)
    train(model, diloco, range(8), rank)
    return copy.deepcopy((model.state_dict(), diloco.state_dict()))


def loaded_by_others(rank: int, world: int, options: dict[str, Any], saved: Any) -> Any:
    model = make(seed=4)
    diloco = offbeat.DiLoCo(adamw(model.parameters()), model, subgroup=None, **options)
    state = saved[rank % len(saved)]
    model.load_state_dict(state[0])
    diloco.load_state_dict(state[1])
    anchors = torch.cat([a.reshape(-1) for a in diloco.anchors().values()])
    momentum = torch.cat([diloco.outer.state[a]["momentum_buffer"].reshape(-1) for a in diloco.anchors().values()])
    train(model, diloco, range(8, 16), rank)
    diloco.finish()
    return anchors, momentum, flat(model)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("options", [{"every": 4}, {"every": 4, "delay": 2, "codec": "int8", "error_feedback": 0.9}])
def test_another_number_of_replicas_goes_on(world, options):
    """Anchors and outer momentum are everybody's: more replicas, or fewer, go on from them."""
    saved = run_ranks(saved_by_two, 2, options)
    results = run_ranks(loaded_by_others, world, options, saved)
    outer = saved[0][1]["replica"][0]["outer"][0]
    anchors = torch.cat([a.reshape(-1) for a in outer["anchors"].values()])
    for found, _, final in results:
        assert torch.equal(found, anchors)
        assert torch.equal(final, results[0][2])
    assert all(torch.equal(one[1], results[0][1]) for one in results)


def through_dcp(rank: int, world: int, folder: str) -> bool:
    import torch.distributed.checkpoint as dcp

    finals = []
    options = {"every": 4, "fragments": 2, "delay": 3, "codec": "int4", "error_feedback": 1.0}
    for stop in (False, True):
        model = make()
        diloco = offbeat.DiLoCo(adamw(model.parameters()), model, subgroup=None, **options)
        for step in range(11):
            if stop and step == 7:
                contents = {f"model{rank}": model.state_dict(), f"optimizer{rank}": diloco.state_dict()}
                dcp.save(contents, checkpoint_id=folder)
                template = copy.deepcopy(contents)
                model = make(seed=3)
                diloco = offbeat.DiLoCo(adamw(model.parameters()), model, subgroup=None, **options)
                dcp.load(template, checkpoint_id=folder)
                model.load_state_dict(template[f"model{rank}"])
                diloco.load_state_dict(template[f"optimizer{rank}"])
            train(model, diloco, range(step, step + 1), rank)
        diloco.finish()
        finals.append(flat(model))
    return torch.equal(*finals)


def test_distributed_checkpoints(tmp_path):
    assert run_ranks(through_dcp, 2, str(tmp_path)) == [True, True]


DCP_OPTIONS = {
    "late": {"every": 4, "fragments": 2, "delay": 3, "codec": "int4", "error_feedback": 1.0},
    "blocking": {"every": 4},
}


def save_with_dcp(rank: int, world: int, folder: str, options: dict[str, Any], stop: int) -> torch.Tensor:
    """Saves in three forms after so many steps, and goes on."""
    import torch.distributed.checkpoint as dcp

    model = make()
    diloco = offbeat.DiLoCo(adamw(model.parameters()), model, subgroup=None, **options)
    train(model, diloco, range(stop), rank)
    state = diloco.state_dict()
    dcp.save({f"model{rank}": model.state_dict(), f"whole{rank}": (state,)}, checkpoint_id=f"{folder}/whole")
    dcp.save({f"optimizer{rank}": state}, checkpoint_id=f"{folder}/parts")
    train(model, diloco, range(stop, stop + 7), rank)
    diloco.finish()
    return flat(model)


def load_with_dcp(rank: int, world: int, folder: str, options: dict[str, Any], stop: int, how: str) -> torch.Tensor:
    """What a new process does, which has nothing of the one that saved."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model = make(seed=3)
    diloco = offbeat.DiLoCo(adamw(model.parameters()), model, subgroup=None, **options)
    whole = {f"model{rank}": model.state_dict(), f"whole{rank}": ()}
    dcp.load(whole, checkpoint_id=f"{folder}/whole")
    model.load_state_dict(whole[f"model{rank}"])
    if how == "whole":
        diloco.load_state_dict(whole[f"whole{rank}"][0])
    elif how == "converted":
        dcp_to_torch_save(f"{folder}/parts", f"{folder}/parts{rank}.pt")
        diloco.load_state_dict(torch.load(f"{folder}/parts{rank}.pt", weights_only=True)[f"optimizer{rank}"])
    else:
        if how == "allocated":
            diloco.init_state()
        parts = {f"optimizer{rank}": diloco.state_dict()}
        dcp.load(parts, checkpoint_id=f"{folder}/parts")
        if how == "empty":
            with pytest.raises(ValueError, match=r"that of 6 is not there .*init_state\(\)"):
                diloco.load_state_dict(parts[f"optimizer{rank}"])
            assert diloco.steps == 0
            assert not diloco.state
            return torch.zeros(())
        diloco.load_state_dict(parts[f"optimizer{rank}"])
    train(model, diloco, range(stop, stop + 7), rank)
    diloco.finish()
    return flat(model)


@pytest.mark.parametrize(("options", "stop"), [("late", 6), ("blocking", 3)])
def test_distributed_checkpoints_in_a_new_process(tmp_path, options, stop):
    arguments = str(tmp_path), DCP_OPTIONS[options], stop
    never = run_ranks(save_with_dcp, 2, *arguments)
    for how in ("whole", "converted", "allocated", "empty") if options == "late" else ("whole",):
        again = run_ranks(load_with_dcp, 2, *arguments, how)
        assert how == "empty" or all(map(torch.equal, never, again))


def test_numbers_that_have_become_strings():
    """As in what ``dcp_to_torch_save`` writes."""

    def turned(state):
        return {**state, "state": {str(key): value for key, value in state["state"].items()}}

    for cls in (offbeat.AdamW, offbeat.LBFGS):
        finals = []
        for stop in (False, True):
            model = make()
            optimizer = cls(model.parameters(), lr=0.01)

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                found = loss(model, batch(0, 0))
                found.backward()
                return found

            optimizer.step(closure)
            if stop:
                state = turned(optimizer.state_dict())
                optimizer = cls(model.parameters(), lr=0.01)
                optimizer.load_state_dict(state)
                closure.__defaults__ = (model, optimizer)
            optimizer.step(closure)
            finals.append(flat(model))
        assert torch.equal(*finals)


@pytest.mark.parametrize(
    ("what", "lose"),
    [
        ("'tracks'", lambda mine: mine.pop("tracks")),
        ("'outer'", lambda mine: mine.pop("outer")),
        ("'residual' of level 0", lambda mine: mine["tracks"][0][0].pop("residual")),
        ("'optimizer' of level 0", lambda mine: mine["outer"][0].pop("optimizer")),
        ("the anchor of '0.weight'", lambda mine: mine["outer"][0]["anchors"].pop("0.weight")),
    ],
)
def test_a_checkpoint_that_is_not_complete_changes_nothing(what, lose):
    def replica(rank: int, peers: Any) -> None:
        def diloco_of(model: Any) -> Any:
            return offbeat.DiLoCo(adamw(model.parameters()), model, every=2, group=peers, subgroup=None)

        model = make()
        diloco = diloco_of(model)
        train(model, diloco, range(3), rank)
        saved = copy.deepcopy(diloco.state_dict())
        lose(saved["replica"][0])
        other = diloco_of(make(seed=3))
        with pytest.raises(ValueError, match=f"{what}.* missing; nothing was changed"):
            other.load_state_dict(saved)
        assert other.steps == 0
        assert not other.state

    offbeat.Simulation(1).run(replica)


def test_a_checkpoint_is_not_written_to_after_loading():
    def replica(rank: int, peers: Any) -> None:
        def diloco_of(model: Any) -> Any:
            outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)
            inner = offbeat.SGD(model.parameters(), lr=0.1)
            return offbeat.DiLoCo(inner, model, every=2, outer=outer, group=peers, subgroup=None)

        model = make()
        diloco = diloco_of(model)
        train(model, diloco, range(3), rank)
        saved = diloco.state_dict()
        before = copy.deepcopy(saved["replica"][0]["outer"][0]["optimizer"]["state"])
        other_model = make(seed=3)
        other = diloco_of(other_model)
        other.load_state_dict(saved)
        train(other_model, other, range(3, 6), rank)
        after = saved["replica"][0]["outer"][0]["optimizer"]["state"]
        assert all(torch.equal(before[i]["momentum_buffer"], after[i]["momentum_buffer"]) for i in before)

    offbeat.Simulation(1).run(replica)


def test_checkpoints_of_before_load():
    def replica(rank: int, peers: Any) -> bool:
        def diloco_of(model: Any) -> Any:
            return offbeat.DiLoCo(adamw(model.parameters()), model, every=3, delay=2, group=peers, subgroup=None)

        model = make()
        diloco = diloco_of(model)
        train(model, diloco, range(4), rank)
        saved = copy.deepcopy(diloco.state_dict())
        (mine,) = saved["replica"]
        del mine["stateful"], mine["tracks"][0][0]["flight"]["left_out"], mine["tracks"][0][0]["flight"]["notes"]
        other_model = make(seed=3)
        other_model.load_state_dict(model.state_dict())
        other = diloco_of(other_model)
        other.load_state_dict({**saved, "replica": mine})
        train(model, diloco, range(4, 7), rank)
        train(other_model, other, range(4, 7), rank)
        return torch.equal(flat(model), flat(other_model))

    assert offbeat.Simulation(2).run(replica) == [True, True]


def test_outer_state_that_has_no_place_is_told_of():
    def replica(rank: int, peers: Any) -> list[str]:
        model = make()
        diloco = offbeat.DiLoCo(sgd(model.parameters()), model, every=2, group=peers, subgroup=None)
        train(model, diloco, range(3), rank)
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every=2, group=peers, subgroup=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            local.load_state_dict(diloco.state_dict())
        return [str(one.message) for one in caught]

    (told,) = offbeat.Simulation(1).run(replica)
    assert any("anchors and an outer optimizer for level 0" in one for one in told)


def stalls(rank: int, world: int) -> Any:
    """One rank stalls for twice as long as a collective may take; then training goes on."""
    model = make()
    replica = offbeat.LocalSGD(sgd(model.parameters()), model, every=2, subgroup=None, deadline=1.0)
    diloco_model = make()
    diloco = offbeat.DiLoCo(
        sgd(diloco_model.parameters()), diloco_model, every=2, subgroup=None, delay=1, level={"deadline": 1.0}
    )
    failed = [0, 0]
    for step in range(12):
        if step == 4 and rank == 1:
            time.sleep(2.5)
        for i, (module, optimizer) in enumerate(((model, replica), (diloco_model, diloco))):
            loss(module, batch(step, rank)).backward()
            try:
                optimizer.step()
            except offbeat.ExchangeError:
                failed[i] += 1
            optimizer.zero_grad()
    replica.sync()
    diloco.sync()
    return failed, flat(model), flat(diloco_model)


def test_a_stall_is_overcome():
    """With a real stall: the round fails on every rank, and a later one connects again."""
    results = run_ranks(stalls, 2)
    for i in range(2):
        counts = [failed[i] for failed, *_ in results]
        assert 1 <= counts[0] <= 2, counts
        assert 1 <= counts[1] <= 2, counts
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])


def saving_after_a_failure(rank: int, world: int) -> Any:
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, subgroup=None, delay=3, deadline=1.0)
    train(model, local, range(1 if rank == 0 else 0), rank)
    saved = local.state_dict() if rank == 0 else {}
    dist.barrier()
    if rank == 0:
        ((track,),) = saved["replica"][0]["tracks"]
        return track["flight"]["failed"] and "values" not in track["flight"]
    return True


def test_saving_works_after_a_failed_round():
    assert run_ranks(saving_after_a_failure, 2) == [True, True]
