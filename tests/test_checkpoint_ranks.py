"""Checkpoints of several ranks: exact resume of every form, other numbers of ranks, other shardings, several disks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.checkpoint import CheckpointMismatch, DamagedCheckpoint
from tests.checkpoint_work import PLAIN, REPLICAS, adamw, quietly, same, train, whole, wrapped
from tests.ranks import run_ranks
from tests.scenarios import Scenarios

pytestmark = pytest.mark.ranks
scenario = Scenarios(__name__)


def shared_folder(rank, own=False):
    """A folder of all ranks, or one that only this rank sees."""
    parts = [tempfile.mkdtemp() if rank == 0 or own else None]
    if not own:
        dist.broadcast_object_list(parts)
    return Path(parts[0]) / "checkpoints"


def resumes(rank, kind, make, folder, seed, first=7, last=20):
    """Saves after ``first`` steps, goes on, loads into fresh objects, goes on again: with the same bits?"""
    model = wrapped(kind)
    optimizer = quietly(make, model)
    torch.manual_seed(50 + rank)
    train(model, optimizer, 0, first, seed)
    offbeat.save_checkpoint(folder, model=model, optimizer=optimizer, extra={"rank": rank})
    train(model, optimizer, first, last, seed)
    model2 = wrapped(kind, seed=1)
    optimizer2 = quietly(make, model2)
    extra = offbeat.load_checkpoint(folder, model=model2, optimizer=optimizer2)
    assert extra["rank"] == rank
    train(model2, optimizer2, first, last, seed)
    assert same(dict(model.state_dict()), dict(model2.state_dict()))
    assert same(optimizer.state_dict()["state"], optimizer2.state_dict()["state"])
    for one in (optimizer, optimizer2):
        if hasattr(one, "finish"):
            one.finish()
    assert same(dict(model.state_dict()), dict(model2.state_dict()))


KINDS = {
    ("plain", 2): REPLICAS,
    ("ddp", 2): {**REPLICAS, **PLAIN},
    ("fsdp", 2): {form: make for form, make in PLAIN.items() if form != "torch AdamW"},
    ("pairs", 4): REPLICAS,
}


def resume(kind, make):
    def exact(rank, world):
        resumes(rank, kind, make, shared_folder(rank), {"fsdp": 0, "pairs": rank // 2}.get(kind, rank))

    return exact


for (kind, world), forms in KINDS.items():
    for form, make in forms.items():
        function = resume(kind, make)
        function.__name__ = f"{form}, {kind}"
        scenario(world)(function)

# --- other numbers of ranks and other shardings


def save_forms(rank, world, kind, folder, names):
    """Save every form; returns the whole model and optimizer state as seen by this rank."""
    result = {}
    for name in names:
        model = wrapped(kind)
        optimizer = quietly({**PLAIN, **REPLICAS}[name], model)
        seed = {"pairs": rank // 2, "plain": rank}.get(kind, 0)
        train(model, optimizer, 0, 7, seed)
        offbeat.save_checkpoint(Path(folder) / name, model=model, optimizer=optimizer, extra={"rank": rank})
        result[name] = content_of(model, optimizer)
        if hasattr(optimizer, "finish"):
            optimizer.finish()
    return result


def load_forms(rank, world, kind, folder, names):
    """Load every form; returns the whole model and optimizer state."""
    result = {}
    for name in names:
        model = wrapped(kind, seed=1)
        optimizer = quietly({**PLAIN, **REPLICAS}[name], model)
        quietly(offbeat.load_checkpoint, Path(folder) / name, model=model, optimizer=optimizer)
        result[name] = content_of(model, optimizer)
        train(model, optimizer, 7, 20, 5)  # it goes on
        assert all(whole(p).isfinite().all() for p in model.parameters())
        if hasattr(optimizer, "finish"):
            optimizer.finish()
    return result


def content_of(model, optimizer):
    state = {key.removeprefix("module."): value for key, value in model.state_dict().items()}
    saved = optimizer.state_dict()
    anchors = [one and one["anchors"] for one in saved["replica"][0]["outer"]] if "replica" in saved else None
    # Which are as the names in the model are, with or without "module.".
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in saved["param_groups"]]
    return whole({"model": state, "state": saved["state"], "groups": groups, "anchors": anchors})


SHARDABLE = ["AdamW", "momentum", "Chain", "Adafactor", "groups"]


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (("fsdp", 2), ("ddp", 1), SHARDABLE),
        (("fsdp", 2), ("fsdp", 3), SHARDABLE),
        (("ddp", 2), ("fsdp", 2), SHARDABLE),
        (("ddp", 2), ("plain", 1), [*SHARDABLE, "8 bits", "torch AdamW"]),
        (("fsdp", 3), ("ddp", 2), SHARDABLE),
    ],
)
def test_other_ranks_and_shards_load_the_same_values(before, after, names, tmp_path):
    saved = run_ranks(save_forms, before[1], before[0], str(tmp_path), names)
    loaded = run_ranks(load_forms, after[1], after[0], str(tmp_path), names)
    for name in names:
        for one in loaded:
            for part in ("model", "state", "groups"):
                assert same(saved[0][name][part], one[name][part]), (name, part)


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (("plain", 2), ("plain", 3), ["LocalSGD", "DiLoCo"]),
        (("plain", 2), ("ddp", 1), ["LocalSGD", "DiLoCo"]),
        (("pairs", 4), ("plain", 2), ["LocalSGD"]),  # an outer momentum is not stored by name
    ],
)
def test_replicas_continue_from_the_saved_ones_in_turn(before, after, names, tmp_path):
    saved = run_ranks(save_forms, before[1], before[0], str(tmp_path), names)
    loaded = run_ranks(load_forms, after[1], after[0], str(tmp_path), names)
    replicas = saved[::2] if before[0] == "pairs" else saved
    for name in names:
        assert not same(replicas[0][name]["model"], replicas[1][name]["model"])
        for rank, one in enumerate(loaded):
            assert same(replicas[rank % 2][name]["model"], one[name]["model"]), (name, rank)
            assert same(replicas[rank % 2][name]["state"], one[name]["state"]), (name, rank)
            if before[0] != "pairs":
                assert same(replicas[rank % 2][name]["anchors"], one[name]["anchors"]), (name, rank)


# --- what is stored, and where


@scenario(2)
def what_is_equal_is_stored_once(rank, world):
    folder = shared_folder(rank)
    model = wrapped("ddp")
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    path = offbeat.save_checkpoint(folder, model=model, optimizer=optimizer, generators=False).wait()
    files = sorted(one.name for one in path.iterdir())
    expected = [f"rank-0{rest}" for rest in ("-extra.json", "-model.json", "-optimizer.json", ".safetensors")]
    assert files == ["manifest.json", *expected]
    with torch.no_grad():
        model.module[4].bias[rank] += 1.0  # one tensor differs
    path = offbeat.save_checkpoint(folder, model=model, optimizer=optimizer, generators=False, step=3).wait()
    from safetensors.torch import load_file

    assert list(load_file(path / "rank-1.safetensors")) == ["model/4.bias"]
    other = wrapped("ddp", seed=1)
    offbeat.load_checkpoint(folder, model=other)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    dist.barrier()


@scenario(2)
def disks_of_their_own(rank, world):
    """Each rank has a complete checkpoint on its own disk, and they agree on the newest one that is whole on both."""
    folder = shared_folder(rank, own=True)
    model = wrapped("plain")
    optimizer = quietly(REPLICAS["DiLoCo"], model)
    states = {}
    for step in (3, 5, 7):
        train(model, optimizer, optimizer.steps, step, rank)
        path = offbeat.save_checkpoint(folder, model=model, optimizer=optimizer, keep=2).wait()
        states[step] = whole(dict(model.state_dict()))
        assert path.parent == folder
        assert (path / f"rank-{rank}.safetensors").exists()
        assert not (path / f"rank-{1 - rank}.safetensors").exists()
    assert [one.step for one in offbeat.list_checkpoints(folder)] == [5, 7]
    if rank == 1:
        file = path / "rank-1.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"rank-1\.safetensors: its checksum"):
        offbeat.load_checkpoint(folder, model=model, optimizer=optimizer, step=7)
    assert same(states[7], dict(model.state_dict()))
    with pytest.warns(UserWarning, match=r"rank-1.safetensors: its checksum .*000002-step-5 is loaded instead"):
        extra = offbeat.load_checkpoint(folder, model=model, optimizer=optimizer)
    assert (extra.step, optimizer.steps) == (5, 5)
    assert same(states[5], dict(model.state_dict()))
    if rank == 0:
        for one in path.iterdir():
            one.unlink()
        path.rmdir()
    with pytest.warns(UserWarning, match=r"000003-step-7: is not there on ranks \[0\]"):
        assert offbeat.load_checkpoint(folder, model=model, optimizer=optimizer).step == 5
    optimizer.finish()


@scenario(2)
def replicas_of_one_disk_cannot_make_up_sharded_tensors(rank, world):
    folder = shared_folder(rank, own=True)
    model = wrapped("fsdp")
    offbeat.save_checkpoint(folder, model=model, step=1)
    other = wrapped("fsdp", seed=1)
    offbeat.load_checkpoint(folder, model=other)
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    plain = wrapped("ddp", seed=1)
    before = whole(dict(plain.state_dict()))
    with pytest.raises(CheckpointMismatch, match="saved on another disk"):
        offbeat.load_checkpoint(folder, model=plain)
    assert same(before, dict(plain.state_dict()))


# --- errors


@scenario(2)
def state_in_8_bits_cannot_be_cut(rank, world):
    folder = shared_folder(rank)
    model, sharded = wrapped("ddp"), wrapped("fsdp", seed=1)
    optimizer, optimizer2 = PLAIN["8 bits"](model), PLAIN["8 bits"](sharded)
    train(model, optimizer, 0, 2)
    before = whole(dict(sharded.state_dict()))
    offbeat.save_checkpoint(folder, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointMismatch, match="state in 8 bits, in blocks of whole parameters"):
        offbeat.load_checkpoint(folder, model=sharded, optimizer=optimizer2)
    assert same(before, whole(dict(sharded.state_dict())))


@scenario(2)
def an_error_on_one_rank_is_one_on_all(rank, world):
    folder = shared_folder(rank)
    model = wrapped("ddp")
    optimizer = adamw(model)
    for background in (False, True):
        bad = {"what": [1, {2} if rank == 1 else 3]}
        with pytest.raises(offbeat.CheckpointError, match=r"extra/what/1 is a builtins\.set, which a "):
            offbeat.save_checkpoint(folder, model=model, extra=bad, background=background).wait()
    real = os.write

    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    os.write = full if rank == 1 else real
    try:
        with pytest.raises(offbeat.CheckpointError, match="No space left on device"):
            offbeat.save_checkpoint(folder, model=model)
    finally:
        os.write = real
    dist.barrier()
    assert os.listdir(folder) == []
    offbeat.save_checkpoint(folder, model=model, optimizer=optimizer, step=1)
    other = wrapped("ddp", seed=1)
    optimizer2 = adamw(other)
    before = whole([dict(other.state_dict()), optimizer2.state_dict()])
    wrong = optimizer2
    if rank == 1:  # a pre-hook that raises stands for any reason
        optimizer2.register_load_state_dict_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("not today")))
    with pytest.raises(CheckpointMismatch, match="not today"):
        offbeat.load_checkpoint(folder, model=other, optimizer=wrong)
    assert same(before, [dict(other.state_dict()), optimizer2.state_dict()])
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 9"):
        offbeat.load_checkpoint(folder, model=other, step=9)


@scenario(2)
def in_the_background_beside_training(rank, world):
    """The thread's collectives and the training's do not meet, and what is saved is the moment of the call."""
    folder = shared_folder(rank)
    model = wrapped("plain")
    optimizer = quietly(REPLICAS["DiLoCo, in flight"], model)
    train(model, optimizer, 0, 7, rank)
    torch.manual_seed(rank)
    saved = offbeat.save_checkpoint(folder, model=model, optimizer=optimizer, background=True)
    train(model, optimizer, 7, 20, rank)
    again = offbeat.save_checkpoint(folder, model=model, optimizer=optimizer, background=True)
    assert saved.done
    saved.wait()
    again.wait(60)
    other = wrapped("plain", seed=1)
    optimizer2 = quietly(REPLICAS["DiLoCo, in flight"], other)
    offbeat.load_checkpoint(folder, model=other, optimizer=optimizer2, step=7)
    train(other, optimizer2, 7, 20, rank)
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    optimizer.finish()
    optimizer2.finish()


@pytest.mark.parametrize(("world", "name"), scenario.cases)
def test_with_several_ranks(world, name):
    scenario.check(world, name)
