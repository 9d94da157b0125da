# SPDX-License-Identifier: Apache-2.0
"""Build the C++ core; everything else is in pyproject.toml.

The core is plain C++ behind ctypes: it depends on no Python and no torch, so one wheel per platform serves them all.
Without a compiler the package installs all the same, as a wheel for any platform, and compiles at first use or runs in
torch.
"""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PACKAGE = "dynaxx.core"
SOURCES = Path(__file__).parent / "src"
core = runpy.run_path(str(SOURCES / PACKAGE.replace(".", "/") / "build.py"))
ONNX = "dynaxx.integrations.onnx"  # its operator, compiled with the core into a library of its own


class BuildCore(build_ext):
    """One shared library per instruction set, named without a Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file name of a library, without a Python version."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile one library."""
        if self.inplace and ext.more:
            return  # compiled at first use: few who develop need it
        compiler = core["find_compiler"]()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        if not self.inplace:
            target.unlink(missing_ok=True)  # what an earlier build left must not be packed if this one fails
        if compiler is None:
            raise CompileError("no C++ compiler found")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            core["compile_library"](ext.isa, target, compiler, ext.more)
        except (OSError, RuntimeError) as error:
            raise CompileError(str(error)) from error


class CoreWheel(bdist_wheel):
    """Tagged for any Python 3, and for this platform if the core was built; else for every platform."""

    def run(self) -> None:
        """Build the wheel, as a pure one if no library was built."""
        if not self.skip_build:
            self.run_command("build")
        built = Path(self.get_finalized_command("build").build_lib) / PACKAGE.replace(".", "/")
        if not any(built.glob("_core_*.so")):
            self.distribution.ext_modules = None  # nothing here is of a platform: install it beside pure packages
            self.root_is_pure = True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag for Python, ABI and platform."""
        return ("py3", "none", "any") if self.root_is_pure else ("py3", "none", super().get_tag()[2])


def extension(isa: str, package: str = PACKAGE, stem: str = "core", more: Path | None = None) -> Extension:
    """Describe the library of one instruction set to setuptools."""
    name = f"{package}.{core['library_name'](isa, stem).removesuffix('.so')}"
    sources = [*core["SOURCE"].iterdir(), *(more.iterdir() if more else ())]
    built = Extension(name, sources=[], depends=sorted(map(str, sources)), optional=True)
    built.isa, built.more = isa, more
    return built


onnx_source = SOURCES / ONNX.replace(".", "/") / "source"
setup(
    ext_modules=[
        each for isa in core["buildable_isas"]() for each in (extension(isa), extension(isa, ONNX, "onnx", onnx_source))
    ],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": CoreWheel},
)
