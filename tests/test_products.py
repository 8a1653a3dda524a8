"""Products of stacks of matrices by Triton: on a GPU where there is one, else through its interpreter on the CPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch

import offbeat
from offbeat.engine.cuda import products
from offbeat.engine.cuda.products import TritonProducts, products_for
from offbeat.engine.matrix import chunks
from offbeat.rules.newton_schulz import newton_schulz
from offbeat.rules.products import Products

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
# Triton's interpreter does not multiply bfloat16.
DTYPES = (torch.bfloat16, torch.float16) if GPU else (torch.float16,)
FACTORS = (3.4445, -4.7750, 2.0315)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """The interpreter is slow: smaller matrices, and tiles that go with them."""
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        for name, value in {"SMALLEST": 16, "BLOCK": 32, "DEEP": 16, "WIDE_FROM": 48}.items():
            monkeypatch.setattr(products, name, value)


def sizes(*shapes):
    return shapes if not GPU else tuple((n, *(8 * side for side in rest)) for n, *rest in shapes)


def close(found, exact, dtype):
    assert (found.double() - exact).norm() <= (3e-3 if dtype == torch.bfloat16 else 5e-4) * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", sizes((2, 40, 72), (1, 64, 64), (3, 72, 40), (2, 104, 32), (1, 32, 160)), ids=str)
def test_a_symmetric_product(shape, turned, dtype):
    x = torch.randn(shape, device=DEVICE).to(dtype)
    x = x.mT if turned else x
    n = x.shape[1]
    plus = torch.randn(shape[0], n, n, device=DEVICE)
    plus = (plus + plus.mT).to(dtype)
    kernels = products_for(dtype, DEVICE)
    assert type(kernels) is TritonProducts
    assert kernels.are_quick(x)
    room = torch.full((shape[0] + 2, n, n), float("nan"), dtype=dtype, device=DEVICE)
    out = room[1:-1]
    kernels.symmetric(x, out)
    close(out, x.double() @ x.double().mT, dtype)
    assert torch.equal(out, out.mT)
    kernels.symmetric(x, out, plus=plus, beta=-1.5, alpha=0.25)
    close(out, 0.25 * x.double() @ x.double().mT - 1.5 * plus.double(), dtype)
    assert torch.equal(out, out.mT)
    assert room[0].isnan().all()
    assert room[-1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(40, 72, 40), (72, 40, 40), (64, 64, 64), (24, 104, 24), (320, 48, 48)])
def test_a_product_that_is_added(m, n, k, dtype):
    m, n, k = (8 * side if GPU else side for side in (m, n, k))
    y, left, right = (torch.randn(2, *s, device=DEVICE).to(dtype) for s in ((m, n), (m, k), (k, n)))
    room = torch.full((4, m, n), float("nan"), dtype=dtype, device=DEVICE)
    products_for(dtype, DEVICE).add_product(y, left, right, 3.5, out=room[1:-1])
    close(room[1:-1], 3.5 * y.double() + left.double() @ right.double(), dtype)
    assert room[0].isnan().all()
    assert room[-1].isnan().all()


@pytest.mark.parametrize("shape", [(2, 40, 60), (2, 12, 64), (2, 36, 64)], ids=str)
def test_torch_multiplies_what_a_descriptor_cannot_read(shape):
    x = torch.randn(shape, device=DEVICE).half()
    kernels = products_for(torch.float16, DEVICE)
    assert not kernels.are_quick(x)
    out = x.new_empty(shape[0], shape[1], shape[1])
    kernels.symmetric(x, out)
    close(out, x.double() @ x.double().mT, torch.float16)
    y = torch.empty_like(x)
    kernels.add_product(x, out, x, 2.0, out=y)
    close(y, 2 * x.double() + out.double() @ x.double(), torch.float16)


def test_torch_multiplies_what_kernels_cannot_count():
    kernels, one = products_for(torch.float16, DEVICE), torch.zeros(1, dtype=torch.float16, device=DEVICE)
    assert kernels.are_quick(one.expand(1, 2**15, 2**15))
    assert not kernels.are_quick(one.expand(1, 2**15, 2**16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quotients(dtype):
    x, by = torch.randn(3, 40, 80, device=DEVICE).to(dtype), torch.tensor([2.0, float("inf"), 3.0], device=DEVICE)
    expected = (x.float() / by.to(dtype).float().view(-1, 1, 1)).to(dtype)
    products_for(dtype, DEVICE).divide(x, by.to(dtype))
    torch.testing.assert_close(x, expected, rtol=8e-3 if dtype == torch.bfloat16 else 1e-3, atol=0)


def test_products_by_torch():
    x, plus, out = torch.randn(2, 3, 5), torch.eye(3).expand(2, 3, 3).contiguous(), torch.empty(2, 3, 3)
    Products().symmetric(x, out, plus, 0.5, 2.0)
    torch.testing.assert_close(out, 2 * x @ x.mT + 0.5 * plus)
    Products().symmetric(x, out, alpha=2.0)
    torch.testing.assert_close(out, 2 * x @ x.mT)
    y = torch.empty_like(x)
    Products().add_product(x, out, x, 2.0, out=y)
    torch.testing.assert_close(y, 2 * x + out @ x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factors", [FACTORS, (1.5, -0.5, 0.0)])
@pytest.mark.parametrize("shape", sizes((2, 40, 72), (1, 72, 40), (2, 48, 48)), ids=str)
def test_the_iteration(shape, factors, dtype):
    x = torch.randn(shape, device=DEVICE)
    kernels = products_for(dtype, DEVICE)
    exact = newton_schulz(x.double(), factors, 5, 1e-7)
    for turned in (False, True):
        start = (x.mT.contiguous().mT if turned else x).to(dtype)
        found = newton_schulz(start.clone(), factors, 5, 1e-7, kernels)
        assert found.shape == x.shape
        plain = newton_schulz(start.clone(), factors, 5, 1e-7)
        error, usual = ((t.double() - exact).norm() / exact.norm() for t in (found, plain))
        assert error <= 1.5 * usual + 1e-3


def test_factors_may_be_tensors():
    x = torch.randn(sizes((2, 40, 72))[0], device=DEVICE).to(DTYPES[0])
    kernels = products_for(DTYPES[0], DEVICE)
    found = newton_schulz(x.clone(), torch.tensor(FACTORS, dtype=torch.float64), 5, 1e-7, kernels)
    assert torch.equal(found, newton_schulz(x.clone(), FACTORS, 5, 1e-7, kernels))


def test_a_result_does_not_depend_on_the_others_in_the_stack():
    x = torch.randn(sizes((3, 40, 72))[0], device=DEVICE).to(DTYPES[0])
    kernels = products_for(DTYPES[0], DEVICE)
    together = newton_schulz(x.clone(), FACTORS, 5, 1e-7, kernels)
    for one, alone in zip(together, x, strict=True):
        assert torch.equal(newton_schulz(alone.clone()[None], FACTORS, 5, 1e-7, kernels)[0], one)


def test_muon_uses_them(monkeypatch):
    calls = []
    real = products._start
    monkeypatch.setattr(products, "_start", lambda name, *args: (calls.append(name), real(name, *args)))
    shapes = [size[1:] for size in sizes((1, 40, 72), (1, 72, 40), (1, 40, 72))]
    params = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    others = [p.detach().clone().requires_grad_() for p in params]
    for p, q in zip(params, others, strict=True):
        p.grad = q.grad = torch.randn_like(p)
    dtype = DTYPES[-1]
    offbeat.Muon(params, lr=0.1, ns_dtype=dtype).step()
    assert calls == ["divide", *["symmetric", "symmetric", "add_product"] * 5] * 2  # two shapes
    with monkeypatch.context() as patched:
        patched.setenv("OFFBEAT_NO_TRITON", "1")
        offbeat.Muon(others, lr=0.1, ns_dtype=dtype).step()
    for p, q in zip(params, others, strict=True):
        assert (p - q).norm() <= 0.02 * 0.1 * min(p.shape) ** 0.5
    assert len(calls) == 32


def test_tables_are_freed_with_their_chunk(monkeypatch):
    """Without the garbage collector, which does not know how much memory of a GPU they take."""
    made, real = [], chunks.Kernels.__init__

    def noted(self, *args):
        made.append(weakref.ref(self))
        real(self, *args)

    monkeypatch.setattr(chunks.Kernels, "__init__", noted)
    monkeypatch.setenv("OFFBEAT_NO_COMPILER", "1")  # elementwise parts by Triton, on the CPU too
    shape = sizes((1, 40, 72))[0][1:]
    params = [torch.randn(shape, device=DEVICE, requires_grad=True) for _ in range(3)]
    optimizer = offbeat.Muon(params, lr=0.1, ns_dtype=DTYPES[-1])
    gc.disable()
    try:
        for step in range(6):
            for i, p in enumerate(params):
                p.grad = torch.ones_like(p) if i != step // 2 else None
            optimizer.step()
        alive = [one() is not None for one in made]
    finally:
        gc.enable()
    assert alive == [False, False, True]


def test_kernels_that_do_not_work_are_not_used(monkeypatch):
    monkeypatch.setattr(products, "_start", lambda *args: None)  # writes nothing
    products._are_right.cache_clear()
    try:
        with pytest.warns(UserWarning, match="uses torch's products of matrices"):
            assert not products._are_right(torch.float16, DEVICE, False)
    finally:
        products._are_right.cache_clear()


@pytest.mark.timeout(300)
def test_kernels_compile_for_hopper(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.compile_products"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    assert [line for line in lines if not line.endswith(": ok")] == []
