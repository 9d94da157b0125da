# SPDX-License-Identifier: Apache-2.0
"""Compilation of the C++ core. Uses only the standard library, because `setup.py` runs it before anything is installed.

Each instruction set gets a shared library of its own. In one library for all of them, the linker could keep an inline
function of the C++ standard library that was compiled for AVX-512, and use it everywhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
TIMEOUT = 600  # seconds to compile one file, which takes ten on an idle machine

# Fastest first. The flags are those of GCC and Clang.
ISAS: dict[str, tuple[str, ...]] = {
    "x86-64-v4-bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
    "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "x86-64-v3": ("-march=x86-64-v3",),
    "baseline": (),
}
_V3_FLAGS = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4_FLAGS = _V3_FLAGS | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_CPU_FLAGS = {
    "x86-64-v4-bf16": _V4_FLAGS | {"avx512_bf16"},
    "x86-64-v4": _V4_FLAGS,
    "x86-64-v3": _V3_FLAGS,
    "baseline": set[str](),
}


def buildable_isas() -> list[str]:
    """Return the instruction sets that can be built on this machine type, fastest first."""
    return list(ISAS) if platform.machine() in ("x86_64", "AMD64") else ["baseline"]


@cache
def supported_isas() -> tuple[str, ...]:
    """Return the instruction sets that this processor supports, fastest first; only the baseline if that is unknown."""
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("flags"):
                flags = set(line.split(":", 1)[1].split())
                break
    return tuple(isa for isa in buildable_isas() if _CPU_FLAGS[isa] <= flags)


@cache
def source_hash(more: Path | None = None) -> str:
    """Return a hash of the core's source files, to detect libraries that were built from other sources.

    Args:
        more: a folder of further sources that are compiled with the core.
    """
    digest = hashlib.sha256()
    for path in [*sorted(SOURCE.iterdir()), *(sorted(more.iterdir()) if more else ())]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def library_name(isa: str, stem: str = "core") -> str:
    """Return the file name of a library, both in its package's folder and in the cache."""
    return f"_{stem}_{isa.replace('-', '_')}.so"


def find_compiler() -> str | None:
    """Return the C++ compiler command: $CXX, which may include arguments, or the first of c++, g++, clang++ found."""
    chosen = os.environ.get("CXX")
    if chosen:
        return chosen if shutil.which(shlex.split(chosen)[0]) else None
    return next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def compile_library(isa: str, target: Path, compiler: str, more: Path | None = None) -> None:
    """Compile the core for `isa` into `target`, several files in parallel. The library is replaced atomically.

    No OpenMP runtime is linked. source/tasks.h calls the runtime that torch has loaded, so that there is one thread
    pool, which `torch.set_num_threads` controls.

    Args:
        isa: one of `ISAS`.
        target: the library.
        compiler: with its arguments.
        more: a folder of further sources, compiled with those of the core into one library.

    Raises:
        OSError: the directory does not exist or is not writable.
        RuntimeError: the compiler failed or timed out; contains its output.
    """
    sources = [str(path) for folder in (SOURCE, more) if folder for path in sorted(folder.glob("*.cpp"))]
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".so.tmp")
    os.close(handle)
    flags = ["-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden", "-pthread"]
    define = f'-DDYNAXX_SOURCE_HASH="{source_hash(more)}"'
    flags += [f"-I{SOURCE}"] if more else []
    try:
        with tempfile.TemporaryDirectory() as build:
            command = [*shlex.split(compiler), *flags, *ISAS[isa], define, "-c"]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda source: _run([*command, source], build), sources))
            objects = [str(path) for path in sorted(Path(build).glob("*.o"))]
            _run([*shlex.split(compiler), "-shared", "-pthread", *objects, "-o", temporary], build)
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _run(command: list[str], directory: str) -> None:
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{shlex.join(command)} took more than {TIMEOUT} s") from error
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
