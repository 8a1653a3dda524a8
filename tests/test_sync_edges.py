"""Where averaging could go wrong without a word: other optimizers, failures in between, ranks that look or differ."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.wire.peers import GroupPeers
from tests.scenarios import Scenarios
from tests.sync_reference import batch, everyone, flat, loss, make, sgd, wait_for_flight
from tests.sync_reference import train as reference_train

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("sync_edges"), pytest.mark.timeout(320)]

scenario = Scenarios(__name__)


def train(module: nn.Module, optimizer: Any, steps: range, rank: int) -> list[bool]:
    """Returns after which steps ranks agreed."""
    return [torch.equal(*everyone(one)) for one in reference_train(module, optimizer, steps, rank)]


@scenario(2)
def optimizer_and_ddp_have_the_same_parameters(rank, world):
    model = make()
    ddp = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"'2\.weight' of the DistributedDataParallel module is not in this optimizer"):
        offbeat.LocalSGD(sgd(model[0].parameters()), ddp)
    extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="is not in the DistributedDataParallel module"):
        offbeat.LocalSGD(sgd([*model.parameters(), extra]), ddp)
    with pytest.raises(ValueError, match="is not in this optimizer"):
        offbeat.LocalSGD(sgd(make().parameters()), ddp)
    local = offbeat.LocalSGD(sgd(model.parameters()), ddp, every=2, subgroup=None)
    train(ddp, local, range(2), rank)
    local.add_param_group({"params": [extra]})
    loss(ddp, batch(2, rank)).backward()
    with pytest.raises(ValueError, match="parameter 0 of group 1 of the optimizer is not in"):
        local.step()


@scenario(2)
def a_failed_sync_under_a_scaler(rank, world):
    """The scale of the step that failed must not be taken for the next one's."""
    for build in (
        lambda opt, m: offbeat.LocalSGD(opt, m, every=2, subgroup=None),
        lambda opt, m: offbeat.PostLocalSGDOptimizer(opt, offbeat.PeriodicModelAverager(2)),
    ):
        model = nn.Linear(1, 1, bias=False)
        optimizer = build(torch.optim.SGD(model.parameters(), lr=1.0), model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        real = GroupPeers.all_reduce
        moved = []
        for step in range(4):
            before = model.weight.item()
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            if step == 0:
                GroupPeers.all_reduce = lambda *a, **k: (_ for _ in ()).throw(RuntimeError("gone"))
                with pytest.raises(RuntimeError, match="gone"):
                    scaler.step(optimizer)
                GroupPeers.all_reduce = real
            else:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step in (1, 3):
                moved.append(round(model.weight.item() - before, 4))
            dist.barrier()
        assert moved == [-1.0, -1.0]


@scenario(2)
def gradients_averaged_in_between(rank, world):
    """Backward after average_gradients(), with and without zeroing, in every spelling."""
    for clear in (None, lambda o, m: o.zero_grad(), lambda o, m: m.zero_grad(set_to_none=False)):
        model, reference = make(), make()
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, warmup=10)
        plain, ddp = sgd(reference.parameters()), DistributedDataParallel(reference)
        for step in range(3):
            loss(model, batch(step, rank)).backward()
            local.average_gradients()
            loss(ddp, batch(step, rank)).backward()
            if clear is not None:
                clear(local, model)
                clear(plain, reference)
            loss(model, batch(50 + step, rank)).backward()
            loss(ddp, batch(50 + step, rank)).backward()
            local.step()
            plain.step()
            local.zero_grad()
            plain.zero_grad()
            torch.testing.assert_close(flat(model), flat(reference), rtol=1e-11, atol=1e-12)
            assert torch.equal(*everyone(flat(model)))


class Flags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("flag", torch.tensor([False, False]))
        self.register_buffer("place", torch.tensor([0]))
        self.register_buffer("short", torch.zeros(4, dtype=torch.int16))
        self.register_buffer("num_batches_tracked", torch.tensor(0))


