"""Overlap in real processes: what DDP and FSDP2 add, what they refuse, and that the overlap is one."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.overlap.consumed import ConsumedGradient
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("overlap_ranks")]

SMALL = 0.0005
INF = math.inf


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(module, optimizer, rank, steps=range(5)):
    for step in steps:
        module(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def three_ranks(rank: int, world: int) -> bool:
    """A third is not a power of two: multiplying before the sum and dividing after it differ."""
    models = [make(), make()]
    for model, overlapped in zip(models, (True, False), strict=True):
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
        optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
        if overlapped:
            offbeat.overlap(optimizer, ddp)
        train(ddp, optimizer, rank, range(20))
    return same(*models)


def test_an_odd_number_of_ranks_rounds_as_ddp_does():
    assert run_ranks(three_ranks, 3) == [True] * 3


def steps_while_others_travel(rank: int, world: int) -> list[str]:
    """The last bucket's reduction is held up until the first bucket's parameters have been seen to change."""
    model = make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    log: list[str] = []
    first: list[torch.Tensor] = []

    def hold_up(state, bucket):
        if bucket.index() == 0:
            first[:] = [bucket.parameters()[0], bucket.parameters()[0].detach().clone()]
        reduced = default_hooks.allreduce_hook(None, bucket)
        if bucket.index() == 0 or not bucket.is_last():
            return reduced
        answer = torch.futures.Future()

        def wait():
            value = reduced.wait()
            for _ in range(2000):
                if not torch.equal(first[0], first[1]):
                    log.append("changed")
                    break
                threading.Event().wait(0.005)
            answer.set_result(value)

        threading.Thread(target=wait).start()
        return answer

    offbeat.overlap(optimizer, ddp, comm_hook=hold_up)
    train(ddp, optimizer, rank, range(3))
    return log


def test_a_bucket_is_stepped_while_later_ones_travel():
    # In the first step DDP has everything in one bucket.
    assert run_ranks(steps_while_others_travel, 2) == [["changed"] * 2] * 2


def zeroed_bucket_views(rank: int, world: int) -> bool:
    """DDP makes its buckets anew before the second step, and copies gradients that stand for zeros."""
    models = [make(), make()]
    for model, overlapped in zip(models, (True, False), strict=True):
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=SMALL)
        optimizer = offbeat.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if overlapped:
            offbeat.overlap(optimizer, ddp)
        for step in range(5):
            ddp(batch(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return same(*models)


def test_gradients_that_are_views_of_buckets_and_set_to_zero():
    assert run_ranks(zeroed_bucket_views, 2) == [True] * 2


def ddp_refusals(rank: int, world: int) -> str:
    model = make()
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match=r"allreduce_hook.*comm_hook="):
        offbeat.overlap(optimizer, ddp)

    ddp = DistributedDataParallel(model)
    ddp.require_manual_backward_finalization = True  # has a meaning from torch 2.15 on
    with pytest.raises(ValueError, match="require_manual_backward_finalization"):
        offbeat.overlap(optimizer, ddp)

    ddp = DistributedDataParallel(model)
    handle = offbeat.overlap(optimizer, ddp)
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    other = make(1)
    with pytest.raises(ValueError, match="not in the module"):
        offbeat.overlap(offbeat.SGD(other.parameters(), lr=0.1), ddp)
    with pytest.raises(ValueError, match="overlapped with an optimizer already"):
        offbeat.overlap(offbeat.SGD(model[0].parameters(), lr=0.1), ddp)

    # The inner module instead of the wrapped one: its gradients are not reduced when they arrive.
    handle.remove()
    offbeat.overlap(optimizer, model)
    with pytest.raises(RuntimeError, match="inside DistributedDataParallel"):
        ddp(batch(0, rank))

    from torch.distributed._composable.replicate import replicate
    from torch.nn.parallel.distributed import _MixedPrecision

    composed = make()
    replicate(composed)
    offbeat.overlap(offbeat.SGD(composed.parameters(), lr=0.1), composed)
    with pytest.raises(RuntimeError, match="inside DistributedDataParallel"):
        composed(batch(0, rank))
    with mock.patch.object(torch, "Stream"):  # which a torch that is built for GPUs cannot make where there is none
        low = DistributedDataParallel(make(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        traced = DistributedDataParallel(make())
    built_in = DistributedDataParallel(make())
    built_in._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
    for wrapped, words in ((low, "mixed_precision"), (traced, "python reducer"), *[(built_in, "once")] * 2):
        refused = offbeat.SGD(wrapped.parameters(), lr=0.1)
        with pytest.raises((ValueError, RuntimeError), match=words):
            offbeat.overlap(refused, wrapped)
        assert not refused._optimizer_step_pre_hooks

    part = nn.Sequential(DistributedDataParallel(make()), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="part of this module"):
        offbeat.overlap(offbeat.SGD(part.parameters(), lr=0.1), part)

    from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard

    from offbeat import _torch

    flat = FullyShardedDataParallel(make(), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="fully_shard"):
        offbeat.overlap(offbeat.SGD(flat.parameters(), lr=0.1), flat)
    sharded = make()
    fully_shard(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False))
    _torch.fsdp_waits_for_offload = False  # as before torch 2.13
    with pytest.raises(ValueError, match="CPUOffloadPolicy"):
        offbeat.overlap(offbeat.SGD(sharded.parameters(), lr=0.1), sharded)
    return "ok"


def test_what_ddp_and_fsdp_cannot_do_is_said():
    assert run_ranks(ddp_refusals, 2) == ["ok"] * 2


def second_backward(rank: int, world: int) -> str:
    for zero in (False, True):
        model = make()
        ddp = DistributedDataParallel(model)
        optimizer = offbeat.SGD(model.parameters(), lr=0.1)
        offbeat.overlap(optimizer, ddp)
        ddp(batch(0, rank)).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        if zero:
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="accumulate"):
            ddp(batch(1, rank)).sum().backward()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

    from torch.distributed.fsdp import fully_shard

    sharded = make()
    fully_shard(sharded)
    optimizer = offbeat.SGD(sharded.parameters(), lr=0.1)
    offbeat.overlap(optimizer, sharded)
    sharded(batch(0, rank)).sum().backward()
    with pytest.raises((RuntimeError, AssertionError)):
        sharded(batch(1, rank)).sum().backward()
    with pytest.raises(RuntimeError, match="clip_norm="):
        nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    return "ok"


def test_a_backward_that_was_not_announced():
    assert run_ranks(second_backward, 2) == ["ok"] * 2


def removed_and_again(rank: int, world: int) -> bool:
    models = [make(), make()]
    ddps = [DistributedDataParallel(model, bucket_cap_mb=SMALL) for model in models]
    opts = [offbeat.AdamW(model.parameters(), lr=0.1) for model in models]
    handle = offbeat.overlap(opts[0], ddps[0])
    for ddp, optimizer in zip(ddps, opts, strict=True):
        train(ddp, optimizer, rank, range(3))
    handle.remove()
    assert not opts[0]._optimizer_step_pre_hooks
    assert all(not p._post_accumulate_grad_hooks for p in models[0].parameters())
    for ddp, optimizer in zip(ddps, opts, strict=True):
        ddp(batch(3, rank)).sum().backward()
        assert not any(isinstance(p.grad, ConsumedGradient) for p in ddp.parameters())
        optimizer.step()
        optimizer.zero_grad()
    offbeat.overlap(opts[0], ddps[0])
    for ddp, optimizer in zip(ddps, opts, strict=True):
        train(ddp, optimizer, rank, range(4, 7))
    ddps[0](batch(8, rank)).sum().backward()
    assert all(isinstance(p.grad, ConsumedGradient) for p in models[0].parameters())
    opts[0].step()
    ddps[1](batch(8, rank)).sum().backward()
    opts[1].step()
    return same(*models)


def test_remove_and_overlap_again():
    assert run_ranks(removed_and_again, 2) == [True] * 2


def nothing_kept(rank: int, world: int) -> list[bool]:
    kept = []
    for remove in (True, False):
        model = make()
        ddp = DistributedDataParallel(model)
        optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
        handle = offbeat.overlap(optimizer, ddp, clip_norm=1.0, clip="previous")
        train(ddp, optimizer, rank, range(3))
        if remove:
            handle.remove()
        ref = weakref.ref(optimizer)
        del optimizer, handle
        gc.collect()
        kept.append(ref() is not None)
        refs = [weakref.ref(ddp), *map(weakref.ref, model.parameters())]
        del ddp, model
        gc.collect()
        kept.append(any(r() is not None for r in refs))
    return kept


def test_ddp_keeps_nothing_alive():
    assert run_ranks(nothing_kept, 2) == [[False] * 4] * 2


def failing_hook(rank: int, world: int) -> str:
    """A reduction that fails is an error of backward, on this rank, at once; its bucket is not stepped."""
    model = make()
    ddp = DistributedDataParallel(model)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)

    def fail(state, bucket):
        answer = torch.futures.Future()
        answer.set_exception(ValueError("the wire is cut"))
        return answer

    offbeat.overlap(optimizer, ddp, comm_hook=fail)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(Exception, match="the wire is cut"):
        ddp(batch(0, rank)).sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    return "ok"


def test_a_failed_reduction_is_an_error_of_backward():
    assert run_ranks(failing_hook, 2) == ["ok"] * 2


def ignored_and_foreign(rank: int, world: int) -> bool:
    """A parameter DDP ignores, and one that no optimizer has."""
    models = [make(), make()]
    for model, overlapped in zip(models, (True, False), strict=True):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
        optimizer = offbeat.AdamW([p for name, p in model.named_parameters() if name != "2.weight"], lr=0.1)
        if overlapped:
            offbeat.overlap(optimizer, ddp)
        for step in range(20):
            ddp(batch(step, rank)).square().mean().backward()
            optimizer.step()
            if step == 19:
                assert model[2].weight.grad is not None
            model.zero_grad()
    return same(*models)


def test_parameters_that_ddp_or_the_optimizer_does_not_have():
    assert run_ranks(ignored_and_foreign, 2) == [True] * 2


def hybrid(rank: int, world: int) -> list[float]:
    """Sharded over one dimension of a mesh and replicated over the other: the norm counts every element once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    whole = make()
    model = make()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    handle = offbeat.overlap(optimizer, model, clip_norm=0.05)
    worst = 0.0
    for step in range(20):
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        whole(torch.cat([batch(step, r) for r in range(world)])).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        reference.step()
        reference.zero_grad()
        worst = max(worst, abs(handle.last_norm.item() - norm.item()))
    apart = max(
        (p.full_tensor() - q).abs().max().item() for p, q in zip(model.parameters(), whole.parameters(), strict=True)
    )
    return [worst, apart]


