"""The recipes of the integrations page run, each as it is, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.blocks import run_page
from tests.frameworks import launched
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
FRAMEWORKS = ("lightning", "accelerate", "transformers")


def run_recipes(rank: int, world: int, folder: str) -> tuple[str | None, list[str]]:
    launched(rank, world)
    os.chdir(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = run_page(ROOT / "docs" / "integrations.md")
    dist.barrier()
    return problem, sorted(os.listdir(folder))


@pytest.mark.ranks
@pytest.mark.xdist_group("transformers")
def test_every_recipe_runs():
    for framework in FRAMEWORKS:
        pytest.importorskip(framework)
    with tempfile.TemporaryDirectory() as folder:
        for problem, files in run_ranks(run_recipes, 2, folder):
            assert problem is None, problem
            assert {"checkpoint", "checkpoint.ckpt", "output"} <= set(files)
        for saved in ("checkpoint", "output/checkpoint-4", "output/checkpoint-8"):
            assert (Path(folder) / saved / "offbeat_1.pt").exists()


def test_the_core_needs_no_framework_and_errors_name_the_extra():
    code = f"""
import sys
import offbeat, offbeat.integrations
print([name for name in sys.modules if name.partition(".")[0] in {FRAMEWORKS!r}])
sys.modules.update(dict.fromkeys({FRAMEWORKS!r}))
for name in ("lightning", "fabric", "accelerate", "transformers"):
    try:
        __import__(f"offbeat.integrations.{{name}}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    loaded, *errors = done.stdout.splitlines()
    assert loaded == "[]", done.stdout + done.stderr
    assert len(errors) == 4
    (extra,) = re.findall(r"^integrations = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    ours = {requirement.partition(">")[0]: requirement for requirement in re.findall(r'"(.*?)"', extra)}
    for error, name in zip(errors, ["lightning", "lightning", "accelerate", "transformers"], strict=True):
        assert error.endswith(f'install it with pip install "{ours[name]}"')  # there is no offbeat on PyPI


def test_the_page_names_the_versions_that_are_pinned():
    page = (ROOT / "docs" / "integrations.md").read_text()
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    for framework in FRAMEWORKS:
        assert f"{framework} {pins[framework]}" in page
