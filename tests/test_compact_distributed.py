"""State in 8 bits of sharded parameters: each shard has its own blocks and scales, checkpoints hold numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.engine.eight_bit import scales_for
from offbeat.engine.tensors import local
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks")]

RULES: dict[str, dict[str, Any]] = {"AdamW": {"lr": 0.01}, "SGD": {"lr": 0.1, "momentum": 0.9}}


def sharded_model(world: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 31), nn.Tanh(), nn.Linear(31, 1))  # shards of unequal size, and empty ones
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model


def backward(model: nn.Module, step: int, rank: int) -> None:
    x = torch.randn(4, 8, 40, generator=torch.Generator().manual_seed(step))
    model(x[rank]).square().mean().backward()


def train(rank: int, world: int, name: str, folder: str) -> dict[str, Any]:
    """FSDP2 beside plain tensors that are the shards, with the same gradients."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.tensor import DTensor

    model = sharded_model(world)
    options = {**RULES[name], "state_dtype": "8bit"}
    ours = getattr(offbeat, name)(model.parameters(), **options)
    plain = [local(p).detach().clone().requires_grad_() for p in model.parameters()]
    reference = getattr(offbeat, name)(plain, **options)
    same = []
    for step in range(9):
        backward(model, step, rank)
        for p, q in zip(model.parameters(), plain, strict=True):
            q.grad = local(p.grad).clone()
        ours.step()
        reference.step()
        ours.zero_grad()
        same.append(all(torch.equal(local(p), q) for p, q in zip(model.parameters(), plain, strict=True)))
        if step == 2:
            saved = ours.state_dict()
            ours = getattr(offbeat, name)(model.parameters(), **options)
            ours.load_state_dict(saved)
        if step == 4:
            contents = get_optimizer_state_dict(model, ours)
            dcp.save(contents, checkpoint_id=folder)
            ours = getattr(offbeat, name)(model.parameters(), **options)
            contents = get_optimizer_state_dict(model, ours)
            dcp.load(contents, checkpoint_id=folder)
            set_optimizer_state_dict(model, ours, contents)
            numbers = {k: v.full_tensor() for k, v in contents["state"]["0.weight"].items() if isinstance(v, DTensor)}
            for p in model.parameters():
                for key, value in ours.state[p].items():
                    if key.endswith("_8bit"):
                        assert isinstance(value, DTensor)
                        assert value.dtype in (torch.int8, torch.uint8)
                    elif key.endswith("_scale"):
                        assert not isinstance(value, DTensor)
                        assert value.shape == (scales_for(local(p).numel()),)
        if step == 6:
            tiers = [choice.tier for choice in ours.tiers()]
            for optimizer in (ours, reference):
                optimizer.param_groups[0]["state_dtype"] = None
    kinds = {key: (isinstance(value, DTensor), value.dtype) for key, value in saved["state"][0].items()}
    return {"same": same, "numbers": numbers, "kinds": kinds, "tiers": tiers}


def load_elsewhere(rank: int, world: int, name: str, folder: str) -> dict[str, torch.Tensor]:
    """The same checkpoint on another number of ranks: its numbers, as 8 bits hold them there."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.tensor import DTensor

    model = sharded_model(world)
    ours = getattr(offbeat, name)(model.parameters(), **RULES[name], state_dtype="8bit")
    contents = get_optimizer_state_dict(model, ours)
    dcp.load(contents, checkpoint_id=folder)
    set_optimizer_state_dict(model, ours, contents)
    backward(model, 5, rank)
    with pytest.raises(ValueError, match="8-bit codes cannot be sharded"):
        ours.load_state_dict(whole_state(name))
    saved = ours.state_dict()["state"][0]
    ours.step()
    return {key: value.full_tensor() for key, value in saved.items() if isinstance(value, DTensor)}


def before_the_first_step(rank: int, world: int, folder: str, state_dtype: Any) -> list[Any]:
    """State that is allocated but has not begun, converted: every rank counts alike, also one with an empty shard."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    model = sharded_model(world)
    full = offbeat.SGD(model.parameters(), **options)
    full.init_state()
    ours = offbeat.SGD(model.parameters(), **options, state_dtype=state_dtype)
    ours.load_state_dict(full.state_dict())
    dcp.save(get_optimizer_state_dict(model, ours), checkpoint_id=folder)
    model = sharded_model(world)
    ours = offbeat.SGD(model.parameters(), **options, state_dtype=state_dtype)
    contents = get_optimizer_state_dict(model, ours)
    dcp.load(contents, checkpoint_id=folder)
    set_optimizer_state_dict(model, ours, contents)
    steps = [ours.state[p]["step"].item() for p in model.parameters()]
    # A shard that is laid out anew, and full precision from here on.
    weight = next(iter(model.parameters()))
    backward(model, 0, rank)
    ours.step()
    weight._local_tensor.data = local(weight).data.t().contiguous().t()
    ours.param_groups[0]["state_dtype"] = None
    backward(model, 1, rank)
    ours.step()
    assert all(ours.state[p]["momentum_buffer"].placements == p.placements for p in model.parameters())
    return steps


@pytest.mark.parametrize("state_dtype", ["8bit", torch.bfloat16], ids=str)
def test_state_that_has_not_begun(state_dtype, tmp_path):
    for steps in run_ranks(before_the_first_step, 2, str(tmp_path / "saved"), state_dtype):
        assert steps == [0.0] * 4


def whole_state(name: str) -> dict[str, Any]:
    """The state dict of the model before it is cut."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 31), nn.Tanh(), nn.Linear(31, 1))
    optimizer = getattr(offbeat, name)(model.parameters(), **RULES[name], state_dtype="8bit")
    backward(model, 0, 0)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("interpret", [False, True], ids=["loop", "kernel"])
@pytest.mark.parametrize("name", RULES)
def test_shards_in_8_bits(name, interpret, tmp_path, monkeypatch):
    if interpret:
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # before the ranks import it
    runs = run_ranks(train, 2, name, str(tmp_path / "saved"))
    for run in runs:
        assert run["same"] == [True] * 9
        assert run["tiers"] == ["fused" if interpret else "loop"]
        assert not any(key.endswith(("_8bit", "_scale")) for key in run["kinds"])
        assert all(kind == (True, torch.float32) for key, kind in run["kinds"].items() if key != "step")
    for world in (1, 3) if name == "AdamW" and not interpret else ():
        for found in run_ranks(load_elsewhere, world, name, str(tmp_path / "saved")):
            assert found.keys() == runs[0]["numbers"].keys()
            for key, value in found.items():
                was = runs[0]["numbers"][key]
                # Blocks are others, and with them scales: half the widest code of a block is as far as a number moves.
                power, levels = (4, 255) if key == "exp_avg_sq" else (2, 127)
                bound = was.abs().max() * power / levels / 2
                assert (value - was).abs().max() <= bound