@scenario(2)
def late_buffers_of_whole_numbers(rank, world):
    """Flags stay flags and places stay in range; only what counts batches goes on counting."""
    for delay in (0, 2):
        module = Flags()
        local = offbeat.LocalSGD(torch.optim.SGD([module.weight], lr=0.0), module, every=4, subgroup=None, delay=delay)
        for step in range(delay + 1):
            module.num_batches_tracked += 1
            module.flag[0] = rank == 0 or step > 0
            module.place.fill_((60 * (1 - rank) + step) % 64)
            module.short.fill_(7 - rank)
            local.step()
        assert module.flag.view(torch.uint8).tolist() == [1, 0]
        assert module.place.item() == 60
        assert module.short.tolist() == [7] * 4
        assert module.num_batches_tracked.item() == delay + 1


@scenario(2)
def finish_without_weights(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, weighted=True, subgroup=None)
    local.seen(1)
    train(model, local, range(1), rank)
    assert train(model, local, range(1, 3), rank) == [False, False]  # and nobody says how much was seen
    local.finish()
    assert torch.equal(*everyone(flat(model)))
    assert local.steps == 3


@scenario(4)
def sharded_gradients_are_not_averaged_over_other_shards(rank, world):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = make()
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(ValueError, match="leave subgroup out"):
        offbeat.LocalSGD(sgd(model.parameters()), model, subgroup=mesh.get_group("shard"))


@scenario(2)
def the_inner_optimizer_by_itself(rank, world):
    """Stepped without its wrapper it would never be averaged; with overlap its buckets are stepped all the same."""
    model = make()
    inner = sgd(model.parameters())
    local = offbeat.LocalSGD(inner, model, every=2, subgroup=None)
    loss(model, batch(0, rank)).backward()
    before = flat(model)
    with pytest.raises(RuntimeError, match="inside LocalSGD"):
        inner.step()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(RuntimeError, match="pass LocalSGD to the scaler"):
        scaler.step(inner)
    assert torch.equal(flat(model), before)
    local.step()
    local.zero_grad()
    del local
    gc.collect()
    loss(model, batch(1, rank)).backward()
    inner.step()  # it is its own again
    for library in (torch.optim, offbeat):
        model = make()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        inner = library.AdamW(model.parameters(), lr=0.01)
        offbeat.overlap(inner, ddp)
        local = offbeat.LocalSGD(inner, ddp, every=2, subgroup=None)
        assert train(ddp, local, range(4), rank) == [True, False, True, False]


@scenario(2)
def the_module_inside_ddp(rank, world):
    model = make()
    ddp = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"pass the DistributedDataParallel module: "):
        offbeat.LocalSGD(sgd(model.parameters()), ddp.module)


@scenario(2)
def state_in_codes(rank, world):
    """They cannot be averaged; kept or reset they are as good as numbers."""
    for policy in ("average", "keep", "reset"):
        model = make(dtype=torch.float32)
        inner = offbeat.AdamW(model.parameters(), lr=0.01, state_dtype=None if policy == "average" else "8bit")
        local = offbeat.LocalSGD(inner, model, every=2, subgroup=None, state=policy)
        loss(model, batch(0, rank).float()).backward()
        if policy == "average":
            inner.param_groups[0]["state_dtype"] = "8bit"  # after LocalSGD has looked
            with pytest.raises(TypeError, match="stored as 8-bit codes, which cannot be averaged"):
                local.step()
            continue
        local.step()
        codes = [entry["exp_avg_8bit"] for entry in inner.state.values()]
        assert (policy == "keep") == any(t.any() for t in codes)
        assert torch.equal(*everyone(flat(model)))


@scenario(2)
def one_replica(rank, world):
    """Sharded over all ranks there is nothing to average, and a warning says so."""
    from torch.distributed.fsdp import fully_shard

    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.warns(UserWarning, match="one replica and nothing to average"):
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every=2)
    loss(model, batch(0, rank)).backward()
    local.step()
    assert (local.steps, local.syncs) == (1, 0)


