"""Overlap on a GPU: streams in order, bits as without overlap. Skipped where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import offbeat
from tests.test_overlap import assert_all_used, assert_same

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.xdist_group("cuda"),
]

STEPS = 20


def blocks(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(768, 768), nn.GELU()) for _ in range(6))).cuda()


def run(module, model, overlapped, library=offbeat, clip=None, scaler=None, **options):
    """Train; returns whether gradients were used during backward, at every step."""
    optimizer = library.AdamW(model.parameters(), lr=1e-3, **options)
    if overlapped:
        clipping = {"clip_norm": 0.01, "clip": clip} if clip else {}
        offbeat.overlap(optimizer, module, scaler=scaler, bucket_cap_mb=5, **clipping)
    previous = None
    for step in range(STEPS):
        x = torch.randn(128, 768, generator=torch.Generator().manual_seed(step)).cuda()
        loss = module(x).float().square().mean()
        if scaler is not None and step == 7:
            loss = loss * float("inf")
        (scaler.scale(loss) if scaler is not None else loss).backward()
        if overlapped and scaler is None and (clip is None or (clip == "previous" and step)):
            assert_all_used(model)
        if clip and not overlapped:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            by = previous if clip == "previous" and previous is not None else norm
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, by)
            previous = norm
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("clip", [None, "exact", "previous"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("library", [offbeat, torch.optim], ids=["offbeat", "torch"])
def test_plain(library, options, clip):
    a, b = blocks(), blocks()
    run(a, a, True, library, clip, **options)
    run(b, b, False, library, clip, **options)
    assert_same(a, b)


@pytest.mark.parametrize("fused", [None, True])
def test_scaler(fused):
    a, b = blocks(), blocks()
    scalers = [torch.amp.GradScaler("cuda", init_scale=128.0, growth_interval=5) for _ in range(2)]
    run(a, a, True, scaler=scalers[0], fused=fused)
    run(b, b, False, scaler=scalers[1], fused=fused)
    assert_same(a, b)
    assert scalers[0].get_scale() == scalers[1].get_scale()


@pytest.mark.filterwarnings("ignore:checkpoint.use_reentrant=True")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_runs_in_a_thread_of_autograd(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.head = nn.Linear(768, 768), nn.Linear(768, 768)

        def forward(self, x):
            x = x.requires_grad_()
            for _ in range(2):
                x = checkpoint(lambda y: torch.tanh(self.inner(y)) @ self.head.weight, x, use_reentrant=reentrant)
            return self.head(x)

    a = Checkpointed().cuda()
    b = copy.deepcopy(a)
    opts = [offbeat.AdamW(m.parameters(), lr=1e-3) for m in (a, b)]
    offbeat.overlap(opts[0], a, bucket_cap_mb=1e-6)
    for step in range(STEPS):
        for model, optimizer in zip((a, b), opts, strict=True):
            x = torch.randn(128, 768, generator=torch.Generator().manual_seed(step)).cuda()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(a, b)


def test_no_host_synchronisation_with_exact_clipping():
    model = blocks()
    optimizer = offbeat.AdamW(model.parameters(), lr=1e-3, fused=True)
    handle = offbeat.overlap(optimizer, model, clip_norm=0.01)
    for step in range(5):
        x = torch.randn(128, 768, generator=torch.Generator().manual_seed(step)).cuda()
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert handle.last_norm.is_cuda


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of one, over NCCL."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("clip", [None, "exact", "previous"])
@pytest.mark.parametrize("view", [True, False])
def test_ddp(alone, view, clip):
    models = [blocks() for _ in range(2)]
    for model, overlapped in zip(models, (True, False), strict=True):
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=4, gradient_as_bucket_view=view)
        run(ddp, model, overlapped, clip=clip)
    assert_same(*models)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("repeat", range(3))
def test_fsdp2(alone, fused, low, repeat):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    models = [blocks(repeat) for _ in range(2)]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else None
    options = {"mp_policy": policy} if policy is not None else {}
    for model, overlapped in zip(models, (True, False), strict=True):
        for block in model:
            fully_shard(block, **options)
        fully_shard(model, **options)
        run(model, model, overlapped, fused=fused)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())


def test_two_ranks_share_the_gpu_without_a_race():
    from benchmarks.overlap_race import race

    assert race(rounds=6)["rounds_that_differ"] == {"0": [], "1": []}
