# SPDX-License-Identifier: Apache-2.0
"""Compile the C++ core. Standard library alone: `setup.py` runs this file before anything is installed.

One shared library per instruction set, not one with three bodies: inline functions of the standard library compiled for
AVX-512 could otherwise be the ones that the linker keeps for all.
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
TIMEOUT = 600  # seconds for one file; it takes ten on an idle machine

# Fastest first. Flags of GCC and Clang.
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
    """Return the instruction sets to build for on this kind of machine, fastest first."""
    return list(ISAS) if platform.machine() in ("x86_64", "AMD64") else ["baseline"]


@cache
def supported_isas() -> tuple[str, ...]:
    """Return the instruction sets this processor runs, fastest first; only the baseline where it cannot be asked."""
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("flags"):
                flags = set(line.split(":", 1)[1].split())
                break
    return tuple(isa for isa in buildable_isas() if _CPU_FLAGS[isa] <= flags)


@cache
def source_hash() -> str:
    """Return a hash of the source files of the core, which tells a library of other sources from one of these."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def library_name(isa: str) -> str:
    """File name of a library, beside this file or in the cache."""
    return f"_core_{isa.replace('-', '_')}.so"


def find_compiler() -> str | None:
    """Return the C++ compiler: $CXX, or the first of c++, g++, clang++ on the path; may carry arguments."""
    chosen = os.environ.get("CXX")
    if chosen:
        return chosen if shutil.which(shlex.split(chosen)[0]) else None
    return next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def compile_library(isa: str, target: Path, compiler: str) -> None:
    """Compile the core for `isa` into `target`, files side by side; the library appears whole or not at all.

    No OpenMP runtime is linked: source/tasks.h calls the one that torch has loaded, whatever its file is called, so
    that there is one pool of threads and `torch.set_num_threads` governs it.

    Raises:
        OSError: no such directory, or it cannot be written.
        RuntimeError: the compiler failed, with what it said, or came to no end.
    """
    sources = [str(path) for path in sorted(SOURCE.glob("*.cpp"))]
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".so.tmp")
    os.close(handle)
    flags = ["-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden"]
    define = f'-DDYNAXX_SOURCE_HASH="{source_hash()}"'
    try:
        with tempfile.TemporaryDirectory() as build:
            command = [*shlex.split(compiler), *flags, *ISAS[isa], define, "-c"]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda source: _run([*command, source], build), sources))
            objects = [str(path) for path in sorted(Path(build).glob("*.o"))]
            _run([*shlex.split(compiler), "-shared", *objects, "-o", temporary], build)
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