@scenario(2)
def overlap_before_and_after(rank, world):
    """Removed and made again, LocalSGD's gradients stay its own; made too late, overlap() is refused."""
    model = make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    inner = offbeat.AdamW(model.parameters(), lr=0.01)
    handle = offbeat.overlap(inner, ddp)
    local = offbeat.LocalSGD(inner, ddp, every=3, warmup=2, subgroup=None)
    assert train(ddp, local, range(4), rank) == [True, True, True, False]
    handle.remove()
    handle = offbeat.overlap(inner, ddp)
    assert train(ddp, local, range(4, 7), rank) == [False, True, False]
    handle.remove()
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    with pytest.raises(ValueError, match="give it the communication hook"):
        offbeat.overlap(inner, ddp, comm_hook=allreduce_hook)
    model = make()
    inner = offbeat.AdamW(model.parameters(), lr=0.01)
    local = offbeat.LocalSGD(inner, model, every=3, warmup=2, subgroup=None)
    with pytest.raises(ValueError, match="call overlap\\(\\) first"):
        offbeat.overlap(inner, model)
    del local
    gc.collect()
    offbeat.overlap(inner, model).remove()


@scenario(2)
def options_that_differ(rank, world):
    for options, words in (
        ({"weighted": bool(rank)}, "weighted is not the same on every rank: False on rank 0, True on rank 1"),
        ({"bucket_mb": 1 + rank}, "bucket_mb"),
        ({"reduce_dtype": (None, torch.float64)[rank]}, "reduce_dtype"),
        ({"warmup": rank}, "warmup"),
        ({"every": 4 + rank}, "every"),
        ({"delay": rank}, "delay"),
        ({"state": ("keep", "reset")[rank]}, "state"),
        ({"every": {2: 1, 4 + rank: 2}}, "every of level 1 is not the same on every rank: 4 on rank 0, 5 on rank 1"),
    ):
        model = make()
        with pytest.raises(offbeat.Disagreement, match=words):
            offbeat.LocalSGD(sgd(model.parameters()), model, subgroup=None, **options)


@scenario(4)
def ddp_over_a_node_alone(rank, world):
    """It makes only its own ranks equal, and warm-up averages over all: replicas must begin alike."""
    node, _ = dist.new_subgroups(group_size=2)
    model = make(seed=rank // 2)
    ddp = DistributedDataParallel(model, process_group=node)
    local = offbeat.LocalSGD(sgd(model.parameters()), ddp, every=3, warmup=2, subgroup=node)
    loss(ddp, batch(0, rank)).backward()
    with pytest.raises(offbeat.Disagreement, match=r"'0\.weight' of ranks 2, 3 differs from rank 0's"):
        local.step()


@scenario(4)
def weights_after_a_failed_late_average(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every={2: 2, 6: 4}, subgroup=None, delay=1, weighted=True)
    real = GroupPeers.all_reduce
    for step in range(4):
        local.seen(10)
        loss(model, batch(step, rank)).backward()
        if step == 2:
            GroupPeers.all_reduce = lambda *a, **k: (_ for _ in ()).throw(RuntimeError("gone"))
        if step == 3:
            with pytest.raises(RuntimeError, match="gone"):
                local.step()
        else:
            local.step()
        if step == 2:
            local._tracks._driver.wait(local._tracks._tracks[0][0].flight)
            GroupPeers.all_reduce = real
        local.zero_grad()
        dist.barrier()
    # The average of all ranks came after step 0, the failed one of pairs after step 2.
    assert [track.seen for (track,) in local._tracks._tracks] == [30.0 + 0.0, 30.0]


@scenario(2)
def join_with_a_scaler(rank, world):
    """A rank without data matches every collective of those that have some, overflows included."""
    model = make(dtype=torch.float32)
    local = offbeat.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, every=3, warmup=6, subgroup=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Join([local]):
        for step in range(9 if rank == 0 else 3):
            value = loss(model, batch(step, rank, torch.float32)) * (float("inf") if step == 4 else 1.0)
            scaler.scale(value).backward()
            scaler.step(local)
            scaler.update()
            local.zero_grad()
    assert torch.equal(*everyone(flat(model)))
    assert torch.isfinite(flat(model)).all()
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, warmup=6, subgroup=None)
    with pytest.raises(RuntimeError, match="cannot be used under Join"), Join([local], throw_on_early_termination=True):
        local.step(lambda: loss(model, batch(0, rank)))


@scenario(2)
def one_rank_fails_to_land(rank, world):
    """It begins the next average all the same, and the two do not lose each other."""
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=2, subgroup=None, delay=2)
    failed = []
    for step in range(9):
        loss(model, batch(step, rank)).backward()
        if step == 2 and rank == 0:
            wait_for_flight(local).error = MemoryError("no room")
        try:
            local.step()
        except MemoryError:
            failed.append(step)
        local.zero_grad()
    assert failed == ([2] if rank == 0 else [])
    local.finish()
    assert torch.equal(*everyone(flat(model)))


