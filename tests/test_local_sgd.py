"""LocalSGD in real processes, against a simulation in one process: when, over whom, and with which optimizer."""

from __future__ import annotations

import gc
import os
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer as TorchPostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.harness import adamw, batch, close, everyone, flat, loss, make, sgd, simulate, train, write
from tests.scenarios import Scenarios

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("local_sgd"), pytest.mark.timeout(320)]

scenario = Scenarios(__name__)


@contextmanager
def nodes_of(size: int | None):
    """As a launcher with so many processes a node would have it."""
    saved = {key: os.environ.pop(key, None) for key in ("LOCAL_WORLD_SIZE", "LOCAL_RANK")}
    if size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(size)
    try:
        yield
    finally:
        for key, value in saved.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


def periodic(world: int, every: int, warmup: int) -> Any:
    return lambda s: [list(range(world))] if s >= warmup and (s - warmup) % every == 0 else []


@scenario(2, 4)
def test_like_the_simulation(rank, world):
    """Plain and DDP modules, ranks by themselves and in nodes of two, our optimizers and torch's."""
    for wrap in (lambda m: m, DistributedDataParallel):
        for node in (1, world // 2):
            for optimizer in (sgd, adamw):
                model = make()
                with nodes_of(node):
                    local = offbeat.LocalSGD(optimizer(model.parameters()), wrapped := wrap(model), every=4, warmup=3)
                addresses = [p.data_ptr() for p in model.parameters()]
                history = train(wrapped, local, range(13), rank)
                expected = simulate(world, 13, optimizer, periodic(world, 4, 3), warmup=3, node=node)
                close(history, expected, rank)
                assert [p.data_ptr() for p in model.parameters()] == addresses
                assert (local.steps, local.syncs) == (13, 3)
                for step, mine in enumerate(history):  # to the bit, where they must agree
                    ranks = everyone(mine)
                    agree = step < 3 or (step - 3) % 4 == 0
                    assert all(torch.equal(one, ranks[0]) for one in ranks) is agree


@scenario(2)
def test_like_torchs_three_parts(rank, world):
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    models = [make(), make()]
    alone, _ = dist.new_subgroups(group_size=1)
    ddps = [DistributedDataParallel(model) for model in models]
    ddps[1].register_comm_hook(torch_hook.PostLocalSGDState(None, alone, 5), torch_hook.post_localSGD_hook)
    theirs = TorchPostLocalSGDOptimizer(sgd(models[1].parameters()), PeriodicModelAverager(3, 5))
    ours = offbeat.LocalSGD(sgd(models[0].parameters()), ddps[0], every=3, warmup=5, subgroup=alone)
    for step in range(14):
        train(ddps[0], ours, range(step, step + 1), rank)
        train(ddps[1], theirs, range(step, step + 1), rank)
        assert torch.equal(flat(models[0]), flat(models[1])), step


@scenario(4)
def test_hierarchies(rank, world):
    """Two levels of sizes, of process groups and of a mesh's dimensions; only the highest that is due is averaged."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "rack"))
    pairs = [[0, 1], [2, 3]]
    groups = [dist.new_group(pair) for pair in pairs]
    everybody = [list(range(4))]

    def due(s):
        return (everybody if (s - 2) % 6 == 0 else pairs if (s - 2) % 2 == 0 else []) if s >= 2 else []

    expected = simulate(4, 12, sgd, due, warmup=2)
    for every in (
        {2: 2, 6: 4},
        [(2, groups[rank // 2]), (6, dist.group.WORLD)],
        {2: "rack", 6: ("site", "rack")},
        {2: mesh["rack"], 6: 4},
        [(lambda s: 2, 2), (lambda s: 6, 4)],
    ):
        model = make()
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every=every, warmup=2, subgroup=None, mesh=mesh)
        close(train(model, local, range(12), rank), expected, rank)
        assert local.syncs == 5
    # A dimension of a mesh that is no block of ranks: the same places of both sites.
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every={2: "site", 4: 4}, subgroup=None, mesh=mesh)
    across = [[0, 2], [1, 3]]
    close(
        train(model, local, range(7), rank),
        simulate(4, 7, sgd, lambda s: everybody if s % 4 == 0 else across if s % 2 == 0 else []),
        rank,
    )
    # Three levels.
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every={1: 1, 2: 2, 4: 4}, subgroup=None)
    close(
        train(model, local, range(9), rank),
        simulate(4, 9, sgd, lambda s: everybody if s % 4 == 0 else pairs if s % 2 == 0 else []),
        rank,
    )


@scenario(2)
def test_schedules_as_functions(rank, world):
    """Periods that grow, and warm-up until the first decay of the learning rate."""
    asked = []

    def growing(step):
        asked.append(step)
        return 1 if step < 3 else 2 if step < 8 else 5

    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=growing)
    history = train(model, local, range(18), rank)
    averaged = [all(torch.equal(a, b) for a, b in [everyone(one)]) for one in history]
    assert [s for s in range(18) if averaged[s]] == [0, 1, 2, 4, 6, 11, 16]
    assert asked == list(range(18))
    close(history, simulate(2, 18, sgd, lambda s: [[0, 1]] if averaged[s] else []), rank)

    model = make()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = offbeat.LocalSGD(
        optimizer, ddp, every=3, warmup=lambda step: optimizer.param_groups[0]["lr"] >= 0.1, subgroup=None
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(local, [4, 7], gamma=0.5)
    agreed = []
    for step in range(12):
        train(ddp, local, range(step, step + 1), rank)
        scheduler.step()
        agreed.append(torch.equal(*everyone(flat(model))))
    assert agreed == [s < 4 or (s - 4) % 3 == 0 for s in range(12)]
    assert local.param_groups[0]["lr"] == 0.025


@scenario(2)
def test_any_optimizer(rank, world):
    """Closures (LBFGS too), hooks, defaults, schedulers, new groups, live groups after a load, names of its own."""
    model = make()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)
    local = offbeat.LocalSGD(inner, model, every=3)
    reference = [make(), make()]
    lbfgs = [torch.optim.LBFGS(m.parameters(), lr=0.3, max_iter=3) for m in reference]

    def closure_of(m, opt, step, r):
        def closure():
            opt.zero_grad()
            value = loss(m, batch(step, r))
            value.backward()
            return value

        return closure

    for step in range(5):
        value = local.step(closure_of(model, local, step, rank))
        assert isinstance(value, torch.Tensor)
        for r in range(2):
            lbfgs[r].step(closure_of(reference[r], lbfgs[r], step, r))
        if step % 3 == 0:
            mean = (flat(reference[0]) + flat(reference[1])) / 2
            for m in reference:
                write(m, mean)
        torch.testing.assert_close(flat(model), flat(reference[rank]), rtol=1e-10, atol=1e-10)

    # In warm-up closures see averaged gradients and losses, or ranks would search for different lengths.
    for wrap in (lambda m: m, DistributedDataParallel):
        model = make()
        module = wrap(model)
        local = offbeat.LocalSGD(
            torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=6, line_search_fn="strong_wolfe"),
            module,
            every=3,
            warmup=3,
            subgroup=None,
        )
        one = make()
        reference = torch.optim.LBFGS(one.parameters(), lr=0.3, max_iter=6, line_search_fn="strong_wolfe")
        for step in range(3):
            value = local.step(closure_of(module, local, step, rank))

            def both(step=step, one=one, reference=reference):
                reference.zero_grad()
                mean = (loss(one, batch(step, 0)) + loss(one, batch(step, 1))) / 2
                mean.backward()
                return mean

            expected = reference.step(both)
            torch.testing.assert_close(value.detach(), expected.detach(), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(flat(model), flat(one), rtol=1e-6, atol=1e-7)
            assert torch.equal(*everyone(flat(model)))

    model = make()
    inner = adamw([{"params": model[0].parameters(), "lr": 0.5}])
    local = offbeat.LocalSGD(inner, model, every=2)
    assert isinstance(local, torch.optim.Optimizer)
    assert local.defaults is inner.defaults
    assert local.param_groups is inner.param_groups
    calls = []
    local.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("before", opt is local)))
    local.register_step_post_hook(lambda opt, args, kwargs: calls.append(("after", opt is local)))
    inner.register_step_post_hook(lambda opt, args, kwargs: calls.append(("inner", opt is inner)))
    local.register_state_dict_post_hook(lambda opt, sd: {**sd, "more": 1})
    scheduler = torch.optim.lr_scheduler.LambdaLR(local, lambda s: 1 / (s + 1))
    train(model, local, range(1), rank)
    assert calls == [("before", True), ("inner", True), ("after", True)]
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.25
    local.add_param_group({"params": [*model[2].parameters(), *model[4].parameters()], "lr": 0.1})
    assert len(inner.param_groups) == 2
    train(model, local, range(1, 3), rank)
    assert torch.equal(*everyone(flat(model)))
    saved = local.state_dict()
    assert saved.pop("more") == 1
    local.load_state_dict(saved)
    assert local.param_groups is inner.param_groups
    local.param_groups[0]["lr"] = 0.0
    before = flat(model[0])
    train(model, local, range(3, 4), rank)
    assert torch.equal(flat(model[0]), before)
    assert local.init_state.__self__ is inner  # names it does not know are the inner optimizer's
    with pytest.raises(AttributeError):
        _ = local.no_such_name


@scenario(2)
def test_overlapped(rank, world):
    """An overlapped optimizer gives the numbers of one that is not, to the bit, on every kind of step."""
    for delay in (0, 2):
        histories = []
        for overlap in ("before", "after", None):
            model = make()
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
            inner = adamw(model.parameters())
            handle = offbeat.overlap(inner, ddp) if overlap == "before" else None
            with nodes_of(1):
                local = offbeat.LocalSGD(inner, ddp, every=3, warmup=4, delay=delay)
            if overlap == "after":
                handle = offbeat.overlap(inner, ddp)
            seen = []
            if overlap:
                before = [flat(model)]

                def look(opt, args, kwargs, model=model, before=before, seen=seen):
                    seen.append(not torch.equal(flat(model), before[0]))

                local.register_step_pre_hook(look)
            history = []
            for step in range(14):
                history += train(ddp, local, range(step, step + 1), rank)
                if overlap:
                    before[0] = flat(model)
            histories.append(history)
            assert seen == ([True] * 14 if overlap else [])  # updated before step(): in backward
            if handle is not None:
                handle.remove()
        for three in zip(*histories, strict=True):
            assert all(torch.equal(one, three[-1]) for one in three)
        if not delay:
            close(histories[0], simulate(2, 14, adamw, periodic(2, 3, 4), warmup=4), rank)
    # Without DDP, gradients have been used before step() could average them.
    model = make()
    inner = adamw(model.parameters())
    offbeat.overlap(inner, model)
    with pytest.raises(ValueError, match="overlapped"):
        offbeat.LocalSGD(inner, model, every=2, warmup=3)
    local = offbeat.LocalSGD(inner, model, every=3, subgroup=None)
    close(train(model, local, range(7), rank), simulate(2, 7, adamw, periodic(2, 3, 0)), rank)
    with pytest.raises(TypeError, match="wraps another optimizer"):
        offbeat.overlap(local, model)


@scenario(4)
def test_sharded_inside_nodes(rank, world):
    """FSDP2 shards over two ranks; the two pairs are replicas, which LocalSGD averages shard by shard."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for given in (None, mesh.get_group("replica")):
        for delay in (0, 1):
            for overlap in (False, True):
                model = make()
                for part in (model[0], model[2], model[4]):
                    fully_shard(part, mesh=mesh["shard"])
                fully_shard(model, mesh=mesh["shard"])
                inner = adamw(model.parameters())
                if overlap:
                    offbeat.overlap(inner, model)
                local = offbeat.LocalSGD(inner, model, every=3, warmup=0 if overlap else 2, group=given, delay=delay)
                warmup = 0 if overlap else 2
                expected = simulate(
                    4,
                    9,
                    adamw,
                    lambda s, warmup=warmup: [[0, 2], [1, 3]] if s >= warmup and (s - warmup) % 3 == 0 else [],
                    warmup=warmup,
                    node=2,
                    delay=delay,
                )
                for step in range(9):
                    loss(model, batch(step, rank)).backward()
                    local.step()
                    local.zero_grad()
                    full = torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])
                    torch.testing.assert_close(full, expected[step][rank], rtol=1e-10, atol=1e-11)
    # Averaging over ranks that hold other shards is refused on all of them.
    model = make()
    fully_shard(model, mesh=mesh["shard"])
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, group=dist.group.WORLD)
    loss(model, batch(0, rank)).backward()
    with pytest.raises(offbeat.Disagreement, match="shard"):
        local.step()


