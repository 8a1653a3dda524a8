"""On a GPU, where there is one: foreach, loop, torch's fused operators, captured graphs, mixed devices."""

from __future__ import annotations

import copy

import pytest
import torch

import offbeat
from tests.cases import CASES, ONE_A_RULE, make_params, set_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NATIVE = ("SGD", "Adam", "AdamW", "Adagrad")


def on_gpu(params):
    return [p.detach().cuda().requires_grad_() for p in params]


def assert_close(ours, theirs, tolerance):
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach().cpu(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tier", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_matches_torch_on_the_cpu(case, tier):
    ours, theirs = on_gpu(make_params(torch.float64)), make_params(torch.float64)
    a, b = case.ours(ours, **case.hyper, **tier), case.reference(theirs)
    for step in range(12):
        set_gradients(step, theirs, none_at=((0, 4), (5, 0)))
        for p, q in zip(ours, theirs, strict=True):
            p.grad = None if q.grad is None else q.grad.cuda()
        a.step()
        b.step()
        if step == 6:
            saved = copy.deepcopy(a.state_dict())
            a = case.ours(ours, **case.hyper, **tier)
            a.load_state_dict(saved)
    assert_close(ours, theirs, 1e-12)
    expected = "foreach" if tier.get("foreach") else "loop" if tier.get("foreach") is False else "fused"
    assert a.tiers()[0].tier == expected


@pytest.mark.parametrize("case", [c for c in CASES if c.name in NATIVE], ids=str)
def test_torchs_operators_without_triton(case, monkeypatch):
    monkeypatch.setenv("OFFBEAT_NO_TRITON", "1")
    ours, theirs = on_gpu(make_params(torch.float64)), make_params(torch.float64)
    a, b = case.ours(ours, **case.hyper, fused=True), case.reference(theirs)
    for step in range(4):
        set_gradients(step, theirs, none_at=((0, 4), (2, 0)))
        for p, q in zip(ours, theirs, strict=True):
            p.grad = None if q.grad is None else q.grad.cuda()
        a.step()
        b.step()
    assert_close(ours, theirs, 1e-6)  # they keep their counters in float32
    assert a.tiers()[0].tier == "native"


@pytest.mark.parametrize("case", [c for c in CASES if "capturable" in c.ours.rule.surface.flags], ids=str)
def test_a_captured_step_replays(case):
    """Counters and learning rate live on the device: a graph recorded once goes on counting."""
    ours, theirs = on_gpu(make_params(torch.float32)), make_params(torch.float64)
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            q.copy_(p)
    hyper = {**case.hyper, "lr": torch.tensor(case.hyper.get("lr", 0.01), device="cuda")}
    a = case.ours(ours, **hyper, capturable=True)
    b = case.theirs(theirs, **{**case.hyper, "lr": case.hyper.get("lr", 0.01)})
    grads = [torch.zeros_like(p) for p in ours]
    for p, g in zip(ours, grads, strict=True):
        p.grad = g

    def next_gradients(step):
        set_gradients(step, theirs)
        for g, q in zip(grads, theirs, strict=True):
            g.copy_(q.grad)
            q.grad = g.cpu().double()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(3):
            next_gradients(step)
            a.step()
            b.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    for step in range(3, 9):
        next_gradients(step)
        if step == 6:
            a.param_groups[0]["lr"].mul_(0.5)
            b.param_groups[0]["lr"] *= 0.5
        graph.replay()
        b.step()
    assert_close([p.double() for p in ours], theirs, 2e-5)


def test_graphs_keep_their_own_tables():
    """Two graphs with gradients of their own, and steps outside with yet others in between."""
    ours, theirs = on_gpu(make_params(torch.float32)), on_gpu(make_params(torch.float32))
    a = offbeat.AdamW(ours, lr=0.1, capturable=True)
    b = offbeat.AdamW(theirs, lr=0.1, foreach=False)
    banks = [[torch.empty_like(p) for p in ours] for _ in range(3)]

    def fill(bank, step):
        set_gradients(step, theirs)
        for g, q in zip(bank, theirs, strict=True):
            g.copy_(q.grad)

    def use(bank):
        for p, g in zip(ours, bank, strict=True):
            p.grad = g

    graphs = []
    step = 0
    use(banks[0])
    for _ in range(2):
        fill(banks[0], step)
        torch.cuda.synchronize()
        a.step()
        b.step()
        step += 1
    for bank in banks[1:]:
        use(bank)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            a.step()
    for which in (1, 0, 2, 1, 0, 0, 2):
        fill(banks[which], step)
        if which == 0:
            use(banks[0])
            a.step()
        else:
            graphs[which - 1].replay()
        b.step()
        step += 1
    # A plan that is given up must not take a graph's tables with it.
    a.state[ours[0]]["exp_avg"] = a.state[ours[0]]["exp_avg"]
    use(banks[0])
    fill(banks[0], step)
    a.step()
    b.step()
    junk = [torch.full((1 << 12,), -1, dtype=torch.int64, device="cuda") for _ in range(64)]
    fill(banks[1], step + 1)
    graphs[0].replay()
    b.step()
    del junk
    assert_close(ours, theirs, 1e-6)
    assert a.tiers()[0].tier == "fused"


def test_an_optimizer_that_dies_during_a_capture_leaves_no_error_behind():
    """Its graph's pinned memory was read by the stream that is being captured now."""

    def capture(during=lambda: None):
        (p,) = on_gpu([torch.ones(8, requires_grad=True)])
        p.grad = torch.ones_like(p)
        optimizer = offbeat.AdamW([p], lr=0.1, capturable=True)
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
            during()
        return optimizer, graph

    optimizer, _graph = capture()  # torch does not allow that a graph dies meanwhile
    old = [optimizer]
    del optimizer
    capture(old.clear)
    assert [torch.ones(1, device="cuda").item() for _ in range(3)] == [1.0] * 3


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
@pytest.mark.parametrize("mode", ["default", "fused", "lr", "scaler"])
def test_a_step_never_waits_for_the_device(case, mode):
    ours = on_gpu(make_params(torch.float32))
    hyper = dict(case.hyper)
    if mode == "lr":
        hyper["lr"] = torch.tensor(hyper.get("lr", 0.01), device="cuda")
    optimizer = case.ours(ours, **hyper, **({} if mode == "default" else {"fused": True}))
    for p in ours:
        p.grad = torch.ones_like(p)
    if mode == "scaler":
        optimizer.grad_scale, optimizer.found_inf = torch.full((1,), 2.0).cuda(), torch.zeros(1).cuda()
    clip = torch.tensor(0.5, device="cuda")
    for _ in range(2):
        optimizer.step(clip=clip)
    fresh = [torch.ones_like(p) for p in ours]
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            optimizer.step()
            optimizer.step(clip=clip)
        for p, g in zip(ours, fresh, strict=True):
            p.grad = g
        optimizer.step(clip=clip)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_capture_without_capturable_is_refused():
    p = torch.ones(3, device="cuda", requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = offbeat.AdamW([p])
    optimizer.step()
    with pytest.raises(RuntimeError, match="capturable is False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.parametrize("case", ONE_A_RULE, ids=str)
def test_one_group_on_two_devices(case):
    mixed = make_params(torch.float32)
    mixed[::2] = on_gpu(mixed[::2])
    plain = make_params(torch.float32)
    a, b = case.ours(mixed, **case.hyper), case.ours(plain, **case.hyper)
    for step in range(4):
        set_gradients(step, plain)
        for p, q in zip(mixed, plain, strict=True):
            p.grad = q.grad.to(p.device)
        a.step()
        b.step()
    assert_close(mixed, plain, 3e-6)


@pytest.mark.parametrize("fused", [None, True])
def test_grad_scaler(fused):
    ours, plain = on_gpu(make_params(torch.float32)), on_gpu(make_params(torch.float32))
    a, b = offbeat.AdamW(ours, fused=fused), offbeat.AdamW(plain, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for step in range(6):
        cpu = make_params(torch.float32)
        set_gradients(step, cpu)
        for p, q, c in zip(ours, plain, cpu, strict=True):
            p.grad, q.grad = c.grad.cuda() * scaler.get_scale(), c.grad.cuda()
        scaler.scale(torch.zeros(1, device="cuda"))
        if step == 2:
            ours[0].grad[0, 0] = float("inf")
        scaler.step(a)
        scaler.update()
        if step != 2:
            b.step()
    assert_close(ours, plain, 0)


def test_half_precision_rounds_once():
    ours = [p.detach().cuda().requires_grad_() for p in make_params(torch.bfloat16)]
    theirs = [p.detach().cpu().double().requires_grad_() for p in ours]
    a, b = offbeat.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for p, q in zip(ours, theirs, strict=True):
        p.grad = torch.randn(p.shape, device="cuda").bfloat16()
        q.grad = p.grad.cpu().double()
    a.step()
    b.step()
    assert_close([p.double() for p in ours], theirs, torch.finfo(torch.bfloat16).eps)