@scenario(2)
def looking_decides_nothing(rank, world):
    """A rank that asks in which phase it is, at a time when the others do not, stays with them."""
    model = make()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = offbeat.LocalSGD(
        optimizer, ddp, every=3, warmup=lambda step: optimizer.param_groups[0]["lr"] >= 0.1, subgroup=None
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(local, [3], gamma=0.5)
    agreed = []
    for step in range(9):
        agreed += train(ddp, local, range(step, step + 1), rank)
        if rank == 0:
            assert local.is_local is (step >= 3)
            with torch.no_grad():
                model(batch(0, 0))
        scheduler.step()
    assert agreed == [s < 3 or (s - 3) % 3 == 0 for s in range(9)]


@scenario(2)
def frozen_on_one_rank_during_warmup(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, warmup=9, subgroup=None)
    train(model, local, range(2), rank)
    model[0].weight.requires_grad_(rank == 0)
    loss(model, batch(2, rank)).backward()
    before = flat(model)
    with pytest.raises(offbeat.Disagreement, match=r"on rank 0: '0\.weight'"):
        local.step()
    assert torch.equal(flat(model), before)


@scenario(2)
def state_that_one_rank_does_not_have_yet(rank, world):
    """An overflow in the first step leaves torch's optimizers without state: that average goes without it, aloud."""
    model = make(dtype=torch.float32)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    local = offbeat.LocalSGD(inner, model, every=2, subgroup=None, state="average")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        value = loss(model, batch(step, rank, torch.float32)) * (float("inf") if step == 0 and rank == 1 else 1.0)
        scaler.scale(value).backward()
        if step == 0:
            with pytest.warns(UserWarning, match="optimizer state was not averaged this time"):
                scaler.step(local)
        else:
            scaler.step(local)
        scaler.update()
        local.zero_grad()
        if step in (0, 2):
            assert torch.equal(*everyone(flat(model)))
    assert torch.equal(*everyone(inner.state[model[0].weight]["exp_avg"]))


@scenario(2)
def gradients_are_freed(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, warmup=2, subgroup=None)
    for step in range(4):
        loss(model, batch(step, rank)).backward()
        local.step()
        grad = weakref.ref(model[0].weight.grad)
        local.zero_grad()
        assert grad() is None, step


@scenario(2)
def one_parameter_twice(rank, world):
    """Given twice, it is averaged once, and comes back after a failure."""
    p = nn.Parameter(torch.full((300,), float(rank)))
    others = [nn.Parameter(torch.full((300,), float(rank))) for _ in range(9)]
    averager = offbeat.PeriodicModelAverager(2, bucket_mb=0.002)
    real, calls = GroupPeers.all_reduce, [0]

    def failing(*args, **kwargs):
        calls[0] += 1
        if calls[0] == 9:
            raise RuntimeError("gone")
        return real(*args, **kwargs)

    GroupPeers.all_reduce = failing
    try:
        with pytest.raises(RuntimeError, match="gone"):
            averager.average_parameters([p, p, *others, p])
    finally:
        GroupPeers.all_reduce = real
    assert all((one == rank).all() for one in (p, *others))
    dist.barrier()


@scenario(2)
def a_scaler_knows_wrappers_by_their_groups(rank, world):
    """A wrapper, made before overlap() or after, is answered for; another optimizer of the same parameters is not."""
    model = make(dtype=torch.float32)
    inner = offbeat.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    handle = offbeat.overlap(inner, model, scaler=scaler)
    local = offbeat.LocalSGD(inner, model, subgroup=None)
    handle.remove()
    handle = offbeat.overlap(inner, model, scaler=scaler)
    inner.load_state_dict(inner.state_dict())  # replaces the list of groups
    for optimizer, factor in ((inner, 1.0), (local, 1.0), (offbeat.AdamW(model.parameters()), 0.125)):
        scaler.scale(loss(model, batch(0, rank, torch.float32))).backward()
        before = [p.grad.clone() for p in model.parameters()]
        scaler.unscale_(optimizer)
        assert all(torch.equal(p.grad, factor * g) for p, g in zip(model.parameters(), before, strict=True))
        handle.reset()
        scaler.update()


@scenario(2)
def parameters_that_leave_during_a_flight(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, subgroup=None, delay=2)
    train(model, local, range(1), rank)
    gone = local.param_groups[0]["params"].pop()
    before = gone.detach().clone()
    train(model, local, range(1, 3), rank)
    assert torch.equal(gone, before)
    local.param_groups[0]["params"].append(gone)
    local.finish()


@scenario(2)
def an_average_at_will_counts(rank, world):
    """With a period that is a function, the next average is that many steps after sync()."""
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=lambda step: 4, subgroup=None)
    agreed = train(model, local, range(3), rank)
    local.sync()
    assert torch.equal(*everyone(flat(model)))
    agreed += train(model, local, range(3, 8), rank)
    assert agreed == [True, False, False, False, False, False, True, False]