def test_hybrid_sharding_clips_by_the_norm_of_the_whole():
    for worst, apart in run_ranks(hybrid, 4):
        assert worst < 1e-6
        assert apart < 1e-6


def passes_under_no_sync(rank: int, world: int) -> bool:
    """accumulate=N counts passes under no_sync() as well."""
    models = [make(), make()]
    for model, overlapped in zip(models, (True, False), strict=True):
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
        optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
        if overlapped:
            offbeat.overlap(optimizer, ddp, accumulate=3)
        for step in range(20):
            for micro in range(2):
                with ddp.no_sync():
                    ddp(batch(3 * step + micro, rank)).square().mean().backward()
            ddp(batch(3 * step + 2, rank)).square().mean().backward()
            if overlapped:
                assert all(isinstance(p.grad, ConsumedGradient) for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    return same(*models)


def test_passes_under_no_sync_count():
    assert run_ranks(passes_under_no_sync, 2) == [True] * 2


def uneven(rank: int, world: int) -> bool:
    """join(): one rank runs out of data early."""
    models = [make(), make()]
    for model, overlapped in zip(models, (True, False), strict=True):
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
        optimizer = offbeat.SGD(model.parameters(), lr=0.1)
        if overlapped:
            offbeat.overlap(optimizer, ddp)
        with ddp.join():
            train(ddp, optimizer, rank, range(20 + 2 * rank))
    return same(*models)


def test_ranks_with_uneven_data():
    assert run_ranks(uneven, 2) == [True] * 2


def half_hook(state, bucket):
    """Answers in another dtype than the bucket's."""
    low = bucket.buffer().to(torch.bfloat16)
    work = torch.distributed.all_reduce(low, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / 2)


def another_dtype(rank: int, world: int) -> list[bool]:
    """A hook that answers in another dtype, with a scaler: what DDP gets is what was unscaled."""
    result = []
    for scaled in (False, True):
        models = [make(), make()]
        for model, overlapped in zip(models, (True, False), strict=True):
            ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
            optimizer = offbeat.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
            if overlapped:
                offbeat.overlap(optimizer, ddp, comm_hook=half_hook, scaler=scaler)
            else:
                ddp.register_comm_hook(None, half_hook)
            for step in range(20):
                scaler.scale(ddp(batch(step, rank)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        result.append(same(*models))
    return result


def test_a_hook_that_answers_in_another_dtype():
    assert run_ranks(another_dtype, 2) == [[True, True]] * 2


def views_of_three(rank: int, world: int) -> bool:
    """DDP divides what was added up in its bucket, and multiplies what it copies there."""
    models = [make(), make()]
    for model, overlapped in zip(models, (True, False), strict=True):
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL, gradient_as_bucket_view=True)
        optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
        if overlapped:
            offbeat.overlap(optimizer, ddp, accumulate=2)
        for step in range(20):
            for micro in range(2):
                ddp(batch(2 * step + micro, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return same(*models)


def test_three_ranks_that_accumulate_in_buckets():
    assert run_ranks(views_of_three, 3) == [True] * 3


class Branch(nn.Module):
    """The optimizers below have only the parameters of ``first``, which a batch may not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, use):
        return self.second(x) + (self.first(x) if use else 0)


def branches(views: bool = False) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(Branch(), find_unused_parameters=True, gradient_as_bucket_view=views)
    return ddp, offbeat.SGD(ddp.module.first.parameters(), lr=0.1, momentum=0.9)


def unannounced_where_one_rank_uses_nothing(rank: int, world: int, accumulate: int, use: bool) -> str:
    ddp, optimizer = branches()
    offbeat.overlap(optimizer, ddp, accumulate=accumulate)
    for step in range(accumulate):
        ddp(batch(step, rank), rank == 0).sum().backward()
    with pytest.raises(RuntimeError, match="accumulate"):
        ddp(batch(9, rank), use and rank == 0).sum().backward()
    return "ok"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("accumulate", "use"), [(1, True), (2, True), (2, False)])
def test_a_pass_too_many_raises_on_a_rank_that_has_updated_nothing(accumulate, use):
    assert run_ranks(unannounced_where_one_rank_uses_nothing, 2, accumulate, use, seconds=60) == ["ok"] * 2


def cleared_where_one_rank_uses_nothing(rank: int, world: int) -> list[bool]:
    """A pass adds to gradients of the step before, which are then cleared: all ranks drop it, or none does."""
    result = []
    for views in (False, True):
        for set_to_none in (True, False):
            for clip in ({}, {"clip_norm": INF, "clip": "previous"}, {"clip_norm": INF, "clip": "bucket"}):
                models = []
                for overlapped in (True, False):
                    ddp, optimizer = branches(views)
                    if overlapped:
                        offbeat.overlap(optimizer, ddp, **clip)
                    for step in range(4):
                        ddp.zero_grad(set_to_none=set_to_none)
                        ddp(batch(2 * step, rank), rank == step % 2).square().mean().backward()
                        optimizer.step()
                        ddp(batch(2 * step + 1, rank), True).square().mean().backward()
                    models.append(ddp)
                result.append(same(*models))
    return result


@pytest.mark.timeout(120)
def test_all_ranks_drop_the_gradients_of_a_pass_or_none_does():
    assert run_ranks(cleared_where_one_rank_uses_nothing, 2, seconds=60) == [[True] * 12] * 2


def not_cleared_where_one_rank_uses_nothing(rank: int, world: int) -> str:
    ddp, optimizer = branches()
    offbeat.overlap(optimizer, ddp)
    ddp(batch(0, rank), rank == 0).sum().backward()
    optimizer.step()
    before = [p.detach().clone() for p in ddp.parameters()]
    ddp(batch(1, rank), True).sum().backward()
    with pytest.raises(RuntimeError, match=r"in an earlier step.*call optimizer\.zero_grad\(\)"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True))
    optimizer.zero_grad()
    ddp(batch(2, rank), True).sum().backward()
    optimizer.step()
    return "ok"


@pytest.mark.timeout(120)
def test_gradients_that_were_not_cleared_raise_on_a_rank_that_has_updated_nothing():
    assert run_ranks(not_cleared_where_one_rank_uses_nothing, 2, seconds=60) == ["ok"] * 2


def accumulated_where_one_rank_uses_nothing(rank: int, world: int) -> list[bool]:
    """A pass counts on every rank, also on one that has used no parameter of the optimizer in it."""
    result = []
    for views in (False, True):
        for sync in (True, False):
            models = []
            for overlapped in (True, False):
                ddp, optimizer = branches(views)
                if overlapped:
                    offbeat.overlap(optimizer, ddp, accumulate=2)
                for step in range(4):
                    with contextlib.nullcontext() if sync else ddp.no_sync():
                        ddp(batch(2 * step, rank), rank == step % 2).square().mean().backward()
                    ddp(batch(2 * step + 1, rank), step % 2 or rank == 0).square().mean().backward()
                    optimizer.step()
                    ddp.zero_grad()
                models.append(ddp)
            result.append(same(*models))
    return result


@pytest.mark.timeout(120)
def test_passes_count_on_a_rank_that_uses_nothing():
    assert run_ranks(accumulated_where_one_rank_uses_nothing, 2, seconds=60) == [[True] * 4] * 2


def skipped_where_one_rank_uses_nothing(rank: int, world: int) -> bool:
    """After a step that the scaler has skipped, the next one begins on every rank."""
    models = []
    for overlapped in (True, False):
        ddp, optimizer = branches()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        if overlapped:
            offbeat.overlap(optimizer, ddp, scaler=scaler)
        for step in range(4):
            x = batch(step, rank) * (INF if step == 0 else 1.0)
            scaler.scale(ddp(x, step == 0 or rank == 0).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            ddp.zero_grad()
        models.append(ddp)
    return same(*models)


@pytest.mark.timeout(120)
def test_a_skipped_step_is_over_on_a_rank_that_uses_nothing_in_the_next():
    assert run_ranks(skipped_where_one_rank_uses_nothing, 2, seconds=60) == [True] * 2


def errors_and_ways_out(rank: int, world: int) -> str:
    # A part of a DDP model that is never called itself.
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

        def forward(self, x):
            return self.parts[1](self.parts[0](x))

    model = Parts()
    ddp = DistributedDataParallel(model)
    optimizer = offbeat.SGD(model.parts.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model.parts)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="DistributedDataParallel module"):
        ddp(batch(0, rank)).sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

    # An error of the optimizer in the thread that steps is that error, and training can go on.
    class Fragile(torch.optim.SGD):
        broken = False

        @torch.no_grad()
        def step(self, closure=None):
            if type(self).broken:
                raise ArithmeticError("out of luck")
            return super().step(closure)

    model = make()
    ddp = DistributedDataParallel(model)
    fragile = Fragile(model.parameters(), lr=0.1)
    handle = offbeat.overlap(fragile, ddp)
    train(ddp, fragile, rank, range(2))
    Fragile.broken = True
    with pytest.raises(ArithmeticError, match="out of luck"):
        ddp(batch(2, rank)).sum().backward()
    Fragile.broken = False
    with pytest.raises(RuntimeError, match=r"out of luck.*handle\.reset"):
        fragile.step()
    handle.reset()
    train(ddp, fragile, rank, range(3, 5))

    # A backward too many, with gradients that have been unscaled: nothing of it may reach the parameters.
    model = make()
    ddp = DistributedDataParallel(model)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    handle = offbeat.overlap(optimizer, ddp, scaler=scaler)
    scaler.scale(ddp(batch(0, rank)).sum()).backward()
    with pytest.raises(RuntimeError, match="accumulate"):
        scaler.scale(ddp(batch(1, rank)).sum()).backward()
    with pytest.raises(RuntimeError, match="changed between"):
        scaler.step(optimizer)
    handle.reset()
    optimizer.zero_grad()

    # One more, with updates that wait: it adds up, as without overlap.
    models = [make(), make()]
    for model, overlapped in zip(models, (True, False), strict=True):
        ddp = DistributedDataParallel(model)
        optimizer = offbeat.SGD(model.parameters(), lr=0.1)
        if overlapped:
            offbeat.overlap(optimizer, ddp, clip_norm=0.1)
        for step in range(4):
            ddp(batch(step, rank)).square().mean().backward()
            if step % 2:
                if not overlapped:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert same(*models)
    return "ok"


def test_errors_under_ddp_have_a_way_out():
    assert run_ranks(errors_and_ways_out, 2) == ["ok"] * 2


def freed_with_accumulation(rank: int, world: int) -> list[int]:
    """FSDP2 without reduction in all passes but the last: that one still steps during backward."""
    from torch.distributed.fsdp import fully_shard

    model = make()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    used = []
    for step in range(3):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model(batch(step, rank)).sum().backward()
        used.append(sum(isinstance(p.grad, ConsumedGradient) for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return used


def test_fsdp2_frees_gradients_in_the_last_of_several_passes():
    assert run_ranks(freed_with_accumulation, 2) == [[6, 6, 6]] * 2


def compiled(rank: int, world: int) -> bool:
    models = [make(), make()]
    for model, overlapped in zip(models, (True, False), strict=True):
        ddp = torch.compile(DistributedDataParallel(model), backend="aot_eager")
        optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
        if overlapped:
            offbeat.overlap(optimizer, ddp)
        for step in range(20):
            ddp(batch(step, rank)).square().mean().backward()
            assert not overlapped or all(isinstance(p.grad, ConsumedGradient) for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    return same(*models)


def test_a_compiled_ddp_module():
    assert run_ranks(compiled, 2) == [True] * 2
