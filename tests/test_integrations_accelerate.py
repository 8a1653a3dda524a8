"""offbeat with Accelerate, against the same training in plain PyTorch."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.integrations import handle_of
from offbeat.overlap.consumed import ConsumedGradient
from tests.frameworks import (
    adamw,
    assert_close,
    assert_equal,
    assert_same,
    average,
    batch,
    batches,
    differ,
    launched,
    loss_of,
    make,
    plain,
    sharded_replicas,
    shared_folder,
)
from tests.scenarios import Scenarios

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ParallelismConfig

from offbeat.integrations.accelerate import finish, prepare
from tests.accelerate_on_cpu import fsdp2, scaled, scaler

scenario = Scenarios(__name__)

LOCAL: dict[str, Any] = {"every": 4, "warmup": 2, "subgroup": None}
TINY = {"bucket_cap_mb": 1e-4}


def train(accelerator: Any, model: Any, optimizer: Any, data: Any, clip: float | None = None) -> list[bool]:
    """A loop as Accelerate's documentation has it. Returns whether gradients were used before each step."""
    used = []
    for x in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x))
            if accelerator.sync_gradients:
                used.append(all(isinstance(p.grad, ConsumedGradient) for p in model.parameters()))
            if accelerator.sync_gradients and clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return used


# In one process


def test_accumulation_without_ddp_is_announced():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make()
    model, optimizer = prepare(accelerator, model, adamw(model.parameters()), overlap=TINY)
    train(accelerator, model, optimizer, batches(0, 6))
    assert_same(model, plain(0, 6, accumulate=2))


def test_bf16():
    found = []
    for over in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = make()
        objects = model, adamw(model.parameters())
        wrapped, optimizer = prepare(accelerator, *objects, overlap=TINY) if over else accelerator.prepare(*objects)
        assert train(accelerator, wrapped, optimizer, batches(0, 4)) == [over] * 4
        found.append(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert_same(*found)


def test_accelerates_own_clipping_returns_the_norm():
    accelerator = Accelerator(cpu=True)
    a, b = make(), make()
    a, optimizer = prepare(accelerator, a, adamw(a.parameters()), overlap={"clip_norm": 0.05, **TINY})
    other = adamw(b.parameters())
    for x in batches(0, 4):
        accelerator.backward(loss_of(a, x))
        loss_of(b, x).backward()
        norm = accelerator.clip_grad_norm_(a.parameters(), 0.05)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(b.parameters(), 0.05))
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        assert_same(a, b)


@pytest.mark.parametrize("features", [{"overlap": {"clip_norm": 1.0, "clip": "previous"}}, {"local_sgd": {"every": 2}}])
def test_freed_models_do_not_stay_alive(features, tmp_path, request):
    accelerator = Accelerator(cpu=True)
    if "local_sgd" in features:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        request.addfinalizer(dist.destroy_process_group)

    def prepared() -> tuple[Any, Any]:
        model = make()
        return prepare(accelerator, model, adamw(model.parameters()), **features)

    first = prepared()
    train(accelerator, *first, batches(0, 3))
    alive = [weakref.ref(one) for one in (first[0], first[1], *first[0].parameters())]
    first = accelerator.free_memory(*first)
    gc.collect()
    assert not any(one() is not None for one in alive)

    model, optimizer = prepared()  # a checkpoint has parts of what there is now
    train(accelerator, model, optimizer, batches(0, 3))
    accelerator.save_state(str(tmp_path))
    expected = [p.detach().clone() for p in model.parameters()]
    train(accelerator, model, optimizer, batches(0, 2))
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected, strict=True))


