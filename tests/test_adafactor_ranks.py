"""Adafactor on parameters that are cut over ranks: the numbers of one process with the whole gradient.

In float64 within 1e-10 of torch.optim.Adafactor in one process, in float32 within 1e-5 of ours in one process, as the
order of sums differs. The same bits on every rank.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.engine.matrix import matrices as matrix_module
from offbeat.engine.matrix import shared as exchange
from tests.ranks import run_ranks
from tests.test_matrix_ranks import Net, data, raised

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("matrices")]

HYPER: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "d": 1.2}


def reference(world: int, cls: Any = torch.optim.Adafactor, steps: int = 6, **more: Any) -> dict[str, torch.Tensor]:
    """One process with all of the data."""
    whole = Net().double()
    optimizer = cls(whole.parameters(), **{**HYPER, **more})
    for step in range(steps):
        whole(data(step, world).flatten(0, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in whole.named_parameters()}


def sharded(world: int, layout: str) -> Net:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (world,))
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
    net = Net().double()
    options: dict[str, Any] = {"mesh": mesh}
    if layout == "columns":  # of matrices and of experts, whose rows are cut then
        options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % world == 0 else Shard(0)
    fully_shard(net.inner, **options)
    fully_shard(net, **options)
    return net


def whole_values(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach() for name, p in net.named_parameters()}


def train(rank: int, world: int, layout: str, round_bytes: int, chunk_bytes: int) -> Any:
    exchange.ROUND_BYTES, matrix_module.CHUNK_BYTES["cpu"] = round_bytes, chunk_bytes
    net = sharded(world, layout)
    optimizer: Any = offbeat.Adafactor(net.parameters(), **HYPER)
    if layout == "overlap":
        offbeat.overlap(optimizer, net)
    sums: list[int] = []
    all_reduce = dist.all_reduce

    def counted(t: torch.Tensor, *args: Any, **more: Any) -> Any:
        sums.append(t.numel())
        return all_reduce(t, *args, **more)

    for step in range(6):
        net(data(step, world)[rank]).square().mean().backward()
        dist.all_reduce = counted
        optimizer.step()
        dist.all_reduce = all_reduce
        optimizer.zero_grad()
        if step == 2 and layout != "overlap":
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = offbeat.Adafactor(net.parameters(), **HYPER)
            optimizer.load_state_dict(saved)
    for p in net.parameters():
        (placement,) = [one for one in p.placements if one.is_shard()]
        for key, value in optimizer.state[p].items():
            if key != "step":
                follows = key == "variance" or (value.shape[placement.dim] != 1 or p.shape[placement.dim] == 1)
                follows &= not (key == "col_var" and placement.dim == p.dim() - 2)
                assert (placement in value.placements) == follows, (key, p.shape)
    kept = [part.keeps for part in optimizer._engine._parts.values()]
    return whole_values(net), sums, kept


@pytest.mark.parametrize(
    ("world", "layout", "round_bytes", "chunk_bytes"),
    [
        (2, "rows", 64 << 20, 4 << 20),
        (3, "rows", 1, 1),
        (4, "rows", 600, 4 << 20),
        (2, "columns", 64 << 20, 4 << 20),
        (4, "hsdp", 64 << 20, 4 << 20),
        (2, "overlap", 64 << 20, 4 << 20),
    ],
    ids=str,
)
def test_shards_move_as_the_whole_model_does(world, layout, round_bytes, chunk_bytes):
    runs = run_ranks(train, world, layout, round_bytes, chunk_bytes)
    exact = reference(world)
    for found, sums, kept in runs:
        for name, p in exact.items():
            torch.testing.assert_close(found[name], p, rtol=1e-10, atol=1e-10, msg=name)
            assert torch.equal(found[name], runs[0][0][name])
        if layout != "overlap":
            assert all(kept)
        if layout == "rows" and round_bytes == 64 << 20:
            # Two numbers to agree, then all columns together, then all norms, and then those of vectors.
            assert len(sums) == 6 * 4
            numbers = sum(p.shape[-1] + 1 for p in exact.values() if p.dim() == 2) + 2 * len(exact)
            assert sum(sums) == 6 * (2 + numbers)


def train_alone(rank: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameters of many shapes, some with fewer rows than ranks and some empty, with gradients in turns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    row, grid = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    places: list[Any] = [(row, [Shard(0)]), (row, [Shard(1)]), (grid, [Replicate(), Shard(0)]), (row, [Replicate()])]
    shapes = [(5, 6), (1, 4), (2, 9), (7,), (1,), (3, 5, 4), (0, 3), (2, 3, 2, 5), (5, 6)]
    torch.manual_seed(0)
    pairs: list[Any] = []
    for shape in shapes:
        for place in places:
            if len(shape) > 1 or place[1] != [Shard(1)]:
                value = torch.randn(shape, dtype=dtype)
                pairs.append((distribute_tensor(value.clone(), *place), value, place))
    ours, whole = (cls([p[i] for p in pairs], **HYPER) for i, cls in enumerate([offbeat.Adafactor] * 2))
    for step in range(5):
        for i, (p, q, place) in enumerate(pairs):
            g = torch.randn(q.shape, dtype=dtype, generator=torch.Generator().manual_seed(100 * step + i))
            missing = (step, i % 5) in ((1, 2), (3, 0))
            p.grad, q.grad = (None, None) if missing else (distribute_tensor(g, *place), g)
        ours.step()
        whole.step()
        if step == 2:
            ours.param_groups[0]["lr"] = whole.param_groups[0]["lr"] = 0.01
    found = []
    for p, q, _ in pairs:
        found += [p.full_tensor(), q]
        for key, value in ours.state[p].items():
            found += [value.full_tensor() if key != "step" else value, whole.state[q][key]]
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
def test_every_shape_and_placement(dtype, tolerance):
    runs = run_ranks(train_alone, 4, dtype)
    for found in runs:
        for a, b, first in zip(found[::2], found[1::2], runs[0][::2], strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)  # of an empty matrix
            torch.testing.assert_close(a, first, rtol=0, atol=0, equal_nan=True)


def checkpoints(rank: int, world: int, folder: str) -> Any:
    """Saves a sharded run, goes on sharded in another way, unsharded, and from the unsharded form again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.tensor import distribute_tensor

    def steps(net: Any, optimizer: Any, start: int, end: int, mine: slice) -> None:
        for step in range(start, end):
            net(data(step, world)[mine].flatten(0, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    here, everything = slice(rank, rank + 1), slice(0, world)
    net = sharded(world, "rows")
    optimizer = offbeat.Adafactor(net.parameters(), **HYPER)
    steps(net, optimizer, 0, 3, here)
    dcp.save({"model": net.state_dict(), "state": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder)
    full = StateDictOptions(full_state_dict=True)
    # Copied: what is the same on every rank is the optimizer's own tensor there, and torch.optim steps what it loads.
    whole_state = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=full))
    weights = whole_values(net)

    found = []
    for layout in ("rows", "columns", "hsdp"):  # resharded by torch.distributed.checkpoint
        other = sharded(world, layout)
        again = offbeat.Adafactor(other.parameters(), **HYPER)
        again.init_state()
        contents = {"model": other.state_dict(), "state": get_optimizer_state_dict(other, again)}
        dcp.load(contents, checkpoint_id=folder)
        other.load_state_dict(contents["model"])
        set_optimizer_state_dict(other, again, contents["state"])
        steps(other, again, 3, 6, here)
        found.append(whole_values(other))

    alone = Net().double()  # not sharded, in torch.optim
    alone.load_state_dict(weights)
    theirs = torch.optim.Adafactor(alone.parameters(), **HYPER)
    offload = StateDictOptions(full_state_dict=True, cpu_offload=True)  # rank 0 alone has it then
    state = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=offload))
    shared = [state if rank == 0 else None]
    dist.broadcast_object_list(shared, 0)
    set_optimizer_state_dict(alone, theirs, shared[0], options=full)
    steps(alone, theirs, 3, 6, everything)
    found.append({name: p.detach() for name, p in alone.named_parameters()})

    back = sharded(world, "rows")  # and from the whole form to shards
    with torch.no_grad():
        for p, value in zip(back.parameters(), weights.values(), strict=True):
            p.copy_(distribute_tensor(value, p.device_mesh, p.placements))
    again = offbeat.Adafactor(back.parameters(), **HYPER)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(back, again, whole_state if rank == 0 else {}, options=options)
    steps(back, again, 3, 6, here)
    found.append(whole_values(back))
    return found


