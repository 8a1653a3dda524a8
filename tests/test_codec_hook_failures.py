"""``codec_hook`` when something goes wrong, and with modules and states out of the ordinary. In real processes."""

from __future__ import annotations

import copy
import io
import os
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import offbeat
from offbeat.ddp import CodecState, codec_hook
from offbeat.wire import TopK
from tests.ranks import rank_context, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("wire_hook_failures")]

SMALL = 0.001  # of a megabyte: several buckets
#: What a process that ends may take at most; a hang is a failure.
SECONDS = 40


def layers(count=6):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(40, 40) for _ in range(count)])


def attach(ddp, state, optimizer=None):
    """Returns the handle, if the optimizer is overlapped."""
    if optimizer is None:
        ddp.register_comm_hook(state, codec_hook)
        return None
    return offbeat.overlap(optimizer, ddp, comm_hook=codec_hook, comm_state=state)


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


# A backward pass that fails while buckets are on their way


def leave(rank, store, overlapped, answers):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS)
    )
    model = layers()
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    attach(ddp, CodecState("int8"), optimizer if overlapped else None)
    for step in range(3):
        if step == 2:
            model[2].weight.register_hook(lambda grad: 1 / 0)
        try:
            ddp(torch.randn(3, 40)).square().mean().backward()
        except ZeroDivisionError:
            answers.put(rank)
            break
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_program_ends_after_an_error_in_backward(overlapped, tmp_path):
    context = rank_context()
    answers, store = context.Queue(), os.path.join(tmp_path, "store")
    workers = [context.Process(target=leave, args=(r, store, overlapped, answers), daemon=True) for r in range(2)]
    try:
        for worker in workers:
            worker.start()
        assert {answers.get(timeout=SECONDS) for _ in workers} == {0, 1}
        for worker in workers:
            worker.join(SECONDS)
            assert worker.exitcode == 0
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()


def go_on(rank, world, feedback):
    model, state = layers(), CodecState("int8", error_feedback=feedback)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for attempt in range(3):
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
        handle = attach(ddp, state, optimizer)
        for step in range(4):
            broken = model[2].weight.register_hook(lambda grad: 1 / 0) if attempt < 2 and step == 2 else None
            loss = ddp(torch.randn(3, 40, generator=generator)).square().mean()
            if broken is not None:
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                broken.remove()
                handle.reset()
                assert all(p.grad is None for p in model.parameters())
                before = parameters(model)
                time.sleep(0.2)
                assert all(map(torch.equal, parameters(model), before))  # nothing is on its way any more
                optimizer.step()
                break
            loss.backward()  # an error of the pass that failed is not raised here
            optimizer.step()
            optimizer.zero_grad()
        del loss
        handle.remove()
        del ddp, handle
    return parameters(model)


@pytest.mark.parametrize("feedback", [None, 1.0])
def test_training_goes_on_after_an_error_in_backward(feedback):
    answers = run_ranks(go_on, 2, feedback)
    for other in answers[1:]:
        assert all(map(torch.equal, other, answers[0]))


def waiting_future(rank, world):
    """Somebody waits for a bucket of a pass that fails, and of one that another pass follows."""
    answers = []
    for how in ("failed", "next"):
        state, futures = CodecState("int8"), []

        def hook(state, bucket, futures=futures):
            if len(futures) == 1 and bucket.index() == 1:
                raise KeyError("the user's own")
            futures.append(codec_hook(state, bucket))
            return futures[-1]

        ddp = DistributedDataParallel(layers(2), bucket_cap_mb=SMALL)
        ddp.register_comm_hook(state, hook)
        if how == "failed":
            ddp(torch.ones(2, 40)).sum().backward()  # in one bucket; DDP makes others after it
            del futures[:]
            with pytest.raises(Exception, match="the user's own"):
                ddp(torch.ones(2, 40)).sum().backward()
        else:
            # Outside of backward, as under join(), nobody tells when a pass ends.
            futures += [codec_hook(state, FakeBucket(index, torch.ones(8))) for index in (0, 1, 0)]
            state.abort()
            futures = [futures[0], futures[2]]
        for future in futures:
            with pytest.raises(RuntimeError, match="the backward pass that it belongs to failed"):
                future.wait()
        answers.append(len(futures))
    return answers


class FakeBucket:
    def __init__(self, index, buffer, last=False):
        self._index, self._buffer, self._last = index, buffer, last

    def index(self):
        return self._index

    def buffer(self):
        return self._buffer

    def parameters(self):
        return []

    def is_last(self):
        return self._last