def test_what_cannot_be_right_raises():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make()
    model, _ = prepare(accelerator, model, adamw(model.parameters()), overlap={"clip_norm": 0.05, **TINY})
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch(0, 0)))
        with pytest.raises(RuntimeError, match=r"only if accelerator\.sync_gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch(0, 1)))
        with pytest.raises(ValueError, match=r"with a norm of 1\.0, but overlap clips to clip_norm=0\.05"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(ValueError, match="norm_type=1, but overlap clips by the 2-norm"):
            accelerator.clip_grad_norm_(model.parameters(), 0.05, norm_type=1)
        with pytest.raises(RuntimeError, match="with other parameters than those of the overlapped optimizer"):
            accelerator.clip_grad_norm_(model[0].parameters(), 0.05)
    other = make()
    accelerator = Accelerator(cpu=True)
    other, _ = prepare(accelerator, other, adamw(other.parameters()), overlap=TINY)
    accelerator.backward(loss_of(other, batch(0, 0)))
    assert all(isinstance(p.grad, ConsumedGradient) for p in other.parameters())
    with pytest.raises(RuntimeError, match=r"turn overlap on with the option clip_norm=1\.0"):
        accelerator.clip_grad_norm_(other.parameters(), 1.0)
    with pytest.raises(ValueError, match="there is no optimizer among the objects"):
        prepare(accelerator, make(), overlap=True)
    with pytest.raises(ValueError, match="the model of an optimizer is not among the objects"):
        prepare(accelerator, adamw(make().parameters()), overlap=True)


# In two processes


@scenario(2)
def overlap_with_accumulation_and_clipping_in_either_order(rank, world):
    launched(rank, world)
    wanted = plain(rank, 8, accumulate=2, clip=0.05)
    for first in ("model", "optimizer"):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.num_processes == world
        model = make()
        objects = [model, adamw(model.parameters())]
        if first == "optimizer":
            objects.reverse()
        found = prepare(accelerator, *objects, overlap={"clip_norm": 0.05})
        wrapped, optimizer = found if first == "model" else reversed(found)
        train(accelerator, wrapped, optimizer, batches(rank, 8), clip=0.05)
        assert_same(model, wanted)
    accelerator = Accelerator(cpu=True)
    model = make()
    wrapped, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    prepare(accelerator, wrapped, optimizer, overlap=True)  # prepared already
    accelerator.backward(loss_of(wrapped, batch(rank, 0)))
    assert all(isinstance(p.grad, ConsumedGradient) for p in model.parameters())
    optimizer.step()
    assert handle_of(optimizer) is not None
    assert_same(model, plain(rank, 1))


@scenario(2)
def replicas_with_accumulation_clipping_and_a_scheduler(rank, world):
    launched(rank, world)
    decay = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # noqa: E731
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    model = make()
    optimizer = adamw(model.parameters())
    schedule = decay(optimizer)
    wrapped, optimizer, schedule = prepare(accelerator, model, optimizer, schedule, local_sgd=LOCAL)
    for x in batches(rank, 16):
        with accelerator.accumulate(wrapped):
            accelerator.backward(loss_of(wrapped, x))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 0.05)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
    assert differ(model)
    finish(optimizer)
    assert not differ(model)
    expected = plain(rank, 16, accumulate=2, clip=0.05, scheduler=decay, local=True, every=4, warmup=2)
    assert_same(model, expected)
    accelerator = Accelerator(cpu=True)
    model = make()
    diloco = {"every": 3, "outer_lr": 0.5, "outer_momentum": 0.9, "subgroup": None}
    wrapped, optimizer = prepare(accelerator, model, adamw(model.parameters()), diloco=diloco)
    train(accelerator, wrapped, optimizer, batches(rank, 8))
    finish(optimizer)
    outer = {"lr": 0.5, "momentum": 0.9, "nesterov": True}
    assert_close(model, plain(rank, 8, local=True, every=3, outer=outer))


@scenario(2)
def save_state_and_load_state_are_exact(rank, world):
    launched(rank, world)
    with shared_folder() as folder:
        kinds: list[dict[str, Any]] = [
            {"local_sgd": LOCAL},
            {"overlap": True, "local_sgd": {**LOCAL, "delay": 2}},
            {"diloco": {"every": 4, "fragments": 2, "delay": 1, "codec": "int8", "subgroup": None}},
            {"overlap": {"clip_norm": 0.05, "clip": "previous"}},
        ]
        for i, features in enumerate(kinds):

            def run(model: nn.Module, steps: range, load: bool = False, save: bool = False) -> nn.Module:
                accelerator = Accelerator(cpu=True)
                wrapped, optimizer = prepare(accelerator, model, adamw(model.parameters()), **features)
                if load:
                    accelerator.load_state(f"{folder}/{i}")
                train(accelerator, wrapped, optimizer, [batch(rank, step) for step in steps])
                if save:
                    accelerator.save_state(f"{folder}/{i}")
                    dist.barrier()
                else:
                    finish(optimizer)
                return model

            whole = run(make(), range(9))
            run(make(), range(5), save=True)
            assert_same(run(make(1), range(5, 9), load=True), whole)
            plain_state = torch.load(f"{folder}/{i}/optimizer.bin", weights_only=True)
            assert set(plain_state) == {"state", "param_groups"}


@scenario(2)
def a_step_that_overflowed_was_skipped(rank, world):
    """Accelerate has fp16 on GPUs only; its own scaler is put in place of none."""
    launched(rank, world)

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0 ** (127 if rank == 0 else 8), growth_interval=100)

    for cls in (torch.optim.AdamW, offbeat.AdamW):
        model, mine, skipped = make(), scaler(), []
        optimizer = cls(model.parameters(), lr=0.01)
        for step in range(6):
            mine.scale(1000 * loss_of(model, batch(rank, step))).backward()
            mine.unscale_(optimizer)
            skipped.append(any(not p.grad.isfinite().all() for p in model.parameters()))
            mine.step(optimizer)
            mine.update()
            optimizer.zero_grad()
            if step in (0, 4, 5):
                average([p.data for p in model.parameters()])
        assert any(skipped) == (rank == 0)
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = scaler()
        other = make()
        options = {"local_sgd": {**LOCAL, "warmup": 0}}
        wrapped, accelerated = prepare(accelerator, other, cls(other.parameters(), lr=0.01), **options)
        found = []
        for step in range(6):
            accelerator.backward(1000 * loss_of(wrapped, batch(rank, step)))
            accelerated.step()
            found.append(accelerated.step_was_skipped)
            accelerated.zero_grad()
        finish(accelerated)
        assert found == skipped, (found, skipped)
        assert accelerator.scaler.get_scale() == mine.get_scale()
        assert_same(other, model)