@scenario(2)
def closures_without_a_loss(rank, world):
    model, reference = make(), make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, warmup=3, subgroup=None)
    ddp, plain = DistributedDataParallel(reference), sgd(reference.parameters())
    for step in range(3):

        def closure(step=step):
            local.zero_grad()
            loss(model, batch(step, rank)).backward()

        assert local.step(closure) is None
        loss(ddp, batch(step, rank)).backward()
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close(flat(model), flat(reference), rtol=1e-11, atol=1e-12)


@scenario(2)
def closures_that_differ(rank, world):
    """A loss on one rank and None on another: both hear of it, and neither waits."""
    for wrap in (lambda model: model, DistributedDataParallel):
        model = make()
        module = wrap(model)
        local = offbeat.LocalSGD(sgd(model.parameters()), module, every=4, warmup=3, subgroup=None)

        def closure(module=module, local=local):
            local.zero_grad()
            found = loss(module, batch(0, rank))
            found.backward()
            return answers[rank](found)

        before = flat(model)
        for other in (lambda found: None, lambda found: {"loss": found}):
            answers = [lambda found: found, other]
            with pytest.raises(offbeat.Disagreement, match=r"rank 0: a number, rank 1: (None|neither)"):
                local.step(closure)
            assert torch.equal(flat(model), before)
        for answers in ([torch.Tensor.item] * 2, [lambda found: found] * 2, [lambda found: [found]] * 2):
            given = answers[rank](sum(loss(model, batch(0, r)) for r in range(world)) / world)
            mean = local.step(closure)
            assert type(mean) is type(given)
            if not isinstance(given, list):  # what is no number stays as it is
                torch.testing.assert_close(mean, given.detach() if isinstance(given, torch.Tensor) else given)
        assert local.steps == 3
        assert torch.equal(*everyone(flat(model)))


@scenario(2)
def a_closure_on_one_rank_alone(rank, world):
    """Both hear of it, and neither waits."""
    for wrap, first in ((lambda model: model, 0), (lambda model: model, 2), (DistributedDataParallel, 0)):
        model = make()
        module = wrap(model)
        local = offbeat.LocalSGD(sgd(model.parameters()), module, every=4, warmup=5, subgroup=None)

        def closure(module=module, local=local):
            local.zero_grad()
            found = loss(module, batch(0, rank))
            found.backward()
            return found

        for step in range(first):
            train(module, local, range(step, step + 1), rank)
        before = flat(model)
        with pytest.raises(offbeat.Disagreement, match="closure is not the same on every rank: True on rank 0, False"):
            local.step(closure) if rank == 0 else (closure(), local.step())
        assert torch.equal(flat(model), before)


@scenario(4)
def levels_that_leave_a_rank_out(rank, world):
    """Every rank hears of it, also those whose own groups are right."""
    group, model = dist.new_group([0, 1, 2]), make()
    levels = [offbeat.Level(every=2, group=group), offbeat.Level(every=4)]
    words = "rank 3 is not in the group of a level" if rank == 3 else "rank 3 cannot use the levels"
    with pytest.raises(ValueError, match=words):
        offbeat.Replica(sgd(model.parameters()), model, levels, subgroup=None)
    if rank == 3:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            offbeat.LocalSGD(sgd(model.parameters()), model, group=group, subgroup=None)


_COPIES = (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)))


