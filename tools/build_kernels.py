"""Compiles the CPU kernels of all built-in rules into libraries that a wheel brings along.

    python tools/build_kernels.py [--into FOLDER] [--rules AdamW SGD ...] [--levels x86-64-v3 ...]

It makes a step with every optimizer, under every structure of its maths and in every dtype, and records the sources
that the engine wants compiled; the codecs of ``offbeat.wire`` are among them. There is one library for each level of
processors (see ``src/offbeat/engine/cpu/shipped.py``). ``make wheel`` then builds a wheel for this platform: setup.py
puts these libraries into it, and no other files. Without a C compiler nothing is built, and the wheel is pure.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

from offbeat.engine.cpu import compiler, kernel, shipped  # noqa: E402
from offbeat.optim import optimizers  # noqa: E402
from offbeat.replicas.slowmo import _SlowMomentum  # noqa: E402
from offbeat.wire.codecs import c_kernels  # noqa: E402

#: The list of the libraries, with a hash of each: setup.py takes these and no others.
MADE = "made.json"


def classes() -> dict[str, Any]:
    """The optimizers whose updates are kernels, by name."""
    found = {name: getattr(optimizers, name) for name in optimizers.__all__}
    found = {name: cls for name, cls in found.items() if hasattr(cls, "rule") and not cls.rule.dense}
    return {**found, "SlowMo": _SlowMomentum}


def structures(cls: Any) -> Iterator[dict[str, Any]]:
    """Options that choose between variants of the maths, in every combination that the rule allows."""
    choices: dict[str, Any] = {hyper.name: (False, True) for hyper in cls.rule.hyper if hyper.type == "bool"}
    choices |= {hyper.name: (0, 0.5) for hyper in cls.rule.hyper if hyper.name in ("momentum", "weight_decay")}
    if any(hyper.name == "ns_dtype" for hyper in cls.rule.hyper):  # of the stacks that Muon multiplies
        choices["ns_dtype"] = tuple(kernel.SUPPORTED)
    if "maximize" in cls.rule.surface.flags:
        choices["maximize"] = (False, True)
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def sources(names: list[str]) -> list[str]:
    """The C sources that steps want compiled."""
    found: dict[str, None] = {}

    def record(source: str) -> Any:
        found[source] = None
        raise compiler.CompilerError("it is only recorded")

    kernel.load = c_kernels.load = record
    for name in names:
        kernel._compiled.cache_clear()  # another rule may have had the same maths
        before, found = found, {}
        for options, dtype in itertools.product(structures(classes()[name]), kernel.SUPPORTED):
            matrix, vector = (torch.ones(shape, dtype=dtype, requires_grad=True) for shape in ((2, 3), (3,)))
            for p in (matrix, vector):
                p.grad = torch.ones_like(p)
                try:
                    optimizer = classes()[name]([p], **options)
                except ValueError:  # these do not go together
                    continue
                optimizer.step()
        if not found:
            raise SystemExit(f"no step of {name} wants a kernel: look at structures()")
        found = before | found
    c_kernels._load_once.cache_clear()
    c_kernels.c_kernels()
    return list(found)


def build(found: list[str], level: str, into: Path) -> None:
    """Compile sources for one level of processors into one library."""
    command = compiler.find_compiler()
    assert command is not None
    target = {"armv8-a": "generic"}.get(level, level.replace("-", "_")) if compiler.is_zig(command) else level
    options = [f"-march={target}" if one == "-march=native" else one for one in compiler.OPTIONS]
    link = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-s"]
    with tempfile.TemporaryDirectory() as work:

        def compile_one(source: str) -> str:
            name = shipped.digest(source)
            path = Path(work) / f"{name}.c"
            path.write_text(f"{source}\nconst char offbeat_has_{name} = 1;\n")
            renamed = [f"-D{one}={one}_{name}" for one in sorted(set(re.findall(r"\boffbeat_\w+", source)))]
            obj = path.with_suffix(".o")
            subprocess.run([*command, *options, *renamed, "-c", str(path), "-o", str(obj)], check=True)
            return str(obj)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_one, found))
        library = into / shipped.file_of(level).name
        subprocess.run([*command, "-shared", *link, *objects, "-o", str(library)], check=True)
    print(f"{library.name}: {len(found)} sources, {library.stat().st_size / 1e6:.1f} MB", flush=True)


def main() -> None:
    """Build the libraries for the machine this runs on."""
    levels = list(shipped.LEVELS.get(platform.machine(), {}))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "kernels" / sysconfig.get_platform())
    parser.add_argument("--rules", nargs="+", default=list(classes()), choices=list(classes()), metavar="RULE")
    parser.add_argument("--levels", nargs="+", default=levels, choices=levels, metavar="LEVEL")
    given = parser.parse_args()
    for old in [given.into / MADE, *given.into.glob("kernels-*.so")]:  # they may be from other sources
        old.unlink(missing_ok=True)
    if why_not := compiler.why_no_compiler() or ("" if levels else f"there are no levels for {platform.machine()}"):
        print(f"no kernels are built: {why_not}")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sources(given.rules)
    given.into.mkdir(parents=True, exist_ok=True)
    made: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=given.into) as work:  # all levels or none
        for level in given.levels:
            build(found, level, Path(work))
        for one in Path(work).iterdir():
            shutil.move(one, given.into / one.name)
            made[one.name] = hashlib.sha256((given.into / one.name).read_bytes()).hexdigest()
    (given.into / MADE).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