@scenario(2)
def fsdp2_overlapped_and_resumed(rank, world):
    launched(rank, world)

    def run(overlap: Any, load: str = "", save: str = "", clip: float | None = None, cls: Any = adamw) -> nn.Module:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = make(1 if load else 0)
        objects = model, cls(model.parameters())
        model, optimizer = prepare(accelerator, *objects, overlap=overlap) if overlap else accelerator.prepare(*objects)
        if load:
            accelerator.load_state(load)
        used = [] if load else train(accelerator, model, optimizer, batches(rank, 4), clip)
        if save:
            accelerator.save_state(save)
        used += train(accelerator, model, optimizer, batches(rank, 8)[4:], clip)
        assert all(one is (overlap is True) for one in used)
        return model

    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731  # without any state
    with shared_folder() as folder:
        for kind, cls in (("FULL_STATE_DICT", adamw), ("SHARDED_STATE_DICT", adamw), ("SHARDED_STATE_DICT", sgd)):
            path = f"{folder}/{kind}-{cls.__name__}"
            expected = plain(rank, 8, accumulate=2, make_optimizer=cls)
            with fsdp2(state_dict_type=kind):
                assert_equal(run(True, save=path, cls=cls), expected)
                assert_equal(run(True, load=path, cls=cls), expected)
    with fsdp2():
        assert_close(run({"clip_norm": 0.05}, clip=0.05), run(None, clip=0.05))


