"""Compiled kernels are code: they are loaded only from a directory that nobody else can write to."""

from __future__ import annotations

import os
import warnings

import pytest

from offbeat.engine.cpu import compiler

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX permissions")

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


@pytest.mark.skipif(compiler.why_no_compiler() is not None, reason="needs a C compiler")
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
    with pytest.warns(UserWarning, match="is not trusted"):
        assert compiler.load(right).answer_planted() == 42
