"""What overlap warns of, whom a warning names, and what is refused with a way out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat import _torch
from offbeat._warn import warn
from offbeat.overlap.consumed import ConsumedGradient
from tests.ranks import run_ranks

WAITS = "with clip='exact' every update waits"


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def used_in_backward(model: nn.Module, **options) -> list[bool]:
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model, **options)
    for step in range(2):  # the first with "previous" is exact
        model(batch(step)).square().mean().backward()
        used = [isinstance(p.grad, ConsumedGradient) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return used


@pytest.mark.parametrize("clip", ["exact", "previous", "bucket", None])
def test_exact_clipping_is_warned_of_because_nothing_is_used_during_backward(clip):
    options = {} if clip is None else {"clip_norm": 1.0, "clip": clip}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        used = used_in_backward(make(), **options)
    assert used == [clip != "exact"] * 4
    assert [WAITS in str(one.message) for one in caught] == ([True] if clip == "exact" else [])
    assert all(one.filename == __file__ for one in caught)


def test_a_scaler_waits_by_itself_so_exact_clipping_is_not_warned_of():
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = torch.amp.GradScaler("cpu")
        offbeat.overlap(offbeat.SGD(model.parameters(), lr=0.1), model, clip_norm=1.0, scaler=scaler)


def test_a_warning_names_the_users_line_from_anywhere():
    with pytest.warns(UserWarning, match="spelt|did you mean") as caught:
        offbeat.SGD([{"params": [torch.ones(1)], "momentun": 0.9}], lr=0.1)
    assert [one.filename for one in caught] == [__file__]

    class Reentrant(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)

    model = Reentrant(*make())
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    offbeat.overlap(optimizer, model)
    with pytest.warns(UserWarning, match="use_reentrant=True") as caught:
        model(batch(0).requires_grad_()).sum().backward()
    assert [one.filename for one in caught] == [__file__]


def test_a_warning_in_a_thread_of_offbeats_own_does_not_name_sys():
    caught = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, filename, *_: caught.append(filename)
        thread = threading.Thread(target=warn, args=("from a thread",))
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert caught[0] not in ("sys", "<sys>")


# Trainable parameters of no optimizer


def train(model, optimizers, steps=3, clear=True):
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        if clear:
            model.zero_grad()


@pytest.mark.parametrize("chain", [False, True])
def test_parameters_that_no_optimizer_has_are_warned_of_once(chain):
    model = make()
    optimizer = offbeat.SGD(model[0].parameters(), lr=0.1)
    optimizer = offbeat.Chain([optimizer]) if chain else optimizer
    offbeat.overlap(optimizer, model)
    with pytest.warns(UserWarning, match=r"'2\.weight', '2\.bias' of the overlapped module get gradients") as caught:
        train(model, [optimizer])
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("other", ["overlapped", "plain", "frozen", "unused"])
def test_parameters_of_another_optimizer_or_without_gradients_are_not(other):
    model = make()
    optimizers = [offbeat.SGD(model[0].parameters(), lr=0.1)]
    offbeat.overlap(optimizers[0], model)
    if other == "frozen":
        model[2].requires_grad_(False)
    elif other == "unused":
        model.never = nn.Linear(2, 2)
        model.forward = lambda x: model[2](model[1](model[0](x)))
    if other in ("overlapped", "plain", "unused"):
        optimizers.append(torch.optim.SGD(model[2].parameters(), lr=0.1))
        if other == "overlapped":
            offbeat.overlap(optimizers[1], model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizers)


# Refused, with a way out


def test_what_wraps_an_optimizer_names_the_way_out():
    class Wrapper:
        def __init__(self, base):
            self.base = base

    model = make()
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=r"call overlap\(\) first, with the SGD, then make the Wrapper around it"
    ) as one:
        offbeat.overlap(Wrapper(optimizer), model)
    assert "its attribute 'base'" in str(one.value)


def zero_redundancy(rank: int, world: int) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = make()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=r"sends parameters.*fully_shard"):
        offbeat.overlap(optimizer, model)
    return "ok"


def test_zero_redundancy_optimizer_is_refused_with_advice_that_can_be_followed():
    assert run_ranks(zero_redundancy, 1) == ["ok"]


def test_a_chain_of_two_arguments_says_what_is_wanted():
    a, b = (offbeat.SGD([torch.ones(1)], lr=0.1) for _ in range(2))
    with pytest.raises(TypeError, match=r"Chain takes one list of optimizers; write Chain\(\[first, second\]\)"):
        offbeat.Chain(a, b)


# Classes are asked for, not their names


def test_a_module_is_compiled_if_its_class_says_so():
    class OptimizedModule(nn.Linear):
        pass

    mine = OptimizedModule(2, 2)
    mine._orig_mod = nn.Linear(2, 2)
    assert _torch.inner_module(mine) is mine
    plain = nn.Linear(2, 2)
    assert _torch.inner_module(torch.compile(plain)) is plain


def placements(rank: int, world: int) -> list[bool]:
    from torch.distributed.tensor import Shard

    from offbeat.engine.tensors import is_plain_shard

    class Strided(Shard):
        """As _StridedShard: pieces in another order."""

    Strided.__name__ = "Shard"
    return [is_plain_shard(Shard(0)), is_plain_shard(Strided(0))]


def test_a_placement_is_a_shard_if_its_class_says_so():
    assert run_ranks(placements, 1) == [[True, False]]


# FSDP2


def offloaded(rank: int, world: int) -> list[bool]:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    ends = []
    for overlapped in (True, False):
        model = make()
        for part in (model[0], model[2], model):
            fully_shard(part, offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = offbeat.AdamW(model.parameters(), lr=0.05)
        if overlapped:
            offbeat.overlap(optimizer, model)
        for step in range(4):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                model(batch(10 * step + 2 * rank + micro)).square().mean().backward()
            if overlapped:
                assert all(isinstance(p.grad, ConsumedGradient) for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.full_tensor() for p in model.parameters()])
    return [torch.equal(p, q) for p, q in zip(*ends, strict=True)]


@pytest.mark.skipif(not _torch.fsdp_waits_for_offload, reason="refused before torch 2.13")
def test_fsdp2_with_cpu_offload_has_the_same_bits():
    assert run_ranks(offloaded, 2) == [[True] * 4] * 2


def ended_by_hand(rank: int, world: int) -> str:
    from torch.distributed.fsdp import fully_shard

    def by_hand(model, value):
        if hasattr(model, "set_manual_backward_finalization"):  # from torch 2.15 on
            model.set_manual_backward_finalization(value)
        else:
            model._get_fsdp_state()._state_ctx.manual_backward_finalization = value

    model = make()
    for part in (model[0], model):
        fully_shard(part)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    by_hand(model, True)
    with pytest.raises(ValueError, match="set_manual_backward_finalization"):
        offbeat.overlap(optimizer, model)
    by_hand(model, False)
    offbeat.overlap(optimizer, model)
    model(batch(0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.full_tensor().clone() for p in model.parameters()]
    by_hand(model, True)  # after overlap: before anything moves
    with pytest.raises(ValueError, match="set_manual_backward_finalization"):
        model(batch(1))
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), before, strict=True))
    return "ok"


def test_fsdp2_whose_backward_is_ended_by_hand_is_refused():
    assert run_ranks(ended_by_hand, 2) == ["ok"] * 2


# Missing extras


def test_nothing_says_to_install_offbeat_from_pypi():
    source = Path(offbeat.__file__).parent
    for file in source.rglob("*.py"):
        assert "pip install offbeat" not in file.read_text().replace("'", "").replace('"', ""), file
    environment = {**os.environ, "PYTHONPATH": str(source.parent)}
    code = "import sys; sys.modules['transformers'] = None; import offbeat.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert 'install it with pip install "transformers>=' in done.stderr