@scenario(4)
def replicas_that_are_sharded(rank, world):
    """Two replicas of two ranks each, which average gradients among themselves."""
    launched(rank, world)
    clip = 0.05

    def run(features: Any, load: str = "", save: str = "") -> nn.Module:
        accelerator = Accelerator(cpu=True)
        model = make(1 if load else 0)
        model, optimizer = prepare(accelerator, model, adamw(model.parameters()), **features)
        if load:
            accelerator.load_state(load)
        else:
            train(accelerator, model, optimizer, batches(rank, 5), clip)
        if save:
            accelerator.save_state(save)
            dist.barrier()
        train(accelerator, model, optimizer, batches(rank, 7)[5:], clip)
        finish(optimizer)
        return model

    kinds: list[tuple[Any, Any]] = [
        ({"local_sgd": {"every": 3, "warmup": 2}}, sharded_replicas(7, clip=clip, every=3, warmup=2)),
        ({"overlap": {"clip_norm": clip}, "local_sgd": {"every": 3}}, sharded_replicas(7, clip=clip, every=3)),
        ({"diloco": {"every": 4, "fragments": 2, "delay": 1, "codec": "int8"}}, None),
    ]
    parallelism = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    with shared_folder() as folder, fsdp2(parallelism):
        for i, (features, expected) in enumerate(kinds):
            whole = run(features, save=f"{folder}/{i}")
            if expected is not None:
                assert_close(whole, expected)
            assert_equal(run(features, load=f"{folder}/{i}"), whole)
        accelerator = Accelerator(cpu=True)
        model = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about how Accelerate makes its mesh
            prepared = accelerator.prepare(model, adamw(model.parameters()))
        with pytest.raises(ValueError, match="prepared the model for an average of gradients over dp_replicate"):
            prepare(accelerator, *prepared, local_sgd=True)
    with fsdp2(parallelism, state_dict_type="SHARDED_STATE_DICT"):
        accelerator = Accelerator(cpu=True)
        model = make()
        prepare(accelerator, model, adamw(model.parameters()), local_sgd=True)
        with pytest.raises(ValueError, match="SHARDED_STATE_DICT, which saves each tensor from whichever replica"):
            accelerator.save_state("nowhere")


@scenario(2)
def overlap_under_ddp_with_a_scaler(rank, world):
    launched(rank, world)
    found = []
    for features in (None, {"overlap": {"clip_norm": 0.05}}):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        with scaled(accelerator, scaler(2.0**40)):
            model = make()
            objects = model, adamw(model.parameters())
            wrapped, optimizer = (
                prepare(accelerator, *objects, **features) if features else accelerator.prepare(*objects)
            )
            train(accelerator, wrapped, optimizer, batches(rank, 12), 0.05)
        found.append((model, accelerator.scaler.get_scale()))
    assert found[0][1] == found[1][1] < 2.0**39
    assert_same(found[1][0], found[0][0])


@scenario(2)
def optimizers_prepared_in_two_calls(rank, world):
    launched(rank, world)
    with shared_folder() as folder:

        def run(seed: int, steps: range, load: bool = False, save: bool = False) -> list[nn.Module]:
            accelerator = Accelerator(cpu=True)
            models = [make(seed), make(seed + 1)]
            prepared = [prepare(accelerator, one, adamw(one.parameters()), local_sgd=LOCAL) for one in models]
            if load:
                accelerator.load_state(folder)
            for wrapped, optimizer in prepared:
                train(accelerator, wrapped, optimizer, [batch(rank, step) for step in steps])
            if save:
                accelerator.save_state(folder)
                dist.barrier()
            else:
                finish(*(optimizer for _, optimizer in prepared))
            return models

        whole = run(0, range(9))
        run(0, range(5), save=True)
        for found, expected in zip(run(7, range(5, 9), load=True), whole, strict=True):
            assert_same(found, expected)
        accelerator = Accelerator(cpu=True)
        one = make()
        prepare(accelerator, one, adamw(one.parameters()), local_sgd=LOCAL)
        accelerator._models *= 2  # else Accelerate itself finds a file too many, or one too few
        with pytest.raises(ValueError, match="has parts of 2 optimizers, but offbeat has prepared 1"):
            accelerator.load_state(folder)


