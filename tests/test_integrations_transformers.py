"""offbeat in the Trainer of Transformers, with a tiny GPT-2, against the same training in plain PyTorch."""

from __future__ import annotations

import functools
import glob
import math
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offbeat.overlap.consumed import ConsumedGradient
from tests.frameworks import (
    assert_equal,
    assert_same,
    average,
    differ,
    launched,
    plain,
    sharded_replicas,
    shared_folder,
)
from tests.scenarios import Scenarios

pytest.importorskip("transformers")

from accelerate.utils import ParallelismConfig
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from offbeat.integrations.transformers import attach
from tests.accelerate_on_cpu import fsdp2, scaled, scaler

logging.set_verbosity_error()
scenario = Scenarios(__name__)

LOCAL: dict[str, Any] = {"every": 4, "warmup": 2, "subgroup": None}
TINY = {"bucket_cap_mb": 1e-3}


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """With tied weights, and without dropout: its random numbers would differ from the plain loop's."""
    torch.manual_seed(seed)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, **off))


def tokens(rank: int, index: int) -> torch.Tensor:
    return torch.randint(0, 32, (1, 12), generator=torch.Generator().manual_seed(1000 * rank + index))


def loss_of(model: nn.Module, x: torch.Tensor, passes: int = 1) -> torch.Tensor:
    """As the Trainer has it: the sum over tokens by the labels in a step; the plain loop divides by passes."""
    return passes * model(input_ids=x, labels=x, num_items_in_batch=torch.tensor(12 * passes)).loss


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def data(rank: int, number: int, world: int) -> list[dict[str, torch.Tensor]]:
    """One row a batch; the Trainer gives every ``world``-th row to a rank."""
    rows = [tokens(i % world, i // world)[0] for i in range(number * world)]
    return [{"input_ids": row, "labels": row} for row in rows]


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Spy(TrainerCallback):
    """Notes before each step whether all gradients have been used, and what is logged."""

    def __init__(self) -> None:
        self.used: list[bool] = []
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.used.append(all(isinstance(p.grad, ConsumedGradient) for p in model.parameters()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])


def trainer(
    model: nn.Module,
    rank: int,
    world: int,
    number: int,
    folder: str | None = None,
    evaluate: Any = None,
    **options: Any,
) -> Trainer:
    arguments = {
        "output_dir": folder or tempfile.gettempdir(),
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "ddp_backend": "gloo" if world > 1 else None,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "max_grad_norm": 0.0,
        "average_tokens_across_devices": False,
        **options,
    }
    args = TrainingArguments(**arguments)
    rows = data(rank, number, world)
    # With FSDP the Trainer wants to make the optimizer itself.
    optimizers = (None if "optim" in options else adamw(model.parameters()), None)
    return InOrder(model, args, train_dataset=rows, eval_dataset=evaluate, optimizers=optimizers)


def run(one: Trainer, **options: Any) -> Spy:
    spy = Spy()
    one.add_callback(spy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one.train(**options)
    return spy


def reference(rank: int, number: int, **options: Any) -> nn.Module:
    loss = functools.partial(loss_of, passes=options.get("accumulate", 1))
    return plain(rank, number, model=gpt2(), loss=loss, data=tokens, make_optimizer=adamw, **options)


# In one process


def test_gradients_are_used_during_backward_and_norms_are_logged():
    model = gpt2()
    one = trainer(model, 0, 1, 6, gradient_accumulation_steps=2)
    attach(one, overlap=TINY)
    spy = run(one)
    assert spy.used == [True] * 3
    assert len(spy.norms) == 3
    plainly = gpt2()
    same = run(trainer(plainly, 0, 1, 6, gradient_accumulation_steps=2))
    assert spy.norms == same.norms
    assert_same(model, plainly)
    assert_same(model, reference(0, 6, accumulate=2))


def test_bf16():
    found = []
    for over in (False, True):
        model = gpt2()
        one = trainer(model, 0, 1, 3, bf16=True)
        if over:
            attach(one, overlap=TINY)
        assert one.accelerator.native_amp
        assert run(one).used == [over] * 3
        found.append(model)
    assert_same(*found)


@pytest.mark.parametrize("clip", ["exact", "previous"])
def test_max_grad_norm_becomes_clip_norm(clip):
    model = gpt2()
    one = trainer(model, 0, 1, 4, max_grad_norm=0.1)
    attach(one, overlap={"clip": clip, **TINY})
    spy = run(one)
    expected = gpt2()
    if clip == "exact":
        same = run(trainer(expected, 0, 1, 4, max_grad_norm=0.1))
        assert spy.norms == same.norms
        assert_same(model, reference(0, 4, clip=0.1))
    else:
        assert spy.used == [False, True, True, True]  # the first step waits for its own norm
        optimizer, last = adamw(expected.parameters()), None
        for i in range(4):
            loss_of(expected, tokens(0, i)).backward()
            norm = nn.utils.get_total_norm([p.grad for p in expected.parameters()])
            nn.utils.clip_grads_with_norm_(expected.parameters(), 0.1, norm if last is None else last)
            assert spy.norms[i] == norm.item()
            last = norm
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, expected if clip == "previous" else reference(0, 4, clip=0.1))


def test_what_cannot_be_right_raises():
    with pytest.raises(ValueError, match=r"max_grad_norm is 1\.0, but overlap was given clip_norm=0\.5"):
        attach(trainer(gpt2(), 0, 1, 1, max_grad_norm=1.0), overlap={"clip_norm": 0.5})
    with pytest.raises(ValueError, match="max_grad_norm is 0, so that clip= has no effect"):
        attach(trainer(gpt2(), 0, 1, 1), overlap={"clip": "previous"})
    with pytest.raises(ValueError, match="no feature is turned on"):
        attach(trainer(gpt2(), 0, 1, 1))
    one = trainer(gpt2(), 0, 1, 1)
    attach(one, overlap=True)
    with pytest.raises(ValueError, match="attached to this Trainer already; give all features to one call"):
        attach(one, local_sgd=True)


# In two processes


@scenario(2)
def overlap_under_ddp(rank, world):
    launched(rank, world)
    model = gpt2()
    one = trainer(model, rank, world, 6, gradient_accumulation_steps=2)
    attach(one, overlap=True)
    spy = run(one)
    assert spy.used == [True] * 3
    assert_same(model, reference(rank, 6, accumulate=2))
    assert not differ(model)
    model = gpt2()
    one = trainer(model, rank, world, 4, max_grad_norm=0.1)
    with pytest.warns(UserWarning, match=r"max_grad_norm=0\.1 clips by the norm of all gradients") as caught:
        attach(one, overlap=True)
    assert [warning.filename for warning in caught] == [__file__]
    run(one)
    assert_same(model, reference(rank, 4, clip=0.1))


@scenario(2)
def replicas_with_the_trainers_clipping(rank, world):
    launched(rank, world)
    model, others = gpt2(), data(rank, 2, world)
    more = {"evaluate": others, "eval_strategy": "steps", "eval_steps": 1}  # in the middle of periods too
    one = trainer(model, rank, world, 16, max_grad_norm=0.1, gradient_accumulation_steps=2, **more)
    attach(one, local_sgd=LOCAL)
    run(one)
    one.predict(others)
    assert_same(model, reference(rank, 16, accumulate=2, clip=0.1, local=True, every=4, warmup=2))
    assert not differ(model)


@scenario(2)
def resume_is_exact_in_the_middle_of_a_period(rank, world):
    launched(rank, world)
    kinds: list[dict[str, Any]] = [
        {"local_sgd": LOCAL},
        {"overlap": True, "diloco": {"every": 4, "fragments": 2, "delay": 1, "codec": "int8", "subgroup": None}},
    ]
    for features in kinds:
        whole = gpt2()
        one = trainer(whole, rank, world, 9)
        attach(one, **features)
        run(one)
        resumed = gpt2(1)
        with shared_folder() as folder:
            one = trainer(gpt2(), rank, world, 9, folder, save_strategy="steps", save_steps=5, max_steps=5)
            attach(one, **features)
            run(one)
            dist.barrier()
            assert len(glob.glob(f"{folder}/checkpoint-5/offbeat_*.pt")) == world
            assert set(torch.load(f"{folder}/checkpoint-5/optimizer.pt", weights_only=True)) == {
                "state",
                "param_groups",
            }
            one = trainer(resumed, rank, world, 9, folder)
            attach(one, **features)
            run(one, resume_from_checkpoint=True)
        assert_same(resumed, whole)
        assert not differ(resumed)


@scenario(2)
def the_loss_is_scaled(rank, world):
    """Accelerate scales the loss on GPUs only; a scaler is put in. With replicas, the first rank's steps overflow."""
    launched(rank, world)

    def trained(scale: float, **features: Any) -> tuple[nn.Module, Any, Spy]:
        model = gpt2()
        one = trainer(model, rank, world, 6, max_grad_norm=0.1)
        if features:
            attach(one, **features)
        with scaled(one.accelerator, scaler(scale)):
            spy = run(one)
        return model, one.accelerator.scaler, spy

    model, mine, spy = trained(2.0**18, overlap={"clip": "exact"})
    expected, other, plainly = trained(2.0**18)
    assert mine.get_scale() == other.get_scale() < 2.0**18
    assert str(spy.norms) == str(plainly.norms)  # the first are not finite
    assert_same(model, expected)
    scale = 2.0 ** (18 if rank == 0 else 8)
    model, mine, _ = trained(scale, local_sgd={"every": 4, "subgroup": None})
    expected, other = gpt2(), scaler(scale)
    optimizer = adamw(expected.parameters())
    for step in range(6):
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(expected, tokens(rank, step))
        other.scale(loss.float()).backward()
        other.unscale_(optimizer)
        nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        other.step(optimizer)
        other.update()
        optimizer.zero_grad()
        if step in (0, 4, 5):
            average([p.data for p in expected.parameters()])
    assert mine.get_scale() == other.get_scale()
    assert (mine.get_scale() < scale) == (rank == 0)
    assert_same(model, expected)


OWN: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 0.01, "weight_decay": 0.0}


@scenario(2)
def fsdp2_by_transformers_itself(rank, world):
    launched(rank, world)
    with shared_folder() as folder:
        if rank == 0:
            gpt2().save_pretrained(folder)
        dist.barrier()
        found = []
        for features in (None, {"overlap": True}):
            model = GPT2LMHeadModel.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=world))
            one = trainer(model, rank, world, 7, gradient_accumulation_steps=2, **OWN)
            if features:
                attach(one, **features)
            spy = run(one)
            assert spy.used == [features is not None] * 4
            found.append((model, spy))
    assert_equal(found[1][0], found[0][0])
    norms = [torch.tensor(spy.norms) for _, spy in found]
    torch.testing.assert_close(norms[1], norms[0], rtol=2e-6, atol=0)


