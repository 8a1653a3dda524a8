"""Compiled kernels are code: they are loaded only from a directory that nobody else can write to."""

from __future__ import annotations

import os
import warnings

import pytest

from offbeat.engine.cpu import compiler

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX permissions")

NEEDS_COMPILER = pytest.mark.skipif(compiler.why_no_compiler() is not None, reason="needs a C compiler")

SOURCE = "int answer_{}(void) {{ return {}; }}"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFBEAT_CACHE_DIR", str(tmp_path / "cache"))
    compiler._warn_once.cache_clear()
    yield tmp_path / "cache"
    compiler._warn_once.cache_clear()


def test_the_directory_is_made_for_this_user_alone(directory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.cache_directory() == directory
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o720])
def test_a_directory_that_others_can_write_to_is_not_used(directory, mode):
    directory.mkdir()
    directory.chmod(mode)
    with pytest.warns(UserWarning, match=rf"{directory} is not trusted: others may write to it \(mode {mode:o}\)"):
        used = compiler.cache_directory()
    assert used != directory
    assert used.stat().st_mode & 0o777 == 0o700
    with warnings.catch_warnings():  # one warning in a process is enough
        warnings.simplefilter("error")
        assert compiler.cache_directory() == used


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
def test_a_directory_of_another_user_is_not_used(directory):
    directory.mkdir(mode=0o700)
    os.chown(directory, 65534, -1)
    with pytest.warns(UserWarning, match="is not trusted: it belongs to user 65534, not to 0"):
        assert compiler.cache_directory() != directory


@NEEDS_COMPILER
def test_a_library_planted_where_others_can_write_is_not_loaded(directory):
    right, wrong = SOURCE.format("planted", 42), SOURCE.format("planted", 13)
    compiler.load.cache_clear()
    compiler.load(wrong)
    (planted,) = directory.glob("*.so")
    compiler.load(right)
    (genuine,) = set(directory.glob("*.so")) - {planted}
    planted.replace(genuine)  # the name that the kernel is looked up by, the code of somebody else
    directory.chmod(0o777)
    compiler.load.cache_clear()
    with pytest.warns(UserWarning, match="is not trusted") as caught:
        assert compiler.load(right).answer_planted() == 42
    assert len(caught) == 1


@pytest.fixture
def read_only(monkeypatch):
    """A function after which nothing can be written to any directory, as root sees it on a read-only file system."""
    access = os.access

    def lock():
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
        compiler.load.cache_clear()

    yield lock
    compiler.load.cache_clear()


@NEEDS_COMPILER
def test_kernels_are_loaded_from_a_cache_that_cannot_be_written_to(directory, read_only, monkeypatch):
    old, new = SOURCE.format("old", 1), SOURCE.format("new", 2)
    compiler.load.cache_clear()
    compiler.load(old)
    files = sorted(directory.iterdir())
    read_only()
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("error")
        patch.setattr(compiler, "_build", lambda *_: pytest.fail("it was compiled again"))
        assert compiler.load(old).answer_old() == 1
    with pytest.warns(UserWarning, match="cannot be written to; kernels that are not in it are compiled anew"):
        assert compiler.load(new).answer_new() == 2
    assert sorted(directory.iterdir()) == files


@NEEDS_COMPILER
def test_without_any_directory_to_write_to_there_is_a_reason(directory, read_only, monkeypatch):
    def none(**_):
        raise FileNotFoundError("No usable temporary directory found")

    directory.mkdir(mode=0o700)
    read_only()
    compiler._private_directory.cache_clear()
    monkeypatch.setattr(compiler.tempfile, "mkdtemp", none)
    with (
        pytest.warns(UserWarning, match="cannot be written to"),
        pytest.raises(compiler.CompilerError, match="no directory for compiled kernels: No usable temporary"),
    ):
        compiler.load(SOURCE.format("nowhere", 3))