@scenario(2)
def test_gradients_of_plain_modules(rank, world):
    """Averaged before the step: unused ones as zero, clipped after they are averaged, refused where ranks differ."""
    model, reference = make(), make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, warmup=10)
    ddp, plain = DistributedDataParallel(reference), sgd(reference.parameters())
    for step in range(4):
        for module, optimizer in ((model, local), (ddp, plain)):
            loss(module, batch(step, rank)).backward()
            if optimizer is local:
                local.average_gradients()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(flat(model), flat(reference), rtol=1e-12, atol=1e-12)

    # New gradients after averaged ones that were thrown away are averaged too.
    local.zero_grad()
    loss(model, batch(9, rank)).backward()
    local.average_gradients()
    model.zero_grad()
    loss(model, batch(10, rank)).backward()
    mine = [p.grad.clone() for p in model.parameters()]
    local.average_gradients()
    local.average_gradients()
    for p, g in zip(model.parameters(), mine, strict=True):
        torch.testing.assert_close(p.grad, sum(everyone(g)) / 2, rtol=1e-12, atol=1e-14)

    # One parameter is used by rank 1 alone, one by nobody.
    one, two, three = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))
    holder = nn.ParameterList([one, two, three])
    local = offbeat.LocalSGD(torch.optim.SGD(holder.parameters(), lr=1.0, weight_decay=0.5), holder, warmup=9)
    (one.sum() * 2 + (two.sum() if rank == 1 else 0)).backward()
    local.step()
    assert torch.equal(one, torch.full_like(one, 1 - 2.5))
    assert torch.equal(two, torch.full_like(two, 1 - 1.0))
    assert torch.equal(three, torch.ones_like(three))
    assert three.grad is None

    model = make(seed=rank)
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=2, warmup=2)
    loss(model, batch(0, rank)).backward()
    with pytest.raises(offbeat.Disagreement, match=r"do not start from the same parameters: '0.weight' of rank 1"):
        local.step()


