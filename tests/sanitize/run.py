# SPDX-License-Identifier: Apache-2.0
"""Fuzz the CPU core and the operator for ONNX Runtime under the compiler's sanitizers: `make sanitize`.

An instrumented core is compiled into a copy of the package. `dynaxx doctor --fuzz` runs on it, then `exports.py`, which
passes extreme integers and changes page tables and layouts from another thread. Before each run the tool proves
itself: the fuzzer must fail on a core with a planted bug. `operator.cpp` fuzzes the operator with any attributes.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dynaxx.core import build

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
CORE = Path("dynaxx/core/source")
FLAGS = ("-O1", "-g", "-std=c++17", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-fno-omit-frame-pointer")
OPERATOR_CASES = 20  # for each case of the core, which takes as long


@dataclass(frozen=True)
class Sanitizer:
    """How to compile with a sanitizer and run under it, and a bug that it must find."""

    name: str
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    options: dict[str, str]
    bug: tuple[str, str, str]  # file of the core, text, replacement
    finds: str  # what its report of that bug contains


SANITIZERS = (
    Sanitizer(
        "address",
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
        ("libasan.so", "libubsan.so"),
        # Python frees little when it exits; torch and Python are not instrumented, so leaks count only in the core.
        {"ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"},
        ("scratch.h", "size_ * sizeof(float)", "size_ / 2 / 16 * 16 * sizeof(float)"),
        "heap-buffer-overflow",
    ),
    Sanitizer(
        "thread",
        ("-fsanitize=thread", "-include", str(Path(__file__).parent / "threads.h")),
        ("libtsan.so",),
        {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_bugs=1:ignore_noninstrumented_modules=1"},
        ("scratch.h", "static thread_local Scratch", "static Scratch"),
        "data race",
    ),
)


def main() -> int:
    """Run the requested sanitizers; return 0 if clean, 1 if one found something, 77 without a compiler or sanitizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="fuzzed problems per sanitizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--isa", default="x86-64-v3", help="instruction set; baseline where there is no AVX2")
    parser.add_argument("--only", choices=[each.name for each in SANITIZERS])
    parser.add_argument("--skip-proof", action="store_true", help="do not run the planted bugs first")
    asked = parser.parse_args()
    compiler = os.environ.get("CXX") or shutil.which("g++") or ""
    chosen = [each for each in SANITIZERS if asked.only in (None, each.name)]
    for sanitizer in chosen:
        why = unavailable(sanitizer, compiler)
        if why:
            print(f"skipped: {sanitizer.name}: {why}")
            return 77
    found = [check(sanitizer, compiler, asked) for sanitizer in chosen]
    return int(any(found))


def unavailable(sanitizer: Sanitizer, compiler: str) -> str:
    """Return why this sanitizer cannot run here, or ""."""
    if not compiler or not shutil.which(shlex.split(compiler)[0]):
        return "no g++ here, or $CXX is not one; install it"
    missing = [name for name in sanitizer.libraries if not library(compiler, name)]
    if missing:
        return f"{compiler} comes without {', '.join(missing)}; install the sanitizers of your compiler"
    return ""


def library(compiler: str, name: str) -> str:
    """Return the path of a runtime library of the compiler, or ""."""
    said = subprocess.run([*shlex.split(compiler), f"-print-file-name={name}"], capture_output=True, text=True).stdout
    return said.strip() if Path(said.strip()).is_absolute() else ""


def check(sanitizer: Sanitizer, compiler: str, asked: argparse.Namespace) -> bool:
    """Prove the sanitizer on a planted bug, then run the core; return whether anything is wrong."""
    if not asked.skip_proof:
        status, said = run(sanitizer, compiler, asked, cases=5, bug=True)
        if status == 0 or sanitizer.finds not in said:
            print(f"{sanitizer.name}: the planted bug was not found, so a clean run would say nothing\n{said[-3000:]}")
            return True
        print(f"{sanitizer.name}: found the planted bug ({sanitizer.finds})", flush=True)
    status, said = run(sanitizer, compiler, asked, cases=asked.cases, bug=False)
    if sanitizer.name == "address":
        done = fuzz_operator(sanitizer, compiler, asked)
        status, said = status or done.returncode, said + done.stdout + done.stderr
    print(f"{sanitizer.name}: {'clean' if status == 0 else f'FAILED, exit code {status}'}\n{said[-6000:]}", flush=True)
    return status != 0


