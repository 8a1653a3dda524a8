"""The codecs by Triton: on a GPU where there is one, else through its interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from offbeat.wire import CodedMean, NotFinite
from offbeat.wire.codecs import triton_launch
from offbeat.wire.codecs.kernels import kernels_for
from tests.test_wire_codecs import inputs
from tests.wire_cases import BUILT_IN, CODECS, NAN, ThreadPeers, run_threads

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")


# Of values that are not finite, or whose sum is not.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def everything(codec, x, start):
    """All that a codec writes."""
    data = torch.full((codec.encoded_bytes(x.numel()) + 1,), 0xA5, dtype=torch.uint8, device=x.device)
    codec.encode(x, data[:-1])
    assert data[-1] == 0xA5
    lost, total, got = x.clone(), start.clone(), torch.full_like(x, NAN)
    codec.encode(x, data[1:], lost)  # not aligned
    codec.encode(x, data[:-1], torch.empty_like(x))
    codec.decode(data[:-1], got)
    codec.decode(data[:-1], total, add=True)
    codec.encode(lost.copy_(x), data[:-1], lost)
    return [data.cpu()[:-1], *(t.cpu().view(torch.int32) for t in (lost, got, total))]


@pytest.mark.parametrize("codec", BUILT_IN, ids=repr)
@pytest.mark.parametrize("numel", [1, 31, 4200])
def test_triton_and_plain_torch_agree_to_the_bit(codec, numel, monkeypatch):
    for kind, power in [("coarse", 3), ("one-sided", 0), ("spread", -79.5), ("normal", 126)]:
        x = inputs(kind, numel, 7, power).nan_to_num(posinf=3e38, neginf=-3e38).to(DEVICE)
        start = inputs("coarse", numel, 8, 0).to(DEVICE)
        assert codec._kernels(x) is kernels_for(DEVICE)
        assert "Triton" in type(kernels_for(DEVICE)).__name__
        ours = everything(codec, x, start)
        with monkeypatch.context() as patch:
            patch.setenv("OFFBEAT_NO_TRITON", "1")
            patch.setenv("OFFBEAT_NO_COMPILER", "1")
            assert kernels_for(DEVICE) is None
            plain = everything(codec, x, start)
        for a, b in zip(ours, plain, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("numel", [1, 4200, 300_001])
def test_the_device_and_the_cpu_agree_to_the_bit(codec, numel, monkeypatch):
    """Replicas of one model may run on different devices. Decoding adds, where a multiply-add could round otherwise."""
    if not GPU and numel > 10_000:
        pytest.skip("the interpreter is slow")
    for kind, power in [("heavy", 0), ("spread", -79.5), ("normal", 126), ("coarse", 3)]:
        x = inputs(kind, numel, 7, power).nan_to_num(posinf=3e38, neginf=-3e38)
        start = inputs("normal", numel, 8, power).nan_to_num(posinf=3e38, neginf=-3e38)
        ours = everything(codec, x.to(DEVICE), start.to(DEVICE))
        with monkeypatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            on_cpu = everything(codec, x, start)
        for a, b in zip(ours, on_cpu, strict=True):
            assert torch.equal(a, b)


class FromGpu(ThreadPeers):
    """Ranks whose values are on a GPU, and that exchange tensors in CPU memory only."""

    def can_exchange(self, device):
        return device.type == "cpu" and not GPU

    def all_gather(self, out, mine):
        assert out.device.type == mine.device.type == "cpu"
        return super().all_gather(out, mine)

    def all_to_all(self, out, mine, out_splits, in_splits):
        assert out.device.type == mine.device.type == "cpu"
        return super().all_to_all(out, mine, out_splits, in_splits)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_values_on_the_device_are_those_of_the_cpu(codec, size, monkeypatch):
    numel = 200_001 if GPU else 3001
    values = [inputs("heavy", numel, rank, 0) for rank in range(size)]

    def reduce(peers, device):
        x = values[peers.rank].to(device)
        lost = torch.zeros_like(x)
        total = CodedMean(codec, return_sum_error=True).reduce(x, peers, 1.0, lost)
        assert total.device == lost.device == x.device
        assert peers.sent == CodedMean(codec).bytes_sent(numel, size)
        return total.cpu(), lost.cpu()

    launch, lock = triton_launch._launch, threading.Lock()

    def one_at_a_time(*arguments, **constants):  # Triton's interpreter has no threads
        with lock:
            launch(*arguments, **constants)

    monkeypatch.setattr(triton_launch, "_launch", one_at_a_time)
    ours = run_threads(size, lambda peers: reduce(peers, DEVICE), FromGpu)
    with monkeypatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        on_cpu = run_threads(size, lambda peers: reduce(peers, torch.device("cpu")))
    for a, b in zip(ours, on_cpu, strict=True):
        for one, other in zip(a, b, strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_not_finite(codec, bad):
    x = torch.randn(3000, device=DEVICE)
    x[2500] = bad
    data = torch.empty(codec.encoded_bytes(3000), dtype=torch.uint8, device=DEVICE)
    lost = torch.ones_like(x)
    for residual in (None, lost):
        with pytest.raises(NotFinite, match="first at element 2500"):
            codec.encode(x, data, residual)
    assert (lost == 1).all()


def test_kernels_compile_for_a_gpu_that_need_not_be_there():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "src")])
    command = [sys.executable, "-m", "tests.compile_wire_kernels"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=150)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(BUILT_IN), done.stderr[-2000:]
    assert [line for line in lines if not line.endswith(": ok")] == []