def test_every_future_is_completed():
    assert run_ranks(waiting_future, 3) == [[1, 2]] * 3


# Modules out of the ordinary


class TwoDtypes(nn.Module):
    def __init__(self, dtypes):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(4, 4).to(dtype) for dtype in dtypes)

    def forward(self, x):
        for part in self.parts:
            x = part(x.to(part.weight.dtype))
        return x


def static_graph(rank, world, dtypes):
    answers = []
    for overlapped in (False, True):
        model = TwoDtypes(dtypes)
        ddp = DistributedDataParallel(model, static_graph=True)
        optimizer = offbeat.SGD(model.parameters(), lr=0.1)
        state = CodecState("int8", error_feedback=0.9)
        attach(ddp, state, optimizer if overlapped else None)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            ddp(torch.randn(3, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(state._residuals) == len(dtypes)
        answers += parameters(model)
    return answers


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float32, torch.float64, torch.bfloat16)])
@pytest.mark.parametrize("world", [2, 3])
def test_a_static_graph_with_several_dtypes(dtypes, world):
    answers = run_ranks(static_graph, world, dtypes)
    for other in answers[1:]:
        assert all(map(torch.equal, other, answers[0]))
    half = len(answers[0]) // 2
    assert all(map(torch.equal, answers[0][:half], answers[0][half:]))


def sparse(rank, world):
    ddp = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    ddp.register_comm_hook(CodecState("int8"), codec_hook)
    with pytest.raises(ValueError, match="cannot encode sparse gradients; make the layer with sparse=False"):
        ddp(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients():
    run_ranks(sparse, 2)


def half_precision(rank, world):
    found = []
    for dtype, value in ((torch.float16, 65300.0), (torch.float16, -65300.0), (torch.bfloat16, 3.38e38)):
        model = Dot(1, 300).to(dtype)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(CodecState("int4"), codec_hook)
        ddp([torch.full((300,), value, dtype=dtype)]).backward()
        found.append(model.weights[0].grad.float())
    return found


def test_finite_gradients_stay_finite_in_half_precision():
    """Scales are rounded up, and a mean may be a little beyond the largest number."""
    for found, value in zip(run_ranks(half_precision, 2)[0], (65300.0, -65300.0, 3.38e38), strict=True):
        assert found.isfinite().all()
        assert ((found / value - 1).abs() < 0.07).all()


# What encoding loses


class Dot(nn.Module):
    """The gradient of each parameter is the input that belongs to it."""

    def __init__(self, count, numel):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for _ in range(count))

    def forward(self, xs):
        return sum((weight * x).sum() for weight, x in zip(self.weights, xs, strict=True))


def skipped_steps(rank, world, enabled):
    """The sum of all updates, of all gradients that were not skipped, and what is left."""
    found = []
    for codec in ("int2", TopK(0.03)):
        model, numel = Dot(1, 4096), 4096
        weight = model.weights[0]
        ddp = DistributedDataParallel(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=7, enabled=enabled)
        state = CodecState(codec, error_feedback=1.0, not_finite="nan", scaler=scaler)
        ddp.register_comm_hook(state, codec_hook)
        optimizer, given = offbeat.SGD([weight], lr=1.0), torch.zeros(numel)
        generator = torch.Generator().manual_seed(0)
        for step in range(24):
            x = torch.randn(numel, generator=generator) + 0.3
            bad = enabled and step in (8, 9, 10, 11)
            if bad:
                x[0] = float("inf")
            else:
                given += x
            scaler.scale(ddp([x])).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        # Rebuilding buckets keeps a module with one parameter as it is, so nothing was forgotten.
        (_, lost), scale = state._residuals[0], state._scale
        found.append((-weight.detach(), given, lost / scale))
    return found


@pytest.mark.parametrize("enabled", [False, True])
def test_what_was_lost_follows_the_scale_of_the_loss(enabled):
    """With a decay of 1 everything arrives, whatever the scale was in between."""
    answers = run_ranks(skipped_steps, 2, enabled)
    for one, other in zip(*answers, strict=True):
        given = (one[1] + other[1]) / 2
        torch.testing.assert_close(one[0] + one[2] + other[2], given, rtol=1e-4, atol=1e-4)


def residuals(state):
    return {number: lost.clone() for number, (_, lost) in state._residuals.items()}