@scenario(2, 4)
def test_nodes(rank, world):
    """From the launcher's local world size, from LOCAL_RANK where it is set, on a CPU."""
    from offbeat.wire.groups import node_group

    with nodes_of(1):
        assert node_group(dist.group.WORLD) == (None, "alone on a node by LOCAL_WORLD_SIZE")
    with nodes_of(None), pytest.warns(UserWarning, match="every rank trains by itself"):  # one host and no launcher
        assert node_group(dist.group.WORLD) == (None, "all are on one host, and LOCAL_WORLD_SIZE is not set")
    with nodes_of(world), pytest.warns(UserWarning, match="all ranks are on one node"):
        assert dist.get_process_group_ranks(node_group(dist.group.WORLD)[0]) == list(range(world))
    if world == 4:
        with nodes_of(2):
            assert dist.get_process_group_ranks(node_group(dist.group.WORLD)[0]) == [rank // 2 * 2, rank // 2 * 2 + 1]
        with nodes_of(3 if rank < 3 else 1):  # nodes of different sizes
            os.environ["LOCAL_RANK"] = str(rank if rank < 3 else 0)
            found, _ = node_group(dist.group.WORLD)
            assert found is None if rank == 3 else dist.get_process_group_ranks(found) == [0, 1, 2]
    from offbeat._torch import timeout_of
    from offbeat.wire.groups import blocks, new_group

    # Whatever groups each rank has: torch's own way would wait for ever if these are not equally many.
    dist.new_group([0])
    for group in (new_group(range(world), dist.group.WORLD), blocks(dist.group.WORLD, 1)):
        assert timeout_of(group) == timeout_of(dist.group.WORLD) == timedelta(seconds=60)
    if world == 4:
        group = dist.new_group([0, 1, 2])
        if rank < 3:
            with pytest.raises(RuntimeError, match=r"of ranks \[0, 1, 2\] is needed"):
                new_group([0, 1, 2], group)
        some, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        if rank in (1, 2):  # ranks outside know nothing of it
            new_group([1, 2], some)
    with nodes_of(1 if rank == 0 else None), pytest.raises(ValueError, match="LOCAL_WORLD_SIZE is set for some"):
        node_group(dist.group.WORLD)
    with nodes_of(None):
        os.environ["LOCAL_WORLD_SIZE"] = "two" if rank == 1 else "1"
        with pytest.raises(ValueError, match="on rank 1 it is 'two'"):
            node_group(dist.group.WORLD)


@scenario(2)
def test_communication_hooks(rank, world):
    """A hook of torch's in warm-up, and clear words where DDP's place for a hook is taken."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

    for hook in (fp16_compress_hook, None):
        model = make(dtype=torch.float32)
        ddp = DistributedDataParallel(model)
        local = offbeat.LocalSGD(sgd(model.parameters()), ddp, every=3, warmup=2, subgroup=None, comm_hook=hook)
        for step in range(4):
            loss(ddp, batch(step, rank, torch.float32)).backward()
            if hook is not None:
                rounded = all(torch.equal(p.grad, p.grad.half().float()) for p in model.parameters())
                assert rounded is (step < 2)
            local.step()
            local.zero_grad()
    with pytest.raises(ValueError, match="another LocalSGD"):
        offbeat.LocalSGD(sgd(model.parameters()), ddp)
    # When that one is gone DDP averages as it always did, and another may take its place.
    del local
    gc.collect()
    for _ in range(2):
        loss(ddp, batch(0, rank, torch.float32)).backward()
        assert torch.equal(*everyone(model[0].weight.grad))
        ddp.zero_grad()
        local = offbeat.LocalSGD(sgd(model.parameters()), ddp, every=2, subgroup=None)
        loss(ddp, batch(0, rank, torch.float32)).backward()
        assert not torch.equal(*everyone(model[0].weight.grad))
        ddp.zero_grad()
        del local
        gc.collect()
    ddp = DistributedDataParallel(make())
    ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match=r"has a communication hook already \(allreduce_hook\)"):
        offbeat.LocalSGD(sgd(ddp.parameters()), ddp)
    ddp = DistributedDataParallel(make())
    inner = adamw(ddp.parameters())
    handle = offbeat.overlap(inner, ddp, comm_hook=allreduce_hook)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"allreduce_hook reduces .* LocalSGD\(\.\.\., comm_hook=\)"):
            offbeat.LocalSGD(inner, ddp)
        handle.remove()  # the hook goes on reducing
    offbeat.overlap(inner, ddp).remove()  # and now it does not
    local = offbeat.LocalSGD(inner, ddp, every=3, subgroup=None)
    loss(ddp, batch(0, rank)).backward()
    assert not torch.equal(*everyone(ddp.module[0].weight.grad))
    assert not ddp.broadcast_buffers
    del local
    gc.collect()
    assert ddp.broadcast_buffers
    ddp.zero_grad()
    handle = offbeat.overlap(inner, ddp, comm_hook=allreduce_hook)  # its place is free again
    handle.remove()
    ddp = DistributedDataParallel(make(), find_unused_parameters=True)
    with pytest.warns(UserWarning, match="find_unused_parameters"):
        offbeat.LocalSGD(sgd(ddp.parameters()), ddp)
    plain = make()
    with pytest.raises(ValueError, match="comm_hook needs a DistributedDataParallel module"):
        offbeat.LocalSGD(sgd(plain.parameters()), plain, comm_hook=allreduce_hook)


@scenario(2)
def test_accumulation(rank, world):
    """Several backward passes a step, in warm-up and after: steps are counted, not passes."""
    for wrap in (DistributedDataParallel, lambda m: m):
        model = make()
        module = wrap(model)
        local = offbeat.LocalSGD(sgd(model.parameters()), module, every=2, warmup=3, subgroup=None)
        both = [make(), make()]
        plain = [sgd(m.parameters()) for m in both]
        for step in range(8):
            for part in range(3):
                loss(module, batch(10 * step + part, rank)).backward()
                for r, m in enumerate(both):
                    loss(m, batch(10 * step + part, r)).backward()
            if step < 3:
                for p, q in zip(*(m.parameters() for m in both), strict=True):
                    p.grad = (p.grad + q.grad) / 2
                    q.grad = p.grad.clone()
            for optimizer in (local, *plain):
                optimizer.step()
                optimizer.zero_grad()
            if step >= 3 and (step - 3) % 2 == 0:
                mean = (flat(both[0]) + flat(both[1])) / 2
                for m in both:
                    write(m, mean)
            torch.testing.assert_close(flat(model), flat(both[rank]), rtol=1e-11, atol=1e-12)
        assert local.steps == 8
