"""The part of the build that pyproject.toml cannot say: compiled kernels, if tools/build_kernels.py has made them."""

import hashlib
import json
import shutil
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

BUILD = Path(__file__).parent / "build"


def made_kernels() -> list[Path]:
    """The kernels that tools/build_kernels.py has listed for this platform.

    A folder that was copied from another machine may hold those of others, and this one may hold other files.
    """
    folder = BUILD / "kernels" / sysconfig.get_platform()
    found = folder / "made.json"
    made = json.loads(found.read_text()) if found.exists() else {}
    for name, digest in made.items():
        library = folder / name
        if not library.exists() or hashlib.sha256(library.read_bytes()).hexdigest() != digest:
            raise SystemExit(f"{library} is not the file that tools/build_kernels.py has made; run it again")
    return [folder / name for name in sorted(made)]


KERNELS = made_kernels()


class WithKernels(Distribution):
    """A wheel with kernels is for one platform; without them it is for all."""

    def has_ext_modules(self) -> bool:
        """Whether the package contains machine code."""
        return bool(KERNELS)


class BuildWithKernels(build_py):
    """Puts the kernels beside the code that loads them. An editable install has none."""

    def run(self) -> None:
        """Build the package, then add the kernels."""
        if self.editable_mode:
            super().run()
            return
        for old in BUILD.glob("lib*"):  # setuptools would pack what an earlier build has left there
            shutil.rmtree(old)
        super().run()
        folder = Path(self.build_lib, "offbeat", "engine", "cpu")
        for one in KERNELS:
            self.copy_file(str(one), str(folder / one.name))


class AnyPython(bdist_wheel):
    """Kernels know nothing of Python, so one wheel is for all its versions."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tags of Python, its ABI and the platform."""
        return ("py3", "none", super().get_tag()[2])


setup(distclass=WithKernels, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": AnyPython})
