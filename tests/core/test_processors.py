# SPDX-License-Identifier: Apache-2.0
"""The core and the command run on other processors: under qemu, and by the instructions that each library holds.

qemu's user emulation (7.2) has no AVX-512: the instructions of those libraries are read instead.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_loading import initialisers

from dynaxx.core import build

ROOT = Path(__file__).parent.parent.parent
PARTS = ("tests/core/test_status.py", "tests/kernels/selection/test_best_blocks.py")
RUN = """
import os, sys, pytest
from dynaxx.__main__ import main
from dynaxx.kernels.attention.cpu import cpu_status
print("core:", cpu_status().isa)
if failed := pytest.main(["-q", "-x", "-p", "no:cacheprovider", *os.environ["PARTS"].split()]):
    sys.exit(failed)
sys.argv = ["dynaxx", "doctor", "--fuzz-cases", "10", "--threads", "1", "--quiet"]
main()
"""
WIDE = {"baseline": r"\bv\w+ .*%[xyz]mm|%[yz]mm|%k[1-7]", "x86-64-v3": r"%zmm|%k[1-7]|%[xy]mm(1[6-9]|2\d|3[01])"}
STARTED = ("_init", "frame_dummy", "register_tm_clones", "_fini", "__do_global_dtors_aux")  # of the C runtime
pytestmark = pytest.mark.slow


def emulated(model, *command):
    """Return a command of Python on another processor; skip without qemu."""
    qemu = shutil.which("qemu-x86_64")
    if not qemu or len(build.buildable_isas()) == 1:
        pytest.skip("needs qemu-x86_64 (Debian's package qemu-user) on an x86-64 machine")
    return [qemu, "-cpu", model, sys.executable, *command]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Return a function that compiles a library once, or takes the one that was built with the package."""
    folder, compiler = tmp_path_factory.mktemp("libraries"), build.find_compiler()

    def library(isa):
        built, target = Path(build.__file__).parent / build.library_name(isa), folder / build.library_name(isa)
        if built.exists():
            return built
        if compiler is None:
            pytest.skip("needs a C++ compiler")
        if not target.exists():
            build.compile_library(isa, target, compiler)
        return target

    return library


@pytest.mark.parametrize(
    ("model", "isa"), [("Nehalem", "baseline"), ("Haswell", "x86-64-v3"), ("Cooperlake", "x86-64-v4-bf16")]
)
def test_other_processors(model, isa):
    """Their instruction set is found, and tests of the core and the command pass, in one process of this processor."""
    probe = f"import runpy; print(runpy.run_path({build.__file__!r})['supported_isas']()[0])"
    said = subprocess.run(emulated(model, "-c", probe), capture_output=True, text=True, check=True)
    if said.stdout.strip() != isa and isa.startswith("x86-64-v4"):
        pytest.skip(f"this qemu emulates no AVX-512: it supports {said.stdout.strip()}")
    assert said.stdout.strip() == isa
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "PARTS": " ".join(PARTS)}
    done = subprocess.run(emulated(model, "-c", RUN), cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert f"core: {isa}" in done.stdout


@pytest.mark.parametrize("isa", build.buildable_isas())
def test_a_library_runs_nothing_when_it_is_loaded_and_keeps_to_its_instructions(isa, libraries):
    assert initialisers(libraries(isa)) == ["frame_dummy"]
    if not shutil.which("objdump"):
        pytest.skip("needs objdump")
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", libraries(isa)], capture_output=True, text=True, check=True
    )
    functions = re.split(r"^[0-9a-f]+ <", code.stdout, flags=re.MULTILINE)
    started = [
        text for text in functions if text.startswith(("_init", "frame_dummy", "register_tm", "_fini", "__do_global"))
    ]
    assert len(started) >= 4
    for text in started:
        assert not re.search(r"%[xyz]mm", text), f"runs before the library is chosen: {text[:300]}"
    if isa in WIDE and len(build.buildable_isas()) > 1:
        assert not re.search(WIDE[isa], code.stdout)


def test_aarch64(tmp_path):
    """The core compiles for it, and its loader's call runs; larger problems need an aarch64 build of torch."""
    compiler, qemu = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if not compiler or not qemu:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64")
    main = tmp_path / "main.cpp"
    main.write_text('extern "C" int dynaxx_cpu_start(); int main() { return dynaxx_cpu_start(); }\n')
    build.compile_library("baseline", tmp_path / "libcore.so", [compiler])
    subprocess.run([compiler, main, tmp_path / "libcore.so", "-o", tmp_path / "main"], check=True)
    run = [qemu, "-L", "/usr/aarch64-linux-gnu", "-E", f"LD_LIBRARY_PATH={tmp_path}", tmp_path / "main"]
    assert subprocess.run(run).returncode == 0
