"""Kernels that come with a wheel: built, installed outside of the tree, and run without a compiler."""

from __future__ import annotations

import functools
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat.engine.cpu import compiler, shipped
from offbeat.engine.cpu.shipped import LEVELS
from tests.test_wheel import ENVIRONMENT, NOT_OURS, ROOT, build, run

pytest.importorskip("setuptools")
pytestmark = [
    pytest.mark.xdist_group("shipped"),
    pytest.mark.skipif(compiler.why_no_compiler() is not None, reason="needs a C compiler to build the kernels"),
    pytest.mark.skipif(platform.machine() not in LEVELS, reason="there are no levels for this processor"),
]

RULES = ("Lion", "Rprop")
KERNELS = "offbeat/engine/cpu/kernels-"
NO_COMPILER = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}

#: Steps of several rules in every dtype, with tensors large enough for two threads: tiers, warnings and hashes.
STEPS = """
import ctypes, hashlib, json, os, sys, warnings
import torch, offbeat
from offbeat.engine.cpu import kernel
{first}
torch.set_num_threads(2)

def digest(tensors):
    found = hashlib.sha256()
    for t in tensors:
        found.update(ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()))
    return found.hexdigest()

steps, tiers = {{}}, {{}}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for name in {names}:
        for dtype in kernel.SUPPORTED:
            torch.manual_seed(0)
            params = [torch.randn(n, requires_grad=True, dtype=torch.float32) for n in (1, 77, 90_000)]
            params = [p.detach().to(dtype).requires_grad_() for p in params]
            optimizer = getattr(offbeat, name)(params, lr=0.01)
            for _ in range(3):
                for p in params:
                    p.grad = (torch.randn(p.shape) * 10.0 ** torch.randint(-6, 3, p.shape)).to(dtype)
                optimizer.step()
            state = [t for p in params for t in optimizer.state[p].values()]
            steps[f"{{name}} {{dtype}}"] = digest([*params, *state])
            tiers[name] = optimizer.tiers()[0].tier
from offbeat.wire.codecs import c_kernels
kernels = c_kernels.c_kernels()
where = os.path.dirname(offbeat.__file__)
maps = set()
if os.path.exists("/proc/self/maps"):
    maps = {{line.split()[-1] for line in open("/proc/self/maps") if "/" in line}}
print(json.dumps({{
    "where": where, "steps": steps, "tiers": tiers, "codecs": kernels is not None,
    "warnings": [str(w.message) for w in caught if "compiled kernels" in str(w.message)],
    "loaded": [one for one in maps if "kernels-" in one and one.startswith(where)],
    "teams": len([one for one in maps if "libgomp" in one or "libomp" in one or "libiomp" in one]),
}}))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, with kernels of a few rules."""
    tree = shutil.copytree(ROOT, tmp_path_factory.mktemp("built") / "tree", ignore=NOT_OURS)
    print(run(sys.executable, "tools/build_kernels.py", "--rules", *RULES, cwd=tree))
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build("wheel", tree, tree.parent)


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A folder in which the wheel is installed."""
    site = wheel.parent / "site"
    words = ("install", "--quiet", "--no-deps", "--no-index", "--target", site)
    run(sys.executable, "-m", "pip", *words, wheel, cwd=wheel.parent)
    return site


def steps(package: Path, cache: Path, *, names: tuple[str, ...] = RULES, first: str = "", **environment: str) -> Any:
    """What a process finds that uses the offbeat in this folder; ``first`` is run in it before."""
    cache.mkdir(mode=0o700, exist_ok=True)
    environment = {
        "PYTHONPATH": str(package),
        "OFFBEAT_CACHE_DIR": str(cache),
        "OFFBEAT_READER": "python",
    } | environment
    command = [sys.executable, "-c", STEPS.format(names=names, first=first)]
    done = subprocess.run(
        command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=150, cwd=cache
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["where"] == str(package / "offbeat")
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What kernels find that are compiled for this processor."""
    found = steps(ROOT / "src", tmp_path_factory.mktemp("cache"))
    assert set(found["tiers"].values()) == {"fused"}
    assert not found["loaded"]
    return found


