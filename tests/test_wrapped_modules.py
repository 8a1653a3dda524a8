"""DDP modules, overlap and copies around a replica; and what is left when it is gone."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.harness import (
    agreements,
    batch,
    flat,
    loss,
    make,
    ranks,
    sgd,
    train,
)

pytestmark = pytest.mark.xdist_group("wrapped_modules")


@ranks(2)
def test_optimizer_and_ddp_have_the_same_parameters(rank, world):
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


@ranks(2)
def test_the_inner_optimizer_by_itself(rank, world):
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
        assert agreements(ddp, local, range(4), rank) == [True, False, True, False]


@ranks(2)
def test_the_module_inside_ddp(rank, world):
    model = make()
    ddp = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"pass the DistributedDataParallel module: "):
        offbeat.LocalSGD(sgd(model.parameters()), ddp.module)


@ranks(2)
def test_overlap_before_and_after(rank, world):
    """Removed and made again, LocalSGD's gradients stay its own; made too late, overlap() is refused."""
    model = make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    inner = offbeat.AdamW(model.parameters(), lr=0.01)
    handle = offbeat.overlap(inner, ddp)
    local = offbeat.LocalSGD(inner, ddp, every=3, warmup=2, subgroup=None)
    assert agreements(ddp, local, range(4), rank) == [True, True, True, False]
    handle.remove()
    handle = offbeat.overlap(inner, ddp)
    assert agreements(ddp, local, range(4, 7), rank) == [False, True, False]
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


_COPIES = (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)))


@ranks(2)
def test_modules_can_be_copied_while_they_train(rank, world):
    for cls in (offbeat.LocalSGD, offbeat.DiLoCo):
        model = make()
        local = cls(sgd(model.parameters()), model, every=2, subgroup=None)
        for copied in _COPIES:
            train(model, local, range(1), rank)
            twin = copied(model)
            assert torch.equal(flat(twin), flat(model))
            twin(batch(0, rank))


@ranks(2)
def test_ddp_modules_can_be_copied_while_they_train(rank, world):
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
            train(ddp, optimizer, range(1), rank)  # after which replicas are equal
            twin, plain = copied(ddp), DistributedDataParallel(copy.deepcopy(ddp.module))
            assert torch.equal(averaged(twin), averaged(plain))
            other, inner = DistributedDataParallel(copy.deepcopy(ddp.module)), sgd(twin.parameters())
            reference = build(sgd(other.parameters()), other)
            ours, theirs = (
                train(one, steps, range(3), rank) for one, steps in ((twin, build(inner, twin)), (other, reference))
            )
            assert torch.equal(ours[-1], theirs[-1])


@ranks(2)
def test_modules_that_are_wrapped_without_a_look_at_every_object(rank, world):
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


@ranks(2)
def test_one_after_the_other(rank, world):
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
