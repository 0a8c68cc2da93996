"""Compiles the library for attention on the CPU; everything else is in pyproject.toml.

The library's interface is C, so a wheel with it is for one platform and every Python 3. Where no compiler can build it,
Overspill is installed without it, and all attention stays on the GPU.
"""

import platform
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path("src/overspill/kv/attention")
# Loaded as a file: importing overspill would import what may not be installed yet.
ATTENTION = runpy.run_path(str(FOLDER / "build.py"))


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        folder = Path(*fullname.split(".")[:-1])
        return str(folder / ATTENTION["library_path"]().name)

    def build_extension(self, ext: Extension) -> None:
        try:
            ATTENTION["build"](Path(self.get_ext_fullpath(ext.name)))
        except ATTENTION["BuildError"] as error:
            raise CompileError(f"attention on the CPU is left out: {error}") from error


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        built = list(Path(self.bdist_dir).rglob("libattention-*.so"))
        return ("py3", "none", super().get_tag()[2] if built else "any")


setup(
    ext_modules=[Extension("overspill.kv.attention.library_", sources=[], optional=True)]
    if platform.machine() in ATTENTION["KERNELS"]
    else [],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
)
