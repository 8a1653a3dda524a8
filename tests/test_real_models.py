"""Models as people train them, overlapped and with replicas, against the plain loop: the same bits, on two ranks."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.overlap.consumed import ConsumedGradient
from tests.frameworks import adamw, assert_same, differ, plain
from tests.ranks import run_ranks

STEPS = 7


def tokens(rank: int, index: int) -> Tensor:
    return torch.randint(0, 32, (2, 10), generator=torch.Generator().manual_seed(1000 * rank + index))


def images(rank: int, index: int) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1000 * rank + index))


def language_loss(model: Any, x: Tensor) -> Tensor:
    return model(input_ids=x, labels=x).loss


def mean_square(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gpt2() -> nn.Module:
    """The input embedding is the weight of the output layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, **off))
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def t5() -> nn.Module:
    """One embedding for encoder, decoder and output."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **sizes))


class Experts(nn.Module):
    """Each batch goes to one expert, so that most are unused at a step, and not the same ones on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))  # the last is never used
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts[int(x.sum()) % 4](self.embedding(x)).relu())


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8, sparse=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1)


def as_it_is(module: Any) -> Any:
    return module


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="aot_eager")


@dataclass
class Case:
    """How a model is made and trained.

    Attributes:
        call: what is called in place of the DDP module.
        all_used: whether all gradients are used during backward. Those of unused parameters and sparse ones under DDP
            are left to ``step()``.
        replicas_in_ddp: whether replicas are tried in DDP.
    """

    make: Callable[[], nn.Module]
    data: Callable[[int, int], Tensor] = tokens
    loss: Callable[[Any, Tensor], Tensor] = mean_square
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    ddp: dict[str, Any] = field(default_factory=dict)
    call: Callable[[Any], Any] = as_it_is
    all_used: bool = True
    replicas_in_ddp: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()


CASES = {
    "gpt2, tied weights": Case(gpt2, loss=language_loss),
    "t5, shared embeddings": Case(t5, loss=language_loss),
    "mixture of experts": Case(Experts, ddp={"find_unused_parameters": True}, all_used=False, replicas_in_ddp=False),
    "sparse embeddings": Case(SparseEmbedding, optimizer=sgd, all_used=False),
    "batch norm": Case(batch_norm, data=images),
    "compiled": Case(mlp, data=images, call=compiled),
}


def ddp_loop(rank: int, case: Case, *, overlap: bool) -> nn.Module:
    model = case.model()
    ddp = case.call(DistributedDataParallel(model, **case.ddp))
    optimizer = case.optimizer(model.parameters())
    if overlap:
        offbeat.overlap(optimizer, ddp)
    for step in range(STEPS):
        case.loss(ddp, case.data(rank, step)).backward()
        if overlap:
            used = [isinstance(p.grad, ConsumedGradient) for p in model.parameters()]
            assert all(used) if case.all_used else any(used) and not all(used), used
        optimizer.step()
        optimizer.zero_grad()
    return model


def run_overlap(rank: int, world: int, name: str) -> None:
    case = CASES[name]
    model = ddp_loop(rank, case, overlap=True)
    assert_same(model, ddp_loop(rank, case, overlap=False))
    if name != "batch norm":  # whose statistics are of the rank's own batches
        assert not differ(model)


def run_replicas(rank: int, world: int, name: str) -> None:
    """Each rank by itself, parameters and buffers averaged after steps 0, 3, 6 and at the end."""
    case = CASES[name]
    model = case.model()
    # With find_unused_parameters DDP gives experts that only others used a gradient of zero; without DDP it is None.
    module = case.call(DistributedDataParallel(model, **case.ddp) if case.replicas_in_ddp else model)
    inner = case.optimizer(model.parameters())
    offbeat.overlap(inner, module)
    optimizer = offbeat.LocalSGD(inner, module, every=3, subgroup=None)
    for step in range(STEPS):
        case.loss(module, case.data(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    options = {"loss": case.loss, "data": case.data, "make_optimizer": case.optimizer}
    assert_same(model, plain(rank, STEPS, model=case.model(), local=True, every=3, **options))
    assert not differ(model)


def attempt(run: Any, rank: int, world: int, name: str) -> str:
    """What went wrong, or nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of torch about sparse tensors, and of dynamo
            run(rank, world, name)
    except Exception:
        return f"{run.__name__}, {name}:\n{traceback.format_exc()}"
    return ""


def run_all(rank: int, world: int, names: list[str]) -> list[str]:
    """Every case in one pair of processes."""
    problems = [attempt(run, rank, world, name) for name in names for run in (run_overlap, run_replicas)]
    return [problem for problem in problems if problem]


@pytest.mark.ranks
def test_models_without_transformers():
    names = [name for name in CASES if name.split(",")[0] not in ("gpt2", "t5")]
    for problems in run_ranks(run_all, 2, names):
        assert not problems, "\n".join(problems)


@pytest.mark.ranks
def test_models_of_transformers():
    pytest.importorskip("transformers")
    names = [name for name in CASES if name.split(",")[0] in ("gpt2", "t5")]
    for problems in run_ranks(run_all, 2, names):
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", [name for name in CASES if name != "sparse embeddings"])
def test_overlap_on_one_process_with_small_buckets(name):
    if name.split(",")[0] in ("gpt2", "t5"):
        pytest.importorskip("transformers")
    case = CASES[name]
    model, other = case.model(), case.model()
    called, plainly = case.call(model), case.call(other)
    ours, theirs = case.optimizer(model.parameters()), case.optimizer(other.parameters())
    offbeat.overlap(ours, called, bucket_cap_mb=1e-3)
    for step in range(STEPS):
        for module, optimizer in ((called, ours), (plainly, theirs)):
            case.loss(module, case.data(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, other)
