# SPDX-License-Identifier: Apache-2.0
"""Compilation of the C++ core. Uses only the standard library, because `setup.py` runs it before anything is installed.

Each instruction set gets a shared library of its own. In one library for all of them, the linker could keep an inline
function of the C++ standard library that was compiled for AVX-512, and use it everywhere.

The name of a library ends in the hash of its sources: `libdynaxx-x86-64-v3.so.0123456789abcdef`. A library of other
sources is not found, and tools that look for Python modules by their suffix do not import one.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
TIMEOUT = 600  # seconds to compile one file, which takes ten on an idle machine
TEMPORARY = "compiling-"  # how the names of unfinished files begin

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden", "-pthread")
# Fastest first. The flags are those of GCC and Clang.
ISAS: dict[str, tuple[str, ...]] = {
    "x86-64-v4-bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
    "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "x86-64-v3": ("-march=x86-64-v3",),
    "baseline": (),
}
# Bits of CPUID by (leaf, as glibc numbers them; register of eax, ebx, ecx, edx) and by the names of /proc/cpuinfo.
_CPUID = {
    (0, 2): {"ssse3": 9, "fma": 12, "sse4_1": 19, "sse4_2": 20, "movbe": 22, "popcnt": 23, "avx": 28, "f16c": 29},
    (1, 1): {"bmi1": 3, "avx2": 5, "bmi2": 8},
    (2, 2): {"abm": 5},  # lzcnt
}
_AVX512 = {"avx512f": 16, "avx512dq": 17, "avx512cd": 28, "avx512bw": 30, "avx512vl": 31}
_BF16 = {"avx512_bf16": 5}
_V3 = {name for bits in _CPUID.values() for name in bits}
_FEATURES = {
    "x86-64-v4-bf16": _V3 | _AVX512.keys() | _BF16.keys(),
    "x86-64-v4": _V3 | _AVX512.keys(),
    "x86-64-v3": _V3,
    "baseline": set[str](),
}


def buildable_isas() -> list[str]:
    """Return the instruction sets that can be built on this machine type, fastest first."""
    return list(ISAS) if platform.machine() in ("x86_64", "AMD64") else ["baseline"]


@cache
def supported_isas() -> tuple[str, ...]:
    """Return the instruction sets that this processor and its system support, fastest first.

    Both the kernel's list and CPUID, as glibc >= 2.33 reads it, must report a feature; an emulator of another processor
    shows the kernel's list of its host. Each of them leaves out features whose registers the system does not save.
    If neither can be read, only the baseline is supported.
    """
    reports = [each for each in (_kernel_features(), _cpuid_features()) if each is not None]
    return isas_with(set.intersection(*reports) if reports else set())


def isas_with(features: set[str]) -> tuple[str, ...]:
    """Return the instruction sets, fastest first, that need no other features than these of /proc/cpuinfo."""
    return tuple(isa for isa in buildable_isas() if _FEATURES[isa] <= features)


def _kernel_features() -> set[str] | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), None)


def _cpuid_features() -> set[str] | None:
    try:
        leaf = ctypes.CDLL(None)["__x86_get_cpuid_feature_leaf"]
    except (AttributeError, OSError, TypeError):  # another C library, or an older one
        return None
    leaf.argtypes, leaf.restype = [ctypes.c_uint], ctypes.POINTER(ctypes.c_uint32 * 8)
    tables = [*_CPUID.items(), ((1, 1), _AVX512), ((6, 0), _BF16)]
    # After four words of what the processor has come four of what the system has enabled.
    return {name for (at, word), bits in tables for name, bit in bits.items() if leaf(at).contents[4 + word] >> bit & 1}


def processors() -> int:
    """Return how many processors this process may use, by its affinity and the quotas of its control groups."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *map(math.ceil, cgroup_quotas())]))


def cgroup_quotas(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[float]:
    """Return the processors that the control groups of this process allow, for each group that has a limit.

    Args:
        groups: where the control groups are mounted.
        own: the file that lists the groups of this process.
    """
    found = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = groups / controllers / path.strip("/")  # version 2 names no controllers
        for group in [folder, *folder.parents][: len(Path(path).parts)]:
            try:
                if controllers:
                    limit = [(group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
                else:
                    limit = (group / "cpu.max").read_text().split()
                if float(limit[0]) > 0:
                    found.append(float(limit[0]) / float(limit[1]))
            except (OSError, ValueError):  # no such group here, or "max"
                continue
    return found


@cache
def source_hash() -> str:
    """Return a hash of the core's sources and of how they are compiled."""
    digest = hashlib.sha256(repr((FLAGS, ISAS)).encode())
    for path in sources():
        digest.update(path.relative_to(SOURCE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def sources(suffixes: Sequence[str] = (".cpp", ".h")) -> list[Path]:
    """Return the source files of the core, those of the operator for ONNX Runtime among them."""
    return sorted(path for path in SOURCE.rglob("*") if path.suffix in suffixes)


def library_name(isa: str) -> str:
    """Return the file name of a library, both in its package's folder and in the cache."""
    return f"libdynaxx-{isa}.so.{source_hash()}"


def find_compiler() -> list[str] | None:
    """Return the C++ compiler command: $CXX, which may include arguments, or the first of c++, g++, clang++ found."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        try:
            command = [chosen] if shutil.which(chosen) else shlex.split(chosen)
        except ValueError:  # an open quotation
            return None
        return command if shutil.which(command[0]) else None
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def compile_library(isa: str, target: Path, compiler: Sequence[str]) -> None:
    """Compile the core for `isa` into `target`, several files in parallel. The library is replaced atomically.

    No OpenMP runtime is linked. source/tasks.h calls the runtime that torch has loaded, so that there is one thread
    pool, which `torch.set_num_threads` controls. Unfinished files lie in a folder beside the library, whose name begins
    with `TEMPORARY`; only a killed process leaves it there.

    Args:
        isa: one of `ISAS`.
        target: the library.
        compiler: with its arguments.

    Raises:
        OSError: the directory does not exist or is not writable.
        RuntimeError: the compiler failed or timed out; contains its output.
    """
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=target.parent) as build:
        files = sorted(sources([".cpp"]), key=lambda path: -path.stat().st_size)  # the longest first
        objects = [f"{number}.o" for number in range(len(files))]
        flags = [*compiler, *FLAGS, *ISAS[isa], f"-I{SOURCE}", "-c"]
        pool = ThreadPoolExecutor(processors())
        try:
            pairs = zip(files, objects, strict=True)
            for done in [pool.submit(_run, [*flags, str(file), "-o", name], build) for file, name in pairs]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)
        _run([*compiler, "-shared", "-pthread", *objects, "-o", target.name], build)
        made = Path(build, target.name)
        made.chmod(0o755)
        made.replace(target)


def _run(command: list[str], directory: str) -> None:
    environment = {**os.environ, "TMPDIR": directory}
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{shlex.join(command)} took more than {TIMEOUT} s") from error
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
