# SPDX-License-Identifier: Apache-2.0
"""Loading of the C++ core, and a report of which core is active.

The core is, in this order: a library that was built with the package, as wheels are; one that was compiled at first use
and stored in the user's cache, as in a checkout; or none, and then attention runs as gathers in torch.
"""

from __future__ import annotations

import ctypes
import getpass
import logging
import os
from ctypes import CDLL
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from dynaxx.core import build, cached_library

logger = logging.getLogger("dynaxx")

ISA_VARIABLE = "DYNAXX_CPU_ISA"
CACHE_VARIABLE = "DYNAXX_CACHE"


@dataclass(frozen=True)
class CpuStatus:
    """The code that computes attention on this CPU, and the reason for it."""

    kind: Literal["built", "compiled", "torch"]  # built with the package, compiled at first use, no core
    isa: str | None  # instruction set of the core; None without a core
    path: Path | None
    why: str

    def __str__(self) -> str:
        """Return the code that runs and the reason, in words."""
        return f"C++ core for {self.isa} ({self.why})" if self.isa else f"gathers in torch ({self.why})"


@dataclass(frozen=True)
class Core:
    """A loaded core, or none, and its status."""

    library: CDLL | None
    status: CpuStatus


def cpu_status() -> CpuStatus:
    """Report whether the C++ core is active, for which instruction set and from which file, or why not. Loads it."""
    return load_core(os.environ.get(ISA_VARIABLE, "")).status


def active_library() -> CDLL | None:
    """Return the core of this process; None if attention runs as gathers in torch."""
    return load_core(os.environ.get(ISA_VARIABLE, "")).library


def present_library() -> CDLL | None:
    """Return the core only if it need not be compiled first, for work that is too short to wait for a compiler."""
    return load_core(os.environ.get(ISA_VARIABLE, ""), may_compile=False).library


@cache
def load_core(isa: str, may_compile: bool = True) -> Core:
    """Load the core for one instruction set; "" selects the fastest that the processor supports, "torch" selects none.

    Raises:
        ValueError: the processor does not support the instruction set.
    """
    choices = (*build.supported_isas(), "torch")
    if isa and isa not in choices:
        raise ValueError(f"`{ISA_VARIABLE}` must be one of {choices} on this processor, got {isa!r}")
    if isa == "torch":
        return _without_core(f"{ISA_VARIABLE}=torch")
    choice = f"{ISA_VARIABLE}={isa}" if isa else "fastest instruction set of this processor"
    wanted, reasons = (isa,) if isa else build.supported_isas(), []
    for name in wanted:
        path = Path(__file__).parent / build.library_name(name)
        if path.exists():
            try:
                _show_openmp()
                library = _declare(CDLL(str(path)))
                return Core(library, CpuStatus("built", name, path, f"built with the package; {choice}"))
            except (OSError, AttributeError) as error:
                reasons.append(f"{path.name}: {error}")
    return _compiled_at_first_use(wanted[0], choice, reasons, may_compile)


def _compiled_at_first_use(isa: str, choice: str, reasons: list[str], may_compile: bool = True) -> Core:
    reasons = reasons or ["no library was built with the package"]
    try:
        path = cache_directory() / "core" / build.library_name(isa)  # raises for a user without a home folder
        library, absence = _cached(path)
        if library is None and may_compile:
            compiler = build.find_compiler()
            if compiler is None:
                absence += "; no C++ compiler found: install g++ or clang++, or set CXX"
            else:
                library = _compiled(isa, path, compiler)
        if library is None:
            return _without_core("; ".join([*reasons, absence]))
        why = f"compiled at first use: {'; '.join(reasons)}; {choice}"
        return Core(_declare(library), CpuStatus("compiled", isa, path, why))
    except (OSError, ImportError, RuntimeError) as error:
        logger.warning(
            "no compiled CPU core, attention runs in torch: %s; set %s to choose another folder", error, CACHE_VARIABLE
        )
        return _without_core("; ".join([*reasons, str(error)]))


def _compiled(isa: str, path: Path, compiler: list[str]) -> CDLL:
    """Compile a library into the cache, unless another process does so meanwhile, and load it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with cached_library.locked(path.parent, build.TEMPORARY, build.TIMEOUT):
        library, _ = _cached(path)
        if library is None:
            logger.info("compiling the CPU core for %s into %s", isa, path)
            build.compile_library(isa, path, compiler)
            cached_library.write_digest(path, build.TEMPORARY)
            library = cached_library.load(path)
            load_core.cache_clear()  # calls that would not compile found no core before
    return library


def _cached(path: Path) -> tuple[CDLL | None, str]:
    """Return the library from the cache, or None and the reason why it must be compiled.

    Raises:
        ImportError: another user owns the library or its folder, or can write to them.
    """
    _show_openmp()
    try:
        return cached_library.load(path), ""
    except FileNotFoundError:
        return None, "none was compiled yet"
    except cached_library.DigestError as error:
        return None, str(error)


def _without_core(why: str) -> Core:
    return Core(None, CpuStatus("torch", None, None, why))


def cache_directory() -> Path:
    """Return the folder for cached files: `DYNAXX_CACHE`, else `dynaxx` in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    users = Path(os.environ.get("XDG_CACHE_HOME", ""))  # its specification says to ignore relative paths
    return (users if users.is_absolute() else _home() / ".cache") / "dynaxx"


def _home() -> Path:
    if os.environ.get("HOME", "~"):
        return Path.home()
    try:  # an empty variable would mean the root folder
        return Path(f"~{getpass.getuser()}").expanduser()
    except (KeyError, OSError) as error:
        raise RuntimeError(f"HOME is empty and the user is unknown: set HOME or {CACHE_VARIABLE}") from error


def _show_openmp() -> None:
    """Make the OpenMP runtime that torch has loaded visible to the core, unless it is visible already."""
    maps = Path("/proc/self/maps")
    if hasattr(CDLL(None), "GOMP_parallel") or not maps.exists():
        return
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line.rsplit("/", 1)[-1]}
    for path in sorted(loaded):
        runtime = CDLL(path, mode=ctypes.RTLD_GLOBAL)
        if hasattr(runtime, "GOMP_parallel"):
            return


def _declare(library: CDLL) -> CDLL:
    """Declare the functions of a library, start it and return it."""
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    arguments = {
        "plan_check": [pointer] * 4 + [size] * 5,
        "plan_masks": [pointer, size, size, size, size, pointer, pointer],
        "plan_rows": [pointer, size, size, pointer],
        "plan_ranks": [pointer, pointer, size, size, size, pointer, pointer],
        "forward": [ctypes.c_char_p],
        "backward": [pointer],
        "decode": [pointer],
        "select_pages": [pointer],
        "summarize_pages": [pointer],
        "token_check": [pointer, size, size, pointer, size, size, pointer],
        "token_forward": [pointer],
        "token_backward": [pointer],
        "token_decode": [pointer],
        "token_top": [pointer, size, size, pointer, size, size, pointer],
        "index_tokens": [pointer],
        "best_blocks": [pointer],
        "list_blocks": [pointer, size],
        "static_layout": [pointer, size, pointer, pointer, pointer],
        "take_layout": [pointer, pointer, size],
        "own_threads": [size],
    }
    for name, types in arguments.items():
        function = getattr(library, f"dynaxx_cpu_{name}")
        function.argtypes, function.restype = types, ctypes.c_int  # a status, see status.py
    library.dynaxx_cpu_start()
    return library
