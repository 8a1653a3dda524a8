"""Averaging on a GPU: two ranks share one through gloo, which copies for itself; NCCL alone where there is one rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.replicas.contents import Item
from offbeat.replicas.hello import Verdict
from offbeat.replicas.values import Reduction, Values
from offbeat.wire.peers import GroupPeers
from tests.harness import failing_reduce
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.ranks,
    pytest.mark.xdist_group("cuda"),
]


def model_on(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)).to(device)


def train(device: str, rank: int, options: dict[str, Any], wrap: Any, steps: int = 14) -> list[torch.Tensor]:
    model = model_on(device)
    module = wrap(model)
    inner = offbeat.AdamW(model.parameters(), lr=0.01)
    if options.pop("overlap", False):
        offbeat.overlap(inner, module)
    local = offbeat.LocalSGD(inner, module, subgroup=None, **options)
    addresses = [p.data_ptr() for p in model.parameters()]
    history = []
    for step in range(steps):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
        module(x).square().mean().backward()
        local.step()
        local.zero_grad()
        history.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu())
    assert [p.data_ptr() for p in model.parameters()] == addresses
    local.finish()
    return history


CASES: list[dict[str, Any]] = [
    {"every": 4, "warmup": 3},
    {"every": 4, "warmup": 3, "bucket_mb": 0.1},
    {"every": 4, "warmup": 3, "delay": 3},
    {"every": 4, "warmup": 3, "delay": 3, "bucket_mb": 0.1},
    {"every": 4, "warmup": 3, "delay": 3, "snapshot": "cpu", "bucket_mb": 0.1},
    {"every": 4, "warmup": 3, "overlap": True},
    {"every": 4, "warmup": 3, "delay": 2, "overlap": True},
]


def all_cases(rank: int, world: int) -> list[Any]:
    return [[train(device, rank, dict(case), DistributedDataParallel) for device in ("cuda", "cpu")] for case in CASES]


def test_the_same_as_on_the_cpu():
    ranks = run_ranks(all_cases, 2, seconds=180)
    for results in ranks:
        for case, (gpu, cpu) in zip(CASES, results, strict=True):
            for step, (a, b) in enumerate(zip(gpu, cpu, strict=True)):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4, msg=lambda m, s=step, c=case: f"{c} {s}: {m}")
    for first, second in zip(*ranks, strict=True):
        for step in (0, 1, 2, 3):
            if step < 3:
                assert torch.equal(first[0][0][step], second[0][0][step])


def simulated(device: str, options: dict[str, Any], steps: int = 12) -> list[torch.Tensor]:
    def replica(rank: int, peers: Any, model: nn.Module) -> torch.Tensor:
        optimizer = offbeat.DiLoCo(
            offbeat.SGD(model.parameters(), lr=3.0), model, group=peers, subgroup=None, warmup=2, **options
        )
        for step in range(steps):
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
            (model(x) - x).square().mean().backward()
            optimizer.average_gradients()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 1500), nn.Tanh(), nn.Linear(1500, 64)).to(device)

    return offbeat.Simulation(4).run(replica, make=make)


@pytest.mark.parametrize(
    "options",
    [{"every": 4}, {"every": 4, "delay": 3}, {"every": 4, "fragments": 2, "delay": 2}, {"every": 4, "codec": "int8"}],
)
def test_simulated_replicas(options):
    """Rounds in the background are on streams of their own, and read what other replicas' streams have written."""
    gpu, cpu = simulated("cuda", dict(options)), simulated("cpu", dict(options))
    for one in gpu:
        assert torch.equal(one, gpu[0])
    torch.testing.assert_close(gpu[0], cpu[0], rtol=1e-3, atol=1e-3)


def failing(rank: int, world: int) -> bool:
    """A round that training waits for changes nothing before all ranks have its result."""
    model = model_on("cuda")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    before = [p.detach().clone() for p in model.parameters()]
    local = offbeat.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.0), model, subgroup=None, bucket_mb=0.05)
    with failing_reduce(5, error=RuntimeError("gone")), pytest.raises(RuntimeError, match="gone"):
        local.step()
    dist.barrier()
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_round_that_failed_changes_nothing():
    assert run_ranks(failing, 2) == [True, True]


def test_nccl_of_one_rank(tmp_path):
    if not dist.is_nccl_available():
        pytest.skip("no NCCL")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        for options in ({"every": 2}, {"every": 2, "delay": 1}):
            train("cuda", 0, dict(options), DistributedDataParallel, steps=5)
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE")
        dist.destroy_process_group()


def test_nccl_reduces_values(tmp_path):
    """One rank cannot average, but its buckets can go through NCCL. Rounds with a delay use gloo."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        tensors = [torch.randn(1000, 100, device="cuda"), torch.randn(77, device="cuda").half()]
        before = [t.clone() for t in tensors]
        half = Verdict(weights=(1.0, 1.0))  # as if there were another rank, with zeros
        items = [Item(str(i), t) for i, t in enumerate(tensors)]
        values = Values(items)
        values.copy(items)
        Reduction(100_000).run(values.flats, GroupPeers(dist.group.WORLD, [0]), half)
        tensors = [values[str(i)] for i in range(len(tensors))]
        for t, b in zip(tensors, before, strict=True):
            torch.testing.assert_close(t, b / 2)
    finally:
        dist.destroy_process_group()