def test_a_wheel_with_kernels_is_for_one_platform(wheel: Path) -> None:
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    assert wheel.name.endswith(f"-{tag}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (archive.read(name).decode() for name in names if name.endswith("/WHEEL"))
    assert {name for name in names if name.endswith(".so")} == {
        f"{KERNELS}{one}.so" for one in LEVELS[platform.machine()]
    }
    assert "Root-Is-Purelib: false" in about
    assert f"Tag: {tag}\n" in about


def test_kernels_of_an_earlier_build_are_left_out(tree: Path) -> None:
    """Those of other platforms too, and what setuptools has kept of an earlier wheel."""
    kernels = tree / "build" / "kernels" / sysconfig.get_platform()
    elsewhere, kept = kernels.with_name("other-8"), tree / "build" / "lib" / f"{KERNELS}old.so"
    kernels.rename(elsewhere)
    try:
        kept.parent.mkdir(parents=True)
        kept.touch()
        pure = build("wheel", tree, tree.parent)
    finally:
        elsewhere.rename(kernels)
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(pure) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_a_wheel_has_only_the_modules_and_the_kernels_of_its_own_build(tree: Path, wheel: Path) -> None:
    """A module that has been deleted is gone, and a file that only is called like a library is left out."""
    stray = tree / "build" / "kernels" / sysconfig.get_platform() / "kernels-stray.so"
    module = tree / "src" / "offbeat" / "deleted.py"
    stray.touch()
    module.touch()
    build("wheel", tree, tree.parent / "earlier")
    module.unlink()
    again = build("wheel", tree, tree.parent / "again")
    stray.unlink()
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert second.namelist() == first.namelist()


def test_kernels_that_were_replaced_are_not_packed(tree: Path) -> None:
    library = min((tree / "build" / "kernels" / sysconfig.get_platform()).glob("kernels-*.so"))
    made = library.read_bytes()
    library.write_bytes(b"something else")
    call = "from setuptools import build_meta as b; b.build_wheel('..')"
    try:
        done = subprocess.run([sys.executable, "-c", call], cwd=tree, env=ENVIRONMENT, capture_output=True, text=True)
    finally:
        library.write_bytes(made)
    assert done.returncode != 0
    assert f"{library.name} is not the file that tools/build_kernels.py has made; run it again" in done.stderr


def test_without_a_compiler_they_run_with_the_bits_of_compiled_ones(site: Path, compiled: Any, tmp_path: Path) -> None:
    found = steps(site, tmp_path, names=(*RULES, "RMSprop"), **NO_COMPILER)
    assert found["tiers"] == {
        "Lion": "fused",
        "Rprop": "fused",
        "RMSprop": "foreach",
    }  # RMSprop's are not in this wheel
    assert len(found["warnings"]) == 1
    assert "there is no /nonexistent/cc, which CC names" in found["warnings"][0]
    assert compiled["steps"].items() <= found["steps"].items()
    assert found["codecs"]
    assert not list(tmp_path.iterdir())  # nothing was compiled
    if sys.platform == "linux":
        assert len(found["loaded"]) == 1
        assert found["teams"] == 1  # threads are torch's


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one level")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_older_processor_gets_the_lower_level_and_the_same_bits(site: Path, compiled: Any, tmp_path: Path) -> None:
    if not shipped._flags() >= shipped._V3:
        pytest.skip("this processor has not even the instructions of the lower level")
    lower = "from offbeat.engine.cpu import shipped; shipped._flags = lambda: shipped._V3"
    found = steps(site, tmp_path, first=lower, **NO_COMPILER)
    assert [Path(one).name for one in found["loaded"]] == ["kernels-x86-64-v3.so"]
    assert found["steps"] == compiled["steps"]


def test_they_are_not_loaded_if_compiled_kernels_are_not_wanted(site: Path, tmp_path: Path) -> None:
    found = steps(site, tmp_path, OFFBEAT_NO_COMPILER="1")
    assert set(found["tiers"].values()) == {"foreach"}
    assert not found["loaded"]
    assert not found["warnings"]
    assert not found["codecs"]


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As if this process used the package of the wheel."""
    folder = site / "offbeat" / "engine" / "cpu"
    monkeypatch.setattr(shipped, "file_of", lambda level: folder / f"kernels-{level}.so")
    monkeypatch.setattr(shipped, "_library", functools.cache(shipped._library.__wrapped__))
    compiler.load.cache_clear()
    yield folder
    compiler.load.cache_clear()


CODECS = ROOT / "src" / "offbeat" / "wire" / "codecs.c"


@pytest.mark.usefixtures("installed")
def test_they_are_used_beside_a_compiler_and_only_for_their_sources() -> None:
    source = CODECS.read_text()
    found = compiler.load(source)
    if not isinstance(found, shipped.Shipped):
        pytest.skip("this processor has not even the instructions of the lower level")
    assert found.offbeat_encode_int8
    with pytest.raises(AttributeError):
        found.offbeat_step  # noqa: B018
    assert shipped.shipped(source + "/* newer */") is None
    assert not isinstance(compiler.load(source + "/* newer */"), shipped.Shipped)


@pytest.mark.parametrize("missing", ["machine", "fma", "popcnt", "all"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86-64")
@pytest.mark.usefixtures("installed")
def test_a_processor_without_the_instructions_gets_none(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "machine":
        monkeypatch.setattr(shipped.platform, "machine", lambda: "riscv64")
    flags = frozenset() if missing == "all" else shipped._V4 - {missing}
    monkeypatch.setattr(shipped, "_flags", lambda: flags)
    assert shipped.shipped(CODECS.read_text()) is None


def test_a_damaged_library_is_not_used(installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for one in installed.glob("kernels-*.so"):
        (tmp_path / one.name).write_bytes(b"nothing")
    monkeypatch.setattr(shipped, "file_of", lambda level: tmp_path / f"kernels-{level}.so")
    assert shipped.shipped(CODECS.read_text()) is None


def test_without_a_compiler_the_tool_removes_old_kernels(tmp_path: Path) -> None:
    (tmp_path / "kernels-old.so").touch()
    command = [sys.executable, str(ROOT / "tools" / "build_kernels.py"), "--into", str(tmp_path)]
    environment = ENVIRONMENT | NO_COMPILER
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout == "no kernels are built: no C compiler was found: there is no /nonexistent/cc, which CC names\n"
    assert not list(tmp_path.iterdir())


#: Every case of the tests, in every dtype: the sources that its step wants, less those that the tool finds.
MISSING = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = [{tools!r}, {root!r}]
import build_kernels, torch
from offbeat.engine.cpu import kernel
from tests.cases import CASES, MATRIX_CASES, make_params, set_gradients

found = set(build_kernels.sources(list(build_kernels.classes())))
wanted, record = {{}}, kernel.load
def load(source):
    wanted[source] = case
    return record(source)
kernel.load = load
for case in [*CASES, *MATRIX_CASES]:
    for dtype in kernel.SUPPORTED:
        kernel._compiled.cache_clear()
        params = make_params(dtype)
        if case in MATRIX_CASES:
            params = [p for p in params if p.dim() == 2]
        set_gradients(0, params)
        case.ours(params, **case.hyper).step()
assert len(found) > 250 and len(wanted) > 80, (len(found), len(wanted))
print(sorted({{str(case) for source, case in wanted.items() if source not in found}}))
"""


def test_the_tool_finds_every_source_that_the_cases_want(tmp_path: Path) -> None:
    script = MISSING.format(tools=str(ROOT / "tools"), root=str(ROOT))
    environment = {"OFFBEAT_READER": "python", "OFFBEAT_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
