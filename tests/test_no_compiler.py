"""Without a C compiler: torch's own operators by default, kernels from a filled cache, and one warning."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

import offbeat
from offbeat import _torch
from offbeat.engine.cpu import compiler
from offbeat.rules.sgd import SGD
from tests.cases import CASES, make_params, set_gradients

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX permissions")

STEP = """
import sys, warnings
import torch, offbeat
from offbeat.engine.reader import wait_for_reader
torch.set_num_threads(1)
p = torch.ones(100, requires_grad=True)
optimizer = offbeat.{name}([p], lr=0.1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in range(3):
        p.grad = torch.full((100,), 1.0 + step)
        optimizer.step()
print(optimizer.tiers()[0].tier, p[0].item(), len([w for w in caught if "compiled kernels" in str(w.message)]))
if {wait}:
    print(wait_for_reader({wait}))
"""


@pytest.fixture
def hidden(monkeypatch, tmp_path):
    """No compiler, and an empty cache."""
    from offbeat.engine.cpu import kernel

    monkeypatch.setenv("CC", "/nonexistent/cc")
    monkeypatch.setenv("OFFBEAT_CACHE_DIR", str(tmp_path / "cache"))
    caches = (compiler.load, kernel._compiled)
    for cached in caches:
        cached.cache_clear()
    compiler._warned.clear()
    yield
    for cached in caches:
        cached.cache_clear()
    compiler._warned.clear()


def run(cache, *, name="AdamW", wait=0, **environment):
    """What a process prints that makes three steps."""
    environment = {**os.environ, "OFFBEAT_CACHE_DIR": str(cache), **environment}
    command = [sys.executable, "-c", STEP.format(name=name, wait=wait)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


HIDDEN = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_torchs_operator_is_the_default_where_there_is_one(case, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = make_params(dtype), make_params(torch.float64)
        with torch.no_grad():
            for p, q in zip(ours, theirs, strict=True):
                q.copy_(p)
        optimizer, reference = case.ours(ours, **case.hyper), case.reference(theirs)
        for step in range(3):
            set_gradients(step, ours)
            for p, q in zip(ours, theirs, strict=True):
                q.grad = None if p.grad is None else p.grad.double()
            optimizer.step()
            reference.step()
        tier = optimizer.tiers()[0].tier
    half = dtype in (torch.bfloat16, torch.float16)
    native = case.ours.rule.surface.native is not None
    wrong = case.ours.rule.name == "SGD" and not _torch.fused_sgd_is_right(dtype)
    assert tier == ("native" if native and not wrong else "foreach")
    tolerance = 1e-12 if dtype == torch.float64 else 3e-5 if not half else 6e-2
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_operator_of_torchs_that_is_wrong_is_not_used(dtype):
    """https://github.com/pytorch/pytorch/issues/191763: it leaves whole vectors of a parameter unchanged."""
    p = torch.ones(64, dtype=dtype, requires_grad=True)
    p.grad = torch.ones_like(p)
    if not _torch.fused_sgd_is_right(dtype):
        with pytest.raises(RuntimeError, match=f"torch's operator is wrong for {dtype} on the CPU. Leave fused out"):
            offbeat.SGD([p], lr=0.5, fused=True).step()
    offbeat.SGD([p], lr=0.5).step()
    assert (p == 0.5).all()
    assert SGD.surface.native_takes(torch.float32)
    assert SGD.surface.native_takes(torch.float64)


@pytest.mark.usefixtures("hidden")
def test_one_warning_says_what_to_do():
    p = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match="Install a C compiler; .* OFFBEAT_CACHE_DIR .* OFFBEAT_NO_COMPILER=1"):
        assert offbeat.Lion([p]).tiers()[0].tier == "foreach"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert offbeat.AdamW([p]).tiers()[0].tier == "native"


@pytest.mark.usefixtures("hidden")
def test_no_warning_if_no_kernel_was_wanted(monkeypatch):
    p = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert offbeat.AdamW([p], foreach=True).tiers()[0].tier == "foreach"
        monkeypatch.setenv("OFFBEAT_NO_COMPILER", "1")
        assert offbeat.AdamW([p]).tiers()[0].tier == "native"


@pytest.mark.skipif(compiler.why_no_compiler() is not None, reason="needs a C compiler to fill the cache")
def test_kernels_come_from_a_filled_cache(tmp_path):
    cache = tmp_path / "cache"
    expected = run(cache, OFFBEAT_READER="python")
    assert expected[0::2] == ["fused", "0"]
    (kernel,) = cache.glob("*.so")
    assert run(cache, **HIDDEN, OFFBEAT_READER="python") == expected
    cache.chmod(0o500)  # as in an image
    assert run(cache, **HIDDEN, OFFBEAT_READER="python") == expected
    # Another rule's kernel is not there; nor is any that this processor or these options did not get.
    assert run(cache, name="RMSprop", **HIDDEN)[0::2] == ["foreach", "1"]
    cache.chmod(0o700)
    kernel.rename(cache / ("0" * 32 + kernel.name[32:]))
    assert run(cache, **HIDDEN)[0::2] == ["native", "1"]


@pytest.mark.skipif(compiler.why_no_compiler() is not None, reason="needs a C compiler to fill the cache")
def test_a_cache_that_others_can_write_to_is_not_used(tmp_path):
    cache = tmp_path / "cache"
    run(cache, OFFBEAT_READER="python")
    cache.chmod(0o777)
    assert run(cache, **HIDDEN)[0::2] == ["native", "1"]


@pytest.mark.skipif(compiler.why_no_compiler() is not None, reason="needs a C compiler to fill the cache")
def test_the_reader_comes_from_a_filled_cache(tmp_path):
    filled = compiler.cached("reader-*.so")
    if not filled:
        pytest.skip("no test has compiled the reader yet")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    for one in filled:
        shutil.copy2(one, cache)
    assert run(cache, wait=20, **HIDDEN)[-1] == "True"
    for one in cache.iterdir():
        one.rename(cache / one.name.replace("reader-", "reader-0"))
    assert run(cache, wait=20, **HIDDEN)[-1] == "False"