@scenario(2)
def fsdp2_through_accelerate_is_resumed(rank, world):
    launched(rank, world)

    def trained(*, resume: bool = False, attached: bool = True, **more: Any) -> nn.Module:
        one = trainer(gpt2(int(resume)), rank, world, 6, **OWN, **more)
        if attached:
            attach(one, overlap=True)
        spy = run(one, resume_from_checkpoint=resume or None)
        assert all(used is attached for used in spy.used)
        return one.model

    with shared_folder() as folder, fsdp2(auto_wrap_policy="transformer_based_wrap"):
        whole = trained(folder=folder, save_strategy="steps", save_steps=4)
        assert_equal(whole, trained(attached=False))
        assert_equal(trained(resume=True, folder=folder), whole)


@scenario(4)
def replicas_that_are_sharded(rank, world):
    launched(rank, world)
    features = {"local_sgd": {"every": 3, "warmup": 2}}

    def trained(*, resume: bool = False, **more: Any) -> nn.Module:
        one = trainer(gpt2(int(resume)), rank, world, 7, **OWN, **more)
        attach(one, **features)
        run(one, resume_from_checkpoint=resume or None)
        return one.model

    make_optimizer = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)
    problem: dict[str, Any] = {"model": gpt2, "loss": loss_of, "data": tokens, "make_optimizer": make_optimizer}
    parallelism = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    with shared_folder() as folder, fsdp2(parallelism, auto_wrap_policy="transformer_based_wrap"):
        whole = trained(folder=folder, save_strategy="steps", save_steps=4)
        assert_equal(whole, sharded_replicas(7, clip=math.inf, every=3, warmup=2, **problem))
        assert_equal(trained(resume=True, folder=folder), whole)


@scenario(2)
def the_best_model_is_left_as_it_was_saved(rank, world):
    """The Trainer loads it before it says that training has ended: replicas must not agree after that."""
    launched(rank, world)
    with shared_folder() as folder:
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        model = gpt2()
        one = trainer(model, rank, world, 8, folder, evaluate=data(rank, 2, world), **saving, **best)
        attach(one, diloco={"every": 3, "subgroup": None})
        run(one)
        saved = GPT2LMHeadModel.from_pretrained(one.state.best_model_checkpoint)
        assert_same(model, saved)
        assert not differ(model)


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize(("world", "name"), scenario.cases)
def test_ranks(world, name):
    scenario.check(world, name)