@scenario(2)
def modules_can_be_copied_while_they_train(rank, world):
    for cls in (offbeat.LocalSGD, offbeat.DiLoCo):
        model = make()
        local = cls(sgd(model.parameters()), model, every=2, subgroup=None)
        for copied in _COPIES:
            train(model, local, range(1), rank)
            twin = copied(model)
            assert torch.equal(flat(twin), flat(model))
            twin(batch(0, rank))


@scenario(2)
def ddp_modules_can_be_copied_while_they_train(rank, world):
    """Copies average their gradients as DDP does, and can be given to an optimizer of their own."""

    def averaged(ddp):
        loss(ddp, batch(9, rank)).backward()
        grads = torch.cat([p.grad.reshape(-1) for p in ddp.parameters()])
        ddp.zero_grad()
        return grads

    for build in (
        lambda inner, ddp: offbeat.LocalSGD(inner, ddp, every=2, subgroup=None),
        lambda inner, ddp: offbeat.DiLoCo(inner, ddp, every=2, warmup=1, subgroup=None),
        lambda inner, ddp: (offbeat.overlap(inner, ddp), inner)[1],
    ):
        for copied in _COPIES:
            ddp = DistributedDataParallel(make())
            optimizer = build(sgd(ddp.parameters()), ddp)
            reference_train(ddp, optimizer, range(1), rank)  # after which replicas are equal
            twin, plain = copied(ddp), DistributedDataParallel(copy.deepcopy(ddp.module))
            assert torch.equal(averaged(twin), averaged(plain))
            other, inner = DistributedDataParallel(copy.deepcopy(ddp.module)), sgd(twin.parameters())
            reference = build(sgd(other.parameters()), other)
            ours, theirs = (
                reference_train(one, steps, range(3), rank)
                for one, steps in ((twin, build(inner, twin)), (other, reference))
            )
            assert torch.equal(ours[-1], theirs[-1])


@scenario(2)
def modules_that_are_wrapped_without_a_look_at_every_object(rank, world):
    """DDP modules are known when they are made or called; a large program has millions of objects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gc.get_objects", lambda *args: pytest.fail("looked at every object"))
        for copied in _COPIES:
            wrapped = copied(DistributedDataParallel(make()))
            for cls in (offbeat.LocalSGD, offbeat.DiLoCo):
                local = cls(sgd(wrapped.module.parameters()), wrapped.module, every=2, subgroup=None)
                loss(wrapped, batch(0, rank)).backward()
                with pytest.raises(RuntimeError, match="is wrapped in DistributedDataParallel, but"):
                    local.step()
                del local
            parent = nn.ModuleDict({"inside": wrapped})
            with pytest.raises(ValueError, match="belong to a DistributedDataParallel module"):
                offbeat.LocalSGD(sgd(parent.parameters()), parent, every=2, subgroup=None)
        model = make()
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every=2, subgroup=None)
        loss(model, batch(0, rank)).backward()
        local.step()
        late = make()
        local = offbeat.LocalSGD(sgd(late.parameters()), late, every=2, subgroup=None)
        wrapped = DistributedDataParallel(late)
        loss(wrapped, batch(0, rank)).backward()
        with pytest.raises(RuntimeError, match="is wrapped in DistributedDataParallel, but"):
            local.step()
        with pytest.raises(ValueError, match="belong to a DistributedDataParallel module"):
            offbeat.LocalSGD(sgd(late.parameters()), late, every=2, subgroup=None)


@scenario(2)
def one_after_the_other(rank, world):
    """A deleted optimizer leaves nothing behind, also if a scheduler holds it in a cycle."""
    gc.disable()
    try:
        for module in (DistributedDataParallel(make()), make()):
            hooks = []
            for _ in range(3):
                local = offbeat.LocalSGD(sgd(module.parameters()), module, every=2, warmup=1, subgroup=None)
                scheduler = torch.optim.lr_scheduler.StepLR(local, 1)
                train(module, local, range(3), rank)
                local.finish()
                del local, scheduler
                hooks.append([len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()])
            gc.collect()
            assert not any(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()), hooks
    finally:
        gc.enable()


@scenario(2)
def copies_of_state(rank, world):
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


@pytest.mark.parametrize(("world", "name"), scenario.cases)
def test_edges(world, name):
    scenario.check(world, name)
