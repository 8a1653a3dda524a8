"""The part of the build that pyproject.toml cannot say: compiled kernels, if tools/build_kernels.py has made them."""

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = sorted(Path("build/kernels").glob("kernels-*.so"))


class BuildWithKernels(build_py):
    """Puts the kernels beside the code that loads them. An editable install has none."""

    def run(self) -> None:
        """Build the package, then add the kernels."""
        super().run()
        if not self.editable_mode:
            for one in KERNELS:
                self.copy_file(str(one), str(Path(self.build_lib, "offbeat", "engine", "cpu", one.name)))


class WheelForPlatform(bdist_wheel):
    """A wheel with kernels is for one platform; without them it is for all."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tags of Python, its ABI and the platform."""
        python, abi, platform = super().get_tag()
        return (python, abi, self.plat_name.replace("-", "_").replace(".", "_") if KERNELS else platform)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForPlatform})