@scenario(2)
def checkpoints_with_and_without_offbeat(rank, world):
    launched(rank, world)
    with shared_folder() as folder:

        def run(features: Any, name: str, steps: range, *, load: bool = False) -> nn.Module:
            accelerator = Accelerator(cpu=True)
            model = make(1 if load else 0)
            objects = model, adamw(model.parameters())
            wrapped, optimizer = (
                prepare(accelerator, *objects, **features) if features else accelerator.prepare(*objects)
            )
            if load:
                accelerator.load_state(f"{folder}/{name}")
            train(accelerator, wrapped, optimizer, [batch(rank, step) for step in steps])
            if not load:
                accelerator.save_state(f"{folder}/{name}")
                dist.barrier()
            finish(optimizer)
            return model

        local = {"local_sgd": {**LOCAL, "warmup": 0}}
        run({}, "plain", range(3))
        with pytest.warns(UserWarning, match="the checkpoint was saved without offbeat"):
            found = run(local, "plain", range(3, 9), load=True)
        assert_same(found, plain(rank, 9, local=True, every=4, warmup=3))
        run({"local_sgd": LOCAL}, "replicas", range(2))  # still in warm-up, so that ranks are equal
        assert_same(run({}, "replicas", range(2, 5), load=True), plain(rank, 5))


@scenario(2)
def an_optimizer_wrapped_too_early_is_refused(rank, world):
    launched(rank, world)
    accelerator = Accelerator(cpu=True)
    model = make()
    early = offbeat.LocalSGD(adamw(model.parameters()), model, every=4, subgroup=None)
    with pytest.raises(ValueError, match="wrapped in LocalSGD already, with the model as it is before"):
        prepare(accelerator, model, early, overlap=True)


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("accelerate")
@pytest.mark.parametrize(("world", "name"), scenario.cases)
def test_ranks(world, name):
    scenario.check(world, name)


class _Part:
    """What is saved of an optimizer, without one."""

    replica = None

    def __init__(self, words: str) -> None:
        self.words, self.loaded = words, None

    def part(self) -> dict[str, Any]:
        return {"words": self.words}

    def load_part(self, part: dict[str, Any]) -> None:
        self.loaded = part["words"]


def test_a_checkpoint_over_one_of_more_ranks(tmp_path, monkeypatch):
    """Every rank goes on from the newer one: what ranks 2 and 3 left there is old."""
    from offbeat.integrations import accelerate, attached

    def as_rank(rank: int, world: int) -> None:
        for module in (accelerate, attached):
            if hasattr(module, "rank_and_world"):
                monkeypatch.setattr(module, "rank_and_world", lambda: (rank, world))

    for world, words in ((4, "old"), (2, "new")):
        for rank in range(world):
            as_rank(rank, world)
            accelerate.save_parts(str(tmp_path), [_Part(words)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["offbeat_0.pt", "offbeat_1.pt"]
    for rank in range(2):
        as_rank(rank, 2)
        one = _Part("")
        accelerate.load_parts(str(tmp_path), [one])
        assert one.loaded == "new"


def test_packed_state_dicts_keep_the_versions_of_modules():
    from offbeat.integrations.shards import pack, unpack

    saved = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    for tree in (pack(saved, []), unpack(pack(saved, []), [])):
        assert tree._metadata == saved._metadata
        assert list(tree) == list(saved)
