# SPDX-License-Identifier: Apache-2.0
"""Find or compile the library of `dynaxx::SparseAttention`, which ONNX Runtime loads.

Like the core, it is built with the package, or compiled at first use and stored in the user's cache.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

from dynaxx.core import build, cached_library
from dynaxx.core.library import ISA_VARIABLE, cache_directory

logger = logging.getLogger("dynaxx")

SOURCE = Path(__file__).parent / "source"


def library_path() -> Path:
    """Return the path of the library for this processor, after compiling it if necessary.

    Pass the path to `SessionOptions.register_custom_ops_library`.

    Raises:
        RuntimeError: the library is missing and cannot be compiled.
        ValueError: `DYNAXX_CPU_ISA` names an instruction set that this processor does not support.
    """
    return _library_path(os.environ.get(ISA_VARIABLE, ""))


@cache
def _library_path(isa: str) -> Path:
    choices = build.supported_isas()
    if isa and isa not in choices:
        fix = ": unset it, because the operator has no torch implementation" if isa == "torch" else ""
        raise ValueError(f"`{ISA_VARIABLE}` must be one of {choices} for ONNX Runtime, got {isa!r}{fix}")
    wanted = (isa,) if isa else choices
    for name in wanted:
        path = Path(__file__).parent / build.library_name(name, "onnx")
        if path.exists() and _is_of_these_sources(path):
            return path
    path = cache_directory() / f"onnx-{build.source_hash(SOURCE)}" / build.library_name(wanted[0], "onnx")
    try:
        cached_library.load(path)
        return path
    except (FileNotFoundError, cached_library.DigestError):
        return _compiled(wanted[0], path)
    except ImportError as error:
        raise RuntimeError(f"the operator's library cannot be trusted: {error}") from error


def _compiled(isa: str, path: Path) -> Path:
    compiler = build.find_compiler()
    if compiler is None:
        raise RuntimeError(
            "dynaxx::SparseAttention must be compiled at first use, and there is no C++ compiler: install g++ or "
            "clang++, or set CXX, or install a wheel of dynaxx for this platform; or export with form='portable'"
        )
    logger.info("compiling the operator for ONNX Runtime for %s into %s", isa, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        cached_library.check_folder(path.parent)
        build.compile_library(isa, path, compiler, SOURCE)
        cached_library.write_digest(path)
    except (OSError, ImportError) as error:
        raise RuntimeError(f"the operator for ONNX Runtime could not be compiled into {path}: {error}") from error
    return path


def _is_of_these_sources(path: Path) -> bool:
    try:
        library = ctypes.CDLL(str(path))
        library.dynaxx_cpu_source_hash.restype = ctypes.c_char_p
        return bool(library.dynaxx_cpu_source_hash().decode() == build.source_hash(SOURCE))
    except (OSError, AttributeError):
        return False
