"""What type checkers tell users: mypy and pyright, over correct and wrong uses of every public name."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat
from offbeat.replicas import options
from tests.blocks import blocks, names

ROOT = Path(__file__).parent.parent
SOURCE = Path(offbeat.__file__).parent
USES = ROOT / "tests" / "typing"
#: Complete scripts, as users write them: without annotations of their own.
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(command, folder):
    # Outside this repository, where its settings do not apply and offbeat is a package like any other.
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    environment.pop("MYPYPATH", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy(paths, folder, *, strict):
    flags = ["--strict"] if strict else ["--check-untyped-defs"]
    flags += ["--config-file=", "--no-error-summary", "--output=json", f"--python-executable={sys.executable}"]
    cache = ROOT / ".mypy_cache" / ("users" if strict else "examples")
    found = run([sys.executable, "-m", "mypy", *flags, f"--cache-dir={cache}", *map(str, paths)], folder)
    messages = [json.loads(line) for line in found.splitlines()]
    return [(Path(one["file"]).name, one["line"], one["message"]) for one in messages if one["severity"] == "error"]


def pyright(paths, folder, *, strict):
    config = {
        "include": [os.path.relpath(path, folder) for path in paths],
        "typeCheckingMode": "strict" if strict else "basic",
        "extraPaths": [str(SOURCE.parent)],
        # torch's own functions, of which some have no complete types
        "reportUnknownMemberType": False,
        "reportUnknownArgumentType": False,
        "reportOptionalMemberAccess": strict,  # an example need not ask whether there is an outer optimizer
    }
    Path(folder, "pyrightconfig.json").write_text(json.dumps(config))
    found = run([sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable], folder)
    messages = json.loads(found)["generalDiagnostics"]
    return [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1, one["message"])
        for one in messages
        if one["severity"] == "error"
    ]


CHECKERS = pytest.mark.parametrize("check", [mypy, pyright], ids=["mypy", "pyright"])


@CHECKERS
def test_correct_uses_are_clean_and_wrong_ones_are_reported(check, tmp_path):
    found = check([USES / "correct.py", USES / "wrong.py"], tmp_path, strict=True)
    assert not [one for one in found if one[0] != "wrong.py"]
    lines = (USES / "wrong.py").read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert {line for name, line, _ in found if name == "wrong.py"} == wrong


@pytest.mark.skipif(not EXAMPLES, reason="there are no examples")
@CHECKERS
def test_examples_are_clean(check, tmp_path):
    assert not check(EXAMPLES, tmp_path, strict=False)


def as_program(page):
    """The blocks of a page one after the other. What a block may use without making it can be anything."""
    code = [f"import {line}" for line in ("copy", "functools", "torch", "torch.distributed as dist", "offbeat")]
    code += ["from typing import Any", "from torch import nn", "def anything() -> Any: ..."]
    code += ["from torch.nn.parallel import DistributedDataParallel"]
    free = [name for name in names() if not any(re.search(rf"\b{name}$", line) for line in code)]
    free.append("sqrt")  # the README shows the maths of a rule
    code += [f"{name} = anything()" for name in free]
    for _, language, text in blocks(page):
        lines = [] if "Traceback (most recent call last)" in text else text.splitlines()
        if language == "pycon":
            lines = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
        code += lines
    return "\n".join(code)


def test_the_code_of_the_documentation_is_clean(tmp_path):
    # pyright alone: to mypy a variable that gets another type in the next block is an error.
    pages = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if blocks(page)]
    # These would be checked against packages of others.
    pages = [page for page in pages if page.name not in ("integrations.md", "reports.md")]
    assert len(pages) > 5
    programs = []
    for page in pages:
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
        programs.append(tmp_path / f"{name}.py")
        programs[-1].write_text(as_program(page))
    assert not pyright(programs, tmp_path, strict=False)


def test_every_public_name_is_among_the_correct_uses():
    text = (USES / "correct.py").read_text()
    assert not [name for name in offbeat.__all__ if not re.search(rf"\boffbeat\.{name}\b", text)]


def test_the_stub_is_what_the_generator_writes():
    spec = importlib.util.spec_from_file_location("make_stubs", ROOT / "tools" / "make_stubs.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert (SOURCE / "optim" / "optimizers.pyi").read_text() == generator.stub(), "run python tools/make_stubs.py"


def keywords(cls):
    found = inspect.signature(cls).parameters.values()
    return {one.name: (one.annotation, one.default) for one in found if one.kind is one.KEYWORD_ONLY}


def test_options_that_are_passed_on_are_those_of_the_class():
    replica = keywords(offbeat.Replica)
    for cls in (offbeat.LocalSGD, offbeat.SlowMo, offbeat.DiLoCo):
        assert "ReplicaOptions" in str(inspect.signature(cls).parameters["options"].annotation), cls
    # Those of a TypedDict are ForwardRefs.
    passed_on = {name: hint.__forward_arg__ for name, hint in options.ReplicaOptions.__annotations__.items()}
    assert passed_on == {name: annotation for name, (annotation, _) in replica.items()}
    level = {field.name: field.type for field in dataclasses.fields(offbeat.Level)}
    passed_on = {name: hint.__forward_arg__ for name, hint in options.SlowMoLevelOptions.__annotations__.items()}
    assert passed_on == {name: hint for name, hint in level.items() if name not in ("every", "outer")}
    own = set(inspect.signature(offbeat.DiLoCo).parameters) - {"deadline", "nonfinite"}  # these may be given either way
    assert set(options.LevelOptions.__annotations__) == {name for name in level if name not in own}


def test_the_package_says_that_it_has_types():
    assert (SOURCE / "py.typed").exists()
    data = re.search(r"\[tool.setuptools.package-data\]\noffbeat = (.*)", (ROOT / "pyproject.toml").read_text())[1]
    assert {"py.typed", "**/*.pyi"} <= set(json.loads(data))
