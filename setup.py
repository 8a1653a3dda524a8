"""The part of the build that pyproject.toml cannot say: compiled kernels, if tools/build_kernels.py has made them."""

import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

#: Those for this platform: a folder that was copied from another machine may hold others.
KERNELS = sorted(Path(__file__).parent.glob(f"build/kernels/{sysconfig.get_platform()}/kernels-*.so"))


class WithKernels(Distribution):
    """A wheel with kernels is for one platform; without them it is for all."""

    def has_ext_modules(self) -> bool:
        """Whether the package contains machine code."""
        return bool(KERNELS)


class BuildWithKernels(build_py):
    """Puts the kernels beside the code that loads them. An editable install has none."""

    def run(self) -> None:
        """Build the package, then add the kernels."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "offbeat", "engine", "cpu")
        for old in folder.glob("kernels-*.so"):  # an earlier build has left it
            old.unlink()
        for one in KERNELS:
            self.copy_file(str(one), str(folder / one.name))


class AnyPython(bdist_wheel):
    """Kernels know nothing of Python, so one wheel is for all its versions."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tags of Python, its ABI and the platform."""
        return ("py3", "none", super().get_tag()[2])


setup(distclass=WithKernels, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": AnyPython})
