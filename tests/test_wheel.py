"""The package as it is released: built from the source distribution, and used from outside of the tree."""

from __future__ import annotations

import email
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import offbeat
from offbeat.engine.cpu.compiler import why_no_compiler

pytest.importorskip("setuptools")

ROOT = Path(__file__).parent.parent
NOT_OURS = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "site", "*.so")
#: What makes sense only to the installed package: no path of the tree, no variables of the tests.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}

SMOKE = """
import importlib.util, sys, torch, offbeat
from pathlib import Path
home = Path(offbeat.__file__).parent
assert str(home).startswith(sys.prefix), home
assert (home / "wire" / "codecs" / "codecs.c").exists() and (home / "engine" / "cpu" / "reader.cpp").exists()
assert importlib.util.find_spec("offbeat.wire.codecs.triton_kernels").origin.startswith(str(home))

torch.manual_seed(0)
ours, theirs = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
theirs.load_state_dict(ours.state_dict())
mine, reference = offbeat.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
offbeat.overlap(mine, ours)
for _ in range(3):
    x = torch.randn(5, 4)
    for model, optimizer in ((ours, mine), (theirs, reference)):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
for p, q in zip(ours.parameters(), theirs.parameters()):
    torch.testing.assert_close(p, q)
print(mine.tiers()[0].tier)
"""


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, words)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(what: str, tree: Path, into: Path) -> Path:
    call = f"from setuptools import build_meta as b; print(b.build_{what}({str(into)!r}))"
    return into / run(sys.executable, "-c", call, cwd=tree).splitlines()[-1]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    tree = shutil.copytree(ROOT, folder / "tree", ignore=NOT_OURS)
    source = build("sdist", tree, folder)
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return source, build("wheel", unpacked, folder)


@pytest.mark.xdist_group("wheel")
def test_the_source_distribution_has_what_its_tests_need(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    wanted += [path for pattern in ("*.c", "*.cpp", "*.pyi", "py.typed") for path in (ROOT / "src").rglob(pattern)]
    wanted += (ROOT / "docs").rglob("*.md")
    missing = {str(path.relative_to(ROOT)) for path in wanted if not path.name.startswith(".")} - names
    assert missing == set()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"} <= names


@pytest.mark.xdist_group("wheel")
def test_the_wheel_has_the_package_and_nothing_else(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        names = set(wheel.namelist())
        (about,) = (name for name in names if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(wheel.read(about))
    source = ROOT / "src"
    kinds = (".py", ".pyi", ".c", ".cpp", ".typed")
    ours = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in kinds}
    assert ours == {name for name in names if ".dist-info/" not in name}
    assert metadata["Version"] == offbeat.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Author"]
    assert set(metadata.get_all("Provides-Extra")) >= {"cli", "test"}
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [line[:5] for line in needed] == ["torch"]  # nothing but torch


@pytest.mark.xdist_group("wheel")
def test_the_wheel_works_outside_of_the_tree(archives: tuple[Path, Path], tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", "clean", cwd=tmp_path)
    binaries = tmp_path / "clean" / ("Scripts" if sys.platform == "win32" else "bin")
    python = binaries / "python"
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", archives[1], cwd=tmp_path
    )
    (site,) = (tmp_path / "clean").rglob("site-packages")
    # torch is that of the tests. Links in there (an editable offbeat) are not followed from here.
    (site / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    tier = run(python, "-c", SMOKE, cwd=tmp_path).strip()
    assert tier == "fused" or why_no_compiler() is not None
    if importlib.util.find_spec("typer"):
        assert run(binaries / "offbeat", "--version", cwd=tmp_path).startswith(f"offbeat {offbeat.__version__} (torch ")
