"""The codecs as a DDP communication hook, in real processes, also under the overlapped step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.ddp import CodecState, codec_hook
from offbeat.wire import CodedMean, NotFinite, TopK, make_codec
from tests.ranks import run_ranks
from tests.wire_cases import run_threads

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("wire_hooks")]

SMALL = 0.001  # of a megabyte: several buckets
STEPS = 4


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def train(rank, world, state, overlapped=False, buckets=None):
    model = make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
    optimizer = offbeat.SGD(model.parameters(), lr=0.1)

    def hook(state, bucket):
        if buckets is not None:
            buckets.append((bucket.index(), [id(p) for p in bucket.parameters()], bucket.buffer().clone()))
        return codec_hook(state, bucket)

    if overlapped:
        offbeat.overlap(optimizer, ddp, comm_hook=codec_hook, comm_state=state)
    else:
        ddp.register_comm_hook(state, hook)
    seen = []
    for step in range(STEPS):
        ddp(batch(step, rank)).square().mean().backward()
        if not overlapped:
            seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen, [p.detach() for p in model.parameters()]


def hooked(rank, world):
    answers = {}
    for name, codec, feedback in (
        ("bf16", "bf16", None),
        ("int8", "int8", None),
        ("int4", "int4", 1.0),
        ("int3", "int3", 1.0),
        ("topk", TopK(0.1), 0.95),
    ):
        buckets = []
        plain = train(rank, world, CodecState(codec, error_feedback=feedback), buckets=buckets)
        assert {index for index, _, _ in buckets} == set(range(max(index for index, _, _ in buckets) + 1))
        assert len({index for index, _, _ in buckets}) > 1
        overlapped = train(rank, world, CodecState(codec, error_feedback=feedback), overlapped=True)
        assert all(map(torch.equal, plain[1], overlapped[1]))
        answers[name] = (plain, [buffer for _, _, buffer in buckets])
    return answers


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_the_coded_mean_on_every_rank(world):
    answers = run_ranks(hooked, world)
    for name in answers[0]:
        (seen, parameters), _ = answers[0][name]
        for other in answers[1:]:
            for mine, theirs in zip(seen, other[name][0][0], strict=True):
                assert all(map(torch.equal, mine, theirs))
            assert all(map(torch.equal, parameters, other[name][0][1]))
    # The first gradients, against the same buckets reduced by threads.
    for name in ("bf16", "int8"):
        mean = CodedMean(make_codec(name))
        first = [one[name][1] for one in answers]
        wanted = [
            run_threads(world, lambda peers, i=i: mean.reduce(first[peers.rank][i] / world, peers))[0]
            for i in range(len(first[0]) // STEPS)
        ]
        flat = torch.cat([g.flatten() for g in answers[0][name][0][0][0]])
        assert torch.equal(flat.sort().values, torch.cat(wanted).sort().values)


def close_to_ddp(rank, world):
    results = []
    for state in (None, CodecState("int8")):
        model = make()
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
        if state is not None:
            ddp.register_comm_hook(state, codec_hook)
        ddp(batch(0, rank)).square().mean().backward()
        results.append(gradients(model))
    return [((a - b).norm() / a.norm()).item() for a, b in zip(*results, strict=True)]


def test_int8_gradients_are_close_to_ddps():
    for errors in run_ranks(close_to_ddp, 3):
        assert max(errors) < 0.03


def bad_gradients(rank, world):
    answers = []
    for overlapped in (False, True):
        model = make()
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
        optimizer = offbeat.SGD(model.parameters(), lr=0.1)
        state = CodecState("int4", error_feedback=1.0)
        if overlapped:
            offbeat.overlap(optimizer, ddp, comm_hook=codec_hook, comm_state=state)
        else:
            ddp.register_comm_hook(state, codec_hook)
        for step in range(4):
            x = batch(step, rank)
            if rank == 1 and step == 2:
                x[0, 0] = float("inf")
            loss = ddp(x).square().mean()
            if step == 2:
                with pytest.raises(NotFinite if overlapped else RuntimeError, match="of rank 1 are NaN or inf"):
                    loss.backward()
                if overlapped:  # some of its buckets have been stepped
                    break
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        assert all(p.isfinite().all() for p in model.parameters())
        answers.append([p.detach() for p in model.parameters()])
    return answers


@pytest.mark.parametrize("world", [2, 3])
def test_not_finite_raises_on_every_rank_and_training_can_go_on(world):
    answers = run_ranks(bad_gradients, world)
    for answer in answers:
        for mine, first in zip(answer, answers[0], strict=True):
            assert all(map(torch.equal, mine, first))


def with_scaler(rank, world):
    model = make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
    ddp.register_comm_hook(CodecState("int8", not_finite="nan"), codec_hook)
    optimizer, scaler = offbeat.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(3):
        x = batch(step, rank)
        if rank == 0 and step == 1:
            x[0, 0] = float("inf")
        scaler.scale(ddp(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, [p.detach() for p in model.parameters()]


def test_a_scaler_skips_the_step_on_all_ranks():
    answers = run_ranks(with_scaler, 3)
    for scales, parameters in answers:
        assert scales == [2.0**10, 2.0**9, 2.0**9]
        assert all(p.isfinite().all() for p in parameters)
        assert all(map(torch.equal, parameters, answers[0][1]))


def half_and_double(rank, world):
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        model = make().to(dtype)
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
        ddp.register_comm_hook(CodecState("int8", error_feedback=0.9), codec_hook)
        for step in range(2):
            ddp(batch(step, rank).to(dtype)).square().mean().backward()
        results.append(gradients(model))
        assert all(g.dtype == dtype for g in results[-1])
    return results


def test_other_dtypes():
    answers = run_ranks(half_and_double, 2)
    for mine, theirs in zip(*answers, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="codec=None leaves nothing"):
        CodecState(None)
    with pytest.raises(ValueError, match="not_finite='ignore'"):
        CodecState("int8", not_finite="ignore")
    with pytest.raises(ValueError, match="codec='int9' is not known"):
        CodecState("int9")
