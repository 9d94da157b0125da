# SPDX-License-Identifier: Apache-2.0
"""Build the C++ core; everything else is in pyproject.toml.

The core is plain C++ behind ctypes: it depends on no Python and no torch, so one wheel per platform serves them all.
A checkout (`pip install -e .`) compiles what its machine runs at first use. `pip install .` compiles that beforehand.
Without a compiler the package installs all the same, as a wheel for any platform, and compiles at first use or runs in
torch. `DYNAXX_BUILD_ISAS`, a list of instruction sets or `all`, says what a wheel must hold; if that does not compile,
there is no wheel.
"""

import os
import runpy
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PACKAGE = "dynaxx.core"
FOLDER = PACKAGE.replace(".", "/")
core = runpy.run_path(str(Path(__file__).parent / "src" / FOLDER / "build.py"))
LIBRARIES = core["library_name"]("*").rpartition(".")[0] + ".*"  # those of other sources too


class BuildCore(build_ext):
    """One shared library per instruction set, named without a Python version."""

    built: ClassVar[set[str]] = set()  # folders; the install within a wheel's build asks again

    def finalize_options(self) -> None:
        """Leave a checkout as it is: it compiles at first use."""
        super().finalize_options()
        if self.inplace:
            self.extensions = []

    def run(self) -> None:
        """Build the libraries once, without those of an earlier build, which must not be packed if this one fails."""
        if self.build_lib in self.built:
            return
        self.built.add(self.build_lib)
        for left in Path(self.build_lib, FOLDER).glob(LIBRARIES):
            left.unlink()
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file name of a library."""
        *package, isa = fullname.split(".")
        return "/".join([*package, core["library_name"](isa)])

    def build_extension(self, ext: Extension) -> None:
        """Compile one library."""
        compiler = core["find_compiler"]()
        if compiler is None:
            raise CompileError("no C++ compiler found")
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            core["compile_library"](ext.name.removeprefix(f"{PACKAGE}."), target, compiler)
        except (OSError, RuntimeError) as error:
            raise CompileError(str(error)) from error


class CoreWheel(bdist_wheel):
    """Tagged for any Python 3, and for this platform if the core was built; else for every platform."""

    def run(self) -> None:
        """Build the wheel, as a pure one if no library was built."""
        if not self.skip_build:
            self.run_command("build")
        if not any(Path(self.get_finalized_command("build").build_lib, FOLDER).glob(LIBRARIES)):
            self.distribution.ext_modules = None  # nothing here is of a platform: install it beside pure packages
            self.root_is_pure = True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag for Python, ABI and platform."""
        return ("py3", "none", "any") if self.root_is_pure else ("py3", "none", super().get_tag()[2])


def wanted_isas() -> list[str]:
    """Return the instruction sets of `DYNAXX_BUILD_ISAS`, or the fastest one of this machine."""
    wanted = os.environ.get("DYNAXX_BUILD_ISAS", "").replace(",", " ").split()
    unknown = set(wanted) - {*core["buildable_isas"](), "all"}
    if unknown:
        raise SystemExit(f"`DYNAXX_BUILD_ISAS` must list {core['buildable_isas']()} or say all, got {sorted(unknown)}")
    return core["buildable_isas"]() if "all" in wanted else wanted or [core["supported_isas"]()[0]]


optional = not os.environ.get("DYNAXX_BUILD_ISAS")
sources = [str(path) for path in core["sources"]()]
setup(
    ext_modules=[
        Extension(f"{PACKAGE}.{isa}", sources=[], depends=sources, optional=optional) for isa in wanted_isas()
    ],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": CoreWheel},
)