def fuzz_operator(sanitizer: Sanitizer, compiler: str, asked: argparse.Namespace) -> subprocess.CompletedProcess[str]:
    """Compile the operator with a stand-in for ONNX Runtime, and fuzz it."""
    core = ROOT / "src" / CORE
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "operator"
        sources = [HERE / "operator.cpp", *sorted(core.rglob("*.cpp"))]
        command = [*shlex.split(compiler), *FLAGS, *build.ISAS[asked.isa], *sanitizer.flags, "-fvisibility=hidden"]
        command += ["-pthread", f"-I{core}", f"-I{core}/onnx", "-o", str(program), *map(str, sources)]
        subprocess.run(command, check=True)
        words = [str(asked.cases * OPERATOR_CASES), str(asked.seed)]
        options = {**os.environ, **sanitizer.options}
        return subprocess.run([str(program), *words], env=options, capture_output=True, text=True)


def run(sanitizer: Sanitizer, compiler: str, asked: argparse.Namespace, cases: int, bug: bool) -> tuple[int, str]:
    """Build the core in a copy of the package and fuzz it; return the exit code and the output."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder)
        shutil.copytree(ROOT / "src/dynaxx", package / "dynaxx", ignore=shutil.ignore_patterns("*.so.*", "__pycache__"))
        if bug:
            name, before, after = sanitizer.bug
            file = package / CORE / name
            text = file.read_text()
            assert before in text, f"the bug for {sanitizer.name} has no place in {name} any more"
            file.write_text(text.replace(before, after))
        library_path = compile_core(sanitizer, compiler, package / CORE, asked.isa)
        environment = {
            **os.environ,
            **sanitizer.options,
            "PYTHONPATH": folder,
            "DYNAXX_CPU_ISA": asked.isa,
            "OMP_WAIT_POLICY": "passive",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        ask = [sys.executable, "-c", "from dynaxx.kernels.attention.cpu import cpu_status; print(cpu_status().path)"]
        loaded = subprocess.run(ask, env={**environment, "LD_PRELOAD": preload(sanitizer, compiler)}, text=True,
                                capture_output=True)  # fmt: skip
        if Path(loaded.stdout.strip()) != library_path:
            return 1, f"the instrumented core did not load: {loaded.stdout}{loaded.stderr}"
        fuzz = [sys.executable, "-m", "dynaxx", "doctor", "--fuzz-cases", str(cases), "--seed", str(asked.seed)]
        exports = [sys.executable, str(HERE / "exports.py"), "--cases", str(cases), "--seed", str(asked.seed)]
        said, status = "", 0
        for command in ([*fuzz, "--threads", "2", "--quiet"], *([] if bug else [exports])):
            done = subprocess.run(
                [*without_aslr(), *command],
                env={**environment, "LD_PRELOAD": preload(sanitizer, compiler)},
                capture_output=True,
                text=True,
            )
            said += done.stdout + done.stderr
            status = status or done.returncode
    return status, re.sub(re.escape(folder), "", said)


def compile_core(sanitizer: Sanitizer, compiler: str, core: Path, isa: str) -> Path:
    """Compile an instrumented core to the path of the package's prebuilt one."""
    target = core.parent / runpy.run_path(str(core.parent / "build.py"))["library_name"](isa)
    command = [*shlex.split(compiler), *FLAGS, *build.ISAS[isa], *sanitizer.flags, "-fvisibility=hidden", "-shared"]
    command += [f"-I{core}", *map(str, sorted(core.rglob("*.cpp")))]
    command.append(str(HERE / "writer.cpp"))
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


def preload(sanitizer: Sanitizer, compiler: str) -> str:
    """Load the sanitizer's runtime before Python."""
    return ":".join(library(compiler, name) for name in sanitizer.libraries)


def without_aslr() -> list[str]:
    """ThreadSanitizer needs a fixed part of the address space; newer kernels place libraries at random in it."""
    setarch = shutil.which("setarch")
    if setarch and subprocess.run([setarch, "-R", "true"], capture_output=True).returncode == 0:
        return [setarch, "-R"]
    return []


if __name__ == "__main__":
    sys.exit(main())
