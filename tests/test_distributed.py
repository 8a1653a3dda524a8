"""Sharded and replicated parameters in real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.engine.grad_transforms import Work
from tests.cases import ONE_A_RULE, Case
from tests.ranks import run_ranks

# One worker runs them all, or the fixture would start its processes twice.
pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks")]


def train_sharded(rank: int, world: int, case: Case) -> dict[str, list[torch.Tensor]]:
    """FSDP2 with our optimizer, and one unsharded model with the reference, on the same data."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (world,))

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()

    whole = build()
    sharded = build()
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    a = case.ours(sharded.parameters(), **case.hyper)
    b = case.reference(whole.parameters())
    for step in range(6):
        torch.manual_seed(step)
        x = torch.randn(world, 4, 5, dtype=torch.float64)
        sharded(x[rank]).square().mean().backward()
        whole(x.flatten(0, 1)).square().mean().backward()
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()
        if step == 2:
            saved = a.state_dict()
            a = case.ours(sharded.parameters(), **case.hyper)
            a.load_state_dict(saved)
    for p in sharded.parameters():
        assert isinstance(p, DTensor)
        for key, value in a.state[p].items():
            if key in ("step", "mu_product", "eta", "mu"):
                assert not isinstance(value, DTensor)
            else:
                assert isinstance(value, DTensor), key
                assert value.placements == p.placements
    return {
        "sharded": [p.full_tensor().detach() for p in sharded.parameters()],
        "whole": [p.detach() for p in whole.parameters()],
        "tiers": [choice.tier for choice in a.tiers()],
    }


def train_all(rank: int, world: int) -> dict[str, dict[str, list[torch.Tensor]]]:
    return {str(case): train_sharded(rank, world, case) for case in ONE_A_RULE}


@pytest.fixture(scope="module")
def sharded_runs():
    """All rules in one set of processes: starting them takes longer than training."""
    return run_ranks(train_all, 2)


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_fsdp2_shards_move_as_the_whole_model_does(case, sharded_runs):
    results = [run[str(case)] for run in sharded_runs]
    for result in results:
        assert result["tiers"] == ["fused"]
        for p, q in zip(result["sharded"], result["whole"], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-11)
    for p, q in zip(results[0]["sharded"], results[1]["sharded"], strict=True):
        assert torch.equal(p, q)


def count_dispatches(rank: int, world: int) -> int:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    mesh = init_device_mesh("cpu", (world,))
    params = [torch.nn.Parameter(distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])) for _ in range(4)]
    optimizer = offbeat.AdamW(params, lr=0.1)
    for p in params:
        p.grad = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])
    # A gradient that is laid out otherwise is brought into the parameter's layout.
    params[-1].grad = distribute_tensor(torch.ones(8, 3), mesh, [Replicate()])
    optimizer.step()
    for p in params:
        assert torch.equal(p.full_tensor(), params[0].full_tensor())
    params[-1].grad = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])

    # State that is cut otherwise than the parameter is not silently taken for its shard.
    plain = [torch.nn.Parameter(torch.ones(8, 3)) for _ in range(4)]
    unsharded = offbeat.AdamW(plain)
    for p in plain:
        p.grad = torch.ones(8, 3)
    unsharded.step()
    with pytest.raises(ValueError, match=r"torch\.distributed\.checkpoint"):
        optimizer.load_state_dict(unsharded.state_dict())
    with pytest.raises(ValueError, match=r"torch\.distributed\.checkpoint"):
        unsharded.load_state_dict(optimizer.state_dict())

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counter.count += any(issubclass(t, DTensor) for t in types)
            return func(*args, **(kwargs or {}))

    with Counter():
        optimizer.step()
    for _ in range(2):  # the first builds batches, the second uses them
        optimizer.step()
    assert optimizer._engine._parts
    loss = params[0].square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return Counter.count


def test_no_operator_is_dispatched_on_distributed_tensors():
    assert run_ranks(count_dispatches, 2) == [0, 0]


def change_distributed_tensors(rank: int, world: int) -> list[bool]:
    """Between steps gradients and shards are replaced by others; returns whether each step went by the tables."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    whole = [torch.randn(8, 3), torch.randn(6)]
    ours, twins = ([distribute_tensor(w, mesh, [Shard(0)]).requires_grad_() for w in whole] for _ in range(2))
    a, b = offbeat.AdamW(ours, lr=0.1), offbeat.AdamW(twins, lr=0.1, foreach=False)
    used = []
    for step in range(9):
        torch.manual_seed(step + 1)
        gradients = [torch.randn(w.shape) for w in whole]
        for params in (ours, twins):
            for p, g in zip(params, gradients, strict=True):
                p.grad = distribute_tensor(g, mesh, [Replicate() if step == 4 else Shard(0)])
        if step == 2:
            ours[1].grad = twins[1].grad = None
        if step == 6:
            for params in (ours, twins):
                params[0]._local_tensor = params[0]._local_tensor.clone()
        group = a.param_groups[0]
        used.append(a._engine._find(Work(group, group["params"], None), a.state) is not None)
        a.step()
        b.step()
        for p, q in zip(ours, twins, strict=True):
            torch.testing.assert_close(p.full_tensor(), q.full_tensor(), rtol=3e-6, atol=3e-6)
    return used


def test_tables_of_distributed_tensors():
    # Not at the first, not with gradients cut otherwise, nor at the step after them, nor with another shard.
    wanted = [False, True, True, True, False, False, False, True, True]
    assert run_ranks(change_distributed_tensors, 2) == [wanted, wanted]


def train_replicated(rank: int, world: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = offbeat.AdamW(model.parameters(), lr=0.1)
    for step in range(5):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dist.get_world_size() == world
    return [p.detach() for p in model.parameters()]


def test_ranks_under_ddp_stay_bit_identical():
    first, second = run_ranks(train_replicated, 2)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def told(rank: int, world: int) -> dict[str, bool]:
    """Whether a backward pass through a graph that was made before the step raises."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, found = init_device_mesh("cpu", (world,)), {}
    for tier in ({"foreach": False}, {"foreach": True}, {}):
        p = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer = offbeat.RMSprop([p], lr=0.5, **tier)
        for _ in range(2):
            p.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
            loss = (p * p).sum()
            optimizer.step()
            try:
                torch.autograd.grad(loss, p)
                found[str(tier)] = False
            except RuntimeError as error:
                found[str(tier)] = "modified by an inplace operation" in str(error)
    return found


def test_autograd_is_told_that_a_distributed_tensor_has_changed():
    for answer in run_ranks(told, 2):
        assert set(answer.values()) == {True}, answer
