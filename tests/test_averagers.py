"""torch's averagers, hook and PostLocalSGDOptimizer beside ours: changing the import is the whole migration."""

from __future__ import annotations

import copy
import os
import warnings
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hook
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torch_hierarchical
from torch.distributed.optim import PostLocalSGDOptimizer as TorchPostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.wire import groups
from tests.harness import (
    batch,
    everyone,
    flat,
    loss,
    make,
    ranks,
    sgd,
    train,
)

pytestmark = pytest.mark.xdist_group("averagers")


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "ours": lambda params: offbeat.AdamW(params, lr=0.01),
}


class Side:
    """One of the two, with a model of its own."""

    def __init__(
        self,
        ours: bool,
        optimizer: str,
        averager: Any,
        warmup: int | None,
        subgroup: Any = None,
        *hook: bool,
        split: Any = lambda model: model.parameters(),
    ) -> None:
        self.model = make()
        params = split(self.model)
        self.ddp = DistributedDataParallel(self.model)
        if warmup is not None:
            if ours:
                self.state: Any = offbeat.PostLocalSGDState(None, subgroup, warmup, *hook)
                self.ddp.register_comm_hook(self.state, offbeat.post_localSGD_hook)
            else:
                self.state = torch_hook.PostLocalSGDState(None, subgroup, warmup, *hook)
                self.ddp.register_comm_hook(self.state, torch_hook.post_localSGD_hook)
        wrapper = offbeat.PostLocalSGDOptimizer if ours else TorchPostLocalSGDOptimizer
        self.averager = averager
        self.optimizer: Any = wrapper(optim=OPTIMIZERS[optimizer](params), averager=averager)

    def step(self, step: int, rank: int) -> None:
        loss(self.ddp, batch(step, rank)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def compare(ours: Side, theirs: Side, steps: range, rank: int, world: int) -> list[bool]:
    """Step both; returns after which steps all ranks had the same."""
    agreed = []
    for step in steps:
        ours.step(step, rank)
        theirs.step(step, rank)
        if world == 2:  # a sum of two has one order
            assert torch.equal(flat(ours.model), flat(theirs.model)), step
        else:
            torch.testing.assert_close(flat(ours.model), flat(theirs.model), rtol=1e-12, atol=1e-13)
        assert ours.averager.step == theirs.averager.step == step + 1
        all_ranks = everyone(flat(ours.model))
        agreed.append(all(torch.equal(one, all_ranks[0]) for one in all_ranks))
    return agreed


def pair(world: int, optimizer: str, period: int, warmup: int) -> tuple[Side, Side]:
    subgroup, _ = dist.new_subgroups(group_size=world // 2)
    return (
        Side(True, optimizer, offbeat.PeriodicModelAverager(period, warmup), warmup, subgroup),
        Side(False, optimizer, torch_averagers.PeriodicModelAverager(period, warmup), warmup, subgroup),
    )


@ranks(2, 4)
def test_periodic(rank, world):
    for optimizer in OPTIMIZERS if world == 2 else ("sgd", "ours"):
        for period, warmup in ((4, 3), (3, 0), (2, 5)) if world == 2 else ((4, 3),):
            agreed = compare(*pair(world, optimizer, period, warmup), range(14), rank, world)
            expected = [s < warmup or (s - warmup) % period == 0 for s in range(14)]
            assert agreed == expected


@ranks(4)
def test_hierarchical(rank, world):
    for warmup in (0, 3):
        for sizes in (
            OrderedDict([(2, 2), (4, 4)]),
            OrderedDict([(3, 2), (5, 4)]),
            OrderedDict([(1, 2), (2, 2), (6, 4)]),
        ):
            ours = Side(True, "sgd", offbeat.HierarchicalModelAverager(sizes, warmup), None)
            theirs = Side(False, "sgd", torch_hierarchical.HierarchicalModelAverager(sizes, warmup), None)
            for side in (ours, theirs):  # without DDP's own reduction, or there would be nothing to average
                side.ddp = side.model
            agreed = compare(ours, theirs, range(13), rank, world)
            assert any(agreed)
            assert not all(agreed)
            assert ours.averager._periods == theirs.averager._periods
            for period, group in theirs.averager.period_process_group_dict.items():
                mine = ours.averager.period_process_group_dict[period]
                assert dist.get_process_group_ranks(mine) == dist.get_process_group_ranks(group)


def groups_and_a_frozen_layer(model: Any) -> list[dict[str, Any]]:
    """Several groups, with their own learning rates, and parameters that never have a gradient."""
    model[2].requires_grad_(False)
    return [
        {"params": [model[0].weight], "lr": 0.02},
        {"params": [*model[2].parameters(), model[0].bias]},
        {"params": list(model[4].parameters()), "weight_decay": 0.1},
    ]


@ranks(4)
def test_everything_together(rank, world):
    """Hook, hierarchy of three levels, groups, parameters without gradients; also without any warm-up."""
    subgroup, _ = dist.new_subgroups(group_size=2)
    for warmup in (0, 3):
        for hook in ((), (False,)):
            sizes = OrderedDict([(1, 1), (2, 2), (3, 4)])
            sides = []
            for ours, module in ((True, offbeat), (False, torch_hierarchical)):
                averager = module.HierarchicalModelAverager(sizes, warmup_steps=warmup)
                sides.append(Side(ours, "adamw", averager, warmup, subgroup, *hook, split=groups_and_a_frozen_layer))
            agreed = compare(*sides, range(13), rank, world)
            assert agreed == [s < warmup or s % 3 == 0 for s in range(13)]
            assert sides[0].state.iter == sides[1].state.iter == warmup


@ranks(2)
def test_local_from_the_first_step(rank, world):
    """``start_localSGD_iter=0``, without gradients being averaged at any time."""
    for split in (lambda model: model.parameters(), groups_and_a_frozen_layer):
        ours = Side(True, "sgd", offbeat.PeriodicModelAverager(3), 0, None, False, split=split)
        theirs = Side(False, "sgd", torch_averagers.PeriodicModelAverager(3), 0, None, False, split=split)
        assert compare(ours, theirs, range(8), rank, world) == [s % 3 == 0 for s in range(8)]


@ranks(2)
def test_checkpoints(rank, world):
    """With a step entry, without one, from torch's to ours and back."""
    ours, theirs = pair(world, "adamw", 4, 3)
    compare(ours, theirs, range(6), rank, world)
    saved, theirs_saved = ours.optimizer.state_dict(), theirs.optimizer.state_dict()
    assert saved.keys() == theirs_saved.keys()
    assert saved["step"] == theirs_saved["step"] == 6
    models = (ours.model.state_dict(), theirs.model.state_dict())

    for with_step in (True, False):
        again = pair(world, "adamw", 4, 3)
        for side, model, state_dict in zip(again, models, (theirs_saved, saved), strict=True):  # crosswise
            state_dict = dict(state_dict)
            if not with_step:
                del state_dict["step"]
            side.model.load_state_dict(model)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                side.optimizer.load_state_dict(state_dict)
            said = [str(one.message) for one in caught]
            wanted = "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0."
            assert said == ([] if with_step else [wanted])
            assert side.averager.step == (6 if with_step else 0)
        for step in range(6, 15):
            for side in again:
                side.step(step, rank)
            assert torch.equal(flat(again[0].model), flat(again[1].model))
            assert again[0].averager.step == again[1].averager.step == (step + 1 if with_step else step - 5)


@ranks(2)
def test_errors_and_warnings(rank, world):
    """The same classes of errors with torch's words, so that code that catches or matches them goes on doing so."""
    for build in (
        lambda m, h: m.PeriodicModelAverager(0),
        lambda m, h: m.PeriodicModelAverager(2, warmup_steps=-1),
        lambda m, h: h.HierarchicalModelAverager({}),
        lambda m, h: h.HierarchicalModelAverager(),
        lambda m, h: h.HierarchicalModelAverager(OrderedDict([(0, 1), (2, 2)])),
        lambda m, h: h.HierarchicalModelAverager(OrderedDict([(2, 1)])),
        lambda m, h: h.HierarchicalModelAverager(OrderedDict([(2, 2)]), warmup_steps=-1),
        lambda m, h: m.PeriodicModelAverager(2).average_parameters([torch.zeros(3)]),
    ):
        errors = []
        for modules in ((torch_averagers, torch_hierarchical), (offbeat, offbeat)):
            with pytest.raises(Exception) as caught:
                build(*modules)
            errors.append(caught.value)
        assert isinstance(errors[1], type(errors[0]))
        theirs = str(errors[0]).replace("period_process_group_dict", "period_group_size_dict")  # so in torch 2.11
        assert str(errors[1]).startswith(theirs), errors
    for build in (
        lambda m, h: m.PeriodicModelAverager(1),
        lambda m, h: h.HierarchicalModelAverager(OrderedDict([(1, 2)])),
    ):
        said = []
        for modules in ((torch_averagers, torch_hierarchical), (offbeat, offbeat)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                build(*modules)
            said.append([(one.category, str(one.message)) for one in caught])
        assert said[0] == said[1]
        assert len(said[0]) == 1


@ranks(2)
def test_averagers_by_themselves(rank, world):
    """From parameters and from groups, as torch's own tests do it; ours leaves storages where they are."""
    for give in (lambda model, opt: model.parameters(), lambda model, opt: opt.param_groups):
        for module in (offbeat, torch_averagers):
            model = torch.nn.Linear(3, 5, bias=False)
            with torch.no_grad():
                model.weight.fill_(float(rank))
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            averager = module.PeriodicModelAverager(period=4, warmup_steps=10)
            address = model.weight.data_ptr()
            for step in range(20):
                with torch.no_grad():
                    model.weight.fill_(float(rank))
                averager.average_parameters(give(model, optimizer))
                mean = step >= 10 and (step - 10) % 4 == 0
                assert torch.equal(model.weight, torch.full((5, 3), 0.5 if mean else float(rank)))
                assert averager.step == step + 1
            assert (model.weight.data_ptr() == address) is (module is offbeat)


@ranks(4)
def test_ranks_outside_the_group(rank, world):
    group = dist.new_group([0, 2])
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    offbeat.PeriodicModelAverager(2, process_group=group).average_parameters([parameter])
    assert torch.equal(parameter, torch.full((3,), 1.0 if rank in (0, 2) else float(rank)))


@ranks(2)
def test_torchs_averager_in_our_optimizer(rank, world):
    ours, theirs = pair(world, "sgd", 4, 3)
    ours.averager = ours.optimizer.averager = torch_averagers.PeriodicModelAverager(4, 3)
    compare(ours, theirs, range(9), rank, world)


@ranks(2)
def test_hook_without_subgroup_after_warmup(rank, world):
    """``post_local_gradient_allreduce=False`` leaves gradients as they are."""
    results = []
    for states, hook in (
        (offbeat.PostLocalSGDState, offbeat.post_local_sgd_hook),
        (torch_hook.PostLocalSGDState, torch_hook.post_localSGD_hook),
    ):
        model = make()
        ddp = DistributedDataParallel(model)
        state = states(None, None, 2, post_local_gradient_allreduce=False)
        ddp.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            loss(ddp, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert state.iter == 2
        results.append(flat(model))
    assert torch.equal(*results)


@ranks(2, 4)
def test_hook_without_a_launcher(rank, world):
    """``subgroup=None`` is the ranks on this host, found without the variables that a launcher sets."""
    launchers = {key: os.environ.pop(key) for key in ("LOCAL_WORLD_SIZE", "LOCAL_RANK") if key in os.environ}
    hosts = [[0] * world, [r // 2 for r in range(world)], [r % 2 for r in range(world)], list(range(world))]
    try:
        for host in (None, *hosts):  # None is the real one
            with pytest.MonkeyPatch.context() as patch:
                if host is not None:
                    patch.setattr(groups, "host_identity", lambda: ("a name they share", host[rank]))
                together = [r for r in range(world) if (host or hosts[0])[r] == (host or hosts[0])[rank]]
                one_host = len(together) == world
                ddp = DistributedDataParallel(make())
                state = offbeat.PostLocalSGDState(None, None, 1)
                ddp.register_comm_hook(state, offbeat.post_local_sgd_hook)
                for step in range(3):
                    ddp.zero_grad()
                    words = "ranks are on one host" if one_host and step == 1 else None
                    with pytest.warns(UserWarning, match=words) if words else nullcontext():
                        loss(ddp, batch(step, rank)).backward()
                    expected = make()
                    over = range(world) if step == 0 else together
                    (sum(loss(expected, batch(step, r)) for r in over) / len(over)).backward()
                    for p, q in zip(ddp.parameters(), expected.parameters(), strict=True):
                        torch.testing.assert_close(p.grad, q.grad)
                assert dist.get_process_group_ranks(state.subgroup) == together
    finally:
        os.environ.update(launchers)


@ranks(2)
def test_warmup_of_hook_and_averager(rank, world):
    """Two counters that do not fit raise before anything is averaged by nobody."""

    def parts(start: int, warmup: int) -> Any:
        ddp = DistributedDataParallel(make())
        state = offbeat.PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
        ddp.register_comm_hook(state, offbeat.post_local_sgd_hook)
        averager = offbeat.PeriodicModelAverager(4, warmup)
        return ddp, state, offbeat.PostLocalSGDOptimizer(sgd(ddp.parameters()), averager)

    for start, warmup in ((3, 5), (5, 3)):
        ddp, state, optimizer = parts(start, warmup)
        with pytest.raises(ValueError, match=f"after {start} steps .* averager after {warmup}"):
            train(ddp, optimizer, range(1), rank)
    ddp, state, optimizer = parts(4, 4)
    loss(ddp, batch(0, rank)).backward()
    loss(ddp, batch(1, rank)).backward()  # two passes, one step, and no no_sync()
    with pytest.raises(RuntimeError, match="has counted 2 backward passes, but the averager 1 steps"):
        optimizer.step()
    ddp, state, optimizer = parts(4, 4)
    for step in range(6):
        with ddp.no_sync():
            loss(ddp, batch(step, rank)).backward()
        train(ddp, optimizer, range(step, step + 1), rank)
    # A checkpoint from before, loaded into the running program: the hook goes back with the averager.
    ddp, state, optimizer = parts(4, 4)
    early = copy.deepcopy(optimizer.state_dict())
    train(ddp, optimizer, range(7), rank)
    assert state.iter == 4
    optimizer.load_state_dict(early)
    assert (state.iter, optimizer.averager.step) == (0, 0)
