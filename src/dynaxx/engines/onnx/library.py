# SPDX-License-Identifier: Apache-2.0
"""Find or compile the library of `dynaxx::SparseAttention`, which ONNX Runtime loads: it is the CPU core."""

from __future__ import annotations

import os
from pathlib import Path

from dynaxx.core import build
from dynaxx.core.library import ISA_VARIABLE, load_core


def library_path() -> Path:
    """Return the path of the library for this processor, after compiling it if necessary.

    Pass the path to `SessionOptions.register_custom_ops_library` in this process. A library from the cache has the path
    of its open file, so ONNX Runtime gets the file that was checked, whatever replaces it meanwhile.

    Raises:
        RuntimeError: the library is missing and cannot be compiled, or cannot be trusted.
        ValueError: `DYNAXX_CPU_ISA` names an instruction set that this processor does not support.
    """
    isa = os.environ.get(ISA_VARIABLE, "")
    if isa == "torch":
        raise ValueError(
            f"`{ISA_VARIABLE}` must be one of {build.supported_isas()} for ONNX Runtime, got 'torch': unset it, "
            "because the operator has no torch implementation"
        )
    core = load_core(isa)
    if core.library is None:
        raise RuntimeError(
            f"dynaxx::SparseAttention needs the compiled CPU core, and there is none: {core.status.why}; install a "
            "wheel of dynaxx for this platform, or export with form='portable'"
        )
    return Path(core.library._name)