def bad_bucket(rank, world, bad, mode):
    model = Dot(3, 512)
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
    scaler = torch.amp.GradScaler(enabled=False)
    state = CodecState("int2", error_feedback=1.0, not_finite=mode, scaler=scaler)
    ddp.register_comm_hook(state, codec_hook)
    xs = [torch.randn(512, generator=torch.Generator().manual_seed(rank)) for _ in range(3)]
    for _ in range(3):
        ddp(xs).backward()
        ddp.zero_grad()
    before = residuals(state)
    assert len(before) == 3
    ys = [x.clone() for x in xs]
    ys[bad][0] = float("nan") if rank == 0 else 1.0
    if mode == "raise":
        with pytest.raises(RuntimeError, match="of rank 0 are NaN"):
            ddp(ys).backward()
    else:
        ddp(ys).backward()
    ddp.zero_grad()
    kept = residuals(state)
    assert kept.keys() == before.keys()
    assert all(torch.equal(kept[number], before[number]) for number in before)
    ddp(xs).backward()
    after = residuals(state)
    assert not any(torch.equal(after[number], before[number]) for number in before)


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("mode", ["raise", "nan"])
def test_a_pass_that_is_thrown_away_loses_nothing(bad, mode):
    """Not in its finite buckets either."""
    run_ranks(bad_bucket, 2, bad, mode)


def test_feedback_without_a_scaler():
    with pytest.raises(ValueError, match=r"error_feedback with not_finite='nan' needs scaler=.*GradScaler\(enabled"):
        CodecState("int8", error_feedback=1.0, not_finite="nan")
    with pytest.raises(ValueError, match=r"scaler=2\.0 must be"):
        CodecState("int8", scaler=2.0)
    CodecState("int8", error_feedback=1.0, not_finite="nan", scaler=torch.amp.GradScaler(enabled=False))


# Copies


def copies(rank, world, overlapped):
    model, state = layers(2), CodecState("int4", error_feedback=0.9)
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    attach(ddp, state, optimizer if overlapped else None)
    for used in (False, True):
        if used:
            for _ in range(2):
                ddp(torch.ones(2, 40)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert state._residuals
        other = copy.deepcopy(ddp)
        averaged = AveragedModel(ddp)
        file = io.BytesIO()
        torch.save(ddp, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        for one in (other, averaged.module, loaded):
            assert all(map(torch.equal, parameters(one), parameters(ddp)))
            one(torch.ones(2, 40)).sum().backward()
    return [p.grad is not None for p in loaded.parameters()]


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_ddp_module_can_be_copied_and_saved(overlapped):
    assert all(map(all, run_ranks(copies, 2, overlapped)))


def copied_state(rank, world):
    group = dist.new_group([0, 1])
    scaler = torch.amp.GradScaler("cpu")
    state = CodecState(TopK(0.1), group, 0.5, "nan", scaler)
    ddp = DistributedDataParallel(layers(2))
    ddp.register_comm_hook(state, codec_hook)
    for _ in range(2):
        ddp(torch.ones(2, 40)).sum().backward()
    twin = copy.deepcopy(state)
    assert (twin.codec, twin.process_group, twin.not_finite, twin.scaler) == (state.codec, group, "nan", scaler)
    assert twin.error_feedback == 0.5
    assert state._residuals
    assert not twin._residuals
    saved = io.BytesIO()
    with pytest.warns(UserWarning, match="a process group cannot be saved"):
        torch.save(state, saved)
    found = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    assert found.process_group is None
    assert found.codec.name == state.codec.name
    assert (found.not_finite, found.error_feedback) == ("nan", 0.5)
    assert not found._residuals
    state.process_group = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(state, io.BytesIO())


def test_a_state_can_be_copied_and_saved():
    run_ranks(copied_state, 2)


# Groups


def wrong_group(rank, world):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    model = layers(2)
    ddp = DistributedDataParallel(model, process_group=mine)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"CodecState\(process_group=None\) averages over all 4 ranks"):
        attach(ddp, CodecState("int8"), optimizer)
    attach(ddp, CodecState("int8", process_group=mine), optimizer)
    x = torch.full((2, 40), float(rank // 2 + 1))
    x[0, 0] = float("inf") if rank == 3 else 1.0
    if rank < 2:
        ddp(x).sum().backward()
        optimizer.step()
    else:
        with pytest.raises(offbeat.NotFinite, match="of rank 3 are NaN") as error:
            ddp(x).sum().backward()
        assert error.value.ranks == (3,)
    return parameters(model)


def test_a_ddp_module_over_some_of_the_ranks():
    answers = run_ranks(wrong_group, 4)
    for one, other in ((0, 1), (2, 3)):
        assert all(map(torch.equal, answers[one], answers[other]))