def test_checkpoints_reshard_and_go_between_whole_and_sharded(tmp_path):
    exact = reference(4)
    for found in run_ranks(checkpoints, 4, str(tmp_path)):
        for one in found:
            for name, p in exact.items():
                torch.testing.assert_close(one[name], p, rtol=1e-9, atol=1e-9, msg=name)


def disagree(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    params = [distribute_tensor(torch.ones(shape), mesh, [Shard(0)]) for shape in ((4, 4), (5,), (3, 2), (6,))]
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    optimizer = offbeat.Adafactor(groups)

    def give(missing: int) -> None:
        for i, p in enumerate(params):
            g = distribute_tensor(torch.ones(p.shape), mesh, [Shard(0)])
            p.grad = None if rank == 1 and i == missing else g

    found: dict[str, Any] = {}
    for i in range(3):
        give(i)
        found[f"missing {i}"] = raised(optimizer.step)
    give(-1)
    optimizer.param_groups[1]["lr"] = 0.1 + rank
    found["lr"] = raised(optimizer.step)
    found["unchanged"] = all(torch.equal(p.full_tensor(), torch.ones(p.shape)) for p in params)
    optimizer.param_groups[1]["lr"] = 0.1
    found["then"] = raised(optimizer.step)
    whole = {
        i: {k: v.full_tensor() if k != "step" else v for k, v in optimizer.state[p].items()}
        for i, p in enumerate(params)
    }
    saved = {"state": whole, "param_groups": optimizer.state_dict()["param_groups"]}
    found["plain state"] = raised(lambda: optimizer.load_state_dict(saved))
    return found


def disagree_quietly(rank: int, world: int) -> dict[str, Any]:
    """Differences that look alike: other matrices of one shape, in one group and in three; rates that repeat."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {}
    for name, rule in (("Adafactor", offbeat.Adafactor), ("Muon", offbeat.Muon)):
        for groups in ([[0, 1, 2]], [[0], [1], [2]]):
            params = [distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) for _ in range(3)]
            optimizer = rule([{"params": [params[i] for i in some], "lr": 0.1} for some in groups])
            params[rank].grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            found[f"{name}, {len(groups)} groups"] = raised(optimizer.step)
        for i, p in enumerate(params):
            p.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            optimizer.param_groups[i]["lr"] = (0.1, 0.2, 0.1 + 0.1 * rank)[i]
        found[f"{name}, rates"] = raised(optimizer.step)
        found[f"{name}, unchanged"] = all(torch.equal(p.full_tensor(), torch.ones(4, 4)) for p in params)
    return found


def test_ranks_that_disagree_quietly_raise_together():
    for found in run_ranks(disagree_quietly, 2):
        for name in ("Adafactor", "Muon"):
            assert "gradients for different matrices" in found[f"{name}, 1 groups"]
            assert "gradients for different matrices" in found[f"{name}, 3 groups"]
            assert "option 'lr'" in found[f"{name}, rates"]
            assert found[f"{name}, unchanged"]


def test_ranks_that_disagree_raise_together():
    for found in run_ranks(disagree, 2):
        for i in range(3):
            assert "gradients for different matrices" in found[f"missing {i}"]
        assert "option 'lr'" in found["lr"]
        assert found["unchanged"]
        assert found["then"] == "nothing"
        assert "torch.distributed.checkpoint" in found["plain state"]
