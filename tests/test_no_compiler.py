"""Without a C compiler: torch's own operators by default, kernels from a filled cache, and one warning."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

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
from offbeat.engine.cpu.reader import wait_for_reader
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
    monkeypatch.setenv("CXX", "/nonexistent/c++")
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


@contextlib.contextmanager
def without_privileges():
    """As a user whom permissions bind. Whatever the block needs must have been imported before."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def locked(directory):
    """A directory with one kernel that only root can reach."""
    directory.mkdir(parents=True)
    (directory / "kernel-0.so").touch()
    directory.chmod(0o000 if os.geteuid() else 0o700)
    return directory


def step_without_privileges(monkeypatch):
    """The tier of a step, and the warnings."""
    from offbeat.engine.cpu import kernel

    monkeypatch.setenv("OFFBEAT_READER", "python")  # the reader of this process stays as it is
    p = torch.ones(5, requires_grad=True)
    p.grad = torch.ones(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        offbeat.AdamW([p]).step()  # imports what a step needs
    for cache in (compiler.load, kernel._compiled):
        cache.cache_clear()
    compiler._warned.clear()
    with warnings.catch_warnings(record=True) as caught, without_privileges():
        warnings.simplefilter("always")
        optimizer = offbeat.AdamW([p])
        optimizer.step()
        tier = optimizer.tiers()[0].tier
    return tier, [str(one.message) for one in caught]


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


@pytest.mark.usefixtures("hidden")
def test_a_home_directory_that_cannot_be_reached_holds_no_kernels(monkeypatch, tmp_path):
    """As in an image that sets HOME=/root and runs as another user."""
    monkeypatch.delenv("OFFBEAT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    home = locked(tmp_path / "home")
    monkeypatch.setenv("HOME", str(home))
    tier, said = step_without_privileges(monkeypatch)
    home.chmod(0o700)
    assert tier == "native"
    assert len(said) == 1
    assert "fill a cache" in said[0]


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize("below", ["", "cache"], ids=["the directory", "its parent"])
def test_the_warning_names_a_cache_that_cannot_be_read(monkeypatch, tmp_path, below):
    parent = locked(tmp_path / "kernels")
    cache = parent / below
    monkeypatch.setenv("OFFBEAT_CACHE_DIR", str(cache))
    tier, said = step_without_privileges(monkeypatch)
    parent.chmod(0o700)
    assert tier == "native"
    assert len(said) == 1
    assert f"the cache directory {cache} cannot be read: Permission denied" in said[0]
    assert "chmod -R a+rX" in said[0]
    assert "fill a cache" not in said[0]


@pytest.mark.usefixtures("hidden")
def test_the_reader_and_the_codecs_do_without_a_cache_that_cannot_be_read(monkeypatch, tmp_path):
    from offbeat.engine.cpu import reader_build
    from offbeat.wire.codecs import c_kernels

    cache = locked(tmp_path / "kernels")
    monkeypatch.setenv("OFFBEAT_CACHE_DIR", str(cache))
    monkeypatch.setattr(reader_build, "_digest", lambda: "0")  # it reads the source, which may be out of reach too
    source = SimpleNamespace(read_text=lambda: "int codec;")
    monkeypatch.setattr(c_kernels, "Path", lambda _: SimpleNamespace(with_name=lambda _: source))
    with without_privileges():
        assert compiler.cached("*.so") == []
        with pytest.raises(compiler.CompilerError, match="kernels cannot be read: Permission denied"):
            reader_build.Build()
        assert c_kernels._load_once.__wrapped__() is None
    cache.chmod(0o700)


@pytest.mark.usefixtures("hidden")
def test_a_file_that_disappears_is_not_in_the_cache(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "kernel-1.so").touch()
    (tmp_path / "cache" / "kernel-2.so").symlink_to("gone")  # listed, but not there
    assert compiler.cached("kernel-*.so") == [tmp_path / "cache" / "kernel-1.so"]
