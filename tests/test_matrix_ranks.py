"""Matrices that several ranks share: the numbers of one process with the whole gradient, the same on every rank.

With ``ns_dtype=torch.float64`` within 1e-9 of one process. By default, in bfloat16, within 2 % of the learning rate a
step, as the order of sums differs.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.engine.matrix import shared as exchange
from offbeat.rules import muon as muon_module
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("matrices")]

EXACT = {"lr": 0.05, "ns_dtype": torch.float64}
ROUGH = {"lr": 0.05}


class Net(torch.nn.Module):
    """Matrices whose rows do not divide evenly, one with fewer rows than ranks, and stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 7))
        self.narrow = torch.nn.Linear(7, 3)
        self.wide = torch.nn.Linear(3, 10)
        self.experts = torch.nn.Parameter(torch.randn(2, 10, 4) / 3)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.narrow(self.inner(x)))
        return self.head(torch.tanh(x @ self.experts[0]) + torch.tanh(x @ self.experts[1]))


def chain(module: torch.nn.Module, hyper: dict[str, Any]) -> offbeat.Chain:
    split = offbeat.split_parameters(module)
    return offbeat.Chain([offbeat.Muon(split.matrices, **hyper), offbeat.AdamW(split.rest, lr=0.01)])


def data(step: int, world: int) -> torch.Tensor:
    return torch.randn(world, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def reference(world: int, hyper: dict[str, Any], steps: int = 5) -> dict[str, torch.Tensor]:
    """One process with all of the data."""
    whole = Net().double()
    optimizer = chain(whole, hyper)
    for step in range(steps):
        whole(data(step, world).flatten(0, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in whole.named_parameters()}


def assert_near(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], hyper: dict[str, Any]) -> None:
    tolerance = 1e-9 if hyper is EXACT else 5 * 0.02 * 0.05 * 2
    for name, p in exact.items():
        torch.testing.assert_close(found[name], p, rtol=tolerance, atol=tolerance, msg=name)


def train_fsdp(rank: int, world: int, layout: str, hyper: dict[str, Any], round_bytes: int) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    exchange.ROUND_BYTES = round_bytes
    mesh = init_device_mesh("cpu", (world,))
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
    net = Net().double()
    options: dict[str, Any] = {"mesh": mesh}
    if layout == "columns":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % world == 0 else Shard(0)
    if layout != "whole":
        fully_shard(net.inner, **options)
    fully_shard(net, **options)
    optimizer = chain(net, hyper)
    if layout == "overlap":
        offbeat.overlap(optimizer, net)
    for step in range(5):
        net(data(step, world)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and layout != "overlap":
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = chain(net, hyper)
            optimizer.load_state_dict(saved)
    for p in optimizer.optimizers[0].param_groups[0]["params"]:
        assert optimizer.state[p]["momentum_buffer"].placements == p.placements
    return {name: p.full_tensor().detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    ("world", "layout", "round_bytes"),
    [
        (2, "rows", 64 << 20),
        (3, "rows", 1),
        (4, "rows", 600),
        (2, "whole", 300),
        (2, "columns", 64 << 20),
        (4, "hsdp", 400),
        (2, "overlap", 400),
    ],
    ids=str,
)
def test_fsdp2_shards_move_as_the_whole_model_does(world, layout, round_bytes):
    runs = run_ranks(train_fsdp, world, layout, EXACT, round_bytes)
    exact = reference(world, EXACT)
    for run in runs:
        assert_near(run, exact, EXACT)
        assert all(torch.equal(run[name], runs[0][name]) for name in run)


def test_fsdp2_in_bfloat16():
    runs = run_ranks(train_fsdp, 2, "rows", ROUGH, 64 << 20)
    assert_near(runs[0], reference(2, ROUGH), ROUGH)
    assert all(torch.equal(runs[1][name], p) for name, p in runs[0].items())


def train_ddp(
    rank: int, world: int, hyper: dict[str, Any], exact: bool, round_bytes: int, overlapped: bool = False
) -> Any:
    exchange.ROUND_BYTES = round_bytes
    net = Net().double()
    module = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-4)
    optimizer = chain(net, hyper)
    optimizer.optimizers[0].share_matrices(exact=exact)
    handle = offbeat.overlap(optimizer, module) if overlapped else None
    seen: list[int] = []
    whole = muon_module.newton_schulz

    def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(x.numel() * min(x.shape[-2:]))
        return whole(x, *args)

    muon_module.newton_schulz = counted
    for step in range(5):
        module(data(step, world)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and handle is None:  # the ranks go on sharing
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return {name: p.detach().clone() for name, p in net.named_parameters()}, sum(seen)


@pytest.mark.parametrize("overlapped", [False, True], ids=["step", "overlap"])
@pytest.mark.parametrize(("world", "round_bytes"), [(2, 64 << 20), (3, 400), (4, 1)])
def test_ddp_ranks_share_the_work(world, round_bytes, overlapped):
    runs = run_ranks(train_ddp, world, EXACT, True, round_bytes, overlapped)
    exact = reference(world, EXACT)
    for run, _ in runs:
        assert_near(run, exact, EXACT)
        assert all(torch.equal(run[name], runs[0][0][name]) for name in run)
    # Together they have done the work once. One matrix, the experts, has almost half of it.
    costs = [7 * 6 * 6, 7 * 7 * 7, 7 * 3 * 3, 3 * 10 * 3, 2 * 10 * 4 * 4]
    assert sum(done for _, done in runs) == 5 * sum(costs)
    if not overlapped:  # where each bucket is shared by itself
        assert max(done for _, done in runs) <= 5 * max(max(costs), sum(costs) * 0.6)


@pytest.mark.parametrize("hyper", [ROUGH, {"lr": 0.05, "ns_dtype": torch.float32}], ids=str)
def test_results_travel_in_bfloat16_unless_asked(hyper):
    runs = run_ranks(train_ddp, 2, hyper, False, 64 << 20)
    assert_near(runs[0][0], reference(2, hyper), ROUGH)
    assert all(torch.equal(runs[1][0][name], p) for name, p in runs[0][0].items())


def train_replicated(rank: int, world: int) -> list[Any]:
    """DTensors of which every rank has all, and one cut over a dimension of the mesh that has one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, world))
    errors = []
    for cls in (offbeat.Muon, offbeat.Adafactor):
        torch.manual_seed(0)
        whole, placements = torch.randn(5, 4), [Shard(0), Replicate()]
        one, other = distribute_tensor(whole, mesh, placements), whole.clone()
        a, b = cls([one], lr=0.05), cls([other], lr=0.05)
        for step in range(3):
            g = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            one.grad, other.grad = distribute_tensor(g, mesh, placements), g
            a.step()
            b.step()
            if step == 1:
                saved = copy.deepcopy(a.state_dict())
                a = cls([one], lr=0.05)
                a.load_state_dict(saved)
        errors.append((one.full_tensor() - other).abs().max().item())
    return errors


def test_replicated_dtensors_are_whole():
    assert run_ranks(train_replicated, 2) == [[0.0, 0.0]] * 2


def replicas(every: int, warmup: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """Two nodes of two ranks that average parameters now and then, each node as one process with all of its data."""
    nets = [Net().double() for _ in range(2)]
    optimizers = [chain(net, EXACT) for net in nets]
    for step in range(steps):
        for node, net in enumerate(nets):
            x = data(step, 4) if step < warmup else data(step, 4)[2 * node : 2 * node + 2]
            net(x.flatten(0, 1)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step >= warmup and (step - warmup) % every == 0:
            with torch.no_grad():
                for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                    p.copy_((p + q) / 2)
                    q.copy_(p)
    return [{name: p.detach() for name, p in net.named_parameters()} for net in nets]


def train_local_sgd(rank: int, world: int, how: str) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "node"))
    net = Net().double()
    module: Any = net
    if how.startswith("fsdp"):
        fully_shard(net.inner, mesh=mesh["node"])
        fully_shard(net, mesh=mesh["node"])
        options: dict[str, Any] = {"group": mesh.get_group("replica")}
    else:
        module = torch.nn.parallel.DistributedDataParallel(net)
        options = {"subgroup": mesh.get_group("node")}
    inner = chain(net, EXACT)
    if how == "ddp shared":
        inner.share_matrices(mesh.get_group("node"), exact=True)
    if how == "fsdp overlap":
        offbeat.overlap(inner, module)
    warmup = 0 if how == "fsdp overlap" else 1
    optimizer = offbeat.LocalSGD(inner, module, every=2, warmup=warmup, **options)
    for step in range(6 + warmup):
        module(data(step, world)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() if how.startswith("fsdp") else p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize("how", ["fsdp", "fsdp overlap", "ddp shared"])
def test_local_sgd_around_it(how):
    warmup = 0 if how == "fsdp overlap" else 1
    expected = replicas(2, warmup, 6 + warmup)
    assert not torch.equal(expected[0]["narrow.weight"], expected[1]["narrow.weight"])
    for rank, found in enumerate(run_ranks(train_local_sgd, 4, how)):
        assert_near(found, expected[rank // 2], EXACT)


def train_meshes(rank: int, world: int) -> float:
    """Parameters of one group on three meshes: all ranks, pairs of them, and one that only has copies."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    row, grid = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    places = [(row, [Shard(0)]), (grid, [Replicate(), Shard(0)]), (grid, [Shard(1), Replicate()]), (row, [Replicate()])]
    torch.manual_seed(0)
    whole = [torch.randn(5 + i, 6, dtype=torch.float64) for i in range(len(places))]
    ours = [distribute_tensor(p.clone(), *place) for p, place in zip(whole, places, strict=True)]
    optimizers = offbeat.Muon(ours, **EXACT), offbeat.Muon(whole, **EXACT)
    for step in range(3):
        for i, (p, q) in enumerate(zip(ours, whole, strict=True)):
            g = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(10 * step + i))
            p.grad, q.grad = distribute_tensor(g, *places[i]), g
        for optimizer in optimizers:
            optimizer.step()
    return max((p.full_tensor() - q).abs().max().item() for p, q in zip(ours, whole, strict=True))


def test_parameters_may_be_on_several_meshes():
    assert max(run_ranks(train_meshes, 4)) < 1e-9


def raised(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def break_things(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    found: dict[str, Any] = {}
    params = [torch.ones(3, 4), torch.ones(3, 4)]
    optimizer = offbeat.Muon(params)
    optimizer.share_matrices()
    for i, p in enumerate(params):
        p.grad = None if (rank, i) == (1, 0) else torch.ones(3, 4)
    found["missing"] = raised(optimizer.step)
    found["unchanged"] = all(torch.equal(p, torch.ones(3, 4)) for p in params)
    for p in params:
        p.grad = torch.full((3, 4), 1.0 + rank)
    found["other gradients"] = raised(optimizer.step)
    found["unchanged"] &= all(torch.equal(p, torch.ones(3, 4)) for p in params)
    other = offbeat.Muon([torch.ones(3 + rank, 4)])
    found["different"] = raised(other.share_matrices)
    found["elementwise"] = raised(offbeat.AdamW(params).share_matrices)
    found["adafactor"] = raised(offbeat.Adafactor(params).share_matrices)
    mesh = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2))
    sharded = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    sharded.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    found["other lr on shards"] = raised(offbeat.Muon([sharded], lr=0.1 + rank).step)
    twice = distribute_tensor(torch.ones(4, 4), grid, [Shard(0), Shard(1)])
    twice.grad = distribute_tensor(torch.ones(4, 4), grid, [Shard(0), Shard(1)])
    found["cut twice"] = raised(offbeat.Muon([twice]).step)
    found["cut twice, adafactor"] = raised(offbeat.Adafactor([twice]).step)
    # After all of this the ranks are still in step.
    for p in params:
        p.grad = torch.ones(3, 4)
    optimizer.step()
    found["params"] = [p.clone() for p in params]
    dist.barrier()
    return found


def test_bad_input_raises_on_every_rank_alike():
    for found in run_ranks(break_things, 4):
        assert "gradients for different matrices" in found["missing"]
        assert found["unchanged"]
        assert "different gradients" in found["other gradients"]
        assert "different parameters" in found["different"]
        assert "no matrices to share" in found["elementwise"]
        assert "no matrices to share" in found["adafactor"]
        assert "different values of the option 'lr'" in found["other lr on shards"]
        assert "one dimension of the mesh only" in found["cut twice"]
        assert "one dimension of the mesh only" in found["cut twice, adafactor"]
        assert not torch.equal(found["params"][0], torch.ones(3, 4))


def test_owners_are_balanced_and_rounds_bounded():
    from offbeat.engine.matrix.assign import assign, cost_of, rounds

    shapes = [(64 * (1 + i % 5), 64 * (1 + i % 3)) for i in range(40)]
    costs = [cost_of(shape) for shape in shapes]
    for ranks in (1, 2, 3, 8):
        owners = assign(costs, ranks)
        load = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
        assert max(load) <= sum(costs) / ranks + max(costs)
        sizes = [a * b for a, b in shapes]
        made = rounds(sizes, owners, ranks, 40_000)
        assert sorted(i for one in made for i in one) == list(range(40))
        for one in made:
            for rank in range(ranks):
                mine = [sizes[i] for i in one if owners[i] == rank]
                assert sum(mine) <= 40_000 or len(mine) == 1
